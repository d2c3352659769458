"""The models of the benchmark: Qwen3 shapes, dense or with experts, with random weights.

A model directory is complete (config, bfloat16 safetensors, tokenizer) and made once. The model has
no end-of-sequence token, so every response has the requested length. The tokenizer has a token for
each ASCII character, so a prompt of n characters has n tokens, and a word for every other id, so
decoding costs as much as with a real tokenizer.

Legend: L layers, h heads of size d, H hidden size, I width of the MLP or of an expert, E experts, k
experts a token, V vocabulary, S tokens of prompt and response, R response tokens.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.batch.columns import BatchColumns


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and a workload that fits the machines for which it is meant."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the MLP, or of one expert."""
    vocab_size: int
    prompts: int
    """Prompts of a rollout."""
    samples_per_prompt: int
    prompt_tokens: int
    response_tokens: int
    """Response tokens of a rollout's sample."""
    trained_tokens: int
    """Tokens of a sample in the trained batch."""
    micro_batch_tokens: int
    micro_batches: int
    """Micro-batches of an optimizer step."""
    together: bool = True
    """True if trainer and baseline fit on one GPU together."""
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def layer_parameters(self) -> int:
        """Parameters of the layers' matrices that a token passes.

        L (2 H h d + 2 H h_kv d + 3 H I); with experts 3 k H I + H E in place of 3 H I.
        """
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        router = self.hidden_size * self.num_experts
        return self.num_layers * (
            attention + router + (self.experts_per_token or 1) * self._mlp_parameters
        )

    @property
    def parameters(self) -> int:
        """All parameters but norms; the embedding is also the output layer."""
        passed_by = (
            self.num_layers * (self.num_experts - self.experts_per_token) * self._mlp_parameters
        )
        return self.layer_parameters + passed_by + self.vocab_size * self.hidden_size

    @property
    def _mlp_parameters(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size

    def forward_flops(self, lengths: np.ndarray, responses: np.ndarray) -> float:
        """Return the FLOPs of a forward pass over samples.

        2 Σ S × layer_parameters + 2 Σ R × V H + 2 L h d Σ S². Attention is causal: a token sees
        S / 2 others on average, in two products of 2 h d each. Logits are needed before the R
        response tokens only. A training step needs three times as much. Recomputation, padding,
        logits of prompts, Adam and norms do not count.

        Shapes: lengths [N] tokens of each sample; responses [N] tokens of its response.
        """
        lengths = lengths.astype(float)
        dense = (
            2.0 * lengths.sum() * self.layer_parameters
            + 2.0 * responses.sum() * self.vocab_size * self.hidden_size
        )
        return dense + 2.0 * self.num_layers * self.num_heads * self.head_dim * float(
            (lengths**2).sum()
        )


SHAPES = {
    "tiny": Shape(128, 3, 4, 2, 32, 384, 512, 8, 4, 32, 32, 128, 1024, 2),
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936, 32, 8, 128, 512, 2048, 16_384, 4),
    "4b": Shape(
        2560, 36, 32, 8, 128, 9728, 151_936, 32, 8, 128, 512, 2048, 16_384, 2, together=False
    ),
    "8b": Shape(
        4096, 36, 32, 8, 128, 12288, 151_936, 32, 8, 512, 2048, 2560, 10_240, 4, together=False
    ),
    "tiny-moe": Shape(
        128, 3, 4, 2, 32, 96, 512, 8, 4, 32, 32, 128, 1024, 2, num_experts=8, experts_per_token=2
    ),
    "moe": Shape(
        2048,
        6,
        32,
        4,
        128,
        768,
        151_936,
        32,
        8,
        128,
        512,
        2048,
        16_384,
        2,
        together=False,
        num_experts=128,
        experts_per_token=8,
    ),
}
"""Sizes of Qwen3-0.6B (`0.6b`), Qwen3-4B (`4b`), Qwen3-8B (`8b`, but its output layer is the
embedding) and six layers of Qwen3-30B-A3B (`moe`); `tiny` and `tiny-moe` are for CPUs."""
CONTEXT_LEN = 40_960
FIRST_CHARACTER = " "
LAST_CHARACTER = "~"


def make_directory(shape: Shape, directory: Path, seed: int = 0) -> None:
    """Write the model directory, computed on the GPU if there is one.

    Call it in a process that ends afterwards. The weights are transformers' random ones (normal,
    0.02), so responses are noise.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(hf_config(shape))
    unfinished = directory.with_name(f"{directory.name}.{os.getpid()}")
    model.save_pretrained(unfinished)
    tokenizer(shape.vocab_size).save_pretrained(unfinished)
    try:
        unfinished.rename(directory)
    except OSError:  # another process was faster
        shutil.rmtree(unfinished)


def hf_config(shape: Shape):
    """Return the transformers configuration of a shape."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    experts = {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.intermediate_size,
        "norm_topk_prob": True,
    }
    kind: Any = Qwen3MoeConfig if shape.num_experts else Qwen3Config
    return kind(
        **(experts if shape.num_experts else {}),
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT_LEN,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def tokenizer(vocab_size: int):
    """Return a tokenizer with a token per printable ASCII character and a word per other id."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(ord(FIRST_CHARACTER), ord(LAST_CHARACTER) + 1)]
    names = [*characters, *(f"<{number}>" for number in range(len(characters), vocab_size))]
    words = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=names[0])
    )
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")  # pyright: ignore[reportAttributeAccessIssue]
    words.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False)


def random_text(random: np.random.Generator, characters: int) -> str:
    """Return a number of random letters."""
    return "".join(chr(code) for code in random.integers(ord("a"), ord("z") + 1, characters))


def trained_batch(shape: Shape, *, ragged: bool = False, seed: int = 0) -> BatchColumns:
    """Return a batch as the train stage gets it: `micro_batches` × `micro_batch_tokens` tokens.

    Samples have `trained_tokens` tokens, or if `ragged` between an eighth of that and all of it,
    uniformly. Advantages are ±1.
    """
    random = np.random.default_rng(seed)
    budget = shape.micro_batches * shape.micro_batch_tokens
    lengths = list[int]()
    shortest = (
        max(shape.prompt_tokens + 1, shape.trained_tokens // 8) if ragged else shape.trained_tokens
    )
    while sum(lengths) + shape.trained_tokens <= budget:
        lengths.append(int(random.integers(shortest, shape.trained_tokens + 1)))
    prompts = [random.integers(0, shape.vocab_size, shape.prompt_tokens).tolist() for _ in lengths]
    responses = [
        random.integers(0, shape.vocab_size, length - shape.prompt_tokens).tolist()
        for length in lengths
    ]
    signs = [
        [float(sign)] * len(response)
        for sign, response in zip(random.choice([-1, 1], len(lengths)), responses, strict=True)
    ]
    return BatchColumns.from_lists(prompts, responses, advantages=signs)
