"""Start a launch of slime with two iterations of a small model.

    start(launch, checkout, folder)      the result of the launch, also in folder/result.json

The words of the launch stay as they are, except sizes and names of this machine: the model is a
stand-in of its type, prompts are stand-ins with the columns that the launch names, there is one
trainer rank and one engine, and batches and responses are short (`small_words`). A model type that
SGLang cannot serve on CPUs trains there on the rollouts that another type has sampled with the same
words. Every record of the run is then checked (`rlpipe audit verify`). A launch that has passed in
`folder` is not started again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.engines.sglang.served_models import OWN_CODE, check_served
from rlpipe.engines.sglang.server import Server
from rlpipe.errors import ConfigError
from rlpipe.slime.args import FLAGS
from rlpipe.slime.megatron_flags import MODEL
from tools.slime_counts.launches import Launch
from tools.slime_counts.services import CODING_AGENT, ROLLOUT_BUFFER, TAU_BENCH, serving
from tools.slime_counts.stand_ins import model_type, write_model, write_rows

TIMEOUT_S = 600.0
GRACE_S = 60.0
STARTED = "started"
TRAINER_ONLY = "started except the engine"
FAILED = "not started"
SAMPLER = "qwen3"
"""Model type that samples for a type that SGLang cannot serve here."""
SIZES = {
    "num_rollout": 2,
    "rollout_batch_size": 2,
    "over_sampling_batch_size": 2,
    "n_samples_per_prompt": 2,
    "n_samples_per_eval_prompt": 1,
    "global_batch_size": 4,
    "num_steps_per_rollout": 2,
    "micro_batch_size": 1,
    "rollout_max_response_len": 8,
    "eval_max_response_len": 8,
    "rollout_max_prompt_len": 256,
    "rollout_max_context_len": 16000,
    "eval_max_prompt_len": 256,
    "eval_max_context_len": 16000,
    "max_tokens_per_gpu": 16384,
    "log_probs_max_tokens_per_gpu": 16384,
    "sglang_server_concurrency": 8,
    "sglang_context_length": 16384,
    "save_interval": 2,
    "eval_interval": 2,
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 1,
    "critic_num_nodes": 1,
    "critic_num_gpus_per_node": 1,
    "rollout_num_gpus": 1,
    "rollout_num_gpus_per_engine": 1,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "num_epoch": None,
    "sglang_config": None,
    "prefill_num_servers": None,
}
"""Flag → its largest value in a start; None: the flag is left out, because it divides GPUs."""
MACHINE = (
    "moe_enable_deepep",
    "moe_token_dispatcher_type",
    "sglang_attention_backend",
    "sglang_cuda_graph_bs",
    "sglang_cuda_graph_max_bs",
    "sglang_deepep_mode",
    "sglang_disaggregation_ib_device",
    "sglang_disaggregation_transfer_backend",
    "sglang_dp_size",
    "sglang_enable_dp_attention",
    "sglang_enable_dp_lm_head",
    "sglang_ep_size",
    "sglang_fp8_gemm_backend",
    "sglang_kv_cache_dtype",
    "sglang_mamba_scheduler_strategy",
    "sglang_mamba_ssm_dtype",
    "sglang_moe_a2a_backend",
    "sglang_moe_dense_tp_size",
    "sglang_moe_runner_backend",
    "sglang_nsa_decode_backend",
    "sglang_nsa_prefill_backend",
    "sglang_page_size",
    "sglang_speculative_algorithm",
    "sglang_speculative_draft_attention_backend",
    "sglang_speculative_eagle_topk",
    "sglang_speculative_num_draft_tokens",
    "sglang_speculative_num_steps",
    "sglang_tp_size",
    "use_precision_aware_optimizer",
    "use_wandb",
)
"""Flags for kernels, several GPUs and services that a machine with two CPU cores does not have."""
FOLDERS = ("load", "save", "critic_load", "critic_save", "update_weight_disk_dir")
ROW_METADATA: dict[str, dict[str, Any]] = {
    "ifbench": {"instruction_id_list": ["format:no_whitespace"], "kwargs": [{}]}
}
"""Verifier → metadata that its rows need."""
MODELS = ("hf_checkpoint", "ref_load", "opd_teacher_load")


@dataclass(frozen=True, slots=True)
class Start:
    """Result of a launch. `problem`: the error if it did not start, or why the engine did not."""

    outcome: str
    problem: str = ""


def start(launch: Launch, checkout: Path, folder: Path) -> Start:
    """Train two iterations of a launch in `folder`, unless it passed there before.

    The output is in `output.txt`. Launches in one parent folder share their home, so that one
    Prefect server serves them all.
    """
    kept = folder / "result.json"
    if kept.is_file() and (before := Start(**json.loads(kept.read_text()))).outcome != FAILED:
        return before
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(folder.parent / "home" / folder.name, ignore_errors=True)
    folder.mkdir(parents=True)
    result = _start(launch, checkout, folder)
    kept.write_text(json.dumps(asdict(result)), encoding="utf-8")
    return result


def _start(launch: Launch, checkout: Path, folder: Path) -> Start:
    try:
        words = small_words(launch.words, folder)
    except (KeyError, ValueError) as error:
        return Start(FAILED, f"no stand-in: {error}")
    script = checkout / launch.name.partition("#")[0]
    paths = [str(checkout), str(script.parent), os.environ.get("PYTHONPATH", "")]
    kind = Path(_flags(tuple(words))["hf_checkpoint"][0]).name
    if kind in OWN_CODE:
        words.append("model.source.trust_remote_code=true")
    with serving(words, checkout, folder) as variables:
        first = variables.get("PYTHONPATH", "")
        environment = {**variables, "PYTHONPATH": os.pathsep.join(filter(None, [first, *paths]))}
        try:
            check_served(kind, "engine", trusts_code=True)
        except ConfigError as error:
            return _start_trainer(words, str(error), folder, checkout, environment)
        with _servers(words, folder) as served:
            problem = _train(served, folder, checkout, environment, "output.txt")
    return Start(FAILED if problem else STARTED, problem)


def _start_trainer(
    words: list[str], problem: str, folder: Path, checkout: Path, environment: dict[str, str]
) -> Start:
    """Sample with a type that SGLang serves here, then train the launch's model on the rollouts.

    `problem`: why SGLang does not serve the model.
    """
    sampling = sampling_words(words, folder)
    rollouts = f"{folder.name}-rollouts"
    problem_of_rollouts = _train(sampling, folder, checkout, environment, "rollouts.txt", rollouts)
    if problem_of_rollouts:
        return Start(FAILED, f"rollouts of {SAMPLER}: {problem_of_rollouts}")
    # The trainer's log-probs are far from those of another model, which --ci-test gates.
    training = [*words, "--load-debug-rollout-data", rollouts, "gates.bounds=[]"]
    if failure := _train(training, folder, checkout, environment, "training.txt"):
        return Start(FAILED, failure)
    return Start(TRAINER_ONLY, problem)


@contextmanager
def _servers(words: list[str], folder: Path) -> Iterator[list[str]]:
    """Serve the launch's model where its words name servers that others start.

    These are external engines, and a teacher that gives rewards (`--rm-url`). The value is the
    words with the addresses of the servers.
    """
    flags = _flags(tuple(words))
    with ExitStack() as servers:

        def serve(name: str, dtype: str) -> str:
            server = Server(
                flags["hf_checkpoint"][0],
                EngineConfig(),
                ResourcesConfig(),
                dtype=dtype,
                port=None,
                log_path=folder / f"{name}.log",
                seed=0,
            )
            servers.callback(server.stop)
            server.start()
            server.wait_ready(TIMEOUT_S)
            return server.url

        if "rollout_external_engine_addrs" in flags:
            flags["rollout_external_engine_addrs"] = [urlsplit(serve("engine", "bfloat16")).netloc]
        url = urlsplit(flags["rm_url"][0]) if "rm_url" in flags else None
        if url is not None and url.path == "/generate" and "use_opd" in flags:
            flags["rm_url"] = [f"{serve('teacher', 'float32')}{url.path}"]
        yield _words(flags)


def _train(
    words: list[str],
    folder: Path,
    checkout: Path,
    environment: dict[str, str],
    output: str,
    run: str = "",
) -> str:
    """Run `rlpipe train` with its output in `output`, and check its records.

    Returns the error, or "".
    """
    run = run or folder.name
    command = [sys.executable, "-m", "rlpipe", "train", *words, "--run", run]
    file = folder / output
    file.with_suffix(".json").write_text(json.dumps(command), encoding="utf-8")
    with file.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            command,
            cwd=checkout,
            env={**os.environ, **environment, "RLPIPE_HOME": str(folder.parent / "home")},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        code = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _end(process)
        return f"did not end within {TIMEOUT_S:g} s ({file})"
    return _audit(run, file) if code == 0 else f"exit code {code}: {_last_error(file)}"


def _audit(run: str, output: Path) -> str:
    """Check the records of a run, with the findings at the end of `output`; return the error."""
    home = output.parent.parent / "home"
    command = [sys.executable, "-m", "rlpipe", "audit", "verify", "--run", run, "--home", str(home)]
    with output.open("a", encoding="utf-8") as stream:
        code = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT).returncode
    return "" if code == 0 else f"the records of the run are wrong ({output})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a run as a preemption does, so that it ends its own processes."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_error(output: Path) -> str:
    """Return the lines of the last error in an output."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [number for number, line in enumerate(lines) if "Error: " in line]
    return " ".join(" ".join(lines[errors[-1] :][:4] if errors else lines[-4:]).split())


