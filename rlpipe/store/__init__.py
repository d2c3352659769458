"""The store: immutable objects under names that are written once, and the records that say what
they mean.

From the bytes up: `files` (first writer wins, over `local` and `s3`), `records` (sealed JSON),
`schema` (Arrow and Parquet), `shards` (tables under names that carry their checksum), `plans`,
`nodes`, `chain` (each commit fixes what is below it), `branches`, `epochs` (who may commit to one,
and who may remove anything), then `audit` and `gc` over all of it. Beside the store: `run_file`,
what a home says of its runs.

    branches/<branch>/config.json, %08d.json      what a run is; its commits
    branches/<branch>/receipts/%08d.json          that they were there
    branches/<branch>/epochs/%08d.json, %08d/*    its drivers, one after another, and their leases; of `.gc` the collectors
    branches/<branch>/signatures/%08d.json        that the holder of a key vouches for them
    branches/<branch>/segments/*, scalars/*       states that took a recorded one's place; tables over the branch
    rollouts/, gates/<branch>/*, draws/*          notes of what has no commit; gates that were opened; plans that chance drew
    plans/<digest>/plan.json, groups/*.parquet    what an iteration will sample; the groups finished so far
    receipts/<stage>/<digest>*.json               that a checkpoint or an evaluation was recorded, or was removed
    nodes/<stage>/<digest>.json                   the result of a stage, by the digest of its inputs
    data/<stage>/<digest>/*                       the files of that result
    checkpoints/<branch>/iter_%07d/...            the files of a checkpoint node

Not here: what the rows are for.
"""
