"""Ray actors of a run: conductor, trainer ranks, engines, router and generator.

Flow processes use `client`. The conductor uses `trainer` and `engines`; `ray` starts, places and
calls actors. The store records results; an actor is a cache that can be rebuilt.
"""