def small_words(words: tuple[str, ...], folder: Path) -> list[str]:
    """Return the words of a launch with the sizes, files and folders of a small run.

    Raises: KeyError, ValueError if the model has no stand-in.
    """
    flags = _flags(words)
    needs_answers = flags.get("loss_type") == ["sft_loss"]
    for name in [name for name in flags if name in MACHINE or _describes_model(name)]:
        del flags[name]
    for name, largest in SIZES.items():
        if name in flags and largest is None:
            del flags[name]
        elif name in flags and float(flags[name][0]) > float(largest or 0):
            flags[name] = [str(largest)]
    flags["num_rollout"] = [str(SIZES["num_rollout"])]
    if "global_batch_size" in flags:
        samples = int(flags["rollout_batch_size"][0]) * int(
            flags.get("n_samples_per_prompt", ["1"])[0]
        )
        flags["global_batch_size"] = [str(min(samples, int(flags["global_batch_size"][0])))]
    if "enable_mtp_training" in flags:
        flags["mtp_num_layers"] = ["1"]  # those of the stand-in
    if TAU_BENCH in flags.get("custom_generate_function_path", ()):
        # The environment gives the rewards, and a stand-in never solves a task.
        flags.pop("dynamic_sampling_filter_path", None)
    if "rollout_stop_token_ids" in flags:
        flags["rollout_stop_token_ids"] = ["1"]
    _use_models(flags, folder)
    _use_rows(flags, folder, needs_answers=needs_answers)
    for name in FOLDERS:
        if name in flags:
            flags[name] = [str(folder / name.removeprefix("critic_").replace("load", "save"))]
    return _words(flags)


