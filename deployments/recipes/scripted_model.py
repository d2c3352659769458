"""Make the small model of a recipe's smoke test: a Qwen3 that writes what a script says.

A recipe for a large model needs responses that call its tools and that are right now and then;
otherwise its rewards are all 0 and its tools are never called. Random weights give neither. The
script names, for a token, the tokens that may follow it:

    script:
      "\\n": ['Answer: \\boxed{']         # after the prompt, which ends with a line break
      'Answer: \\boxed{': ["3", "4"]      # one of these, equally likely
      "3": ["}"]
      "4": ["}"]

Any other token is followed by the end of the sequence. Texts of several characters are one token.
The weights are a complete Qwen3 (its layers add nothing at first), so that trainer, engine, weight
transfer and checkpoints do their real work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import AddedToken, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from deployments.recipes.tiny_models import SPECIAL_TOKENS, character_tokenizer, save_model

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Call functions of these signatures:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML with tools, as in the templates of Qwen, without their texts."""
LOGIT = 12.0
"""Logit of a scripted token; others have 0. A scripted token is drawn in 999 of 1,000 cases, and
the others keep a probability that training can change."""
HEAD_DIM = 32
NUM_KV_HEADS = 2


def make_scripted_model(
    directory: str,
    *,
    script: Mapping[str, Sequence[str]],
    seed: int = 0,
    num_layers: int = 2,
    max_position_embeddings: int = 2048,
) -> None:
    """Write a float32 Qwen3 and its tokenizer. `seed` decides the weights of the layers."""
    tokenizer = scripted_tokenizer(script)
    size = len(tokenizer)
    config = Qwen3Config(
        vocab_size=size,
        # One dimension a token, so that the next token is a linear function of the last one.
        hidden_size=size,
        intermediate_size=2 * HEAD_DIM,
        num_hidden_layers=num_layers,
        num_attention_heads=2 * NUM_KV_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        tie_word_embeddings=False,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index("<eos>"),
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        weights = dict(model.named_parameters())
        weights["model.embed_tokens.weight"].copy_(torch.eye(size))
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        # The final norm scales a one-hot vector to the square root of its size.
        weights["lm_head.weight"].copy_(_logits(tokenizer, script).T / size**0.5)
    save_model(model, tokenizer, directory)


def scripted_tokenizer(script: Mapping[str, Sequence[str]]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a character and one for each text of the script."""
    texts = dict.fromkeys([*script, *(text for texts in script.values() for text in texts)])
    tokenizer = character_tokenizer("<|im_start|>")
    tokens: list[str | AddedToken] = [
        AddedToken(text, normalized=False) for text in texts if len(text) > 1
    ]
    tokenizer.add_tokens(tokens)
    # Several ranks can share a vocabulary and heads of these sizes.
    padding = -len(tokenizer) % HEAD_DIM
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [f"<spare_{number}>" for number in range(padding)]}
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _logits(
    tokenizer: PreTrainedTokenizerFast, script: Mapping[str, Sequence[str]]
) -> torch.Tensor:
    """Return the logits of the next token [last token, next token]."""
    logits = torch.zeros(len(tokenizer), len(tokenizer))
    logits[:, SPECIAL_TOKENS.index("<eos>")] = LOGIT
    for text, followers in script.items():
        (token,) = tokenizer.encode(text, add_special_tokens=False)
        logits[token] = 0
        for follower in followers:
            (following,) = tokenizer.encode(follower, add_special_tokens=False)
            logits[token, following] = LOGIT
    return logits
