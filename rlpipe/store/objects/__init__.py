"""Immutable named objects on local disk or S3."""
