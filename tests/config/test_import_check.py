"""Import user files in a separate process first (rlpipe.config.import_check)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from rlpipe.config import import_check
from rlpipe.config.import_check import check_imports, user_files
from rlpipe.config.load import validate
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError

REWARD = "def reward(sample):\n    return 1.0\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(import_check, "_passed", set())
    (tmp_path / "mine.py").write_text(REWARD)
    return tmp_path


def config(folder: Path, **sections: object) -> RunConfig:
    values = {
        "run": "run",
        "num_rollout": 1,
        "model": {"source": {"type": "made", "maker": f"{folder}/mine.py:reward"}},
        "data": {"prompts": {"type": "reasoning_gym", "task": "spell_backward", "size": 1}},
        "rollout": {"rollout_batch_size": 1, "n_samples_per_prompt": 2},
        "reward": {"function": {"type": "python", "path": f"{folder}/mine.py:reward"}},
    }
    return validate({**values, **sections})


def import_files(config: RunConfig, timeout_s: float = 60.0) -> None:
    with check_imports(config, timeout_s) as importing:
        importing.wait()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import sys; sys.exit(0)", "the file ends Python: SystemExit: 0"),
        ("import os; os._exit(0)", "ended the process that imported it: exit status 0"),
        ("raise ValueError('odd')", r"ValueError: odd \(.*mine\.py:3\)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise BaseException('odd')", "BaseException: odd"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        (
            "import os; print('before the end', flush=True); os.kill(os.getpid(), 9)",
            r"killed by SIGKILL\s+mine.py: before the end",
        ),
        (
            "import os\nif os.fork() == 0: raise ValueError",
            r"forks while it is imported[\s\S]*os\.fork",
        ),
        (
            "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
            "forks while it is imported",
        ),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", "printed more than 8 MiB"),
        ("import os; os.closerange(3, 256)", "ended the process"),
        (
            "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd",
            "message cannot be read",
        ),
        ("import no_such_package", "no_such_package"),
        ("def reward(", "SyntaxError"),
    ],
)
def test_every_failure_of_an_import_is_an_error_that_names_the_file(
    folder: Path, code: str, found: str
):
    (folder / "mine.py").write_text(f"{REWARD}{code}\n")
    with pytest.raises(ConfigError, match=found) as caught:
        import_files(config(folder))
    assert caught.value.where is not None
    assert caught.value.where.endswith(f"{folder}/mine.py:reward")


@pytest.mark.parametrize(
    "code",
    ["import time; time.sleep(600)", "while True: pass", "9 ** 9 ** 9 ** 9 if __name__ else 0"],
)
def test_an_import_that_never_ends_is_an_error_after_the_deadline(folder: Path, code: str):
    (folder / "mine.py").write_text(f"{REWARD}n = 9\n{code.replace('9 **', 'n **')}\n")
    started = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"still being imported[\s\S]*within 1 s \(resources\.import_timeout_s\)"
    ):
        import_files(config(folder), 1.0)
    assert time.monotonic() - started < 30


def test_a_class_is_created_with_its_arguments_and_its_failure_is_an_error(folder: Path):
    (folder / "mine.py").write_text(
        "import os\nclass reward:\n    def __init__(self, status): os._exit(status)\n"
    )
    function = {"type": "python", "path": f"{folder}/mine.py:reward", "arguments": {"status": 7}}
    with pytest.raises(ConfigError, match="exit status 7"):
        import_files(
            config(
                folder,
                model={"source": {"type": "huggingface", "hf_checkpoint": "/"}},
                reward={"function": function},
            )
        )


def test_files_that_pass_are_not_imported_again_and_leave_no_process(folder: Path):
    (folder / "mine.py").write_text(
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"print('noise')\n{REWARD}"
    )
    (folder / "log.py").write_text("def log(*all): ...\n")
    both = config(folder, observe={"custom_rollout_log_function_path": f"{folder}/log.py"})
    before = set(psutil.Process().children(recursive=True))
    import_files(both)
    assert len(import_check._passed) == 3
    assert set(psutil.Process().children(recursive=True)) <= before
    with check_imports(both, 60.0) as importing:
        assert importing._process is None
    (folder / "log.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        import_files(both)


def test_every_function_of_a_configuration_is_imported(folder: Path):
    mine = f"{folder}/mine.py"
    python = {"type": "python", "path": mine}
    rollout = {
        "rollout_batch_size": 1,
        "n_samples_per_prompt": 2,
        "rollout_sample_hook_path": [mine, mine],
        "dynamic_sampling_filter_path": mine,
        "data_source_path": mine,
        "tools": [{"path": mine, "arguments": {"a": 1}}],
    }
    held = {
        "name": "held",
        "prompts": {"type": "reasoning_gym", "task": "spell_backward", "size": 1},
        "reward": {"function": python},
    }
    configuration = config(
        folder,
        rollout=rollout,
        evaluation={"datasets": [held]},
        train={
            "custom_megatron_init_path": mine,
            "loss": {"use_tis": True, "custom_tis_function_path": mine},
        },
        observe={"custom_eval_rollout_log_function_path": mine},
    )
    assert {file.key for file in user_files(configuration)} == {
        "model.source.maker",
        "reward.function.path",
        "evaluation.datasets.0.reward.function.path",
        "rollout.rollout_sample_hook_path",
        "rollout.dynamic_sampling_filter_path",
        "rollout.data_source_path",
        "rollout.tools.0.path",
        "train.custom_megatron_init_path",
        "train.loss.custom_tis_function_path",
        "observe.custom_eval_rollout_log_function_path",
    }


def test_project_code_and_a_run_without_user_code_start_no_process(folder: Path):
    own = {
        "source": {
            "type": "made",
            "maker": "deployments/recipes/tiny_models.py:make_spell_backward_model",
        }
    }
    with check_imports(
        config(folder, model=own, reward={"function": {"type": "math"}}), 60.0
    ) as importing:
        assert importing._process is None


def test_the_process_imports_no_torch(folder: Path):
    (folder / "mine.py").write_text(
        "import sys\n"
        "heavy = {'torch', 'ray', 'prefect', 'transformers'} & set(sys.modules)\n"
        f"assert not heavy, heavy\n{REWARD}"
    )
    import_files(config(folder))
    assert "rlpipe.config.import_check" in sys.modules
