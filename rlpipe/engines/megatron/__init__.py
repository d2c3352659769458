"""The training engine: Megatron-core models, optimizer steps, scoring, checkpoints and export, on
CUDA or CPU."""
