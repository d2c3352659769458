"""Check a model directory's config.json, key by key, against what the trainer's layers compute.

Every key is one of three kinds, for the directory's model type:

- the bridge reads it (`Family.reads`), perhaps for some values only (`Family.only`,
  `Family.rules`);
- it does not change what a text policy computes (`HARMLESS`);
- anything else is refused by name, unless its value says that it is off (`_OFF`, `_NEUTRAL`).

A key of the last kind is refused even where transformers ignores it: SGLang or the directory's own
code may compute with it, and then engines sample from another model than the one that is trained.
Each entry was decided by comparing the log-probs of a tiny model in the trainer and in transformers
(`tests/engines/megatron/bridges/test_supported.py`).

This module reads JSON alone and imports neither torch nor transformers: preflight calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpipe.errors import ConfigError
from rlpipe.model_dir import check_sizes, read_object

SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers does not have, and the type that each is under another name."""
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The only llama3 scaling that Megatron has: that of Llama 3.1 and later."""
FP8_BLOCK = [128, 128]

Problem = tuple[str, Any, str]
"""(key, the value found, what is expected)."""
Rule = Callable[[Mapping[str, Any]], Iterator[Problem]]
"""Gets config.json with the defaults of its family."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


HARMLESS = _words("""
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation _from_model_config _name_or_path architectures attn_implementation auto_map
    chunk_size_feed_forward dtype initializer_range is_llama_config max_position_embeddings model_type
    pretraining_tp torch_dtype transformers.js_config transformers_version unsloth_fixed unsloth_version use_cache

    bos_token_id cls_token_id decoder_start_token_id eod_token_id eos_token_id mask_token_id pad_token_id
    prefix sep_token_id tokenizer_class unk_token_id

    finetuning_task id2label label2id num_labels problem_type task_specific_params

    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate torchscript

    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id generation_config length_penalty
    max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences remove_invalid_values
    repetition_penalty suppress_tokens temperature top_k top_p typical_p

    aux_loss_alpha ep_size num_nextn_predict_layers output_router_logits router_aux_loss_coef seq_aux
""")
"""Names of no effect: about the file, token ids, heads of classifiers, outputs of transformers, old
generation settings, auxiliary losses (off here) and how experts were spread in pretraining. Layers
that predict further tokens (`num_nextn_predict_layers`) are not trained: `kept` carries them
through an export."""

_OFF = (None, False, "", [], {})
"""Values by which an unknown key says that it is not in use."""

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
"""Keys of any family that are off at a value of their own, and those values. A dropout other than 0
is refused: the same batch would then get other log-probs in training than in scoring."""

_EVERY_BRIDGE = _words("""
    head_dim hidden_size intermediate_size layer_types num_attention_heads num_hidden_layers num_key_value_heads
    quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size
""")
_ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": _words("factor"),
    "llama3": _words("factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": _words(
        "factor beta_fast beta_slow mscale mscale_all_dim original_max_position_embeddings"
    ),
}
"""What each type of rotation takes, beside its type, `rope_theta` and `partial_rotary_factor`."""
_REQUIRED = {
    "default": frozenset[str](),
    "linear": _words("factor"),
    "llama3": _ROPE_KEYS["llama3"],
    "yarn": _words("factor original_max_position_embeddings"),
}


