"""Model construction: layers, attention, kernels and the vocabulary head."""
