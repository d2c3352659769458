"""`ImageReader`: patches, tokens and pixels of images as a model reads them.

The image processor is transformers' for Pillow, with the settings of `preprocessor_config.json` in
the model directory. An image of r × c patches has r · c / merge² tokens in the prompt.

Entry points: `load_image_reader`, `StoredPixels`.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image as PillowImage

from rlpipe.config.data import DataConfig
from rlpipe.data.image_files import PLACEHOLDER, upright, with_parts
from rlpipe.data.prompts import PromptRow
from rlpipe.errors import ConfigError, DataError
from rlpipe.store.images import Images
from rlpipe.store.objects.files import Files
from rlpipe.system.model_files import read_object
from rlpipe.types import Image

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlpipe.data.tokens import Encoded

MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl")
"""Types of models that read images."""
SETTINGS = "preprocessor_config.json"
CACHED_BYTES = 256 * 2**20
"""Bytes of pixels that a process keeps for later use."""
_TOKENS = ("vision_start_token_id", "image_token_id", "vision_end_token_id")


def load_image_reader(directory: str | Path) -> ImageReader | None:
    """Return the reader of a model directory; None for a model of text.

    Raises: ConfigError without the settings of an image processor.
    """
    config = read_object(Path(directory) / "config.json", "model.source")
    if config.get("model_type") not in MODEL_TYPES:
        return None
    path = Path(directory) / SETTINGS
    if not path.is_file():
        raise ConfigError(
            "a model that reads images needs the settings of its image processor",
            where="model.source",
            found=f"no {path}",
            do=f"copy {SETTINGS} from the model's page into the directory",
        )
    return ImageReader(str(directory), config)


class ImageReader:
    """See the module. Pickles as the model directory and its configuration."""

    def __init__(self, directory: str, config: Mapping[str, Any]) -> None:
        self.directory = directory
        self.config = dict(config)

    def __reduce__(self) -> tuple[type[ImageReader], tuple[str, dict[str, Any]]]:
        return ImageReader, (self.directory, self.config)

    @property
    def image_token(self) -> int:
        """Id of the token that stands for a merged patch."""
        return int(self.config["image_token_id"])

    def image(self, sha256: str, width: int, height: int) -> Image:
        """Return the reference to an image of this size in pixels.

        Raises: DataError for a size that the processor refuses.
        """
        processor, smart_resize = self._processor
        try:
            height, width = smart_resize(
                height,
                width,
                factor=processor.patch_size * processor.merge_size,
                min_pixels=processor.size["shortest_edge"],
                max_pixels=processor.size["longest_edge"],
            )
        except (ValueError, ZeroDivisionError) as error:
            raise DataError(
                "the image processor refuses an image",
                where=f"image {sha256}",
                found=f"{width} × {height} pixels: {error}",
            ) from error
        return sha256, height // processor.patch_size, width // processor.patch_size

    def num_tokens(self, image: Image) -> int:
        """Return the number of tokens of an image."""
        processor, _ = self._processor
        return image[1] * image[2] // processor.merge_size**2

    def pixels(self, content: bytes, image: Image) -> np.ndarray:
        """Return the patches of an image: [rows · columns, values of a patch] float32.

        Raises: DataError if the file is damaged, or has other patches than the reference.
        """
        processor, _ = self._processor
        digest, rows, columns = image
        try:
            with PillowImage.open(io.BytesIO(content)) as opened:
                found = processor(images=[upright(opened).convert("RGB")], return_tensors="np")
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(
                "an image cannot be read", where=f"image {digest}", found=str(error)
            ) from error
        if found["image_grid_thw"].tolist() != [[1, rows, columns]]:
            raise DataError(
                "the image processor makes other patches than when the plan was written",
                where=f"image {digest}",
                found=found["image_grid_thw"].tolist(),
                expected=[[1, rows, columns]],
                do=f"restore {SETTINGS} of the model directory",
            )
        return np.ascontiguousarray(found["pixel_values"], np.float32)

    def shown(
        self, row: PromptRow, data: DataConfig, tokenizer: PreTrainedTokenizerBase
    ) -> PromptRow:
        """Return a row whose prompt has the model's tokens, or message parts, for its images."""
        if not row.images:
            return row
        prompt = row.prompt
        if data.apply_chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return replace(row, prompt=with_parts(messages))
        if isinstance(prompt, str):
            ids = [self.config[name] for name in _TOKENS]
            tokens: Any = tokenizer.convert_ids_to_tokens(ids)
            prompt = prompt.replace(PLACEHOLDER, "".join(tokens))
        return replace(row, prompt=prompt)

    def expanded(self, encoded: Encoded, row: PromptRow) -> Encoded:
        """Return a row whose prompt has a token for each merged patch of its images.

        Raises: DataError if the prompt has not one placeholder token for each image.
        """
        images = tuple(self.image(one.sha256, one.width, one.height) for one in row.images)
        num_found = encoded.prompt_ids.count(self.image_token)
        if num_found != len(images):
            raise DataError(
                "the tokens of the prompt have not one place for each image",
                where=row.where,
                found=f"{num_found} of token {self.image_token}, {len(images)} images",
                do="use the model's chat template (data.apply_chat_template), and no text that "
                "is the placeholder token; images of a supervised row are before its answer",
            )
        if not images:
            return encoded
        left = iter(images)
        ids: list[int] = []
        for token in encoded.prompt_ids:
            count = self.num_tokens(next(left)) if token == self.image_token else 1
            ids += [token] * count
        return replace(encoded, prompt_ids=tuple(ids), images=images)

    @cached_property
    def _processor(self) -> tuple[Any, Any]:
        # Imports torch, for seconds.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
            smart_resize,
        )

        # AutoImageProcessor needs torchvision, which does not import with a CPU torch.
        return Qwen2VLImageProcessorPil.from_pretrained(self.directory), smart_resize


class StoredPixels(Mapping[str, np.ndarray]):
    """Digest → pixels of stored images, each read at its first use.

    Thread-safe. Keeps the last CACHED_BYTES. Pickles without them.
    """

    def __init__(self, files: Files, reader: ImageReader, images: Sequence[Image] = ()) -> None:
        self._files = files
        self._reader = reader
        self._images = {image[0]: image for image in images}
        self._cache: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[StoredPixels], tuple[Files, ImageReader, list[Image]]]:
        return StoredPixels, (self._files, self._reader, list(self._images.values()))

    def add(self, images: Sequence[Image]) -> None:
        """Add images that may be read."""
        with self._lock:
            self._images.update((image[0], image) for image in images)

    def __getitem__(self, digest: str) -> np.ndarray:
        """Raises: KeyError; ObjectMissing, ObjectCorrupt; DataError, as `ImageReader.pixels`."""
        with self._lock:
            image = self._images[digest]
            if digest in self._cache:
                self._cache.move_to_end(digest)
                return self._cache[digest]
        pixels = self._reader.pixels(Images(self._files).read(digest), image)
        with self._lock:
            self._cache[digest] = pixels
            while sum(each.nbytes for each in self._cache.values()) > CACHED_BYTES:
                if len(self._cache) == 1:
                    break
                self._cache.popitem(last=False)
        return pixels

    def __iter__(self) -> Iterator[str]:
        return iter(self._images)

    def __len__(self) -> int:
        return len(self._images)