@dataclass(frozen=True)
class Family:
    """What the bridge of one model type computes with."""

    reads: frozenset[str] = frozenset()
    """Beside what every bridge reads."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The values for which a key is computed as transformers does; a missing key is transformers'
    default."""
    ropes: tuple[str, ...] = ("default",)
    """Types of rotation."""
    rules: tuple[Rule, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' own, of keys that a rule looks at."""


def check_supported(directory: Path, key: str) -> None:
    """Check the config.json of a directory. `key`: what names the directory in the configuration.

    Raises: ConfigError naming file and keys, for anything that the trainer does not compute.
    """
    path = directory / "config.json"
    check_config(read_object(path, key), f"{key}: {path}")


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Check the contents of a config.json. Raises: ConfigError, as `check_supported`."""
    check_sizes(config, where)
    kind = config.get("model_type")
    family = FAMILIES.get(SAME_AS.get(str(kind), str(kind)))
    if family is None:
        raise ConfigError(
            "the trainer has no layers for this model type",
            where=f"{where}: model_type",
            found=kind,
            expected=f"one of {', '.join(sorted({*FAMILIES, *SAME_AS}))}",
        )
    rules = (_full_attention_everywhere, *family.rules)
    try:
        problems = [*_of_keys(config, family), *_of_rope(config, family), *_of_quantization(config)]
        problems += [problem for rule in rules for problem in rule({**family.defaults, **config})]
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            "not a model's configuration", where=where, found=f"a value of another type: {error}"
        ) from error
    if problems:
        names, found, expected = zip(*problems, strict=True)
        raise ConfigError(
            "the trainer does not compute this",
            where=f"{where}: {', '.join(names)}",
            found="; ".join(
                f"{name} = {value!r}" for name, value in zip(names, found, strict=True)
            ),
            expected="; ".join(expected),
            do="take another model; delete a key only if you know that nothing computes with it",
        )


def _of_keys(config: Mapping[str, Any], family: Family) -> Iterator[Problem]:
    for name, value in config.items():
        if (values := family.only.get(name)) is not None:
            if not _among(value, values):
                yield name, value, f"{name}: {_listed(values)}"
        elif name in family.reads or name in _EVERY_BRIDGE or name in HARMLESS:
            continue
        elif (values := _NEUTRAL.get(name)) is not None:
            if not _among(value, values):
                yield name, value, f"{name}: {_listed(values)}, or no such key"
        elif not _among(value, _OFF):
            yield name, value, f"no key {name}, which is unknown for {config['model_type']}"


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    """Equality that tells true from 1 and false from 0."""
    return any(
        isinstance(value, bool) == isinstance(each, bool) and value == each for each in values
    )


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in values if value is not None)


def _of_rope(config: Mapping[str, Any], family: Family) -> Iterator[Problem]:
    """Both names of the rotation: `rope_scaling`, and `rope_parameters` since transformers 5."""
    for name in ("rope_scaling", "rope_parameters"):
        if (rope := config.get(name)) is not None and rope != {}:
            yield from _of_one_rope(name, rope, config, family)
    both = [config.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if all(isinstance(each, dict) and each for each in both) and both[0] != both[1]:
        yield "rope_scaling, rope_parameters", both, "one rotation, not two different ones"


def _of_one_rope(
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
            f"{name}: {_listed(family.ropes)} for {config['model_type']}",
        )
        return
    known = _ROPE_KEYS[kind] | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    for each in sorted(rope.keys() - known):
        off = (None, True) if each == "truncate" else _OFF
        if not _among(rope[each], off):
            yield f"{name}.{each}", rope[each], f"no key {each} in a rotation of type {kind}"
    for each in ("rope_theta", "partial_rotary_factor"):
        if (
            config.get(each) is not None
            and rope.get(each) is not None
            and config[each] != rope[each]
        ):
            yield each, config[each], f"{each}: {rope[each]!r}, as in {name}"
    partial = rope.get("partial_rotary_factor")
    if "partial_rotary_factor" not in family.reads and not _among(partial, (None, 1)):
        yield f"{name}.partial_rotary_factor", partial, f"{name}.partial_rotary_factor: 1"
    missing = sorted(_REQUIRED[kind] - rope.keys())
    if missing:
        yield name, rope, f"{', '.join(missing)} in {name}"
    elif kind == "llama3":
        for each, value in LLAMA3_ROPE.items():
            if rope[each] != value:
                yield f"{name}.{each}", rope[each], f"{name}.{each}: {value!r}"
    elif kind == "yarn":
        yield from _of_yarn_scale(name, rope)


def _of_yarn_scale(name: str, rope: Mapping[str, Any]) -> Iterator[Problem]:
    """transformers and Megatron scale attention alike only where both factors are given or neither
    is."""
    scales = [rope.get("mscale") or None, rope.get("mscale_all_dim") or None]
    if None in scales and scales not in ([None, None], [1, None]):
        yield (
            f"{name}.mscale, mscale_all_dim",
            scales,
            f"{name}: both of mscale and mscale_all_dim, or neither",
        )


def _of_quantization(config: Mapping[str, Any]) -> Iterator[Problem]:
    """FP8 in blocks, as DeepSeek has it, is read and made whole (`files`)."""
    found = config.get("quantization_config")
    if not found:
        return
    if not isinstance(found, dict):
        yield "quantization_config", found, "an object, or none"
    elif found.get("quant_method") != "fp8" or found.get("weight_block_size") != FP8_BLOCK:
        what = {name: found.get(name) for name in ("quant_method", "weight_block_size")}
        yield (
            "quantization_config",
            what,
            f"none, or fp8 in blocks of {FP8_BLOCK}: take the model's bf16 directory",
        )


def _full_attention_everywhere(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Any family: no layer of another kind, but with a window that hides nothing."""
    kinds = set(config.get("layer_types") or ())
    harmless = (
        {"full_attention", "sliding_attention"} if _hides_nothing(config) else {"full_attention"}
    )
    if kinds - harmless:
        yield "layer_types", sorted(kinds), "layer_types: 'full_attention' alone"


def _window_by_layer(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Qwen2, Qwen3, Qwen2-MoE: layers from `max_window_layers` on have the window, unless
    `layer_types` says otherwise."""
    if (
        config.get("layer_types") is None
        and config["max_window_layers"] < config["num_hidden_layers"]
    ):
        yield from _window_everywhere(config)


def _window_everywhere(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Qwen3-MoE: `use_sliding_window` gives every layer the window, whatever `max_window_layers`
    says."""
    if config.get("use_sliding_window"):
        yield from _window(config, "use_sliding_window", "false")


def _window_of_mixtral(config: Mapping[str, Any]) -> Iterator[Problem]:
    yield from _window(config, "sliding_window", "null")


def _window(config: Mapping[str, Any], name: str, off: str) -> Iterator[Problem]:
    window = config.get("sliding_window")
    longest = config["max_position_embeddings"]
    if window is not None and not _hides_nothing(config):
        found = (
            config[name]
            if name == "sliding_window"
            else f"{config[name]!r}, with sliding_window {window!r}"
        )
        yield (
            name,
            found,
            f"{name}: {off}, or a window of max_position_embeddings ({longest}) at least",
        )


def _hides_nothing(config: Mapping[str, Any]) -> bool:
    """True if the window is as long as the longest context."""
    window = config.get("sliding_window")
    longest = config.get("max_position_embeddings")
    return isinstance(window, int) and isinstance(longest, int) and window >= longest


def _renormalised_or_one(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Megatron's sigmoid router makes weights sum to 1 if it chooses more than one expert, and
    never else."""
    chosen = config["num_experts_per_tok"]
    normed = bool(config["norm_topk_prob"])
    if normed != (chosen > 1):
        found = f"{config['norm_topk_prob']!r}, with num_experts_per_tok {chosen}"
        yield (
            "norm_topk_prob",
            found,
            f"norm_topk_prob: {'true' if chosen > 1 else 'false'} (weights of several experts sum to 1)",
        )


def _softmax_of_more_than_one(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Megatron refuses to renormalise the weight of one expert, which would always be 1."""
    if config["norm_topk_prob"] and config["num_experts_per_tok"] == 1:
        yield (
            "num_experts_per_tok",
            1,
            "num_experts_per_tok: 2 or more, if weights are renormalised",
        )


def _groups_of_experts(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Megatron ranks groups by their best k // topk_group experts, the models by their best two."""
    groups = config["n_group"] or 1
    best = config["topk_group"] or 1
    chosen = config["num_experts_per_tok"]
    if best < groups and chosen // best != 2:
        found = f"{chosen}, with topk_group {best} of n_group {groups}"
        yield "num_experts_per_tok", found, f"num_experts_per_tok: {2 * best}, twice topk_group"


def _experts_everywhere(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Qwen: no layer without experts among those that have them."""
    if config.get("mlp_only_layers"):
        yield "mlp_only_layers", config["mlp_only_layers"], "mlp_only_layers: []"
    if config["decoder_sparse_step"] != 1:
        yield "decoder_sparse_step", config["decoder_sparse_step"], "decoder_sparse_step: 1"


def _dense_layers_first(config: Mapping[str, Any]) -> Iterator[Problem]:
    """GLM-4.7-Flash: a number of dense layers, then those with experts. transformers reads the list
    and not the number."""
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (
        config["num_hidden_layers"] - 1
    )
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if dense == len(kinds) or set(kinds[dense:]) != {"sparse"} or set(kinds[:dense]) - {"dense"}:
        yield "mlp_layer_types", kinds, "mlp_layer_types: 'dense' some times, then 'sparse'"
    elif config.get("first_k_dense_replace", dense) != dense:
        yield (
            "first_k_dense_replace",
            config["first_k_dense_replace"],
            f"first_k_dense_replace: {dense}, as mlp_layer_types has it",
        )


def _some_layer_has_experts(config: Mapping[str, Any]) -> Iterator[Problem]:
    if config["first_k_dense_replace"] > config["num_hidden_layers"]:
        found = config["first_k_dense_replace"]
        most = config["num_hidden_layers"]
        yield (
            "first_k_dense_replace",
            found,
            f"first_k_dense_replace: at most num_hidden_layers, {most}",
        )


def _sizes_of_latent_heads(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Sizes that follow from others; transformers takes `head_dim` for the rotation's."""
    turned = config["qk_rope_head_dim"]
    plain = config["qk_nope_head_dim"]
    for name, size in (("head_dim", turned), ("qk_head_dim", turned + plain)):
        if config.get(name) not in (None, size):
            yield name, config[name], f"{name}: {size}, or no such key"


_WINDOWS = _words("max_window_layers sliding_window use_sliding_window")
_QWEN_EXPERTS = _words(
    "decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts_per_tok"
)
_NAMES_OF_EXPERTS = _words("num_experts num_local_experts")
_SIGMOID_EXPERTS = _words("""
    first_k_dense_replace moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob
    num_experts_per_tok num_local_experts routed_scaling_factor topk_group
""")
_LATENT = _words(
    "kv_lora_rank q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim"
)
_LATENT_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "moe_layer_freq": (1,),
    "rope_interleave": (None, True),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
_WINDOW_DEFAULTS = {
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_hidden_layers": 32,
}
_QWEN_EXPERTS_DEFAULTS = {
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "max_position_embeddings": 32768,
}
_LATENT_RULES = (_renormalised_or_one, _groups_of_experts, _sizes_of_latent_heads)

FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family(
        reads=_SIGMOID_EXPERTS | _LATENT,
        only=_LATENT_ONLY,
        ropes=("default", "yarn"),
        rules=(*_LATENT_RULES, _some_layer_has_experts),
        defaults={
            "first_k_dense_replace": 3,
            "n_group": 8,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "topk_group": 4,
        },
    ),
    "glm4": Family(reads=_words("attention_bias partial_rotary_factor")),
    "glm4_moe": Family(
        reads=_SIGMOID_EXPERTS | _words("attention_bias partial_rotary_factor use_qk_norm"),
        only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        rules=(_renormalised_or_one, _groups_of_experts, _some_layer_has_experts),
        defaults={
            "first_k_dense_replace": 1,
            "n_group": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 46,
            "topk_group": 1,
        },
    ),
    "glm4_moe_lite": Family(
        reads=_SIGMOID_EXPERTS | _LATENT | {"mlp_layer_types"},
        only=_LATENT_ONLY,
        ropes=("default", "yarn"),
        rules=(*_LATENT_RULES, _dense_layers_first),
        defaults={
            "n_group": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 47,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "topk_group": 1,
        },
    ),
    "llama": Family(
        only={"attention_bias": (None, False), "mlp_bias": (None, False)},
        ropes=("default", "linear", "llama3"),
    ),
    "mixtral": Family(
        reads=_NAMES_OF_EXPERTS | _words("num_experts_per_tok sliding_window"),
        only={"router_jitter_noise": (None, 0)},
        rules=(_window_of_mixtral, _softmax_of_more_than_one),
        defaults={
            "max_position_embeddings": 131072,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen2": Family(
        reads=_WINDOWS,
        only={"attention_bias": (None, False, True), "qkv_bias": (None, True)},
        rules=(_window_by_layer,),
        defaults=_WINDOW_DEFAULTS,
    ),
    "qwen2_moe": Family(
        reads=_WINDOWS
        | _QWEN_EXPERTS
        | _NAMES_OF_EXPERTS
        | _words("qkv_bias shared_expert_intermediate_size"),
        rules=(_window_by_layer, _softmax_of_more_than_one, _experts_everywhere),
        defaults={
            **_WINDOW_DEFAULTS,
            **_QWEN_EXPERTS_DEFAULTS,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
        },
    ),
    "qwen3": Family(
        reads=_WINDOWS,
        only={"attention_bias": (None, False), "use_qk_norm": (None, True)},
        rules=(_window_by_layer,),
        defaults=_WINDOW_DEFAULTS,
    ),
    "qwen3_moe": Family(
        reads=_WINDOWS | _QWEN_EXPERTS | _NAMES_OF_EXPERTS,
        only={"attention_bias": (None, False), "use_qk_norm": (None, True)},
        rules=(_window_everywhere, _softmax_of_more_than_one, _experts_everywhere),
        defaults={**_QWEN_EXPERTS_DEFAULTS, "num_experts_per_tok": 8},
    ),
}
"""By transformers' model type."""