def sampling_words(words: list[str], folder: Path) -> list[str]:
    """Return the words of a run that only samples, with a model that SGLang serves on CPUs."""
    flags = _flags(tuple(words))
    directory = _stand_in(SAMPLER, folder)
    for flag in MODELS:
        if flag in flags:
            flags[flag] = [directory]
    return [*_words(flags), "--debug-rollout-only"]


def _words(flags: dict[str, list[str]]) -> list[str]:
    return [
        word for name, values in flags.items() for word in (f"--{name.replace('_', '-')}", *values)
    ]


def _flags(words: tuple[str, ...]) -> dict[str, list[str]]:
    """Return name → values of a command line; the last one of a repeated flag counts."""
    flags: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values = flags[name.replace("-", "_")] = [value] if equals else []
        else:
            values.append(word)
    return flags


def _describes_model(name: str) -> bool:
    """True if config.json of the stand-in decides the value of a flag."""
    flag = FLAGS.get(name)
    return name in MODEL or (flag is not None and flag.reason.startswith("config.json decides"))


def _use_models(flags: dict[str, list[str]], folder: Path) -> None:
    """Replace each model by a stand-in of its type."""
    name = Path(flags["hf_checkpoint"][0]).name or flags["hf_checkpoint"][0]
    kind = model_type(flags["hf_checkpoint"][0].rstrip("/").rpartition("/")[2])
    if kind is None:
        raise ValueError(f"no type of the model {name}")
    directory = _stand_in(kind, folder)
    for flag in MODELS:
        if flag in flags:
            flags[flag] = [directory]


def _stand_in(kind: str, folder: Path) -> str:
    """Return the directory of a small model, which all launches of a parent folder share."""
    directory = folder.parent / "models" / kind
    if not (directory / "config.json").is_file():
        write_model(kind, directory)
    return str(directory)


def _use_rows(flags: dict[str, list[str]], folder: Path, *, needs_answers: bool) -> None:
    """Replace prompt files by rows with the same columns."""
    functions = flags.get("rollout_function_path", [])
    # The server of the rollout buffer reads messages from the prompt file itself.
    is_chat = needs_answers or "apply_chat_template" in flags or ROLLOUT_BUFFER in functions
    # Random rewards where a filter needs groups with different ones: the stand-in is never right.
    metadata: dict[str, Any] = {}
    if "dynamic_sampling_filter_path" in flags:
        metadata = {"rm_type": "random"}
    if CODING_AGENT in flags.get("custom_generate_function_path", ()):
        metadata = {"image": "stand-in", "workdir": "/workspace", "eval_cmd": "true"}

    def rows(name: str, prefix: str, metadata: dict[str, Any] = metadata) -> str:
        def column(flag: str, default: str | None) -> str | None:
            of_run = flags.get(flag, [default])
            return flags.get(f"{prefix}{flag}", of_run)[0]

        columns = {
            "input": column("input_key", "input"),
            "label": column("label_key", None),
            "metadata": column("metadata_key", "metadata"),
        }
        path = folder / name
        write_rows(path, columns, messages=is_chat, answered=needs_answers, metadata=metadata)
        return str(path)

    if "prompt_data" in flags:
        flags["prompt_data"] = [rows("train.jsonl", "")]
    if "eval_prompt_data" in flags:
        flags["eval_prompt_data"] = ["stand_in", rows("test.jsonl", "eval_")]
    if "eval_config" in flags:
        content = yaml.safe_load(Path(flags["eval_config"][0]).read_text(encoding="utf-8"))
        for dataset in content["eval"]["datasets"]:
            of_set = ROW_METADATA.get(dataset.get("rm_type", ""), metadata)
            path = rows(f"{dataset['name']}.jsonl", "eval_", of_set)
            dataset |= {"path": path, "n_samples_per_eval_prompt": 1}
        content["eval"].setdefault("defaults", {})["max_response_len"] = 8
        flags["eval_config"] = [str(folder / "eval.yaml")]
        (folder / "eval.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
