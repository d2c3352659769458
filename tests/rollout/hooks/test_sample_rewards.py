"""Reward functions of samples, generate functions of held-out sets, and unread fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.data import EvalDataset, FilePrompts
from rlpipe.config.load import validate
from rlpipe.data.user_source import CustomSource
from rlpipe.errors import ConfigError, HookError
from rlpipe.lineage.stage_inputs import eval_inputs
from rlpipe.preflight import check
from rlpipe.rollout.generate import GroupFailed
from rlpipe.rollout.generators import RolloutContext, RolloutResources, open_generate_function
from rlpipe.slime.evaluation_flags import datasets
from rlpipe.store.parquet.rows import samples_to_table, table_to_samples
from rlpipe.store.parquet.schema import decode, encode
from rlpipe.types import DataState, Sample, Status
from tests.model_files import write_model
from tests.rollout.hooks.test_generate_function import GROUP, TOKENIZER, _Engine, _rows
from tests.rollout.hooks.test_rollout_function import ARGS, _planner, _run

ANSWER = (
    "    sample.tokens = sample.tokens + [5]\n    sample.response_length = 1\n    return sample\n"
)
REWARDS = """
def by_label(args, sample):
    return {"score": len(sample.label) + args.n_samples_per_prompt, "short": 1.0}
async def fails(args, sample):
    raise ValueError("no verdict")
"""

SIGNATURE = "def generate(args, sample, sampling_params):\n"


def _names(tmp_path: Path, function: str) -> str:
    """Return a generate function whose samples name a reward function."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    path = f"{tmp_path / 'rewards.py'}:{function}"
    return f"{SIGNATURE}    sample.custom_rm_path = {path!r}\n{ANSWER}"


async def test_a_sample_is_scored_by_the_function_that_it_names(tmp_path: Path):
    (tmp_path / "other.py").write_text("def by_label(sample):\n    return 7.0\n")
    rows = await _rows(tmp_path, _names(tmp_path, "by_label").replace("rewards.py", "other.py"))
    assert [(row.reward, row.reward_parts) for row in rows] == [(7.0, {})] * 2
    assert [row.metadata["custom_rm_path"] for row in rows] == [
        f"{tmp_path / 'other.py'}:by_label"
    ] * 2


async def test_an_exception_of_a_samples_reward_function_fails_the_group(tmp_path: Path):
    with pytest.raises(GroupFailed, match="no verdict") as caught:
        await _rows(tmp_path, _names(tmp_path, "fails"))
    assert {row.status for row in caught.value.samples} == {Status.FAILED}
    with pytest.raises(GroupFailed, match="the module has no 'nowhere'"):
        await _rows(tmp_path, _names(tmp_path, "nowhere"))
    with pytest.raises(GroupFailed, match=r"has no entry .reward."):
        await _rows(tmp_path, _names(tmp_path, "by_label"))


async def test_a_reward_that_a_sample_has_is_kept(tmp_path: Path):
    source = _names(tmp_path, "fails").replace(
        "    return sample", "    sample.reward = 0.25\n    return sample"
    )
    assert [row.reward for row in await _rows(tmp_path, source)] == [0.25, 0.25]


async def test_samples_of_a_rollout_function_are_scored_by_the_functions_that_they_name(
    tmp_path: Path,
):
    (tmp_path / "rewards.py").write_text(
        "def seven(sample):\n    return 7\ndef fails(sample):\n    raise ValueError('no verdict')\n"
    )
    body = """
groups = finish(data_source.get_samples(2))
for group in groups:
    for sample in group:
        sample.custom_rm_path = "PATH:NAME"
return groups
""".replace("PATH", str(tmp_path / "rewards.py"))
    _, stored = await _run(
        tmp_path, _planner(tmp_path), body.replace("NAME", "seven"), 0, DataState()
    )
    assert [sample.reward for group in stored._read(stored.files).values() for sample in group] == [
        7.0
    ] * 4
    (tmp_path / "again").mkdir()
    with pytest.raises(HookError, match="no verdict"):
        await _run(
            tmp_path / "again",
            _planner(tmp_path / "again"),
            body.replace("NAME", "fails"),
            0,
            DataState(),
        )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "sample.generate_function_path = 'a.py:f'",
            "evaluation.datasets.N.custom_generate_function_path",
        ),
        ("sample.train_metadata = {'a': 1}", "set sample.metadata"),
        ("sample.multimodal_inputs = {'images': [1]}", "vision"),
        ("sample.teacher_log_probs = [-1.0]", "teacher.opd_type: samples"),
    ],
)
async def test_an_unread_field_is_refused_with_the_replacement(
    tmp_path: Path, line: str, message: str
):
    source = f"def generate(args, sample, sampling_params):\n    {line}\n{ANSWER}"
    with pytest.raises(GroupFailed, match="is not read") as caught:
        await _rows(tmp_path, source)
    assert message in str(caught.value)
    hook = tmp_path / "hook.py"
    hook.write_text(f"def hook(args, sample):\n    {line}\n")
    plain = f"def generate(args, sample, sampling_params):\n{ANSWER}"
    with pytest.raises(GroupFailed, match="is not read"):
        await _rows(tmp_path, plain, rollout_sample_hook_path=[str(hook)])


