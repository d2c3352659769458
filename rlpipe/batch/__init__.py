"""The batch of an iteration: its columns, how it is built, packed, measured and stored."""
