"""Names of `slime.utils.types` for functions written for slime.

`Sample` is rlpipe's Sample with slime's keywords and its counts of speculative decoding and of the
prefix cache. `own_sample` converts a sample of slime's own class.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from rlpipe import types


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


class _SampleType(type):
    """Type of `Sample`: every sample of rlpipe is an instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, types.Sample)


class Sample(types.Sample, metaclass=_SampleType):
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
        """Set version, status and counts."""
        super().update_from_meta_info(args, meta_info)
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled sample, ours or slime's."""
        if "prompt_ids" in state:
            vars(self).update(state)
        else:
            vars(self).update(vars(type(self).from_dict(state)))


def own_sample(value: Any) -> Any:
    """Return a sample of slime's own class as rlpipe's; any other value unchanged.

    slime's class appears where its modules were imported before `modules.provide` was called.
    """
    if isinstance(value, types.Sample) or type(value).__name__ != "Sample":
        return value
    if not (hasattr(value, "to_dict") and hasattr(value, "response_length")):
        return value
    return Sample.from_dict(value.to_dict())


RolloutBatch = dict[str, list[Any]]


@dataclass
class MultimodalType:
    """A kind of input, and its placeholder in messages."""

    name: str
    placeholder: str


class MultimodalTypes:
    """The kinds of inputs that slime's prompts may have."""

    IMAGE = MultimodalType("image", "<image>")
    VIDEO = MultimodalType("video", "<video>")
    AUDIO = MultimodalType("audio", "<audio>")

    @classmethod
    def all(cls) -> list[MultimodalType]:
        """Return all kinds."""
        return [cls.IMAGE, cls.VIDEO, cls.AUDIO]

    @classmethod
    def get(cls, name: str) -> MultimodalType | None:
        """Return the kind of this name."""
        return next((kind for kind in cls.all() if kind.name == name), None)
