"""The conversions: `to_torch_dist`, `to_hf` and, of an optimizer state, `to_adam_state`.

Each holds the tensors of one file in memory, reports progress, and continues an interrupted
conversion. A checkpoint carries the small files of its model's directory (tokenizer, generation
config, chat template) and the arguments of its architecture. So it converts back without that
directory. `tools/convert_to_hf.py` converts under torchrun, from weights in the ranks.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401
from rlpipe.engines.megatron.checkpoint.adapters import stored_lora
from rlpipe.engines.megatron.checkpoint.conversion import checkpoint_paths, hf_files
from rlpipe.engines.megatron.checkpoint.conversion.adam_state import AdamState
from rlpipe.engines.megatron.checkpoint.conversion.hf_files import HfWeights
from rlpipe.engines.megatron.checkpoint.conversion.legacy import LegacyCheckpoint
from rlpipe.engines.megatron.checkpoint.conversion.meta_model import (
    DTYPES,
    MetaModel,
    arguments,
    single_process_groups,
)
from rlpipe.engines.megatron.checkpoint.conversion.torch_dist import Checkpoint, Unit, Writer, units
from rlpipe.engines.megatron.checkpoint.export import COPIES, LAYER
from rlpipe.errors import ConfigError, DataError
from rlpipe.system.megatron_weights import RELEASE, find_checkpoint

ALREADY_CONVERTED = "the target already has this conversion"
SHARD_BYTES = 5 * 1024**3
"""Size limit of a file. A larger tensor gets its own file."""
Progress = Callable[[int, int, str], None]
"""Called with the finished bytes, all bytes, and the current file."""


@dataclass
class Report:
    """Result of a conversion."""

    folder: str
    tensors: int
    total_bytes: int
    files: int
    dtype: str
    reused_files: int = 0
    """Files of an earlier, interrupted conversion."""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


def no_progress(_done: int, _total: int, _what: str) -> None:
    """Ignore progress."""


def to_torch_dist(
    hf_dir: Path,
    save: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
    progress: Progress = no_progress,
) -> Report:
    """Convert a Hugging Face directory to `save`/release, a checkpoint for any parallel layout.

    `dtype`: of the weights; None: config.json's. Raises: ConfigError, DataError, StoreFull,
    ResourceError.
    """
    if not checkpoint_paths.is_hf_directory(hf_dir):
        raise ConfigError("not a Hugging Face directory", where=str(hf_dir), found="no config.json")
    target = save / RELEASE
    start = time.monotonic()
    target_dtype = checked_dtype(dtype or _config_dtype(hf_dir))
    weights = HfWeights(hf_dir, target_dtype)
    source_files = [*weights.files(), *hf_files.small_files(hf_dir)]
    identity = checkpoint_paths.conversion_identity(
        source_files, dtype=target_dtype, shard=shard_bytes, to="torch_dist"
    )
    with single_process_groups():
        meta_model = MetaModel(hf_dir, target_dtype)
        sources = {name: meta_model.hf_names(name) for name in meta_model.tensors}
        extra = {name: weights.meta(name) for name in _extra_names(weights, sources, meta_model)}
        files = _split(units(meta_model, extra), shard_bytes, lambda unit: unit.size_bytes)
        report = _report(target, files, lambda unit: unit.size_bytes, target_dtype)
        checkpoint_paths.refuse_training_checkpoints(save, force=force)
        if checkpoint_paths.is_converted(target, identity) and not force:
            checkpoint_paths.point_to_release(save)
            report.notes.append(ALREADY_CONVERTED)
            return report
        if extra:
            report.notes.append(
                f"{len(extra)} tensors that Megatron's model does not have are stored unchanged"
            )

        with checkpoint_paths.staging_folder(
            target, identity, needed_bytes=report.total_bytes, force=force
        ) as folder:
            read = partial(_read_unit, weights, meta_model, sources)
            writer = Writer(folder, meta_model, files, read)
            done = 0
            for number, file in enumerate(files):
                progress(done, report.total_bytes, f"{number + 1} of {len(files)}")
                report.reused_files += not writer.write(number)
                done += sum(unit.size_bytes for unit in file)
            hf_files.pack(hf_dir, folder / hf_files.CARRIED)
            writer.finish(
                {"checkpoint_version": 3.0, "iteration": 0, "args": arguments(meta_model.bridge)}
            )
            _write_record(folder, identity, hf_dir, report)
    checkpoint_paths.point_to_release(save)
    progress(report.total_bytes, report.total_bytes, "done")
    report.seconds = time.monotonic() - start
    return report


def _read_unit(
    weights: HfWeights, meta_model: MetaModel, sources: dict[str, list[str]], unit: Unit
) -> torch.Tensor:
    if unit.is_extra:
        return weights.read(unit.name)
    return meta_model.from_hf(unit.name, [weights.read(name) for name in sources[unit.name]])


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
    with_adapters: bool = True,
    progress: Progress = no_progress,
) -> Report:
    """Convert a checkpoint to a Hugging Face directory.

    The checkpoint is torch_dist or of the older format, in any layout. `origin`: the model's
    directory; None: the files that the checkpoint carries. `step`: the iteration, if there are
    several. `dtype`: of the weights; None: the stored one. `known_as`: identity of a copied
    checkpoint; None: its files. `with_adapters`: merge adapters; else leave them out. Tensors that
    Megatron's model does not have come from the checkpoint, else from `origin`. Raises: as
    `to_torch_dist`.
    """
    source = find_checkpoint(checkpoint, step)
    start = time.monotonic()
    stored = LegacyCheckpoint(source.folder) if source.legacy else Checkpoint(source.folder)
    target_dtype = checked_dtype(dtype) if dtype else stored.dtype
    identity = checkpoint_paths.conversion_identity(
        [] if known_as else _identifying_files(source.folder),
        dtype=target_dtype,
        shard=shard_bytes,
        origin=origin,
        known_as=known_as,
        to="huggingface" if with_adapters else "base",
    )
    with single_process_groups(), model_files(source.folder, origin) as model_dir:
        lora = stored_lora(stored.layout) if with_adapters else None
        meta_model = MetaModel(
            model_dir, target_dtype, metadata=stored.layout, predicts=stored.predicts, lora=lora
        )
        has_weights = any(model_dir.glob("*.safetensors"))
        original = HfWeights(model_dir, target_dtype) if has_weights else None
        plan = _Plan(meta_model, stored, original)
        files = _split(list(plan.sizes), shard_bytes, plan.sizes.__getitem__)
        report = _report(output, files, plan.sizes.__getitem__, target_dtype)
        report.tensors = sum(map(len, plan.results.values()))
        report.notes = plan.notes
        if checkpoint_paths.is_converted(output, identity) and not force:
            report.notes.append(ALREADY_CONVERTED)
            return report
        with checkpoint_paths.staging_folder(
            output, identity, needed_bytes=report.total_bytes, force=force
        ) as folder:
            _write_hf_files(folder, plan, files, report, progress)
            hf_files.carry(model_dir, folder, target_dtype)
            if list(stored.value_head) == ["score.weight"]:
                hf_files.classify_sequences(folder)
            _write_record(folder, identity, source.folder, report)
    progress(report.total_bytes, report.total_bytes, "done")
    report.seconds = time.monotonic() - start
    return report


def _identifying_files(folder: Path) -> list[Path]:
    """Files of a checkpoint. The metadata identifies torch_dist's data files (`__*`)."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("__")]


