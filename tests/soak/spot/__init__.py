"""A soak: the nodes of engines vanish in turn while a real run continues."""
