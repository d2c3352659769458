"""slime's data sets, data sources and loss masks, for functions written for slime.

    RolloutDataSource, RolloutDataSourceWithBuffer, pop_first    slime.rollout.data_source
    Dataset, read_file, filter_long_prompt, get_source           slime.utils.data
    MultiTurnLossMaskGenerator, get_response_lengths             slime.utils.mask_utils
    load_tokenizer, load_processor                               slime.utils.processing_utils

They read files and apply chat templates as runs do. A run itself does not use them.

Differs: `sample.prompt` of a data source is the prompt of the row, because the run applies the chat
template to the samples of `rollout.data_source_path`.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.config.data import DataConfig, FilePrompts
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.prompt_files import FileRows, split_slice
from rlpipe.data.prompts import PromptRow, load_prompts
from rlpipe.data.tokenizer import load_tokenizer
from rlpipe.data.tokens import encode_supervised, render
from rlpipe.slime.sample import Sample
from rlpipe.slime.utilities import load_function
from rlpipe.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["load_tokenizer"]


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, or of a slice `path@[a:b]` of it. Raises: DataError."""
    for _where, content in FileRows(path):
        yield content


def _parse_generalized_path(path: str) -> tuple[str, slice | None]:
    file, rows = split_slice(path)
    return file, None if file == path else rows


def load_processor(name_or_path: str, **keywords: Any) -> Any:
    """Return the processor of a model with images; None for a model of text."""
    if not Path(name_or_path, "preprocessor_config.json").is_file():
        return None
    from transformers import AutoProcessor  # takes seconds to import

    return AutoProcessor.from_pretrained(name_or_path, **keywords)


def filter_long_prompt(
    origin_samples: list[Sample], tokenizer: Any, processor: Any, max_length: int | None
) -> list[Sample]:
    """Return the samples whose prompt has at most `max_length` tokens, in their order.

    Prompts that are lists of messages are not measured.
    """
    if max_length is None or not origin_samples or not isinstance(origin_samples[0].prompt, str):
        return origin_samples
    return [
        sample
        for sample in origin_samples
        if _prompt_length(sample, tokenizer, processor) <= max_length
    ]


def _prompt_length(sample: Sample, tokenizer: Any, processor: Any) -> int:
    inputs = sample.multimodal_inputs or {}
    if processor and any(value is not None for value in inputs.values()):
        return len(processor(text=sample.prompt, **inputs)["input_ids"][0])
    return len(tokenizer([sample.prompt], add_special_tokens=False)["input_ids"][0])


def get_source(sample: Sample) -> str:
    """Return the name of the prompt source of a sample, `unknown` without one."""
    metadata = sample.metadata or {}
    return getattr(sample, "source", None) or metadata.get("source_name") or "unknown"


