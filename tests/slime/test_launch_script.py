"""Launch scripts of slime: their arguments are found, and nothing is run (rlpipe.slime)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.errors import ConfigError
from rlpipe.slime import launch_script
from rlpipe.slime.launch_script import read_launch, train_words

SCRIPT = r"""#!/bin/bash
pkill -9 sglang
sleep 3
ray stop --force
set -ex
export PATH=/usr/bin:/bin:$PATH
PATH=/bin:$PATH
NVLINK_COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l)
if [ "$NVLINK_COUNT" -gt 0 ]; then
    HAS_NVLINK=1
fi
if [ -z "${BASE_FOLDER}" ]; then
  echo "BASE_FOLDER is not set."
  exit 1
fi
mkdir -p made
touch made_by_name
/usr/bin/touch made_by_path
echo text > made_by_redirection
kill -9 $$
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/small.sh"
CKPT_ARGS=(
   --hf-checkpoint ${BASE_FOLDER}/model
   #--hf-checkpoint /root/other
   --save "/root/a folder/"
)
CKPT_ARGS+=( --save-interval 20 )
SGLANG_ARGS=( --sglang-cuda-graph-bs 1 2 $(seq 16 8 40) $(seq 3) )
WANDB_ARGS=(
   # --use-wandb
)
for WORKER in $(awk '{print $1}' /root/hosts); do
  ssh root@"${WORKER}" "pkill python" &
done
wait
RUNTIME_ENV_JSON="{ \"env_vars\": { \"PYTHONPATH\": \"/root/Megatron-LM/\" } }"
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --colocate --update-weight-buffer-size $(( 1024 * 4 )) \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]:0:2} "${CKPT_ARGS[@]:2}" \
   ${SGLANG_ARGS[@]} ${WANDB_ARGS[@]} 2>&1 | tee log
ray stop
"""
MODEL = r"""
NLAYERS=5
arr=()
for ((i=0; i<NLAYERS; i++)); do
  if (( i < 2 )); then
    arr+=(0)
  else
    arr+=(1)
  fi
done
printf -v MOE_LAYER_FREQ "[%s]" "$(IFS=', '; echo "${arr[*]}")"
MODEL_ARGS=( --swiglu --rotary-base "${ROTARY:-1000000}" --moe-layer-freq $MOE_LAYER_FREQ )
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A launch script and the script of its model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text(MODEL)
    (tmp_path / "run.sh").write_text(SCRIPT)
    return tmp_path / "run.sh"


def test_arrays_loops_and_sourced_scripts_are_expanded(script: Path):
    assert train_words(script, {"BASE_FOLDER": "/data", "ROTARY": "500"}) == [
        *("--colocate", "--update-weight-buffer-size", "4096"),
        *("--swiglu", "--rotary-base", "500", "--moe-layer-freq", "[0,0,1,1,1]"),
        *("--hf-checkpoint", "/data/model", "--save", "/root/a folder/", "--save-interval", "20"),
        *("--sglang-cuda-graph-bs", "1", "2", "16", "24", "32", "40", "1", "2", "3"),
    ]


def test_the_environment_of_the_job_is_read(script: Path):
    launch = read_launch(script, {"BASE_FOLDER": "/data"})
    assert launch.environment == {"PYTHONPATH": "/root/Megatron-LM/"}
    script.write_text(
        'ray job submit --runtime-env-json \'{"env_vars": {"A": 1}}\' -- python3 train.py\n'
    )
    assert read_launch(script, {}) == ([], {"A": "1"})
    script.write_text("ray job submit --runtime-env-json='{' -- python3 train.py --lr 1\n")
    assert read_launch(script, {}) == (["--lr", "1"], {})


def test_no_program_runs_and_no_file_is_written(script: Path):
    before = sorted(script.parent.rglob("*"))
    train_words(script, {"BASE_FOLDER": "/data"})
    assert sorted(script.parent.rglob("*")) == before


def test_a_temporary_file_of_the_script_is_written_to_the_scratch_folder(script: Path):
    script.write_text(
        "FILE=$(mktemp /tmp/groups_XXXXXX.yaml)\nSIZE=4\n"
        'cat > "${FILE}" <<END\nsglang:\n  size: ${SIZE}\nEND\n'
        'cat > "made" <<END\ntext\nEND\n'
        "OTHER=/tmp/../made\ncat > $OTHER <<END\ntext\nEND\n"
        'python3 train.py --sglang-config "$FILE" $(cat <<END\n--lr 1\nEND\n)\n'
    )
    scratch = script.parent / "scratch"
    scratch.mkdir()
    _, file, *rest = train_words(script, {}, scratch)
    assert rest == ["--lr", "1"]
    assert Path(file).parent == scratch and Path(file).read_text() == "sglang:\n  size: 4\n"
    assert Path(file).name.startswith("groups_") and not (script.parent / "made").exists()
    assert list(scratch.iterdir()) == [Path(file)]


def test_the_message_of_a_script_that_stops_is_shown(script: Path):
    with pytest.raises(ConfigError) as caught:
        train_words(script, {})
    assert "found:    BASE_FOLDER is not set." in str(caught.value)
    assert "NAME=VALUE" in str(caught.value)


def test_a_missing_model_script_is_named(script: Path):
    (script.parent / "models" / "small.sh").unlink()
    (script.parent / "run.sh").write_text('source "models/small.sh"\npython train.sh\n')
    with pytest.raises(ConfigError, match=r"sources a file that does not exist\n.*models/small.sh"):
        train_words(script, {})


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python train_async.py --lr 1e-6", ["--lr", "1e-6"]),
        ("CUDA_VISIBLE_DEVICES=0 python3 /root/slime/train.py --lr 1e-6 > log", ["--lr", "1e-6"]),
        ("torchrun --nproc 2 train.py --lr '1e-6'", ["--lr", "1e-6"]),
        ('run() { python train.py "$@"; }\nrun --lr 1e-6', ["--lr", "1e-6"]),
        ("while read -r line; do :; done < run.sh\npython train.py", []),
        (
            "python train.py --lr 1e-6\n  --seed 1 \\\n --bf16",
            ["--lr", "1e-6", "--seed", "1", "--bf16"],
        ),
    ],
)
def test_other_forms_of_the_command_are_found(script: Path, command: str, words: list[str]):
    script.write_text(f"{command}\n")
    assert train_words(script, {}) == words
    assert not (script.parent / "log").exists() or (script.parent / "log").stat().st_size == 0


def test_a_script_that_does_not_end_is_refused(script: Path, monkeypatch: pytest.MonkeyPatch):
    script.write_text("while true; do sleep 1; done\n")
    monkeypatch.setattr(launch_script, "TIMEOUT_S", 0.5)
    with pytest.raises(ConfigError, match="did not end within"):
        train_words(script, {})


def test_a_missing_script_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="the launch script does not exist"):
        train_words(tmp_path / "none.sh", {})
