"""Command lines, kept thin: what they do is in flows, tasks and rlpipe."""
