"""Chaos: a seeded soak of the real stack in which processes are killed at random moments, and the
proof that nothing is lost."""
