"""Rewards: what scores a sample, and how many of them are scored with deadlines, retries and worker
processes."""
