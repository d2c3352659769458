"""Prefect deployments, run recipes and model presets."""
