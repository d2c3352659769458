"""Weight transports: one class, one file each, all in `registry.TRANSPORTS`."""
