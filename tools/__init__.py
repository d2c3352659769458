"""Command lines. The work is in flows, tasks and rlpipe."""