def to_adam_state(
    checkpoint: Path,
    output: Path,
    *,
    origin: Path,
    step: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = no_progress,
) -> Report:
    """Convert the optimizer state of a Megatron checkpoint, for `checkpoint.load_adam_state`.

    The result has Adam's tensors by parameter, for any parallel layout, and the numbers of steps.
    Arguments as `to_hf`. Raises: as `to_torch_dist`.
    """
    start = time.monotonic()
    source = find_checkpoint(checkpoint, step)
    if source.legacy:
        raise ConfigError(
            "optimizer state of this format is not read",
            where=str(source.folder),
            found="ckpt_format torch",
            expected="torch_dist",
            do="take its weights only: model.source.megatron_optimizer=false (--no-load-optim)",
        )
    stored = Checkpoint(source.folder)
    if stored_lora(stored.layout) is not None:
        raise ConfigError(
            "the optimizer state is of adapters, not of all weights",
            where=str(source.folder),
            do="take the weights only: model.source.megatron_optimizer=false",
        )
    with single_process_groups():
        meta_model = MetaModel(
            origin,
            stored.dtype,
            metadata=stored.layout,
            predicts=stored.predicts,
            critic=bool(stored.value_head),
        )
        adam = AdamState(stored, meta_model)
        files = _split(list(adam.units()), shard_bytes, lambda unit: unit.size_bytes)
        report = _report(output, files, lambda unit: unit.size_bytes, torch.float32)
        identity = checkpoint_paths.conversion_identity([], source=source.folder, to="adam_state")
        with checkpoint_paths.staging_folder(
            output, identity, needed_bytes=report.total_bytes, force=False
        ) as folder:
            writer = Writer(folder, meta_model, files, adam.tensor)
            for number in range(len(files)):
                progress(number, len(files), f"{number + 1} of {len(files)}")
                report.reused_files += not writer.write(number)
            steps = {"adam_step": adam.step, "schedule_steps": adam.schedule_steps}
            writer.finish({**steps, "weights_dtype": str(stored.dtype)})
    report.seconds = time.monotonic() - start
    return report


