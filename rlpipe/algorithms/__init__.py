"""Pure functions of RL: advantages, KL estimates, losses, off-policy correction, reduction.

None of them reads the store, a model or a process group. `README.md` lists them by task.
"""
