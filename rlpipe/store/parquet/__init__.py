"""Rows of samples, rewards and batches as Arrow tables and Parquet shards.

`schema` encodes and decodes tables, `rules` checks rows, `arrays` and `rows` convert columns and
samples, and `shards` writes and reads files. `rlpipe.store.columns` lists all columns.
"""