def _write_hf_files(
    folder: Path,
    plan: _Plan,
    files: list[list[tuple[str, str]]],
    report: Report,
    progress: Progress,
) -> None:
    """Write the safetensors files that do not exist yet, and their index."""
    names = hf_files.file_names(len(files))
    done = 0
    for name, part in zip(names, files, strict=True):
        progress(done, report.total_bytes, name)
        if (folder / name).exists():
            report.reused_files += 1
        else:
            hf_files.write_file(folder / name, plan.read(part))
        done += sum(plan.sizes[unit] for unit in part)
    index = {
        name: [tensor for unit in part for tensor in plan.results[unit]]
        for name, part in zip(names, files, strict=True)
    }
    hf_files.write_index(folder, index, report.total_bytes)


def _report(
    target: Path, files: list[list[Any]], size: Callable[[Any], int], dtype: torch.dtype
) -> Report:
    return Report(
        folder=str(target),
        tensors=sum(map(len, files)),
        total_bytes=sum(size(unit) for file in files for unit in file),
        files=len(files),
        dtype=str(dtype).removeprefix("torch."),
    )


def _write_record(folder: Path, identity: str, source: Path, report: Report) -> None:
    checkpoint_paths.write_record(
        folder, {"identity": identity, "source": str(source), **asdict(report)}
    )


