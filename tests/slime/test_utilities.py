"""slime's small helpers (rlpipe.slime.utilities) and results (rlpipe.slime.outputs)."""

from __future__ import annotations

import asyncio
import socket
from argparse import Namespace

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlpipe.slime import outputs, utilities
from rlpipe.types import Sample


def hook_of_names(args, sample, *, rollout_id=None):
    sample.metadata["seen"] = (args.mark, rollout_id)


async def hook_of_copies(args, sample, **keywords):
    return Sample(metadata={**sample.metadata, "evaluation": keywords["evaluation"]})


def hook_of_texts(args, sample):
    return "text"


def test_coroutines_of_several_calls_share_a_loop():
    async def loop():
        return asyncio.get_running_loop()

    assert utilities.run(loop()) is utilities.run(loop())


def test_functions_are_loaded_from_a_dotted_path_and_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text("def one():\n    return 1\n")
    assert utilities.load_function("os.path.join")("a", "b") == "a/b"
    assert utilities.load_function(f"{tmp_path}/mine.py:one")() == 1


def test_engines_follow_from_gpus():
    count = utilities.get_rollout_num_engines
    assert count(Namespace(rollout_num_gpus=8, rollout_num_gpus_per_engine=4)) == 2
    assert count(Namespace(rollout_num_gpus=0)) == 0
    assert count(Namespace(rollout_num_engines=3)) == 3


def test_a_used_port_is_not_free():
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        used = server.getsockname()[1]
        assert not utilities.is_port_available(used)
        assert utilities.get_free_port(used) > used


@pytest.mark.parametrize(
    ("iteration", "interval", "expected"), [(0, None, False), (3, 4, True), (4, 4, False)]
)
def test_periodic_actions(iteration, interval, expected):
    assert utilities.should_run_periodic_action(iteration, interval) is expected
    assert utilities.should_run_periodic_action(9, 4, num_rollout=10)
    assert utilities.should_run_periodic_action(2, 4, num_rollout_per_epoch=3)


async def test_sample_hooks_keep_the_shape_of_lists():
    args = Namespace(
        mark=1,
        rollout_sample_hook_path=[f"{__name__}.hook_of_names", f"{__name__}.hook_of_copies"],
    )
    utilities.set_current_rollout_id(7)
    samples = [[Sample()], [Sample()]]
    result = await utilities.apply_rollout_sample_hooks(args, samples, evaluation=True)
    assert [[one.metadata for one in group] for group in result] == [
        [{"seen": (1, 7), "evaluation": True}]
    ] * 2
    wrong = Namespace(rollout_sample_hook_path=[f"{__name__}.hook_of_texts"])
    with pytest.raises(TypeError, match="expected Sample or None"):
        await utilities.apply_rollout_sample_hooks(wrong, Sample())
    with pytest.raises(TypeError, match="expected Sample or list"):
        await utilities.apply_rollout_sample_hooks(wrong, "text")


def test_a_fallback_group_is_dropped_only_if_others_fill_the_batch():
    args = Namespace(reward_key=None)
    output = outputs.call_dynamic_filter(
        outputs.check_reward_nonzero_std_with_fallback, args, [Sample(reward=1.0)] * 2
    )
    drop = outputs.should_drop_dynamic_filter_output
    assert drop(output, remaining_batch_size=3, target_data_size=2)
    assert not drop(output, remaining_batch_size=2, target_data_size=2)
    assert outputs.call_dynamic_filter(None).keep
    assert outputs.call_dynamic_filter(lambda: False).keep is False


def test_dropped_groups_are_counted_by_reason():
    gatherer = outputs.MetricGatherer()
    for reason in ("zero_std_1", "zero_std_1", None):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {"rollout/dynamic_filter/drop_zero_std_1": 2}


async def test_a_refused_request_names_the_reason_of_the_server():
    async def refuse(request):
        return web.Response(status=400, text="the prompt has 5000 tokens, the model takes 4096")

    app = web.Application()
    app.router.add_post("/generate", refuse)
    async with TestServer(app) as server:
        with pytest.raises(httpx.HTTPStatusError, match=r"400[\s\S]*has 5000 tokens") as caught:
            await utilities.post(str(server.make_url("/generate")), {})
    assert caught.value.response.status_code == 400
