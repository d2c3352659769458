"""Arguments that go to Megatron-core, SGLang and its router (rlpipe.config.arguments)."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext

import pytest
from packaging.version import Version

from rlpipe.config.arguments import names
from rlpipe.config.arguments.check import check_megatron, check_router, check_sglang, effective
from rlpipe.config.arguments.names import TABLES, accepts, load, receivers, stored
from rlpipe.config.arguments.table import TABLE
from rlpipe.config.train import TrainConfig
from rlpipe.errors import ConfigError
from rlpipe.slime.command_line import read_flags


def test_known_names_with_values_of_their_types_pass():
    check_megatron(
        {
            "recompute_granularity": "full",
            "recompute_num_layers": 1,
            "overlap_grad_reduce": True,
            "moe_input_jitter_eps": 1,
        }
    )
    check_sglang(
        {
            "mem_fraction_static": 0.8,
            "context_length": 4096,
            "elastic_ep_join_mode": None,
            "disable_overlap_schedule": True,
        }
    )
    check_router({"policy": "round_robin", "health_check_interval_secs": 5})


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({}, {"recompute_method": "uniform", "recompute_num_layers": 1}),
        ({"recompute_method": "block", "recompute_num_layers": 3}, {}),
    ],
)
def test_full_recomputation_gets_all_arguments_that_megatron_needs(given, more):
    arguments = {"recompute_granularity": "full", **given}
    assert TrainConfig.model_validate({"megatron": arguments}).megatron == arguments | more
    assert TrainConfig.model_validate(
        {"megatron": {"recompute_granularity": "selective"}}
    ).megatron.keys() == {"recompute_granularity"}


@pytest.mark.parametrize(
    ("check", "name", "nearest"),
    [
        (check_megatron, "recompute_granularityy", "recompute_granularity"),
        (check_sglang, "mem-fraction-static", "mem_fraction_static"),
        (check_sglang, "--context-length", "context_length"),
        (check_router, "policyy", "policy"),
    ],
)
def test_the_error_of_an_unknown_name_has_the_nearest(check, name, nearest):
    with pytest.raises(ConfigError, match="no argument of this name") as caught:
        check({name: 1})
    assert nearest in str(caught.value.expected)


@pytest.mark.parametrize(
    ("check", "name", "key"),
    [
        (check_megatron, "tensor_model_parallel_size", "train.parallel.tensor_model_parallel_size"),
        (check_megatron, "hidden_size", "model.source"),
        (check_megatron, "lr", "train.optimizer.lr"),
        (check_sglang, "tp_size", "resources.rollout_num_gpus_per_engine"),
        (check_sglang, "tensor_parallel_size", "resources.rollout_num_gpus_per_engine"),
        (check_sglang, "model", "model.source"),
        (check_router, "host", "engine.host"),
    ],
)
def test_an_owned_name_is_refused_with_the_key_to_use(check, name, key):
    with pytest.raises(ConfigError, match="sets this argument itself") as caught:
        check({name: 1})
    assert key in str(caught.value.do)


@pytest.mark.parametrize(
    ("check", "name", "value"),
    [
        (check_sglang, "mem_fraction_static", "0.8"),
        (check_sglang, "context_length", True),
        (check_sglang, "disable_overlap_schedule", 1),
        (check_megatron, "recompute_granularity", "some"),
        (check_megatron, "activation_func", "gelu"),
        (check_megatron, "grad_scale_func", 2.0),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(check, name, value):
    with pytest.raises(ConfigError) as caught:
        check({name: value})
    assert caught.value.found == repr(value)


@pytest.mark.parametrize(
    ("type_text", "value", "expected"),
    [
        ("int", 1, True),
        ("int", 1.0, False),
        ("int", True, False),
        ("float", 1, True),
        ("bool", False, True),
        ("bool", 0, False),
        ("str | None", None, True),
        ("str", None, False),
        ("'full' | 'selective'", "full", True),
        ("'full' | 'selective'", "half", False),
        ("1 | 2", 2, True),
        ("list", (1,), True),
        ("dict", {}, True),
        ("object", "x", False),
        ("object | None", None, True),
    ],
)
def test_types_are_checked_as_far_as_json_goes(type_text, value, expected):
    assert accepts(type_text, value) is expected


def test_receivers_are_the_classes_with_an_argument():
    assert receivers("megatron", "recompute_granularity") == ["TransformerConfig"]
    assert receivers("megatron", "overlap_grad_reduce") == ["DistributedDataParallelConfig"]
    assert receivers("megatron", "nothing") == []


@pytest.mark.parametrize("table", TABLES)
def test_every_name_of_the_table_is_an_argument_of_some_version(table):
    kinds = [kind for content in stored(table).values() for kind in content["receivers"].values()]
    fields = {entry.get("field", name) for kind in kinds for name, entry in kind.items()}
    assert set(TABLE[table]) <= fields


@pytest.mark.parametrize(
    ("version", "older", "newer"),
    [("0.5.15", True, False), ("0.5.18", True, True), ("0.5.21", False, True), (None, False, True)],
)
def test_names_are_those_of_the_installed_version(monkeypatch, version, older, newer):
    monkeypatch.setattr(names, "installed", lambda package: Version(version) if version else None)
    monkeypatch.setattr(names, "load", load.__wrapped__)
    for name, known in (
        ("cuda_graph_max_bs", older),
        ("prefill_decode_interval", newer),
        ("chunked_prefill_size", True),
    ):
        with (
            nullcontext() if known else pytest.raises(ConfigError, match="no argument of this name")
        ):
            check_sglang({name: None})


@pytest.mark.parametrize("table", TABLES)
def test_secrets_are_refused_because_they_would_be_stored_with_the_run(table):
    kinds = [kind for content in stored(table).values() for kind in content["receivers"].values()]
    fields = {entry.get("field", name) for kind in kinds for name, entry in kind.items()}
    secrets = {name for name in fields if "api_key" in name or "password" in name}
    assert secrets <= TABLE[table].keys()
    assert all("stored with the run" in TABLE[table][name].text for name in secrets)
    assert bool(secrets) == (table != "megatron")


@pytest.mark.integration
def test_the_tables_are_those_of_the_installed_packages(repository):
    result = subprocess.run(
        [sys.executable, "-m", "tools.argument_tables", "--check"],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_configuration_imports_without_the_heavy_packages(repository):
    heavy = {"torch", "ray", "prefect", "megatron", "sglang", "transformers"}
    code = "import sys, rlpipe.config.load; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert heavy.isdisjoint(result.stdout.split())


@pytest.mark.parametrize(
    ("check", "name", "value"),
    [
        (check_sglang, "device", "cpu"),
        (check_sglang, "skip_tokenizer_init", True),
        (check_sglang, "pp_size", 2),
        (check_sglang, "disaggregation_mode", "prefill"),
        (check_sglang, "quantization", "fp8"),
        (check_sglang, "allow_auto_truncate", True),
        (check_sglang, "delete_ckpt_after_loading", True),
        (check_router, "pd_disaggregation", True),
        (check_router, "tls_cert_path", "/cert"),
        (check_megatron, "moe_aux_loss_coeff", 0.01),
        (check_megatron, "moe_z_loss_coeff", 0.01),
        (check_megatron, "moe_router_load_balancing_type", "aux_loss"),
        (check_megatron, "use_cpu_initialization", True),
        (check_megatron, "perform_initialization", False),
        (check_megatron, "overlap_p2p_comm_warmup_flush", True),
        (check_megatron, "overlap_p2p_comm", True),
        (check_megatron, "batch_p2p_comm", True),
        (check_megatron, "deallocate_pipeline_outputs", True),
        (check_megatron, "optimizer", "sgd"),
        (check_megatron, "apply_query_key_layer_scaling", True),
        (check_megatron, "softmax_scale", 0.5),
    ],
)
def test_values_that_a_rank_or_an_engine_would_refuse_are_refused_early(check, name, value):
    with pytest.raises(ConfigError, match=name):
        check({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp8", "e4m3"),
        ("fp4", "e2m1"),
        ("window_size", [128, 0]),
        ("qk_clip", True),
        ("experimental_attention_variant", "dsa"),
        ("muon_momentum", 0.9),
        ("muon_num_ns_steps", 6),
        ("sgd_momentum", 0.5),
        ("linear_attention_freq", 2),
        ("tp_comm_overlap", True),
        ("cross_entropy_loss_fusion", True),
        ("use_megatron_fsdp", True),
        ("cuda_graph_impl", "transformer_engine"),
        ("log_num_zeros_in_grad", True),
        ("init_method_std", 0.1),
    ],
)
def test_an_argument_without_effect_is_refused_with_the_reason(name, value):
    with pytest.raises(ConfigError, match=r"(?s)would have no effect.*remove it: ") as caught:
        check_megatron({name: value})
    assert caught.value.where == f"train.megatron.{name}"
    assert len(str(caught.value.do)) > 30


def test_values_without_effect_are_accepted_and_not_passed_on():
    given = {
        "optimizer": "adam",
        "moe_aux_loss_coeff": 0,
        "moe_router_load_balancing_type": "none",
        "attention_softmax_in_fp32": True,
        "fp8": None,
        "batch_p2p_comm": False,
    }
    check_megatron(given)
    assert effective("megatron", {**given, "grad_reduce_in_fp32": True}) == {
        "grad_reduce_in_fp32": True
    }
    with pytest.raises(ConfigError):
        check_megatron({"batch_p2p_comm": 0})


LAUNCH_FLAGS = """
--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
--attention-softmax-in-fp32 --attention-backend flash --recompute-granularity full
--recompute-method uniform --recompute-num-layers 1 --optimizer-cpu-offload
--overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer --use-distributed-optimizer
--moe-token-dispatcher-type alltoall --moe-enable-deepep --moe-router-dtype fp32
--moe-permute-fusion --moe-grouped-gemm --moe-aux-loss-coeff 0
--moe-router-load-balancing-type seq_aux_loss --moe-router-bias-update-rate 0
--moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-topk-scaling-factor 2.5 --moe-layer-freq 1 --no-gradient-accumulation-fusion
--no-rope-fusion --transformer-impl transformer_engine --no-masked-softmax-fusion
--overlap-grad-reduce --init-method-std 0.02 --make-vocab-size-divisible-by 1
--sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-dp-size 8
--sglang-ep-size 8 --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head
--sglang-cuda-graph-bs-decode 1 2 4 8 --sglang-disable-radix-cache
--sglang-attention-backend fa3 --sglang-speculative-algorithm EAGLE
--sglang-speculative-num-steps 3 --sglang-log-level warn --sglang-server-concurrency 512
"""
"""Flags of slime's launch scripts."""


