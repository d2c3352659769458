"""OpenAI-compatible endpoints for agents: gateway, sessions and their protocol."""
