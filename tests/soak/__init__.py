"""Long runs of the real stack: kills (chaos) and flatness."""
