"""The models that are measured: Qwen3 shapes, dense or with experts, random weights; what they are
fed, and the FLOPs it takes.

A directory is complete (config, bfloat16 safetensors, tokenizer) and made once. Its model has no
end-of-sequence token, so every response is exactly as long as it was asked to be. The tokenizer has
a token for each ASCII character, so a prompt of n characters has n tokens, and a word for every
other id, so reading responses costs what it costs with a real one.

Legend: L layers, h heads of size d, H hidden size, I width of the MLP or of an expert, E experts of
which a token goes to k, V vocabulary, S tokens of prompt and response.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.batch.packing import BatchColumns


@dataclass(frozen=True)
class Shape:
    """A model, and the work that shows what it can do on the machines it is for."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Of an expert, where there are some."""
    vocab_size: int
    prompts: int
    """Of a rollout."""
    samples_per_prompt: int
    prompt_tokens: int
    response_tokens: int
    """Of a rollout."""
    trained_tokens: int
    """Prompt and response of a sample in the trainer's batch."""
    micro_batch_tokens: int
    micro_batches: int
    """Of an optimizer step."""
    together: bool = True
    """Do the trainer and its baseline fit on a GPU together?"""
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def layer_parameters(self) -> int:
        """Of all layers' matrices that a token goes through: L (2 H h d + 2 H h_kv d + 3 H I), with
        experts 3 k H I + H E."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        router = self.hidden_size * self.num_experts
        return self.num_layers * (
            attention + router + (self.experts_per_token or 1) * self._mlp_parameters
        )

    @property
    def parameters(self) -> int:
        """With the embedding, which is the output layer's matrix too, and all experts; norms are
        left out."""
        passed_by = (
            self.num_layers * (self.num_experts - self.experts_per_token) * self._mlp_parameters
        )
        return self.layer_parameters + passed_by + self.vocab_size * self.hidden_size

    @property
    def _mlp_parameters(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size

    def forward_flops(self, lengths: np.ndarray, responses: np.ndarray) -> float:
        """FLOPs that a forward pass over samples needs: 2 Σ S × layer_parameters + 2 Σ R × V H + 2
        L h d Σ S².

        Attention is causal: a token sees S / 2 others on average, in two products of 2 h d each.
        Logits are needed before the R response tokens only. A training step needs three times as
        much; what is computed again for the backward pass does not count, nor do padding, logits of
        prompts, Adam or norms.

        Shapes: lengths [N] tokens of each sample; responses [N] of its response.
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
"""`0.6b` and `4b` have the sizes of Qwen3-0.6B and Qwen3-4B, `moe` those of six layers of
Qwen3-30B-A3B; `tiny` and `tiny-moe` are for CPUs."""
CONTEXT_LEN = 40_960
FIRST_CHARACTER = " "
LAST_CHARACTER = "~"


def make_directory(shape: Shape, directory: Path, seed: int = 0) -> None:
    """Write the model. On the GPU if there is one; call it in a process that may end.

    The random weights are those of transformers (normal, 0.02), so responses are noise.
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
    except OSError:  # somebody else was faster
        shutil.rmtree(unfinished)


def hf_config(shape: Shape):
    """transformers' configuration of a shape."""
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
    """One token a printable ASCII character, and a word for each other id."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(ord(FIRST_CHARACTER), ord(LAST_CHARACTER) + 1)]
    names = [*characters, *(f"<{number}>" for number in range(len(characters), vocab_size))]
    made = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=names[0])
    )
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


def random_text(random: np.random.Generator, characters: int) -> str:
    """So many letters."""
    return "".join(chr(code) for code in random.integers(ord("a"), ord("z") + 1, characters))


def trained_batch(shape: Shape, *, ragged: bool = False, seed: int = 0) -> BatchColumns:
    """A batch as the train stage gets it, of `micro_batches` × `micro_batch_tokens` tokens.

    Samples of `trained_tokens`; if `ragged` from an eighth of that to all of it, uniformly.
    Advantages are ±1.
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