async def test_an_empty_unread_field_is_accepted(tmp_path: Path):
    source = f"{SIGNATURE}    sample.multimodal_inputs = {{}}\n{ANSWER}"
    assert len(await _rows(tmp_path, source)) == 2


@pytest.mark.parametrize("name", ["custom_rm_path", "generate_function_path", "train_metadata"])
def test_a_data_source_cannot_set_fields_that_a_plan_does_not_store(tmp_path: Path, name: str):
    (tmp_path / "mine.py").write_text(
        "from rlpipe.types import Sample\nclass Source:\n    def __init__(self, args): pass\n"
        "    def get_samples(self, n):\n"
        f"        return [[Sample(prompt='p'), Sample(prompt='p', {name}={{'a': 1}})]] * n\n"
    )
    with pytest.raises(HookError, match=f"sample.{name} is not kept from the data source"):
        CustomSource(f"{tmp_path / 'mine.py'}:Source", ARGS).draw(1, drawn=0, iteration=0)


def _with_set(tmp_path: Path, path: str | None, **rollout: Any) -> Any:
    prompts = {"type": "file", "paths": ["a.jsonl"]}
    own = {"custom_generate_function_path": path} if path else {}
    values = {
        "run": "run",
        "num_rollout": 1,
        "model": {"source": {"type": "huggingface", "hf_checkpoint": str(tmp_path)}},
        "data": {"prompts": prompts},
        "reward": {"function": {"type": "math"}},
        "rollout": {
            "rollout_batch_size": 1,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 9,
            **rollout,
        },
        "evaluation": {
            "datasets": [
                {"name": "a", "prompts": prompts, **own},
                {"name": "b", "prompts": prompts},
            ]
        },
    }
    return validate(values)


async def test_a_held_out_set_may_have_a_separate_generate_function(tmp_path: Path):
    (tmp_path / "run.py").write_text(
        f"def generate(args, sample, sampling_params):\n    sample.label = 'run'\n{ANSWER}"
    )
    (tmp_path / "own.py").write_text(
        f"def generate(args, sample, sampling_params):\n    sample.label = 'own'\n{ANSWER}"
    )
    config = _with_set(
        tmp_path, str(tmp_path / "own.py"), custom_generate_function_path=str(tmp_path / "run.py")
    )
    model = {"vocab_size": len(TOKENIZER), "max_position_embeddings": 200}
    resources = RolloutResources.load(config, TOKENIZER, model, str(tmp_path))
    labels = {}
    for dataset in config.evaluation.datasets:
        rollout = config.rollout.model_copy(update=dataset.sampling())
        context = RolloutContext(rollout, 0, evaluation=True)
        async with open_generate_function(resources, context, _Engine()) as generate:  # pyright: ignore[reportArgumentType]
            labels[dataset.name] = {row.label for row in await generate(GROUP)}
    assert labels == {"a": {"own"}, "b": {"run"}}
    assert config.reads_text


