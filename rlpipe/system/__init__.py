"""Processes, ports, certificates and files of the machine. Knows nothing of reinforcement
learning."""
