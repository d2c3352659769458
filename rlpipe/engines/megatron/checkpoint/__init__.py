"""torch_dist checkpoints, state digests, export and conversion."""
