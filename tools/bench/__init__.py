"""Speed, as ratios measured in one run: a command each, that prints a table and writes JSON beside it."""
