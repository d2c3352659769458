"""`check_supported`: check a model directory's config.json against the trainer's layers.

Every key of the file is one of three kinds for its model type (`supported_families`):

- the bridge reads the key (`Family.reads`), possibly for some values only (`Family.only`,
  `Family.rules`);
- the key does not change the computation of a text policy (`HARMLESS`);
- any other key is refused by name, unless its value turns it off (`_OFF`, `_NEUTRAL`).

A key of the last kind is refused even if transformers ignores it. SGLang or the directory's own
code may compute with it, and then engines would sample from another model than the trained one.

Preflight calls this module, so it imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlpipe.engines.megatron.bridges.family import Family, Problem, check_layer_types, words
from rlpipe.engines.megatron.bridges.supported_families import FAMILIES
from rlpipe.errors import ConfigError
from rlpipe.system.model_files import check_sizes, read_object

SAME_AS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Model type that transformers does not have → the equivalent type. MiMo-7B is a Qwen2 with layers
for multi-token prediction."""
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Megatron's only llama3 scaling: that of Llama 3.1 and later."""
VISION = frozenset(name for name, family in FAMILIES.items() if family.tower)
"""Model types that read images. Their text model may be an object of its own, `text_config`."""
FP8_BLOCK = [128, 128]

HARMLESS = words("""
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation _from_model_config _model_name_or_path _name_or_path architectures
    attn_implementation auto_map chunk_size_feed_forward dtype initializer_range is_llama_config
    max_position_embeddings model_type pretraining_tp torch_dtype transformers.js_config
    transformers_version unsloth_fixed unsloth_version use_cache

    bos_token_id cls_token_id decoder_start_token_id eod_token_id eos_token_id mask_token_id
    pad_token_id prefix sep_token_id tokenizer_class unk_token_id

    finetuning_task id2label label2id num_labels problem_type task_specific_params

    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate
    torchscript

    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id generation_config length_penalty max_length min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences remove_invalid_values repetition_penalty
    suppress_tokens temperature top_k top_p typical_p

    aux_loss_alpha ep_size num_nextn_predict_layers output_router_logits router_aux_loss_coef
    seq_aux
""")
"""Keys without effect: about the file, token ids, heads of classifiers, outputs of transformers,
old generation settings, auxiliary losses (off here) and the layout of experts in pretraining.
Layers for multi-token prediction (`num_nextn_predict_layers`) are trained only if
train.megatron.mtp_num_layers is set; otherwise `export` copies them."""

_OFF = (None, False, "", [], {})
"""Values of an unknown key that turn it off."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "activation_function": ("silu",),
    "attention_dropout": (0,),
    "attention_sink_size": (None, 0),
    "embd_pdrop": (0,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None, 0),
    "attn_logit_softcapping": (None, 0),
    "hidden_act": ("silu", "swish"),
    "hidden_activation": (None, "silu", "swish"),
    "hidden_dropout": (0,),
    "is_causal": (None, True),
    "is_decoder": (None, False, True),
    "logit_scale": (None, 1),
    "logit_softcap": (None, 0),
    "logits_scaling": (None, 1),
    "lm_head_multiplier": (None, 1),
    "num_attention_sinks": (None, 0),
    "partial_rotary_factor": (None, 1),
    "resid_pdrop": (0,),
    "residual_multiplier": (None, 1),
    "rotary_pct": (None, 1),
    "scale_emb": (None, 1),
    "use_qk_norm": (None, False),
}
"""Key of any family → the values that turn it off. A dropout other than 0 is refused, because the
same batch would get different log-probs in training and in scoring."""

_EVERY_BRIDGE = words("""
    head_dim hidden_size intermediate_size layer_types num_attention_heads num_hidden_layers
    num_key_value_heads quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta
    tie_word_embeddings vocab_size
