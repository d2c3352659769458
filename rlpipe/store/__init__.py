"""The store: immutable objects, each written once, and the records that describe them.

Modules from the lowest layer up: `objects` (the first writer of a name wins, on disk or in S3),
`records` (sealed JSON), `columns` (the list of all columns), `parquet` (Arrow tables and shards),
`plans`, `nodes`, `chain` (a commit fixes everything below it), `branches`, `epochs` (one driver a
branch), `tables`, then `gc` and `audit` over all of them. `run_file` is outside the store: it names
the store of a run.

    branches/<branch>/config.json, %08d.json      configuration of a run; its commits
    branches/<branch>/receipts/%08d.json          receipts of the commits
    branches/<branch>/epochs/%08d.json, %08d/*    drivers and their leases; of `.gc`: collectors
    branches/<branch>/signatures/%08d.json        signatures of the commits
    branches/<branch>/segments/*                  states that replaced a recorded state
    branches/<branch>/scalars/*                   tables over the branch
    rollouts/<branch>/*                           nodes of iterations without a commit
    gates/<branch>/*                              gates that a person opened
    draws/*                                       plans of draws that cannot be repeated
    plans/<digest>/plan.json                      prompts, group ids and seeds of an iteration
    plans/<digest>/groups/*, cut/*                finished groups; tokens of cut groups
    images/<sha256>                               image files of prompts
    row_states/<sha256>                           draws and pass rates of the rows of a curriculum
    receipts/<stage>/<digest>*.json               receipts of checkpoints and evaluations; removals
    nodes/<stage>/<digest>.json                   result of a stage, named by its input digest
    data/<stage>/<digest>/*                       files of that result
    checkpoints/<branch>/iter_%07d/...            files of a checkpoint node

The store defines the format of the rows. Other packages define their use.
"""
