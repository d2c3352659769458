"""The two conversions: `to_torch_dist` and `to_hf`. Each holds the tensors of one file in memory,
reports as it goes, and goes on where an interrupted start of the same stopped.

A checkpoint carries the small files of its model's directory (tokenizer, generation config, chat
template) and the arguments of its architecture, so that it can be turned back without that
directory. Not here: under torchrun, from the weights in the ranks (`tools/convert_to_hf.py`).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401
from rlpipe.engines.megatron.bridges.kept import COPIES, LAYER
from rlpipe.engines.megatron.checkpoint.conversion import hf_files, places
from rlpipe.engines.megatron.checkpoint.conversion.hf_files import HfWeights
from rlpipe.engines.megatron.checkpoint.conversion.legacy import LegacyCheckpoint
from rlpipe.engines.megatron.checkpoint.conversion.skeleton import (
    DTYPES,
    Skeleton,
    alone,
    arguments,
)
from rlpipe.engines.megatron.checkpoint.conversion.torch_dist import Checkpoint, Unit, Writer, units
from rlpipe.errors import ConfigError, DataError

SHARD_BYTES = 5 * 1024**3
"""How large a file gets at most, unless one tensor is larger."""
"""What layers that predict further tokens have a copy of."""
Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all, and the file that is written."""


@dataclass
class Report:
    """What a conversion did."""

    folder: str
    tensors: int
    total_bytes: int
    files: int
    dtype: str
    reused_files: int = 0
    """Written by an earlier start that was interrupted."""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


def silent(_done: int, _total: int, _what: str) -> None:
    """No progress."""


def to_torch_dist(
    hf_dir: Path,
    save: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
    progress: Progress = silent,
) -> Report:
    """A Hugging Face directory as `save`/release, a checkpoint that any parallel layout loads.

    `dtype`: of the weights; None: as config.json says. Raises: ConfigError, DataError, StoreFull,
    ResourceError.
    """
    if not places.is_hf(hf_dir):
        raise ConfigError("not a Hugging Face directory", where=str(hf_dir), found="no config.json")
    target = save / places.RELEASE
    begun = time.monotonic()
    wanted = _dtype(dtype or _said(hf_dir))
    weights = HfWeights(hf_dir, wanted)
    name = places.identity(
        [*weights.files(), *hf_files.small_files(hf_dir)],
        dtype=wanted,
        shard=shard_bytes,
        to="torch_dist",
    )
    with alone():
        skeleton = Skeleton(hf_dir, wanted)
        made_of = {unit: skeleton.hf_names(unit) for unit in skeleton.tensors}
        passengers = {other: weights.meta(other) for other in _others(weights, made_of, skeleton)}
        files = _split(units(skeleton, passengers), shard_bytes, lambda unit: unit.size_bytes)
        total = sum(unit.size_bytes for file in files for unit in file)
        report = Report(
            str(target), sum(map(len, files)), total, len(files), str(wanted).removeprefix("torch.")
        )
        places.refuse_iterations(save, force=force)
        if places.is_made(target, name) and not force:
            places.point_to_release(save)
            report.notes.append("it was there already")
            return report
        if passengers:
            report.notes.append(
                f"{len(passengers)} tensors that Megatron's model does not have are stored as they are"
            )

        def read(unit: Unit) -> torch.Tensor:
            if unit.passenger:
                return weights.read(unit.name)
            return skeleton.from_hf(unit.name, [weights.read(each) for each in made_of[unit.name]])

        with places.unfinished(target, name, needed_bytes=total, force=force) as folder:
            writer = Writer(folder, skeleton, files, read)
            done = 0
            for number, file in enumerate(files):
                progress(done, total, f"{number + 1} of {len(files)}")
                report.reused_files += not writer.write(number)
                done += sum(unit.size_bytes for unit in file)
            hf_files.pack(hf_dir, folder / hf_files.CARRIED)
            writer.finish(
                {"checkpoint_version": 3.0, "iteration": 0, "args": arguments(skeleton.bridge)}
            )
            places.record(folder, {"identity": name, "source": str(hf_dir), **asdict(report)})
    places.point_to_release(save)
    progress(total, total, "done")
    report.seconds = time.monotonic() - begun
    return report