class _Plan:
    """The source of every Hugging Face tensor, before any is read.

    A unit is (source, name); the source is "model", "stack" (experts that are one tensor in the
    file), "checkpoint", "head" (of a critic) or "origin".
    """

    def __init__(
        self, meta_model: MetaModel, stored: Checkpoint | LegacyCheckpoint, origin: HfWeights | None
    ) -> None:
        self._meta_model = meta_model
        self._stored = stored
        self._origin = origin
        head = stored.value_head
        split = {
            name: meta_model.to_hf(name, tensor)
            for name, tensor in meta_model.tensors.items()
            if not (head and name == "output_layer.weight")
        }
        self._stacks: dict[str, list[str]] = {}
        """Tensor in the file → the Megatron tensors of its experts, in the order of experts."""
        self.results: dict[tuple[str, str], list[str]] = {}
        """Unit → the names of its Hugging Face tensors."""
        self.sizes: dict[tuple[str, str], int] = {}
        for name, parts in split.items():
            whole, bracket, _ = next(iter(parts)).partition("[")
            unit = ("stack", whole) if bracket else ("model", name)
            if bracket:
                self._stacks.setdefault(whole, []).append(name)
            self.results[unit] = [whole] if bracket else list(parts)
            self.sizes[unit] = self.sizes.get(unit, 0) + sum(t.nbytes for t in parts.values())
        names = {name: list(parts) for name, parts in split.items()}
        extra = {("checkpoint", name): tensor for name, tensor in stored.extra_tensors.items()}
        missing = [] if origin is None or extra or head else _extra_names(origin, names, meta_model)
        extra |= {("head", name): tensor for name, tensor in head.items()}
        self.notes: list[str] = []
        self._copies: dict[str, str] = {}
        """Tensor of a multi-token prediction layer → the model's tensor that it is a copy of."""
        self._megatron_name = {part: name for name, parts in names.items() for part in parts}
        if missing and origin is not None:
            extra |= {("origin", name): origin.meta(name) for name in missing}
            self._copies = {
                name: COPIES[match[2]]
                for name in missing
                if (match := LAYER.fullmatch(name)) and match[2] in COPIES
            }
            self.notes.append(
                f"{len(missing)} tensors that are not trained come from the original directory: "
                f"{missing[0]} …"
            )
        self.results |= {unit: [unit[1]] for unit in extra}
        self.sizes |= {unit: tensor.nbytes for unit, tensor in extra.items()}
        mtp_layers = getattr(meta_model.bridge, "prediction_layers", 0)
        if mtp_layers and not extra and not any(name.startswith("mtp.") for name in split):
            self.notes.append(
                f"the {mtp_layers} layers for multi-token prediction are missing: give "
                "--origin-hf-dir to include them"
            )

    def read(self, part: Sequence[tuple[str, str]]) -> dict[str, torch.Tensor]:
        """Return the Hugging Face tensors of these units."""

        def names_from(wanted: str) -> list[str]:
            return [name for source, name in part if source == wanted]

        stored = self._merged(names_from("model"))
        tensors = {
            hf_name: tensor
            for name, full in stored.items()
            for hf_name, tensor in self._meta_model.to_hf(name, full).items()
        }
        tensors |= {whole: self._stack(whole) for whole in names_from("stack")}
        tensors |= self._stored.read_extra(names_from("checkpoint"))
        tensors |= self._stored.read_value_head(names_from("head"))
        return tensors | {name: self._original(name) for name in names_from("origin")}

    def _merged(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return these tensors of the model, with adapters merged."""
        stored = self._stored.read(self._meta_model, names)
        for name in names:
            if adapters := self._meta_model.adapters(name):
                read = self._stored.read(self._meta_model, [*adapters.values()])
                parts = {key: read[each] for key, each in adapters.items()}
                stored[name] = self._meta_model.with_adapters(name, stored[name], parts)
        return stored

    def _stack(self, whole: str) -> torch.Tensor:
        experts = self._stacks[whole]
        stored = self._stored.read(self._meta_model, experts)
        parts: dict[str, torch.Tensor] = {}
        for name in experts:
            parts |= self._meta_model.to_hf(name, stored[name])
        return torch.stack([parts[f"{whole}[{number}]"] for number in range(len(parts))])

    def _original(self, name: str) -> torch.Tensor:
        """Return a tensor of the original directory, or the trained tensor if it is a copy."""
        assert self._origin is not None
        copied = self._copies.get(name)
        if copied not in self._megatron_name:
            return self._origin.read(name)
        trained = self._megatron_name[copied]
        full = self._stored.read(self._meta_model, [trained])[trained]
        return self._meta_model.to_hf(trained, full)[copied]


def _extra_names(
    weights: HfWeights, sources: dict[str, list[str]], meta_model: MetaModel
) -> list[str]:
    """Return the names of the directory's tensors that Megatron's model does not have.

    The copy of a tied embedding is not among them.
    """
    known = {name.partition("[")[0] for names in sources.values() for name in names}
    return [
        name
        for name in weights.names
        if name not in known and not (meta_model.tied and name == "lm_head.weight")
    ]


def _split(items: list[Any], limit: int, size: Callable[[Any], int]) -> list[list[Any]]:
    """Split into consecutive parts of at most `limit`, or of one item."""
    parts: list[list[Any]] = [[]]
    free = limit
    for item in items:
        if parts[-1] and size(item) > free:
            parts.append([])
            free = limit
        parts[-1].append(item)
        free -= size(item)
    return parts


@contextmanager
def model_files(folder: Path, origin: Path | None) -> Iterator[Path]:
    """Yield a directory with config.json and the other small files of the model."""
    if origin is not None:
        if not checkpoint_paths.is_hf_directory(origin):
            raise ConfigError(
                "not a Hugging Face directory", where="--origin-hf-dir", found=str(origin)
            )
        yield origin
        return
    if not (folder / hf_files.CARRIED).is_file():
        raise ConfigError(
            "this checkpoint carries no configuration of its model",
            where=str(folder),
            do="give the model's directory: --origin-hf-dir",
        )
    with tempfile.TemporaryDirectory(prefix="rlpipe-") as temporary:
        hf_files.unpack(folder / hf_files.CARRIED, Path(temporary))
        yield Path(temporary)


def _config_dtype(hf_dir: Path) -> str:
    """Return the dtype of config.json."""
    path = hf_dir / "config.json"
    try:
        config: dict[str, Any] = {**json.loads(path.read_text())}
    except (ValueError, TypeError) as error:
        raise DataError("not a model's configuration", where=str(path), found=str(error)) from error
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def checked_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name. Raises: ConfigError for an unsupported one."""
    if name not in DTYPES:
        raise ConfigError(
            "unsupported dtype of weights",
            where="--dtype",
            found=name,
            expected=" or ".join(DTYPES),
        )
    return getattr(torch, name)
