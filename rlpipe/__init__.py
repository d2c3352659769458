"""rlpipe: reinforcement-learning post-training of language models, as a workflow.

The library behind the flows; it knows nothing of Prefect. Layers, top to bottom, each importing
only what is below it:

    actors      trainer, engine, generator: Ray actors that hold state, and how to find them
    sync        moving weights from the trainer to the engines
    engines     sglang (inference) and megatron (training): the only places that import those packages
    rollout     sampling groups of responses
    lineage     how to get back to a state            run_history  what a branch's records say, for reports
    stage_files the data files of the stages
    batch       scored rows to the iteration's batch  inputs    what decides each stage's result: its digest
    data        prompts, chat templates, the data source
    rewards     rows to reward columns
    packing     samples to packed micro-batches       store     nodes, shards, commits: what happened
    algorithms  pure functions on tensors             observe   metrics, sinks, progress, the report page
    config      one frozen model per stage            orphan    no process outlives the one that started it
    children    ending a child process with all that it started
    rendezvous  where processes of torch.distributed meet
    routed      which experts an engine sent a token to, from its answer to the batch
    types       samples, groups, plans, nodes, commits
    errors      one exception tree

Beside them: `preflight` (what can be known to be wrong before anything starts), `model_dir` (where
the model is, which it is), `reprocess` (stored rollouts under other rewards, filters and
estimators).

Start reading at `flows/iteration.py`: it is the picture in the README, and each of its lines leads
to one folder here.
"""
