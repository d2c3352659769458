"""Sample groups of responses from the engines.

`sampler` runs a rollout with a generate function from `generators`. `client/` sends requests to the
engines over HTTP and does not import SGLang. `hooks/` calls user functions. `agent/` serves
OpenAI's and SGLang's APIs to them. README.md describes the features for users.
"""
