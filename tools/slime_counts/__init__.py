"""Count how much of a checkout of slime runs here unchanged (development only)."""
