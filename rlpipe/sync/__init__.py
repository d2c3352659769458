"""Weight sync: send the trainer's weights to the engines, and check the result.

`transports` has one class a transport, `session` the calls to engines in a push, `probe` the check.
"""
