"""Flatness of a long run: iteration 200 costs what iteration 20 cost."""
