"""Hugging Face directories to Megatron checkpoints and back, a file's worth of tensors in memory at
a time, on a CPU."""
