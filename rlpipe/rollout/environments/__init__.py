"""Environments in which the policy acts: `rollout.environment`."""
