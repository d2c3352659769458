"""The one table of arguments that are not simply passed on: owned, fixed, without effect, or
harmless.

The check of a configuration, the trainer and the engines read it (`check`), and `python -m
tools.flags --arguments` prints it.
"""

from __future__ import annotations

from rlpipe.config.arguments.megatron import MEGATRON
from rlpipe.config.arguments.rows import Rule
from rlpipe.config.arguments.sglang import ROUTER, SGLANG

TABLE: dict[str, dict[str, Rule]] = {"megatron": MEGATRON, "sglang": SGLANG, "router": ROUTER}
