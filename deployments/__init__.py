"""Deployments, run recipes and model presets."""
