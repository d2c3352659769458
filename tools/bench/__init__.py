"""Speed, as ratios measured in one run: `python -m tools.bench`, and `python -m
tools.bench.ahead`."""
