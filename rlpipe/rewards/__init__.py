"""Rewards: verifiers, and the calls that score samples with deadlines, retries and processes.

`reward_rows.score` scores the samples of a rollout, `scorer.Scorer` calls one reward function, and
`workers` run it on the event loop, in a thread or in a process (on the Ray cluster:
`rlpipe.actors.reward_workers`). `rules`, `math`, `reasoning_gym`
and `remote` are the verifiers; `user_rewards` loads reward functions of users.
"""