def test_the_source_of_a_held_out_sets_function_is_in_the_input_digest_and_is_checked_first(
    tmp_path: Path,
):
    own = tmp_path / "own.py"
    own.write_text(f"def generate(args, sample, sampling_params):\n{ANSWER}")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    config = _with_set(tmp_path, str(own))
    files = FilePrompts(type="file", paths=(str(tmp_path / "a.jsonl"),))
    first, second = (
        one.model_copy(update={"prompts": files}) for one in config.evaluation.datasets
    )
    assert str(own) in eval_inputs(config, first, "w").hooks
    assert eval_inputs(config, second, "w").hooks == {}
    assert (
        "custom_generate_function_path"
        not in EvalDataset.model_validate({"name": "b", "prompts": files}).identity()
    )
    before = eval_inputs(config, first, "w").digest
    own.write_text(f"def generate(args, sample, sampling_params):\n    pass\n{ANSWER}")
    assert eval_inputs(config, first, "w").digest != before
    own.write_text("def generate(args):\n    pass\n")
    config = config.model_copy(update={"data": config.data.model_copy(update={"prompts": files})})
    held_out = config.evaluation.model_copy(update={"datasets": (first,)})
    write_model(tmp_path)
    with pytest.raises(
        ConfigError, match=r"evaluation\.datasets\.0\.custom_generate_function_path"
    ):
        check(config.model_copy(update={"evaluation": held_out}), tmp_path)


def test_a_held_out_sets_function_is_refused_if_the_rollout_function_would_not_call_it(
    tmp_path: Path,
):
    with pytest.raises(ConfigError, match="remove one of them"):
        _with_set(tmp_path, "a.py:f", eval_function_path="b.py:f")
    assert (
        "custom_generate_function_path"
        not in (datasets({"eval_prompt_data": ["a", "a.jsonl"]}) or [{}])[0]
    )
    path = tmp_path / "eval.yaml"
    path.write_text(
        "eval: {datasets: [{name: a, path: a.jsonl, custom_generate_function_path: a.py:f}]}\n"
    )
    assert (datasets({"eval_config": str(path)}) or [{}])[0][
        "custom_generate_function_path"
    ] == "a.py:f"


TEACHER = (
    "def generate(args, sample, sampling_params):\n    sample.teacher_log_probs = VALUES\n" + ANSWER
)


async def test_a_samples_teacher_log_probs_are_stored_if_the_run_uses_them(
    tmp_path: Path,
):
    opd = {"advantage": {"use_opd": True}, "teacher": {"opd_type": "samples"}}
    rows = await _opd_rows(tmp_path, "[-1.5]", opd)
    stored = table_to_samples(decode(encode(samples_to_table(rows, 0)), "test"))
    assert [row.teacher_log_probs for row in stored] == [[-1.5], [-1.5]]
    for values, message in (
        ("[-1.5, -2.0]", "one value per response token"),
        ("[float('nan')]", "not a finite number"),
    ):
        with pytest.raises(GroupFailed, match=message):
            await _opd_rows(tmp_path, values, opd)
    with pytest.raises(GroupFailed, match=r"teacher\.opd_type: samples"):
        await _opd_rows(tmp_path, "[-1.5]", {"teacher": {"opd_type": "samples"}})


async def _opd_rows(tmp_path: Path, values: str, sections: dict[str, Any]) -> list[Sample]:
    (tmp_path / "mine.py").write_text(TEACHER.replace("VALUES", values))
    config = _with_set(tmp_path, None, custom_generate_function_path=str(tmp_path / "mine.py"))
    config = validate({**config.model_dump(mode="json"), **sections})
    resources = RolloutResources.load(
        config,
        TOKENIZER,
        {"vocab_size": len(TOKENIZER), "max_position_embeddings": 200},
        str(tmp_path),
    )
    engine: Any = _Engine()
    context = RolloutContext(config.rollout)
    async with open_generate_function(resources, context, engine) as generate:
        return await generate(GROUP)


def test_teacher_log_probs_of_samples_need_a_user_function():
    supervised = {
        "rollout": {"type": "dataset", "rollout_batch_size": 1},
        "train": {"loss": {"type": "sft"}},
        "reward": {"function": {"type": "none"}},
    }
    with pytest.raises(ConfigError, match="needs functions that sample"):
        validate(
            {
                "run": "r",
                "num_rollout": 1,
                "model": {"source": {"type": "huggingface", "hf_checkpoint": "/m"}},
                "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
                "advantage": {"advantage_estimator": "none", "use_opd": True},
                "teacher": {"opd_type": "samples"},
                **supervised,
            }
        )
