"""Fix the configuration of a run: recorded paths and defaults, and commits on the Hub.

`pinned` adds the hash of the commit to each address: `Qwen/Qwen3-0.6B` becomes
`Qwen/Qwen3-0.6B@c1899de289a0...`. The stored configuration of the run thus names what it trained,
all nodes and all later starts use the same files, and a fork continues with those of its parent.

`as_recorded` also keeps the defaults of the release that started the run (`EARLIER_DEFAULTS`), so
that the run continues after an upgrade. A fork gets the defaults of the present release.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlpipe.config.data import FilePrompts
from rlpipe.config.load import validate_stored
from rlpipe.config.model import HuggingFaceModel
from rlpipe.config.paths import with_recorded_paths
from rlpipe.config.run import RunConfig
from rlpipe.data.prompt_files import split_slice
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from rlpipe.system.hub import HubReference, file_reference, model_reference, resolved

Keys = tuple[str | int, ...]
EARLIER_DEFAULTS: dict[Keys, Any] = {
    ("advantage", "score_proximal"): True,
    ("train", "max_tokens_per_gpu"): 8192,
}
"""Key that decides results → its default in an earlier release. The present default is None."""


def as_recorded(config: RunConfig, home: Path) -> RunConfig:
    """Return the configuration with the files that the run, or a fork's parent, has recorded.

    A run of an earlier release keeps the defaults of that release (`EARLIER_DEFAULTS`).
    Raises: as `pinned`.
    """
    stored = _stored(config, home)
    if stored is None:
        return pinned(config, home)
    if stored.run == config.run:
        for keys, value in EARLIER_DEFAULTS.items():
            if _value(config, keys) is None and _value(stored, keys) == value:
                config = _replaced(config, keys, value)
    return pinned(with_recorded_paths(config, stored), home)


def pinned(config: RunConfig, home: Path) -> RunConfig:
    """Return the configuration with the commit of every model and file on the Hub.

    An address without a revision gets the commit that the run started with; a new run, or another
    revision, gets the present commit. Raises: ConfigError, ResourceError as
    `rlpipe.system.hub.resolved`; DataError for a malformed slice; StoreError.
    """
    references = list(_references(config))
    if not references:
        return config
    stored = _stored(config, home)
    for keys, reference, rows in references:
        before = None if stored is None else _value(stored, keys)
        given = _value(config, keys)
        # A run of an older version may have stored an address without a commit.
        if before != given:
            text = f"{_commit(reference, before, keys)}{rows}"
            config = _replaced(config, keys, text)
    return config


def _references(config: RunConfig) -> Iterator[tuple[Keys, HubReference, str]]:
    """Yield (key, address, slice of rows or nothing) of all models and files on the Hub."""
    models: dict[Keys, str | None] = {}
    if isinstance(config.model.source, HuggingFaceModel):
        models["model", "source", "hf_checkpoint"] = config.model.source.hf_checkpoint
    if config.uses_critic:
        models["critic", "hf_checkpoint"] = config.critic.hf_checkpoint
    if config.advantage.reference:
        models["reference", "ref_load"] = config.reference.ref_load
    if config.advantage.use_opd:
        models["teacher", "opd_teacher_load"] = config.teacher.opd_teacher_load
    for keys, text in models.items():
        if text is not None and (reference := model_reference(text)) is not None:
            yield keys, reference, ""
    sources: dict[Keys, Any] = {("data", "prompts"): config.data.prompts}
    for number, dataset in enumerate(config.evaluation.datasets):
        sources["evaluation", "datasets", number, "prompts"] = dataset.prompts
    for keys, source in sources.items():
        for number, path in enumerate(source.paths if isinstance(source, FilePrompts) else ()):
            file = split_slice(path)[0]
            if (reference := file_reference(file)) is not None:
                yield (*keys, "paths", number), reference, path.removeprefix(file)


def _stored(config: RunConfig, home: Path) -> RunConfig | None:
    """Return the stored configuration of the run, or of the run that a new fork starts from."""
    branches = Branches(Files(config.store.root or home / "store"))
    record = branches.find(config.run)
    if record is None and config.fork_from is not None:
        record = branches.find(config.fork_from.branch)
    return None if record is None else validate_stored(record.config)


def _commit(reference: HubReference, before: Any, keys: Keys) -> HubReference:
    """Return the reference with a commit: that of the stored value `before`, or the present one."""
    if reference.revision is None and isinstance(before, str):
        text = split_slice(before)[0]
        earlier = file_reference(text) if reference.file else model_reference(text)
        if earlier is not None and earlier.is_pinned and earlier.is_same_source(reference):
            return earlier
    return resolved(reference, ".".join(map(str, keys)))


def _value(model: Any, keys: Keys) -> Any:
    """Return the value of a key; None if the configuration has no such key."""
    for key in keys:
        if isinstance(key, int):
            model = model[key] if isinstance(model, tuple) and key < len(model) else None
        else:
            model = getattr(model, key, None)
    return model


def _replaced(model: Any, keys: Keys, value: Any) -> Any:
    """Return a copy of a configuration with another value of a key."""
    if not keys:
        return value
    first, *rest = keys
    if isinstance(first, int):
        items = list(model)
        items[first] = _replaced(items[first], tuple(rest), value)
        return tuple(items)
    return model.model_copy(update={first: _replaced(getattr(model, first), tuple(rest), value)})