def to_hf(
    checkpoint: Path,
    output: Path,
    *,
    origin: Path | None = None,
    step: int | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
    known_as: str | None = None,
    progress: Progress = silent,
) -> Report:
    """A checkpoint, torch_dist or of the older format, of any layout, as a Hugging Face directory.

    `origin`: the model's directory; None: what the checkpoint carries. `step`: which iteration, of
    several. `dtype`: of the weights; None: as stored. `known_as`: what tells this checkpoint from
    others, where it is a copy; None: its files. Tensors that Megatron's model does not have are
    taken from the checkpoint, else from `origin`. Raises: as `to_torch_dist`.
    """
    place = places.find_checkpoint(checkpoint, step)
    begun = time.monotonic()
    stored: Checkpoint | LegacyCheckpoint = (
        LegacyCheckpoint(place.folder) if place.legacy else Checkpoint(place.folder)
    )
    wanted = _dtype(dtype) if dtype else stored.dtype
    source = [
        path
        for path in place.folder.rglob("*")
        if path.is_file() and not path.name.startswith("__")
    ]
    settings = {
        "dtype": wanted,
        "shard": shard_bytes,
        "origin": origin,
        "known_as": known_as,
        "to": "huggingface",
    }
    name = places.identity([] if known_as else source, **settings)
    with alone(), _model_files(place.folder, origin) as model_dir:
        skeleton = Skeleton(model_dir, wanted, metadata=stored.layout)
        plan = _Plan(
            skeleton, stored, HfWeights(model_dir, wanted) if _has_weights(model_dir) else None
        )
        files = _split(list(plan.sizes), shard_bytes, plan.sizes.__getitem__)
        total = sum(plan.sizes.values())
        names = hf_files.file_names(len(files))
        report = Report(
            str(output),
            sum(map(len, plan.makes.values())),
            total,
            len(files),
            str(wanted).removeprefix("torch."),
        )
        report.notes = plan.notes
        if places.is_made(output, name) and not force:
            report.notes.append("it was there already")
            return report
        with places.unfinished(output, name, needed_bytes=total, force=force) as folder:
            done = 0
            for file, part in zip(names, files, strict=True):
                progress(done, total, file)
                if (folder / file).exists():
                    report.reused_files += 1
                else:
                    hf_files.write_file(folder / file, plan.read(part))
                done += sum(plan.sizes[unit] for unit in part)
            index = {
                file: [each for unit in part for each in plan.makes[unit]]
                for file, part in zip(names, files, strict=True)
            }
            hf_files.write_index(folder, index, total)
            hf_files.carry(model_dir, folder, wanted)
            places.record(folder, {"identity": name, "source": str(place.folder), **asdict(report)})
    progress(total, total, "done")
    report.seconds = time.monotonic() - begun
    return report


