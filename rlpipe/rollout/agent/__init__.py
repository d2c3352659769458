"""APIs of SGLang, OpenAI and Anthropic for user functions and agents."""
