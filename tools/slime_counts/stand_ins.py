"""Small stand-ins for what a launch of slime needs: a model, a tokenizer and prompt files.

    write_model("qwen3_moe", folder)                      a Hugging Face directory, random weights
    write_rows(folder / "train.jsonl", columns)           rows with the columns of a launch

A model has the architecture of its type: transformers' default configuration with the sizes in
`SIZES`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployments.recipes.tiny_models import SPECIAL_TOKENS, character_tokenizer, save_model

MODEL_TYPES = (
    (r"qwen3\.[56].*a\d+b", "qwen3_5_moe_text"),
    (r"qwen3\.[56]", "qwen3_5_text"),
    (r"qwen3-next", "qwen3_next"),
    (r"qwen3.*-a\d+b", "qwen3_moe"),
    (r"qwen3", "qwen3"),
    (r"qwen2|distill-qwen", "qwen2"),
    (r"glm-?5", "glm_moe_dsa"),
    (r"glm-?4\.7-(flash|30b)", "glm4_moe_lite"),
    (r"glm-?4\.[5-7]", "glm4_moe"),
    (r"glm", "glm4"),
    (r"deepseek|kimi|moonlight", "deepseek_v3"),
    (r"mimo", "mimo"),
    (r"minimax", "minimax_m2"),
)
"""Pattern of a model's name → its type. The first one that matches counts."""
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
}
"""Key of config.json → its value in a stand-in, if the model type has the key."""
EXTRA: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 32.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 128,
        },
    },
    "glm4": {"attention_bias": True},
    "glm4_moe": {"attention_bias": True, "use_qk_norm": True},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "minimax_m2": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000.0,
            "partial_rotary_factor": 0.5,
        },
        "rotary_dim": 8,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "qwen3_next": {"full_attention_interval": 2},
}
"""Model type → keys that its released models have and transformers' defaults do not."""
MIMO = """\
from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
"""Python file of MiMo's directories, which read its config.json."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION = "What is 2 + 3?"
ANSWER = "5"
VERL_LABEL = {"style": "rule", "ground_truth": {"target": [ANSWER]}}
"""Content of verl's column `reward_model`."""


def model_type(name: str) -> str | None:
    """Return the type of a model by the name of its folder; None if no pattern matches."""
    return next((kind for pattern, kind in MODEL_TYPES if re.search(pattern, name.lower())), None)


def write_model(kind: str, folder: Path) -> None:
    """Write a model of a type with two layers and random weights, and its tokenizer.

    Raises: KeyError if transformers has no such type.
    """
    if kind == "mimo":
        _write_mimo(folder)
        return
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    tokenizer = character_tokenizer(QUESTION)
    tokenizer.chat_template = CHAT_TEMPLATE
    make: Any = CONFIG_MAPPING[kind]
    known = make().to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if "kv_lora_rank" in sizes:  # latent attention has a head for each query
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if "linear_attention" not in (known.get("layer_types") or ()):
        sizes.pop("layer_types", None)
    config = make(
        **sizes,
        **EXTRA.get(kind, {}),
        vocab_size=len(tokenizer),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index("<eos>"),
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_model(model, tokenizer, str(folder))


def _write_mimo(folder: Path) -> None:
    """Write a model of MiMo, which is a Qwen2 with a layer for multi-token prediction.

    The directory's own code describes the Qwen2.
    """
    import torch
    from safetensors.torch import load_file, save_file

    write_model("qwen2", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
    }
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "configuration_mimo.py").write_text(MIMO, encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    size = config["hidden_size"]
    layer = {
        name.replace("model.layers.0.", "model.mtp_layers.0."): weight.clone()
        for name, weight in weights.items()
        if name.startswith("model.layers.0.")
    }
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        layer[f"model.mtp_layers.0.{norm}.weight"] = torch.ones(size)
    layer["model.mtp_layers.0.input_proj.weight"] = torch.eye(size).repeat(1, 2) / 2
    save_file(weights | layer, folder / "model.safetensors", metadata={"format": "pt"})


def write_rows(
    path: Path,
    columns: Mapping[str, str | None],
    *,
    messages: bool,
    answered: bool,
    metadata: Mapping[str, Any],
) -> None:
    """Write eight prompts as JSON lines.

    `columns`: `input`, `label`, `metadata` → name of the column, or None without one. The column
    `index` has the numbers of tasks, as tau-bench's files. `messages`: prompts are chat messages;
    `answered`: with the assistant's answer.
    """
    rows = []
    for number in range(8):
        text = f"{QUESTION} {number}"
        turns = [{"role": "user", "content": text}]
        if answered:
            turns.append({"role": "assistant", "content": ANSWER})
        label = VERL_LABEL if columns.get("label") == "reward_model" else ANSWER
        prompt = number if columns.get("input") == "index" else turns if messages else text
        values = {"input": prompt, "label": label, "metadata": metadata}
        rows.append({column: values[use] for use, column in columns.items() if column})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