""")
_ROPE_KEYS = {
    "mrope": frozenset[str](),
    "default": frozenset[str](),
    "linear": words("factor"),
    "llama3": words("factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": words(
        "factor beta_fast beta_slow mscale mscale_all_dim original_max_position_embeddings"
    ),
}
"""Type of rotation → its keys, in addition to the type, `rope_theta` and
`partial_rotary_factor`."""
_REQUIRED = {
    "mrope": frozenset[str](),
    "default": frozenset[str](),
    "linear": words("factor"),
    "llama3": _ROPE_KEYS["llama3"],
    "yarn": words("factor original_max_position_embeddings"),
}


def check_supported(directory: Path, key: str) -> None:
    """Check the config.json of a directory. `key`: the configuration key of the directory.

    Raises: ConfigError with file and keys, for anything that the trainer does not compute.
    """
    path = directory / "config.json"
    check_config(read_object(path, key), f"{key}: {path}")


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Check the contents of a config.json. Raises: ConfigError, as `check_supported`."""
    config = text_part(config, where) if config.get("model_type") in VISION else config
    check_sizes(config, where)
    kind = config.get("model_type")
    family = FAMILIES.get(SAME_AS.get(str(kind), str(kind)))
    if family is None:
        raise ConfigError(
            "the trainer has no layers for this model type",
            where=f"{where}: model_type",
            found=kind,
            expected=f"one of {', '.join(sorted({*FAMILIES, *SAME_AS}))}",
            do="write its text model with `python -m tools.text_model`, and use that"
            if f"{kind}_text" in FAMILIES
            else "use another model",
        )
    try:
        problems = [
            *_key_problems(config, family),
            *_rope_problems(config, family),
            *_quantization_problems(config, family),
        ]
        problems += check_layer_types(config, family)
        filled = {**family.defaults, **config}
        problems += [problem for rule in family.rules for problem in rule(filled)]
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            "not a model's configuration", where=where, found=f"a value of another type: {error}"
        ) from error
    if problems:
        names, found, expected = zip(*problems, strict=True)
        raise ConfigError(
            "the trainer does not support this config.json",
            where=f"{where}: {', '.join(names)}",
            found="; ".join(
                f"{name} = {value!r}" for name, value in zip(names, found, strict=True)
            ),
            expected="; ".join(expected),
            do="use another model; delete a key only if no code computes with it",
        )


