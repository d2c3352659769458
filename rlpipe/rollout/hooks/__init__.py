"""Calls of the user's functions during a rollout."""
