"""Ray actors that hold state (trainer ranks, engines, generator), how they are placed, found by
name and called."""
