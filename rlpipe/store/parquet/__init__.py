"""Rows of samples, rewards and batches as Arrow tables and Parquet shards."""