def text_part(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the keys of the text model of a model with vision, and those of the whole model.

    Raises: ConfigError for an unknown key of the vision tower, or two values of one key.
    """
    text, tower = (config.get(name) or {} for name in ("text_config", "vision_config"))
    family = FAMILIES[config["model_type"]]
    if not isinstance(text, dict) or not isinstance(tower, dict) or not tower:
        raise ConfigError("not the configuration of a model with vision", where=where)
    unknown = sorted(
        name for name in tower.keys() - family.tower - HARMLESS if not _contains(tower[name], _OFF)
    )
    twice = {name for name in text.keys() & config.keys() - HARMLESS if text[name] != config[name]}
    if unknown or twice:
        raise ConfigError(
            "the trainer does not support this config.json",
            where=f"{where}: "
            + ", ".join([*(f"vision_config.{name}" for name in unknown), *sorted(twice)]),
            found=", ".join(f"{name} = {tower[name]!r}" for name in unknown)
            or "other values in text_config",
            expected=f"no such keys for {config['model_type']}" if unknown else "one value",
            do="use another model; delete a key only if no code computes with it",
        )
    both = {**text, **config}
    return {name: both[name] for name in both if name not in ("text_config", "vision_config")}


def _key_problems(config: Mapping[str, Any], family: Family) -> Iterator[Problem]:
    for name, value in config.items():
        if (values := family.only.get(name)) is not None:
            if not _contains(value, values):
                yield name, value, f"{name}: {_alternatives(values)}"
        elif name in family.reads or name in _EVERY_BRIDGE or name in HARMLESS:
            continue
        elif (values := _NEUTRAL.get(name)) is not None:
            if not _contains(value, values):
                yield name, value, f"{name}: {_alternatives(values)}, or no such key"
        elif not _contains(value, _OFF):
            yield name, value, f"no key {name}, which is unknown for {config['model_type']}"


def _contains(value: Any, values: tuple[Any, ...]) -> bool:
    """True if a value is in `values`. true is different from 1, and false from 0."""
    return any(
        isinstance(value, bool) == isinstance(candidate, bool) and value == candidate
        for candidate in values
    )


def _alternatives(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in values if value is not None)


def _rope_problems(config: Mapping[str, Any], family: Family) -> Iterator[Problem]:
    """Check both names of the rotation: `rope_scaling`, and transformers 5's `rope_parameters`."""
    for name in ("rope_scaling", "rope_parameters"):
        if (rope := config.get(name)) is not None and rope != {}:
            yield from _one_rope_problems(name, rope, config, family)
    ropes = [config.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if all(isinstance(rope, dict) and rope for rope in ropes) and ropes[0] != ropes[1]:
        yield "rope_scaling, rope_parameters", ropes, "one rotation, not two different ones"


def _one_rope_problems(
    name: str, rope: Any, config: Mapping[str, Any], family: Family
) -> Iterator[Problem]:
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        yield name, rope, f"{name}: one rotation for all layers"
        return
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in family.ropes:
        yield (
            f"{name}.rope_type",
            kind,
            f"{name}: {_alternatives(family.ropes)} for {config['model_type']}",
        )
        return
    known = (
        _ROPE_KEYS[kind]
        | family.rope_keys
        | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    )
    for key in sorted(rope.keys() - known):
        off = (None, True) if key == "truncate" else _OFF
        if not _contains(rope[key], off):
            yield f"{name}.{key}", rope[key], f"no key {key} in a rotation of type {kind}"
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None and rope.get(key) is not None and config[key] != rope[key]:
            yield key, config[key], f"{key}: {rope[key]!r}, as in {name}"
    partial = rope.get("partial_rotary_factor")
    if "partial_rotary_factor" not in family.reads and not _contains(partial, (None, 1)):
        yield f"{name}.partial_rotary_factor", partial, f"{name}.partial_rotary_factor: 1"
    missing = sorted(_REQUIRED[kind] - rope.keys())
    if missing:
        yield name, rope, f"{', '.join(missing)} in {name}"
    elif kind == "llama3":
        for key, value in LLAMA3_ROPE.items():
            if rope[key] != value:
                yield f"{name}.{key}", rope[key], f"{name}.{key}: {value!r}"
    elif kind == "yarn":
        yield from _yarn_scale_problems(name, rope)


def _yarn_scale_problems(name: str, rope: Mapping[str, Any]) -> Iterator[Problem]:
    """Check the scale of attention.

    transformers and Megatron scale equally only if both factors are given or neither is.
    """
    scales = [rope.get("mscale") or None, rope.get("mscale_all_dim") or None]
    if None in scales and scales not in ([None, None], [1, None]):
        yield (
            f"{name}.mscale, mscale_all_dim",
            scales,
            f"{name}: both of mscale and mscale_all_dim, or neither",
        )


def _quantization_problems(config: Mapping[str, Any], family: Family) -> Iterator[Problem]:
    """Check the quantization. `weight_files` dequantises FP8 in blocks, and MXFP4."""
    quantization = config.get("quantization_config")
    if not quantization:
        return
    if not isinstance(quantization, dict):
        yield "quantization_config", quantization, "an object, or none"
        return
    method = quantization.get("quant_method")
    block = quantization.get("weight_block_size")
    if method == "mxfp4" and method in family.quantizations:
        return
    if method != "fp8" or block != FP8_BLOCK or method not in family.quantizations:
        readable = {"fp8": f"fp8 in blocks of {FP8_BLOCK}", "mxfp4": "mxfp4"}
        names = " or ".join(readable[name] for name in family.quantizations)
        yield (
            "quantization_config",
            {"quant_method": method, "weight_block_size": block},
            f"none, or {names}: use the model's bf16 directory",
        )
