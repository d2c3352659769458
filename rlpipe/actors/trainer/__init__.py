"""The trainer: its rank actors, the group that calls them, scoring, states and pushes."""
