"""Call user functions during a rollout."""
