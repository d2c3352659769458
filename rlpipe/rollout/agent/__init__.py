"""OpenAI- and SGLang-compatible endpoints for user functions and agents."""
