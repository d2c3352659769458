"""Small stand-ins for the launches of slime (tools.slime_counts.start)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tools.slime_counts import services
from tools.slime_counts import start as starts
from tools.slime_counts.launches import Launch
from tools.slime_counts.stand_ins import MODEL_TYPES, model_type, write_model
from tools.slime_counts.start import FAILED, STARTED, TRAINER_ONLY, Start

LAUNCH = (
    "--num-layers 36 --hidden-size 2560 --swiglu --hf-checkpoint /root/Qwen3-4B/ "
    "--ref-load /root/Qwen3-4B_torch_dist --load /root/Qwen3-4B_slime --save /root/Qwen3-4B_slime "
    "--prompt-data /root/dapo.jsonl --input-key question --label-key label --apply-chat-template "
    "--rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 "
    "--global-batch-size 256 --rollout-max-response-len 8192 --eval-interval 20 "
    "--eval-prompt-data aime /root/aime.jsonl --eval-input-key prompt "
    "--tensor-model-parallel-size 2 --sequence-parallel --eps-clip 0.28 --lr=1e-6 "
    "--sglang-mem-fraction-static 0.7 --sglang-attention-backend nsa"
)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Flags of the small run of LAUNCH."""
    monkeypatch.setattr(starts, "write_model", lambda kind, folder: folder.mkdir(parents=True))
    (tmp_path / "launch").mkdir()
    return starts._flags(tuple(starts.small_words(tuple(LAUNCH.split()), tmp_path / "launch")))


def test_sizes_are_small_and_the_algorithm_stays(small: dict[str, list[str]]):
    assert small["num_rollout"] == ["2"] and small["global_batch_size"] == ["4"]
    assert (small["rollout_batch_size"], small["n_samples_per_prompt"]) == (["2"], ["2"])
    assert small["tensor_model_parallel_size"] == ["1"] and small["sequence_parallel"] == []
    assert (small["eps_clip"], small["lr"], small["rm_type"]) == (
        ["0.28"],
        ["1e-6"],
        ["deepscaler"],
    )
    assert small["sglang_mem_fraction_static"] == ["0.7"]


def test_the_model_and_kernels_of_its_machine_are_left_out(small: dict[str, list[str]]):
    assert not {"num_layers", "hidden_size", "swiglu", "sglang_attention_backend"} & set(small)


def test_files_are_those_of_the_stand_in(small: dict[str, list[str]], tmp_path: Path):
    assert small["hf_checkpoint"] == small["ref_load"] == [str(tmp_path / "models" / "qwen3")]
    assert small["load"] == small["save"] == [str(tmp_path / "launch" / "save")]
    (train,) = small["prompt_data"]
    row = json.loads(Path(train).read_text().splitlines()[0])
    assert row["label"] == "5" and row["question"][0]["role"] == "user"
    _, test = small["eval_prompt_data"]
    assert "prompt" in json.loads(Path(test).read_text().splitlines()[0])


def test_a_launch_without_a_stand_in_is_named(tmp_path: Path):
    launch = Launch("scripts/run.sh", ("--hf-checkpoint", "/root/unheard-of"))
    result = starts.start(launch, tmp_path, tmp_path / "a")
    assert result == Start(FAILED, "no stand-in: no type of the model unheard-of")


class Runs:
    """Stand-in of `rlpipe train`: fails with the error of a run's output file, if there is one."""

    def __init__(self, **errors: str) -> None:
        self.errors = errors
        self.words: dict[str, list[str]] = {}

    def __call__(self, words, folder, checkout, python_path, output, run="") -> str:
        self.words[output] = words
        return self.errors.get(Path(output).stem, "")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    runs = Runs()
    monkeypatch.setattr(starts, "_train", runs)
    monkeypatch.setattr(starts, "write_model", lambda *_: None)
    return runs


def test_only_launches_that_did_not_pass_are_started_again(runs: Runs, tmp_path: Path):
    launch = Launch("scripts/run.sh", tuple(LAUNCH.split()))
    runs.errors["output"] = "exit code 1"
    assert starts.start(launch, tmp_path, tmp_path / "a") == Start(FAILED, "exit code 1")
    runs.errors.clear()
    assert starts.start(launch, tmp_path, tmp_path / "a") == Start(STARTED)
    runs.errors["output"] = "not started again"
    assert starts.start(launch, tmp_path, tmp_path / "a") == Start(STARTED)


def test_a_type_that_sglang_cannot_serve_trains_on_rollouts_of_another(runs: Runs, tmp_path: Path):
    words = LAUNCH.replace("Qwen3-4B", "MiniMax-M2").split()
    result = starts.start(Launch("run.sh", tuple(words)), tmp_path, tmp_path / "a")
    assert result.outcome == TRAINER_ONLY and "rms_sumsq_serial" in result.problem
    assert "output.txt" not in runs.words
    sampling = starts._flags(tuple(runs.words["rollouts.txt"]))
    assert sampling["hf_checkpoint"] == [str(tmp_path / "models" / "qwen3")]
    assert sampling["debug_rollout_only"] == []
    training = starts._flags(tuple(runs.words["training.txt"]))
    assert training["hf_checkpoint"] == [str(tmp_path / "models" / "minimax_m2")]
    assert training["load_debug_rollout_data"] == ["a-rollouts", "gates.bounds=[]"]
    assert training["save"] == sampling["save"]


