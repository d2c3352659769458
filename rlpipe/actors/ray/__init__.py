"""Ray: start or join a cluster, place actors, find them by name, call them with deadlines."""
