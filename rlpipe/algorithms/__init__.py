"""Pure functions: rewards to advantages, divergences, losses, and how per-token values become one
number."""
