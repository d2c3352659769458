"""The command `rlpipe`: the table of its verbs, their options, and the dispatch."""
