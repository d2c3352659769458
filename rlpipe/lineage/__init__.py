"""The identity of each stage, the states of a run, and the history that its records tell."""
