"""Weight transports, one module each: tensor, ipc, distributed, staged, disk and delta."""
