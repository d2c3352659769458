"""Make the model of the recipes with tools: a tiny Qwen3 with one token for each tag.

Needs no network. The weights are random.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import AddedToken

from deployments.recipes.tiny_models import character_tokenizer, make_tiny_model

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A chat template, so that the model accepts chat completions."""


def make_agent_model(
    directory: str,
    *,
    tools: Sequence[str],
    seed: int = 0,
    hidden_size: int = 128,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 384,
    max_position_embeddings: int = 512,
) -> None:
    """Write a Qwen3 of 0.6M parameters with tokens for the tags of tools and results.

    The other tokens are those of `tiny_models`. A question of n characters is a prompt of n tokens.
    A tool call costs two tokens more than its argument.
    """
    tokenizer = character_tokenizer("Question: ")
    names = [*tools, "result"]
    tags: list[str | AddedToken] = [
        AddedToken(f"<{end}{name}>", normalized=False) for name in names for end in ("", "/")
    ]
    tokenizer.add_tokens(tags)
    # Pad the vocabulary to a multiple of 8: 2, 4 or 8 ranks can share it.
    padding = -len(tokenizer) % 8
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [f"<spare_{number}>" for number in range(padding)]}
    )
    tokenizer.chat_template = CHATML
    make_tiny_model(
        directory,
        tokenizer,
        seed=seed,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
    )
