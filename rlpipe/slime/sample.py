"""`slime.utils.types.Sample` for functions written for slime: rlpipe's Sample with slime's keywords
and its counts of speculative decoding and of the prefix cache.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from rlpipe.types import Sample


@dataclass
class SpecInfo:
    """Counts of speculative decoding, as in SGLang's `meta_info`."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted share of drafted tokens; 0 without drafts."""
        return self.spec_accept_token_num / max(1, self.spec_draft_token_num)

    @property
    def spec_accept_length(self) -> float:
        """Tokens of a verification; 0 without one."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: dict[str, Any]) -> None:
        """Add the counts of one answer."""
        self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
        self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)


@dataclass
class PrefixCacheInfo:
    """Counts of the engine's prefix cache."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of prompt tokens from the cache; 0 without prompts."""
        return self.cached_tokens / max(1, self.total_prompt_tokens)

    def add(self, meta_info: dict[str, Any]) -> None:
        """Add the counts of one answer."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)


class SlimeSample(Sample):
    """rlpipe's Sample with a constructor that accepts slime's keywords.

    `spec_info` and `prefix_cache_info` are not stored.
    """

    SpecInfo: ClassVar = SpecInfo
    PrefixCacheInfo: ClassVar = PrefixCacheInfo

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self.spec_info = SpecInfo()
        self.prefix_cache_info = PrefixCacheInfo()
        values.pop("group_index", None)  # a read-only property of Sample
        length = values.pop("response_length", None)
        for name, value in values.items():
            setattr(self, name, value)
        if length is not None:
            self.response_length = length

    def update_from_meta_info(self, args: Any, meta_info: dict[str, Any]) -> None:
        """Set version, status and counts. An unknown finish reason leaves the status."""
        status = self.status
        super().update_from_meta_info(args, meta_info)
        if self.finish_reason not in ("stop", "length", "abort"):
            self.status = status
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)

    def to_dict(self) -> dict[str, Any]:
        """Return all values, with the counts as dictionaries."""
        counts = {
            "spec_info": asdict(self.spec_info),
            "prefix_cache_info": asdict(self.prefix_cache_info),
        }
        return super().to_dict() | counts

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the sample of a dict from `to_dict`; unknown keys become attributes."""
        values = {name: value for name, value in values.items() if not name.startswith("_")}
        spec_info = values.pop("spec_info", {})
        prefix_cache_info = values.pop("prefix_cache_info", {})
        length = values.pop("response_length", None)
        sample = super().from_dict(values)
        if length is not None:
            sample.response_length = length  # slime does not compare it with the tokens
        sample.spec_info = SpecInfo(**spec_info)
        sample.prefix_cache_info = PrefixCacheInfo(**prefix_cache_info)
        return sample
