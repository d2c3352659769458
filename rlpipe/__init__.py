"""rlpipe: reinforcement-learning post-training of language models, as a workflow.

The library behind the flows; it knows nothing of Prefect. Layers, top to bottom, each importing only what is below it:

    actors      trainer, engine, generator: Ray actors that hold state, and how to find them
    sync        moving weights from the trainer to the engines
    engines     sglang (inference) and megatron (training): the only places that import those packages
    rollout     sampling groups of responses          data      prompts, chat templates, the data source
    rewards     rows to reward columns
    packing     samples to packed micro-batches       store     nodes, shards, commits: what happened
    algorithms  pure functions on tensors             observe   metrics, sinks, progress, the report page
    config      one frozen model per stage            types     samples, groups, plans, nodes, commits
    errors      one exception tree

Start reading at `flows/iteration.py`: it is the picture in the README, and each of its lines leads to one folder here.
"""
