"""Optimizer steps, scoring passes, the critic and routing replay."""
