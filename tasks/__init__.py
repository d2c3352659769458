"""The stages as Prefect tasks: look the node up, else do the work, record it. One file a stage."""
