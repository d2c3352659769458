"""The generator on a real engine: growing plans, the buffer, several rollouts at once
(rlpipe.actors.generator)."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlpipe.actors.drivers import Driver
from rlpipe.actors.generator import Generator, RolloutAbandoned
from rlpipe.actors.specs import GeneratorSpec
from rlpipe.config.hooks import load_hook
from rlpipe.config.load import load_run, validate
from rlpipe.errors import DataError, Fenced
from rlpipe.rollout.generate import FINISHED
from rlpipe.rollout.pool import Pool
from rlpipe.rollout.rollout_rows import StoredRows
from rlpipe.slime.command_line import read_flags
from rlpipe.slime.flag_keys import BASE, overrides_of
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import table_to_samples
from rlpipe.store.parquet.shards import read_rows
from rlpipe.store.plans import Plans
from rlpipe.types import DataState, Sample
from tests.live_engine import CONTEXT_LEN, END, VOCAB_SIZE, Live, live_engine, log_probs

REPLACED = Driver("run", 1)
DRIVER = Driver("run", 2)
SLOW = """
import asyncio

async def hook(args, sample, *, rollout_id, evaluation):
    await asyncio.sleep(0.2 * (sample.group_index % 2))
"""
"""A hook that makes every other group slow."""
REWARD = "def reward(sample):\n    return float(len(sample.response_ids) % 2)\n"


@pytest.fixture
def live(request: pytest.FixtureRequest) -> Live:
    """A real server behind a real router."""
    return live_engine(request.config)


async def _generator(
    live: Live, folder: Path, rollout: dict[str, Any], **sections: Any
) -> Generator:
    """Return a generator that is set up and connected, with 40 short prompts."""
    if not (folder / "model").exists():
        shutil.copytree(live.model_dir, folder / "model")
    generator = Generator(str(Path.cwd()))
    await generator.setup(DRIVER, _spec(folder, rollout, **sections))
    await generator.connect(live.router.url, on_gpus=False, engines=1)
    return generator


def _spec(folder: Path, rollout: dict[str, Any], **sections: Any) -> GeneratorSpec:
    """Return the specification of a generator with the model in this folder."""
    model_dir = folder / "model"
    load_hook("deployments/recipes/tiny_models.py:character_tokenizer")("Spell: ").save_pretrained(
        model_dir
    )
    lines = [f'{{"prompt": "{chr(97 + n % 26)}{n}", "label": "x"}}' for n in range(40)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "reward.py").write_text(REWARD)
    config = validate(
        {
            "run": "run",
            "num_rollout": 9,
            "model": {"source": {"type": "huggingface", "hf_checkpoint": str(model_dir)}},
            "data": {"prompts": {"type": "file", "paths": [str(folder / "a.jsonl")]}},
            "reward": {"function": {"type": "python", "path": f"{folder / 'reward.py'}:reward"}},
            "rollout": {
                "n_samples_per_prompt": 4,
                "rollout_max_response_len": 64,
                "flush_interval_s": 0.1,
                **rollout,
            },
            **sections,
        }
    )
    return GeneratorSpec(config, str(model_dir), str(folder / "store"))


async def _until_done(generator: Generator, groups: int) -> None:
    """Wait until this number of groups of iteration 0 is finished."""
    for _ in range(3000):
        if (await generator.progress(0))["done"] >= groups:
            return
        await asyncio.sleep(0.01)


def _samples(folder: Path, answer: dict[str, Any]) -> dict[str, list[Sample]]:
    groups: dict[str, list[Sample]] = {}
    for sample in table_to_samples(read_rows(Files(folder / "store"), answer["files"])):
        groups.setdefault(sample.group_id, []).append(sample)
    return groups


@pytest.mark.integration
async def test_surplus_and_cut_off_groups_stay_in_the_buffer_until_each_is_used(live, tmp_path):
    filtered = {
        "rollout_batch_size": 3,
        "over_sampling_batch_size": 8,
        "partial_rollout": True,
        "dynamic_sampling_filter_path": "rlpipe.rollout.filters.reward_nonzero_std",
    }
    generator = await _generator(live, tmp_path, filtered, async_buffer_size=9)
    state = DataState()
    used = []
    continued = 0
    versions = None
    for k in range(4):
        planned = await generator.plan(DRIVER, k, state)
        assert not planned["static"]
        answer = await generator.rollout(DRIVER, planned["plan"])
        out = answer["outputs"]
        groups = _samples(tmp_path, answer)
        plans = [Plans(Files(tmp_path / "store")).read(digest) for digest in out["plans"]]
        ids = [group.group_id for plan in plans for group in plan.groups]
        state = DataState.model_validate(out["after"])
        assert sorted(
            [*out["accepted"], *out["dropped"], *(one.group_id for one in state.buffer)]
        ) == sorted(ids)
        assert len(out["accepted"]) == 3 and set(out["dropped"].values()) <= {
            "zero_std_0",
            "zero_std_1",
        }
        continued += sum(group.earlier is not None for plan in plans for group in plan.groups)
        for group_id in out["accepted"]:
            assert all(sample.status in FINISHED for sample in groups[group_id])
            assert len({len(sample.response_ids) % 2 for sample in groups[group_id]}) == 2
            assert all(sample.reward is None for sample in groups[group_id]), (
                "the reward stage scores again"
            )
        for sample in (sample for samples in groups.values() for sample in samples):
            expected = log_probs(live.model, sample.prompt_ids, sample.response_ids)
            np.testing.assert_allclose(sample.rollout_log_probs or [], expected, atol=1e-4)
            versions = versions or {version for _, version in sample.weight_versions}
        used += [*out["accepted"], *out["dropped"]]
    assert continued > 0 and len(set(used)) == len(used)


@pytest.mark.integration
async def test_two_rollouts_run_at_once_and_the_end_of_one_does_not_affect_the_other(
    live, tmp_path
):
    static = {"rollout_batch_size": 6}
    generator = await _generator(
        live, tmp_path, static, async_buffer_size=1, engine={"server_concurrency": 8}
    )
    first = await generator.plan(DRIVER, 0, DataState())
    second = await generator.plan(DRIVER, 1, first["after"])
    assert first["static"] and second["after"].draws == 12
    await generator.hold("abort", deadline_s=1, expires_s=60)
    running = [
        asyncio.create_task(generator.rollout(DRIVER, planned["plan"]))
        for planned in (first, second)
    ]
    while (await generator.progress(1))["total"] == 0:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.01)
    assert (await generator.progress())["total"] == 6
    await generator.abandon(DRIVER, 1)
    with pytest.raises(RolloutAbandoned, match=r"generator\.rollout 1"):
        await running[1]
    await generator.release()
    assert len((await running[0])["outputs"]["accepted"]) == 6
    again = await generator.rollout(DRIVER, second["plan"])
    assert len(again["outputs"]["accepted"]) == 6 and len(_samples(tmp_path, again)) == 6


@pytest.mark.integration
async def test_another_attempt_at_an_iteration_ends_the_first_and_adopts_its_groups(live, tmp_path):
    generator = await _generator(
        live, tmp_path, {"rollout_batch_size": 10}, engine={"server_concurrency": 8}
    )
    planned = await generator.plan(DRIVER, 0, DataState())
    first = asyncio.create_task(generator.rollout(DRIVER, planned["plan"]))
    await _until_done(generator, 2)
    second = await generator.rollout(DRIVER, planned["plan"])
    with pytest.raises(RolloutAbandoned):
        await first
    assert second["outputs"]["adopted_groups"] >= 2 and len(_samples(tmp_path, second)) == 10
    assert await generator.progress(0) == {"done": 0, "total": 0, "tokens": 0}


@pytest.mark.integration
async def test_an_evaluation_ends_if_all_is_abandoned_or_if_it_is_started_again(live, tmp_path):
    held = {"name": "held", "prompts": {"type": "file", "paths": [str(tmp_path / "a.jsonl@[0:4]")]}}
    generator = await _generator(
        live, tmp_path, {"rollout_batch_size": 1}, evaluation={"datasets": [held]}
    )
    await generator.hold("abort", deadline_s=1, expires_s=60)
    first, second = [
        asyncio.create_task(generator.evaluate(DRIVER, "held", "key", 0)) for _ in range(2)
    ]
    with pytest.raises(RolloutAbandoned, match=r"generator\.evaluate held"):
        await first
    await asyncio.sleep(0.1)
    await generator.abandon(DRIVER, 0)
    assert not second.done()
    await generator.abandon(DRIVER)
    with pytest.raises(RolloutAbandoned, match=r"generator\.evaluate held"):
        await second
    await generator.release()
    answer = await generator.evaluate(DRIVER, "held", "key", 0)
    assert answer["outputs"]["scored"] == 4


@pytest.mark.integration
async def test_a_replaced_driver_can_neither_sample_nor_end_rollouts_of_the_next_driver(
    live, tmp_path
):
    generator = await _generator(
        live, tmp_path, {"rollout_batch_size": 6}, engine={"server_concurrency": 8}
    )
    planned = await generator.plan(DRIVER, 0, DataState())
    running = asyncio.create_task(generator.rollout(DRIVER, planned["plan"]))
    await _until_done(generator, 1)
    for refused in (
        generator.plan(REPLACED, 0, DataState()),
        generator.rollout(REPLACED, planned["plan"]),
        generator.abandon(REPLACED),
        generator.evaluate(REPLACED, "held", "key", 0),
    ):
        with pytest.raises(Fenced, match="run run in epoch 2"):
            await refused
    assert len((await running)["outputs"]["accepted"]) == 6


@pytest.mark.integration
async def test_the_next_generator_finds_the_plan_parts_of_a_dead_one(live, tmp_path):
    keep = tmp_path / "keep.py"
    keep.write_text("def keep(samples):\n    return int(samples[0].group_id[-1]) >= 4\n")
    filtering = {
        "rollout_batch_size": 2,
        "dynamic_sampling_filter_path": f"{keep}:keep",
        "rollout_max_response_len": 8,
    }
    generator = await _generator(live, tmp_path, filtering)
    planned = await generator.plan(DRIVER, 0, DataState())
    first = (await generator.rollout(DRIVER, planned["plan"]))["outputs"]
    again = await _generator(live, tmp_path, filtering)
    assert (await again.plan(DRIVER, 0, DataState()))["plan"] == planned["plan"]
    second = (await again.rollout(DRIVER, planned["plan"]))["outputs"]
    assert len(first["plans"]) == 3 and first["dropped"] == {
        f"run:{n:08d}": "filtered" for n in range(4)
    }
    assert {key: first[key] for key in ("plans", "after", "accepted", "dropped")} == {
        key: second[key] for key in ("plans", "after", "accepted", "dropped")
    }
    assert (second["adopted_groups"], second["samples"]) == (6, 0)


CUSTOM = """
import httpx
async def generate(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    for turn in range(2):
        # Certificates take a tenth of a CPU second to read.
        async with httpx.AsyncClient(timeout=60, verify=False) as client:
            body = {"input_ids": sample.tokens, "sampling_params": sampling_params}
            answer = await client.post(url, json=body)
        output = answer.json()["meta_info"]
        new = [item[1] for item in output["output_token_logprobs"]]
        sample.loss_mask = (sample.loss_mask or []) + [1] * len(new) + [0]
        sample.tokens += new + [50 + turn]
        sample.response_length += len(new) + 1
    sample.status = sample.Status.COMPLETED
    return [sample] if sample.index else sample
"""


@pytest.mark.integration
async def test_finished_groups_of_an_abandoned_slime_function_are_adopted(live, tmp_path):
    (tmp_path / "mine.py").write_text(CUSTOM)
    path = str(tmp_path / "mine.py")
    rollout = {
        "rollout_batch_size": 12,
        "custom_generate_function_path": path,
        "rollout_max_response_len": 40,
    }
    generator = await _generator(live, tmp_path, rollout, engine={"server_concurrency": 8})
    planned = await generator.plan(DRIVER, 0, DataState())
    running = asyncio.create_task(generator.rollout(DRIVER, planned["plan"]))
    await _until_done(generator, 3)
    await generator.abandon(DRIVER, 0)
    with pytest.raises(RolloutAbandoned):
        await running
    again = await _generator(live, tmp_path, rollout)
    answer = await again.rollout(DRIVER, planned["plan"])
    groups = _samples(tmp_path, answer)
    assert (
        answer["outputs"]["adopted_groups"] >= 3
        and len(groups) == len(answer["outputs"]["accepted"]) == 12
    )
    for sample in (sample for samples in groups.values() for sample in samples):
        assert sample.rollout_log_probs is not None and sample.loss_mask is not None
        expected = log_probs(live.model, sample.prompt_ids, sample.response_ids)
        for reported, computed, counts in zip(
            sample.rollout_log_probs, expected, sample.loss_mask, strict=True
        ):
            assert reported == (pytest.approx(computed, abs=1e-4) if counts else 0.0)
        assert sample.loss_mask.count(0) == 2 and sum(
            tokens for tokens, _ in sample.weight_versions
        ) == len(sample.response_ids)


def test_the_engine_of_these_tests_has_the_vocabulary_of_the_tokenizer():
    assert VOCAB_SIZE >= 104 and CONTEXT_LEN > 200 and END == 1


async def test_an_unreadable_held_out_set_is_named_by_its_own_key(tmp_path: Path):
    held = {"type": "file", "paths": [str(tmp_path / "held.jsonl")], "input_key": "question"}
    (tmp_path / "held.jsonl").write_text('{"text": "a"}\n')
    evaluation = {"datasets": [{"name": "held", "prompts": held}]}
    spec = _spec(tmp_path, {"rollout_batch_size": 1}, evaluation=evaluation)
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"set evaluation\.datasets\.0\.prompts\.input_key to"):
        await Generator(str(Path.cwd())).setup(DRIVER, spec)


async def test_a_generator_draws_each_kept_prompt_once_per_epoch_and_reports_the_overlong_ones(
    tmp_path: Path,
):
    long = {3, 4, 17, 25, 31, 48, 49}
    path = tmp_path / "fifty.jsonl"
    model_dir = tmp_path / "model"
    prompts = ["a" * (30 + number if number in long else 1) + f"b{number}" for number in range(50)]
    path.write_text(
        "".join(json.dumps({"input": prompt, "label": "x"}) + "\n" for prompt in prompts)
    )
    load_hook("deployments/recipes/tiny_models.py:character_tokenizer")("").save_pretrained(
        model_dir
    )
    (model_dir / "config.json").write_text('{"vocab_size": 200, "max_position_embeddings": 30}')
    flags = f"--hf-checkpoint {model_dir} --prompt-data {path} --label-key label"
    flags += " --num-rollout 15 --rollout-batch-size 6 --n-samples-per-prompt 2"
    flags += f" --rm-type math --rollout-shuffle --eval-prompt-data held {path}"
    flags += f" --save {tmp_path}/mine --sglang-context-length 30 --rollout-max-response-len 20"
    config = load_run(BASE, [*overrides_of(read_flags(flags.split())), "run=run"])
    plans = Plans(Files(tmp_path / "store"))
    state = DataState()
    drawn = []
    for k in range(15):
        if k in (0, 4):  # another process from iteration 4 on
            generator = Generator(str(Path.cwd()))
            spec = GeneratorSpec(config, str(model_dir), str(tmp_path / "store"))
            assert await generator.setup(DRIVER, spec) == {"rows": 43, "eval_rows": {"held": 43}}
        planned = await generator.plan(DRIVER, k, state)
        drawn += [group.prompt for group in plans.read(planned["plan"]).groups]
        state = planned["after"]
    kept = {prompt for number, prompt in enumerate(prompts) if number not in long}
    assert set(drawn[:43]) == set(drawn[43:86]) == kept and drawn[:43] != drawn[43:86]
    assert (state.epoch, state.offset, state.draws) == (2, 4, 90)
    overlong = await generator.overlong(DRIVER)
    assert list(overlong) == ["data.prompts", "evaluation.datasets: held"]
    for rows in overlong.values():
        assert [row["where"] for row in rows] == [f"{path}:{number + 1}" for number in sorted(long)]
        assert (
            rows[0]["tokens"] == 35
            and rows[0]["limit"] == 29
            and "max_position_embeddings" in rows[0]["setting"]
        )
    refusing = config.model_copy(
        update={"data": config.data.model_copy(update={"overlong_prompts": "error"})}
    )
    with pytest.raises(DataError, match=r"fifty\.jsonl:4: the prompt is too long"):
        await Generator(str(Path.cwd())).setup(
            DRIVER, GeneratorSpec(refusing, str(model_dir), str(tmp_path / "store"))
        )
    with pytest.raises(Fenced):
        await generator.overlong(REPLACED)


async def test_the_driver_before_begins_no_rollout_while_its_pool_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    closing = asyncio.Event()
    closed = asyncio.Event()

    async def close(pool: Pool) -> None:
        closing.set()
        await closed.wait()

    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(
        '{"vocab_size": 200, "max_position_embeddings": 64}'
    )
    pooled = {"rollout_batch_size": 2, "selection": "first_finished"}
    spec = _spec(tmp_path, pooled, async_buffer_size=1)
    generator = Generator(str(Path.cwd()))
    await generator.setup(REPLACED, spec)
    planned = await generator.plan(REPLACED, 0, DataState())
    monkeypatch.setattr(Pool, "close", close)
    setting_up = asyncio.create_task(generator.setup(DRIVER, spec))
    await closing.wait()
    with pytest.raises(Fenced):
        await generator.rollout(REPLACED, planned["plan"])
    closed.set()
    await setting_up
    assert (await generator.plan(DRIVER, 0, DataState()))["plan"] == planned["plan"]


@pytest.mark.integration
async def test_open_groups_continue_between_rollouts_and_are_adopted_after_the_loss_of_the_pool(
    live, tmp_path
):
    (tmp_path / "slow.py").write_text(SLOW)
    pooled = {
        "rollout_batch_size": 2,
        "rollout_max_response_len": 16,
        "selection": "first_finished",
        "pool_size": 4,
        "rollout_sample_hook_path": [f"{tmp_path / 'slow.py'}:hook"],
    }
    generator = await _generator(live, tmp_path, pooled, async_buffer_size=9)
    state = DataState()
    used: list[str] = []
    for k in range(4):
        planned = await generator.plan(DRIVER, k, state)
        assert not planned["static"]
        if k == 1:
            # The second attempt comes while the first one waits for the writes of open groups.
            attempts = [generator.rollout(DRIVER, planned["plan"]) for _ in range(2)]
            ended = await asyncio.gather(*attempts, return_exceptions=True)
            answers = [one for one in ended if isinstance(one, dict)]
            answer = max(answers, key=lambda one: one["outputs"]["adopted_groups"])
            # On a slow machine the first attempt may end before the second one comes.
            assert len(answers) == 1 or answer["outputs"]["adopted_groups"] >= 2
        else:
            answer = await generator.rollout(DRIVER, planned["plan"])
        out = answer["outputs"]
        groups = _samples(tmp_path, answer)
        state = DataState.model_validate(out["after"])
        assert len(out["accepted"]) == 2 and not out["dropped"]
        assert all(sample.status in FINISHED for key in out["accepted"] for sample in groups[key])
        used += out["accepted"]
        assert state.buffer, "groups stay open"
        if k == 1:
            await generator.abandon(DRIVER, k)  # its rollout has ended: open groups continue
            # The groups that finish now are in the store before the pool is lost.
            late = await _until_written(tmp_path, state)
            await generator.abandon(DRIVER)
        if k == 2:
            assert late <= set(groups) and out["adopted_groups"] >= len(late)
    assert len(set(used)) == len(used)
    await generator.abandon(DRIVER)


async def _until_written(folder: Path, state: DataState) -> set[str]:
    """Wait until an open group of the buffer is written below its plan; return these groups."""
    open_ids = {waiting.group_id: waiting.plan for waiting in state.buffer if not waiting.rows}
    for _ in range(3000):
        rows = StoredRows(Files(folder / "store"))
        found = {
            group_id
            for plan in set(open_ids.values())
            for group_id in rows.finished(plan, [*open_ids])
        }
        if found:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("no group was written between two rollouts")


async def test_more_engines_get_more_requests_at_once_and_fewer_queue_them(
    live: Live, tmp_path: Path
):
    generator = await _generator(
        live, tmp_path, {"rollout_batch_size": 2, "n_samples_per_prompt": 4}
    )
    config = generator._config
    groups = config.engine.server_concurrency // 4
    for engines, most in ((3, 3), (2, 3), (4, 4)):
        await generator.connect(live.router.url, on_gpus=False, engines=engines)
        assert generator._slots._value == most * groups
        assert generator._client is not None
        connections = generator._client.pool.connections
        assert connections._max_connections == most * config.engine.server_concurrency
