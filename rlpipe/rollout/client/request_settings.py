"""Settings of a request, and the key of requests that may share a batch."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from rlpipe.rollout.client.image_requests import RequestImages
from rlpipe.rollout.generation import Generation
from rlpipe.store.routed_experts import num_rows

# sglang-router 0.3.2 forwards json_schema, regex and ebnf. It drops structural_tag, and the engine
# then samples without a grammar.
DROPPED_BY_ROUTER = ("structural_tag", "ebnf_full_assistant")


class BatchKey(NamedTuple):
    """Settings that all requests of a batch share."""

    sampling: str
    """SGLang's sampling parameters as JSON."""
    routing_key: str | None
    routed_from: int | None
    """First token that needs routed experts. None: no token."""
    num_top_log_probs: int = 0
    """Number of the most probable tokens to report at each position."""
    has_images: bool = False

    @property
    def bypasses_router(self) -> bool:
        """True if the router drops a part of the request."""
        dropped = any(f'"{name}"' in self.sampling for name in DROPPED_BY_ROUTER)
        return self.routed_from is not None or self.has_images or dropped


class RequestSettings(NamedTuple):
    """Settings of the request for one response."""

    sampling: dict[str, Any]
    routing_key: str | None
    routed_from: int | None
    num_top_log_probs: int = 0
    images: RequestImages | None = None

    def continued(self, partial: Generation) -> RequestSettings:
        """Return the settings of the request that continues a partial response."""
        left = self.sampling["max_new_tokens"] - len(partial.response_ids)
        routed_from = self.routed_from
        if routed_from is not None:
            routed_from += num_rows(partial.routed_experts)
        sampling = {**self.sampling, "max_new_tokens": left}
        return self._replace(sampling=sampling, routed_from=routed_from)

    def batch_key(self) -> BatchKey:
        """Return the key that is equal for requests that may share a batch."""
        sampling = json.dumps(self.sampling, sort_keys=True)
        return BatchKey(
            sampling,
            self.routing_key,
            self.routed_from,
            self.num_top_log_probs,
            self.images is not None,
        )