class Dataset:
    """The prompts of a file as samples, in an order that depends on seed and epoch."""

    def __init__(
        self,
        path: str | Sequence[str],
        tokenizer: Any,
        processor: Any,
        max_length: int | None,
        *,
        prompt_key: str = "text",
        multimodal_keys: dict[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str | None = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Read all rows. Raises: DataError for a bad row; ValueError for images."""
        if multimodal_keys:
            raise ValueError("prompts are text: multimodal_keys must be None")
        data = DataConfig(
            prompts=FilePrompts(
                type="file",
                paths=(path,) if isinstance(path, str) else tuple(path),
                input_key=prompt_key,
                label_key=label_key,
                metadata_key=metadata_key,
                tool_key=tool_key,
            ),
            apply_chat_template=apply_chat_template,
            apply_chat_template_kwargs=apply_chat_template_kwargs or {},
        )
        assert data.prompts is not None
        samples = [_sample(row, tokenizer, data) for row in load_prompts(data.prompts)]
        self.origin_samples = filter_long_prompt(samples, tokenizer, processor, max_length)
        self.samples = self.origin_samples
        self.epoch_id = -1
        self.seed = seed

    def shuffle(self, new_epoch_id: int) -> None:
        """Set the order of an epoch."""
        if self.epoch_id == new_epoch_id:
            return
        order = list(range(len(self.samples)))
        random.Random(self.seed + new_epoch_id).shuffle(order)
        self.samples = [self.origin_samples[number] for number in order]
        self.epoch_id = new_epoch_id

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


def _sample(row: PromptRow, tokenizer: Any, data: DataConfig) -> Sample:
    prompt = row.prompt
    if data.apply_chat_template:
        tools = row.metadata.get("tools")
        prompt = render(tokenizer, prompt, data, where=row.where, tools=tools)
    return Sample(prompt=prompt, label=row.label, metadata=dict(row.metadata))


class DataSource(ABC):
    """Groups of samples for rollouts."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next groups."""

    @abstractmethod
    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Keep groups for a later rollout."""

    @abstractmethod
    def save(self, rollout_id: int) -> None:
        """Store the position."""

    @abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Restore the position."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of prompts."""


class RolloutDataSource(DataSource):
    """The prompts of `args.prompt_data` in epochs; without a data set, samples without a prompt.

    `save` and `load` do nothing: a run restores the position of a source from its commits.
    """

    def __init__(self, args: Namespace) -> None:
        """Read the data set. Raises: DataError."""
        self.args = args
        self.epoch_id = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.sample_offset = 0
        self.metadata: dict[str, Any] = {}
        self.dataset: Dataset | None = None
        if args.rollout_global_dataset and args.prompt_data is not None:
            tokenizer = load_tokenizer(args.hf_checkpoint)
            self.dataset = Dataset(
                args.prompt_data,
                tokenizer,
                None,
                args.rollout_max_prompt_len,
                prompt_key=args.input_key,
                label_key=args.label_key,
                metadata_key=args.metadata_key,
                tool_key=args.tool_key,
                seed=args.rollout_seed,
            )
            if args.rollout_shuffle:
                self.dataset.shuffle(self.epoch_id)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next groups, `args.n_samples_per_prompt` copies of a prompt each."""
        return [self._group(self._next_prompt()) for _ in range(num_samples)]

    def _next_prompt(self) -> Sample:
        if self.dataset is None:
            return Sample()
        if self.sample_offset == len(self.dataset):
            self.epoch_id += 1
            self.sample_offset = 0
            if self.args.rollout_shuffle:
                self.dataset.shuffle(self.epoch_id)
        self.sample_offset += 1
        return self.dataset[self.sample_offset - 1]

    def _group(self, prompt: Sample) -> list[Sample]:
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = deepcopy(prompt)
            sample.group_id = f"source:{self.sample_group_index:08d}"
            sample.index = self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Raises: RuntimeError; this source has no buffer."""
        raise RuntimeError(f"{type(self).__name__} is read-only: samples cannot be added")

    def save(self, rollout_id: int) -> None:
        """Do nothing."""

    def load(self, rollout_id: int | None = None) -> None:
        """Do nothing."""

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The prompts of `args.prompt_data`, after the groups of a buffer."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.buffer: list[list[Sample]] = []
        path = args.buffer_filter_path
        self.buffer_filter = pop_first if path is None else load_function(path)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return groups that the buffer filter takes, then the next groups."""
        groups: list[list[Sample]] = []
        if self.buffer and num_samples:
            groups = list(self.buffer_filter(self.args, None, self.buffer, num_samples))
        return groups + super().get_samples(num_samples - len(groups))

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Append groups to the buffer. Raises: ValueError for another number of samples."""
        for group in samples:
            if len(group) != self.args.n_samples_per_prompt:
                expected = self.args.n_samples_per_prompt
                raise ValueError(f"a group of {len(group)} samples, expected {expected}")
            self.buffer.append(group)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Set entries of the metadata."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata."""
        return self.metadata

    def get_buffer_length(self) -> int:
        """Return the number of groups in the buffer."""
        return len(self.buffer)


def pop_first(
    args: Namespace, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
) -> list[list[Sample]]:
    """Take the oldest groups from the buffer."""
    groups = buffer[:num_samples]
    del buffer[:num_samples]
    return groups


def get_response_lengths(loss_masks: list[list[int]]) -> list[int]:
    """Return the number of tokens from the first trained one on, for each mask."""
    return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Tokens and loss masks of conversations: all messages of the assistant are trained.

    Differs: the template renders the whole conversation at once, so one class serves all models.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokenizer_type: str = "qwen") -> None:
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        """Return the number of tokens from the first trained one on, for each mask."""
        return get_response_lengths(loss_masks)

    def get_loss_mask(
        self, messages: list[Message], tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Return token ids, and 0 or 1 for each. Raises: DataError without a trained message."""
        row = PromptRow(messages, None, {"tools": tools} if tools else {}, "messages")
        encoded = encode_supervised(
            self.tokenizer,
            row,
            DataConfig(apply_chat_template=True),
            RolloutConfig(rollout_batch_size=1, loss_mask_type="all_assistant"),
        )
        ids = [*encoded.prompt_ids, *encoded.response_ids]
        return ids, [0] * len(encoded.prompt_ids) + list(encoded.loss_mask)

    def get_text_from_loss_mask(self, token_ids: list[int], loss_masks: list[int]) -> list[str]:
        """Return the text of each stretch of trained tokens."""
        stretches: list[list[int]] = [[]]
        for token, is_trained in zip(token_ids, loss_masks, strict=True):
            if is_trained:
                stretches[-1].append(token)
            elif stretches[-1]:
                stretches.append([])
        return [str(self.tokenizer.decode(ids)) for ids in stretches if ids]
