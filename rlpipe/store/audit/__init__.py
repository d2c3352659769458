"""Checks of a store: records, files, rows, the chain of commits, and unexplained objects."""