def test_servers_that_a_launch_names_end_with_the_run(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = []

    class Served:
        url = "http://127.0.0.1:7"

        def __init__(self, model_path: str, *_: object, log_path: Path, **__: object) -> None:
            self.name = log_path.stem
            calls.append((self.name, Path(model_path).name))

        def __getattr__(self, name: str):
            return lambda *_: calls.append((self.name, name))

    monkeypatch.setattr(starts, "Server", Served)
    words = [*LAUNCH.split(), "--use-opd", "--rm-url", "http://teacher:13141/generate"]
    words += ["--rollout-external-engine-addrs", "192.0.2.2:1", "192.0.2.2:2"]
    assert starts.start(Launch("run.sh", tuple(words)), tmp_path, tmp_path / "a") == Start(STARTED)
    flags = starts._flags(tuple(runs.words["output.txt"]))
    assert flags["rm_url"] == ["http://127.0.0.1:7/generate"]
    assert flags["rollout_external_engine_addrs"] == ["127.0.0.1:7"]
    for name in ("teacher", "engine"):
        of_server = [call for server, call in calls if server == name]
        assert of_server == ["qwen3", "start", "wait_ready", "stop"]


def test_a_model_with_own_code_is_trusted(runs: Runs, tmp_path: Path):
    words = LAUNCH.replace("Qwen3-4B", "MiMo-7B").split()
    assert starts.start(Launch("run.sh", tuple(words)), tmp_path, tmp_path / "a") == Start(STARTED)
    assert runs.words["output.txt"][-1] == "model.source.trust_remote_code=true"


def test_a_launch_that_trains_prediction_layers_has_those_of_the_stand_in(
    runs: Runs, tmp_path: Path
):
    words = [*LAUNCH.replace("Qwen3-4B", "MiMo-7B").split(), "--enable-mtp-training"]
    (tmp_path / "a").mkdir()
    small = starts.small_words((*words, "--mtp-num-layers", "3"), tmp_path / "a")
    assert starts._flags(tuple(small))["mtp_num_layers"] == ["1"]
    write_model("mimo", tmp_path / "mimo")
    names = load_file(tmp_path / "mimo" / "model.safetensors")
    assert names["model.mtp_layers.0.input_proj.weight"].shape == (64, 128)


def _first_row(words: list[str], folder: Path) -> tuple[dict[str, list[str]], dict]:
    """Flags of the small run of these words, and the first row of its prompts."""
    small = starts._flags(tuple(starts.small_words(tuple(words), folder)))
    (path,) = small["prompt_data"]
    return small, json.loads(Path(path).read_text().splitlines()[0])


def test_rows_have_what_the_functions_of_examples_read(runs: Runs, tmp_path: Path):
    filtered = ["--dynamic-sampling-filter-path", "m.filter"]
    base = LAUNCH.replace("--apply-chat-template ", "").split()
    small, row = _first_row([*base, *filtered], tmp_path)
    assert row["question"].startswith("What") and row["metadata"] == {"rm_type": "random"}
    assert small["dynamic_sampling_filter_path"] == ["m.filter"]
    tasks = [word if word != "question" else "index" for word in base]
    generate = ["--custom-generate-function-path", services.TAU_BENCH]
    small, row = _first_row([*tasks, *filtered, *generate], tmp_path)
    assert row["index"] == 0 and "dynamic_sampling_filter_path" not in small
    generate = ["--custom-generate-function-path", services.CODING_AGENT]
    _, row = _first_row([*base, *generate], tmp_path)
    assert row["metadata"]["eval_cmd"] == "true"
    rollout = ["--rollout-function-path", services.ROLLOUT_BUFFER]
    _, row = _first_row([*base, *rollout], tmp_path)
    assert row["question"][0]["role"] == "user"


def test_each_set_of_an_evaluation_has_the_rows_of_its_verifier(runs: Runs, tmp_path: Path):
    sets = [{"name": "math", "rm_type": "math"}, {"name": "if", "rm_type": "ifbench"}]
    (tmp_path / "eval_of_launch.yaml").write_text(json.dumps({"eval": {"datasets": sets}}))
    words = [*LAUNCH.split(), "--eval-config", str(tmp_path / "eval_of_launch.yaml")]
    starts.small_words(tuple(words), tmp_path)
    metadata = [
        json.loads((tmp_path / f"{name}.jsonl").read_text().splitlines()[0])["metadata"]
        for name in ("math", "if")
    ]
    assert metadata == [{}, starts.ROW_METADATA["ifbench"]]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen2.5-0.5B-Instruct", "qwen2"),
        ("DeepSeek-R1-Distill-Qwen-7B", "qwen2"),
        ("Qwen3-30B-A3B-FP8", "qwen3_moe"),
        ("qwen3-4b-sft", "qwen3"),
        ("Qwen3.5-35B-A3B", "qwen3_5_moe_text"),
        ("Qwen3.5-27B", "qwen3_5_text"),
        ("Qwen3-Next-80B-A3B-Thinking", "qwen3_next"),
        ("GLM-5.2-FP8", "glm_moe_dsa"),
        ("GLM-4.7-Flash", "glm4_moe_lite"),
        ("GLM-4.7-355B-A32B", "glm4_moe"),
        ("GLM-Z1-9B-0414", "glm4"),
        ("Moonlight-16B-A3B", "deepseek_v3"),
        ("MiniMax-M2.5", "minimax_m2"),
    ],
)
def test_the_type_of_a_model_is_known_by_its_name(name: str, kind: str):
    assert model_type(name) == kind


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3", "qwen3_next", "mimo"])
def test_a_stand_in_has_two_layers_of_its_type(tmp_path: Path, kind: str):
    write_model(kind, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"]) == (kind, 2)
    assert kind in dict(MODEL_TYPES).values() and config["hidden_size"] == 64
    assert (tmp_path / "tokenizer.json").is_file()
