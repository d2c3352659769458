"""Prompts: read from files or made by generators, turned into token ids, and drawn in a
reproducible order."""
