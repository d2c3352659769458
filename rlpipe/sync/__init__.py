"""Moving weights from the trainer to the engines."""
