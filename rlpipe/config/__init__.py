"""The configuration of a run: typed, frozen, complete, and importable without torch, ray or
prefect."""
