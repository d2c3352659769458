"""Re-score stored rollouts and re-estimate their advantages as a new branch."""

OWNED_KEYS = (
    "num_rollout",
    "fork_from",
    "warm_start",
    "model.start_from",
    "debug",
    "store.root",
    "stop_when",
)
"""Keys that a reprocessed branch sets itself."""
