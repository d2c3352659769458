"""Data: prompts are read from files or generated, converted to token ids, and drawn in epochs.

`prompts.load_prompts` returns the rows of a prompt source, `tokens` encodes them, and
`source.DataSource` draws the groups of an iteration, with `curriculum.Curriculum` by source and
difficulty. `user_source` runs data sources of users.
"""
