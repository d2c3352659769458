"""Typed and frozen configuration of a run; imports without torch, Ray or Prefect."""
