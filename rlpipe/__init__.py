"""rlpipe: reinforcement-learning post-training of language models, as a workflow.

This is the library behind the flows; it knows nothing of Prefect. Start reading at
`flows/iteration.py`: it is the picture in the README, and each of its lines leads to one package
here. Packages from top to bottom; each imports only packages below it:

    actors      Ray actors that hold state: client, conductor, generator; trainer/, engines/, ray/
    preflight   checks that need no process: model, configuration and machine fit together
    reprocess   stored rollouts with other rewards, filters and estimators
    sync        pushes of weights from the trainer to the engines; transports/
    engines     megatron (training) and sglang (inference): the only users of those packages
    rollout     sampling: sampler, planner, generators, tools; client/, hooks/, agent/
    lineage     identity of each stage (stage_inputs), states, history, provenance
    batch       the batch of an iteration: columns, build, packing, metrics, files
    data        prompts, chat templates, the data source
    rewards     verifiers: samples to rewards
    store       immutable objects, records, nodes, branches, tables, audit, garbage collection
    algorithms  estimators and losses: pure functions
    observe     metrics and their sinks, progress, report, pages
    model_dir   the model directory of a run
    slime       slime's flags, `args` of its hooks, its importable modules
    config      one frozen model per stage; YAML and overrides; arguments/
    system      processes, ports, certificates, files of the machine
    types       samples, groups, plans, nodes, commits; the words of the project
    errors      the exception tree
"""
