"""`load_tokenizer`: the tokenizer of a model directory, with as few imports as possible."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlpipe.errors import ConfigError
from rlpipe.system.imports import quick_imports
from rlpipe.system.model_files import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PLAIN = ("transformers.tokenization_utils_tokenizers", "TokenizersBackend")
QWEN = ("transformers.models.qwen2.tokenization_qwen2", "Qwen2Tokenizer")
CLASSES = {
    "PreTrainedTokenizerFast": PLAIN,
    "TokenizersBackend": PLAIN,
    "Qwen2Tokenizer": QWEN,
    "Qwen2TokenizerFast": QWEN,
}
"""Module and name of the class that `AutoTokenizer` takes for a `tokenizer_class`, for the model
types below."""
MODEL_TYPES = ("qwen3", "qwen3_moe")
GGUF = "transformers.modeling_gguf_pytorch_utils"
"""Module with the reader of GGUF files, which the tokenizers import. The module imports torch."""


def load_tokenizer(directory: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a Hugging Face model directory.

    Raises: ConfigError if the directory does not exist or has no loadable tokenizer.
    """
    if not Path(directory).is_dir():
        raise ConfigError(
            "no such model directory", where="model.source.hf_checkpoint", found=directory
        )
    try:
        with quick_imports():
            # local_files_only: a missing file must not become a request to the Hugging Face hub.
            if known := _known_class(Path(directory)):
                return known.from_pretrained(directory, local_files_only=True)
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(
                directory, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            "the model directory has no tokenizer that can be loaded",
            where="model.source.hf_checkpoint",
            found=f"{directory}: {error}",
            expected="tokenizer.json and tokenizer_config.json",
        ) from error


def _known_class(directory: Path) -> Any:
    """Return the class that `AutoTokenizer` would choose for a directory; None if not known here.

    `AutoTokenizer` imports torch, torch._dynamo, sympy and accelerate, which no tokenizer uses. The
    import takes 8 CPU seconds on a busy machine; that of the class alone takes 1.5.
    """
    files = [directory / "config.json", directory / "tokenizer_config.json"]
    if not all(path.is_file() for path in (*files, directory / "tokenizer.json")):
        return None
    model, settings = (read_object(path, "model.source") for path in files)
    found = CLASSES.get(str(settings.get("tokenizer_class")))
    if model.get("model_type") not in MODEL_TYPES or "auto_map" in settings or found is None:
        return None
    import transformers  # noqa: F401 - the parent of the replaced module

    replaces = GGUF not in sys.modules
    if replaces:
        sys.modules[GGUF] = _gguf_without_torch()
    try:
        module = import_module(found[0])
    finally:
        if replaces:
            del sys.modules[GGUF]
    return getattr(module, found[1])


def _gguf_without_torch() -> ModuleType:
    """Return a module with the one function that tokenizers import from `GGUF`."""

    def load_gguf_checkpoint(*arguments: Any, **keywords: Any) -> Any:
        return import_module(GGUF).load_gguf_checkpoint(*arguments, **keywords)

    module = ModuleType(GGUF)
    vars(module)["load_gguf_checkpoint"] = load_gguf_checkpoint
    return module
