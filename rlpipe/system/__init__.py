"""Processes, ports, certificates and files of the machine."""
