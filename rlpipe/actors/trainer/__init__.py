"""Trainer: rank actors, their group, checkpoints, state restore, replay, and pushes."""
