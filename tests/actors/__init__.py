"""Tests of the actors; a package, so that its Ray ends when the last of them has run."""
