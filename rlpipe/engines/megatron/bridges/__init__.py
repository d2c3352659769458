"""Bridges between Hugging Face directories and Megatron: model families, config.json and weights.

Importing a family's module registers its bridge.
"""
