"""The stages as Prefect tasks, one file a stage.

Each looks up its node, or else does the work and records the node.
"""