class _Plan:
    """Which Hugging Face tensors come from what, before any is read."""

    def __init__(
        self, skeleton: Skeleton, stored: Checkpoint | LegacyCheckpoint, origin: HfWeights | None
    ) -> None:
        self._skeleton = skeleton
        self._stored = stored
        self._origin = origin
        made = {name: skeleton.to_hf(name, tensor) for name, tensor in skeleton.tensors.items()}
        self.makes: dict[tuple[str, str], list[str]] = {
            ("model", name): list(parts) for name, parts in made.items()
        }
        """The tensors that each unit (where from, name) becomes."""
        self.sizes = {
            ("model", name): sum(part.nbytes for part in parts.values())
            for name, parts in made.items()
        }
        names = {name: list(parts) for name, parts in made.items()}
        passengers = {("checkpoint", name): tensor for name, tensor in stored.passengers.items()}
        missing = [] if origin is None or passengers else _others(origin, names, skeleton)
        self.notes: list[str] = []
        self._copies: dict[str, str] = {}
        self._maker = {part: name for name, parts in names.items() for part in parts}
        if missing and origin is not None:
            passengers |= {("origin", name): origin.meta(name) for name in missing}
            self._copies = {
                name: COPIES[found[2]]
                for name in missing
                if (found := LAYER.fullmatch(name)) and found[2] in COPIES
            }
            self.notes.append(
                f"{len(missing)} tensors that training does not know are the original's: {missing[0]} …"
            )
        self.makes |= {unit: [unit[1]] for unit in passengers}
        self.sizes |= {unit: tensor.nbytes for unit, tensor in passengers.items()}
        further = getattr(skeleton.bridge.hf_config, "num_nextn_predict_layers", 0)
        if further and not passengers and not any(name.startswith("mtp.") for name in made):
            self.notes.append(
                f"without the {further} layers that predict further tokens: give --origin-hf-dir to have them"
            )

    def read(self, part: Sequence[tuple[str, str]]) -> dict[str, torch.Tensor]:
        """The tensors of these units."""
        own = self._stored.read(
            self._skeleton, [name for source, name in part if source == "model"]
        )
        found = {
            each: tensor
            for name, whole in own.items()
            for each, tensor in self._skeleton.to_hf(name, whole).items()
        }
        found |= self._stored.read_passengers(
            [name for source, name in part if source == "checkpoint"]
        )
        return found | {name: self._original(name) for source, name in part if source == "origin"}

    def _original(self, name: str) -> torch.Tensor:
        """A tensor of the original's; where it is a copy of a trained one, that one as it is
        now."""
        assert self._origin is not None
        copied = self._copies.get(name)
        if copied not in self._maker:
            return self._origin.read(name)
        maker = self._maker[copied]
        return self._skeleton.to_hf(maker, self._stored.read(self._skeleton, [maker])[maker])[
            copied
        ]


def _others(weights: HfWeights, made_of: dict[str, list[str]], skeleton: Skeleton) -> list[str]:
    """The directory's tensors that no tensor of Megatron's stands for (but not the copy of a tied
    embedding)."""
    known = {each for names in made_of.values() for each in names}
    return [
        name
        for name in weights.names
        if name not in known and not (skeleton.tied and name == "lm_head.weight")
    ]


def _split(whole: list[Any], limit: int, size: Callable[[Any], int]) -> list[list[Any]]:
    """In order, into parts of at most `limit`, or of one."""
    parts: list[list[Any]] = [[]]
    room = limit
    for each in whole:
        if parts[-1] and size(each) > room:
            parts.append([])
            room = limit
        parts[-1].append(each)
        room -= size(each)
    return parts


@contextmanager
def _model_files(folder: Path, origin: Path | None) -> Iterator[Path]:
    """A directory with config.json and what belongs to it."""
    if origin is not None:
        if not places.is_hf(origin):
            raise ConfigError(
                "not a Hugging Face directory", where="--origin-hf-dir", found=str(origin)
            )
        yield origin
        return
    if not (folder / hf_files.CARRIED).is_file():
        raise ConfigError(
            "this checkpoint carries no configuration of its model",
            where=str(folder),
            do="name its directory: --origin-hf-dir",
        )
    with tempfile.TemporaryDirectory(prefix="rlpipe-") as made:
        hf_files.unpack(folder / hf_files.CARRIED, Path(made))
        yield Path(made)


def _has_weights(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))


def _said(hf_dir: Path) -> str:
    """The dtype of config.json."""
    path = hf_dir / "config.json"
    try:
        config: dict[str, Any] = {**json.loads(path.read_text())}
    except (ValueError, TypeError) as error:
        raise DataError("not a model's configuration", where=str(path), found=str(error)) from error
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(
            "not a dtype of weights", where="--dtype", found=name, expected=" or ".join(DTYPES)
        )
    return getattr(torch, name)
