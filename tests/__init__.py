"""Tests, in the shape of the source: tests/<room>/test_<module>.py. Shared servers and files are
here; no test is."""