def test_flags_of_launch_scripts_are_accepted():
    given = read_flags(LAUNCH_FLAGS.split())
    check_megatron(given.megatron)
    check_sglang(given.sglang)
    assert given.megatron["optimizer_cpu_offload"] is True


@pytest.mark.parametrize(
    "flag",
    [
        "--fp8-recipe blockwise",
        "--sglang-device cpu",
        "--sglang-policyy x",
        "--mtp-standalone",
    ],
)
def test_flags_are_refused_by_the_same_table(flag):
    with pytest.raises(ConfigError, match=flag.split()[0]):
        read_flags(flag.split())


@pytest.mark.parametrize("table", TABLES)
def test_every_row_has_an_alternative_or_a_reason(table):
    for name, rule in TABLE[table].items():
        starts = ("use ", "remove it: ") if rule.kind == "owned" else ("",)
        assert rule.text.startswith(starts), name
        assert "nothing: " not in rule.text, name
        assert len(rule.text.split()) >= 2, name


@pytest.mark.parametrize(
    ("check", "name", "value", "words"),
    [
        (check_sglang, "attention_backend", "flash", "flashinfer"),
        (check_sglang, "moe_a2a_backend", "deepp", "deepep"),
        (check_router, "policy", "consistent_hashing", "manual"),
        (check_sglang, "enable_multimodal", False, "only be turned on"),
        (check_sglang, "context_length", "4096tokens", "not a size"),
        (check_sglang, "forward_hooks", "not json", "not JSON"),
    ],
)
def test_a_value_that_the_packages_command_line_refuses_is_refused(check, name, value, words):
    with pytest.raises(ConfigError, match=words):
        check({name: value})
