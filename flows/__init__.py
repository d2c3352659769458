"""Prefect flows: compositions of tasks that read like the diagram in the README."""
