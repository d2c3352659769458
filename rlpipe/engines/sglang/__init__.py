"""SGLang: server process, router, and control client of one engine.

Only this package imports sglang.
"""
