"""The page and the picture of a run (rlpipe.observe.run_report, charts, pictures)."""

from __future__ import annotations

import itertools
import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.observe.charts import (
    line_chart,
    moving_average,
    number,
    shares,
    stacked_chart,
    tick_labels,
)
from rlpipe.observe.pass_rates import PARTS
from rlpipe.observe.pictures import write_figure
from rlpipe.observe.run_curves import LENGTHS
from rlpipe.observe.run_history import REWARD, Evaluation, IterationRecord, RunHistory, SampleChange
from rlpipe.observe.run_report import render, write_report
from tests.observe.histories import example_history

VOID = {"meta", "line", "rect", "path", "circle", "br"}


class Outline(HTMLParser):
    """Checks that tags nest, and collects text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_has_the_result_and_every_section():
    text = outline(render(example_history())).text
    for part in (
        "36%",
        "74%",
        "+38.0 points",
        "256 held-out responses",
        "Reward",
        "Where the time went",
        "rollout",
        "47%",
    ):
        assert part in text
    for part in (
        "Do trainer and engine agree?",
        "Before and after",
        "tenalp",
        "Configuration",
        "lr: 0.00025",
        "sglang 0.5.21",
        "10:12",
    ):
        assert part in text


def test_the_page_has_no_requests_and_no_scripts():
    parser = outline(render(example_history()))
    assert not [name for name, _ in parser.attributes if name == "src" or name.startswith("on")]
    assert "<script" not in render(example_history())
    assert not re.search(r"url\(|@import|https?://", render(example_history()))


def test_text_of_a_model_cannot_break_the_page():
    evil = "</td><script>alert(1)</script>&lt;"
    history = RunHistory(
        evil,
        samples=[SampleChange(evil, evil, evil, evil, 0.0, 1.0)],
        config_yaml=evil,
        totals={evil: evil},
    )
    page = render(history)
    assert "<script" not in page
    assert outline(page).text.count(evil) >= 6


def test_a_run_without_evaluations_shows_its_reward():
    history = RunHistory("r", [IterationRecord(k, {REWARD: 0.25 + k / 100}) for k in range(20)])
    text = outline(render(history)).text
    assert "0.25" in text
    assert "0.44" in text
    assert "mean reward of the first and the last iteration" in text


def test_the_large_figures_have_three_digits_and_the_size_that_their_length_allows():
    rewards = (0.0012468, 0.28512)
    page = render(RunHistory("r", [IterationRecord(k, {REWARD: r}) for k, r in enumerate(rewards)]))
    assert "0.00125→0.285" in outline(page).text
    assert 'class="big" style="--characters: 13"' in page
    assert "min(56px, 420px / var(--characters, 1))" in page


def test_the_marks_of_a_short_run_are_whole_iterations():
    history = RunHistory("r", evaluations=[Evaluation(k, "a", 0.5, 10) for k in (20, 40)])
    assert re.findall(r'text-anchor="middle">([^<]*)<', render(history)) == [
        "20",
        "25",
        "30",
        "35",
        "40",
    ]


def test_a_run_without_iterations_has_a_page():
    text = outline(render(RunHistory("empty", status="failed"))).text
    assert "failed" in text
    assert "Training" not in text


def test_totals_are_labelled_in_words_and_objects_are_omitted():
    totals = {
        "samples": 1200,
        "rollout_tokens_per_s": 1844.7,
        "orchestration_s_per_iteration": 0.12,
        "by_stage": {"a": 1},
        "nothing": None,
    }
    text = outline(render(RunHistory("r", totals=totals))).text
    for part in (
        "1,200",
        "1,845",
        "tokens sampled per second",
        "0.12 s",
        "between stages, per iteration",
    ):
        assert part in text
    assert "by stage" not in text
    assert "nothing" not in text


def test_a_decrease_of_accuracy_is_marked():
    history = RunHistory(
        "r", evaluations=[Evaluation(0, "a", 0.5, 10), Evaluation(9, "a", 0.4, 10)]
    )
    page = render(history)
    assert "-10.0 points" in page
    assert "gain down" in page


def test_the_page_links_to_the_samples_and_to_the_flow_run():
    address = "http://127.0.0.1:4200/runs/flow-run/1"
    page = render(RunHistory("r", links={"Samples": "samples.html", "Prefect run": address}))
    assert '<a href="samples.html">Samples</a>' in page
    assert f'<a href="{address}" title="Opens while this Prefect server runs.">' in page
    assert "<nav" not in render(RunHistory("r"))


def scored(*scores: float, **rest: object) -> RunHistory:
    evaluations = [
        Evaluation(k, "a", score, 64, **rest)  # type: ignore[arg-type]
        for k, score in enumerate(scores)
    ]
    return RunHistory("r", evaluations=evaluations)


def test_a_mean_reward_is_not_called_accuracy():
    text = outline(render(scored(-0.5, 1.25, binary=False))).text
    assert "mean reward on 64 held-out responses" in text
    assert "+1.75" in text and "1.25" in text
    assert "accuracy" not in text and "%" not in text


def test_a_given_threshold_makes_a_pass_rate():
    history = scored(0.4, 0.6, binary=False, passed=0.25)
    text = outline(render(history)).text
    assert "pass rate (rewards of at least pass_threshold)" in text
    assert "25%" in text and "no change" in text


def test_a_set_is_an_accuracy_only_if_every_evaluation_is():
    history = scored(0.0, 0.3)
    history.evaluations[1].binary = False
    assert history.measure("a") == "mean reward", (
        "the rewards of an untrained model are often all 0"
    )


def test_rewards_that_are_all_0_are_no_accuracy_until_one_is_1():
    assert scored(0.0, 0.0).measure("a") == "mean reward"
    assert scored(0.0, 0.25).measure("a") == "accuracy"


def test_sets_with_another_measure_have_a_chart_of_their_own():
    history = scored(0.2, 0.5)
    history.evaluations += [Evaluation(k, "shaped", 2.5 + k, 8, binary=False) for k in (0, 1)]
    text = outline(render(history)).text
    assert "Held-out: shaped" in text and "mean reward" in text
    assert "held-out accuracy over iterations" in text


def test_a_worse_result_is_not_shown_as_a_good_one():
    worse = render(scored(0.5, 0.4))
    assert 'class="to worse"' in worse and 'class="gain down"' in worse
    better = render(scored(0.4, 0.5))
    assert 'class="to"' in better and 'class="gain"' in better
    rewards = [IterationRecord(k, {REWARD: 1.0 - k}) for k in range(2)]
    assert 'class="to worse"' in render(RunHistory("r", rewards))


def test_a_run_without_a_reference_has_no_kl_to_it():
    records = [IterationRecord(k, {"train/kl_loss": 0.1}) for k in range(3)]
    assert "KL to the reference" in render(RunHistory("r", records))
    assert "KL to the reference" not in render(RunHistory("r", records, has_reference=False))


def test_the_largest_differences_of_a_token_and_of_an_iteration_have_distinct_names():
    records = [IterationRecord(k, {"rollout/logprob_abs_diff/mean": 2e-6}) for k in range(3)]
    text = outline(render(RunHistory("r", records, totals={"max_logprob_difference": 3e-5}))).text
    assert "3e-5largest log-prob difference of one token" in text
    assert "Largest mean of an iteration: 2e-6." in text


def test_a_chart_of_zeros_says_so():
    records = [IterationRecord(k, {"train/clipfrac": 0.0}) for k in range(3)]
    page = render(RunHistory("r", records))
    assert "Every value is 0." in page and "<svg" not in page


@pytest.mark.parametrize("iterations", [1, 2, 8])
def test_a_short_run_shows_its_points(iterations: int):
    page = render(example_history(iterations))
    assert page.count('class="dot s0"') >= 6 * iterations
    assert "moving average" not in page


def test_the_page_of_a_long_run_is_bounded():
    assert len(render(example_history(20_000))) < 250_000


def test_files_are_written_atomically_into_new_folders(tmp_path):
    path = write_report(example_history(3), tmp_path / "a" / "report.html")
    assert path.read_text(encoding="utf-8").endswith("</html>\n")
    assert len(list(path.parent.iterdir())) == 1
    picture = write_figure(example_history(3), tmp_path / "b" / "report.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert write_figure(RunHistory("empty"), tmp_path / "b" / "empty.png").stat().st_size > 1000


POINTS = st.lists(st.floats(width=32) | st.floats(-1, 1), max_size=30)
SPANS = st.integers(1, 100_000)


@given(POINTS, st.booleans(), st.booleans())
def test_a_chart_of_any_numbers_stays_inside_its_frame(numbers, logarithmic, smooth):
    chart = line_chart(
        {"x": list(enumerate(numbers))},
        width=640,
        height=250,
        logarithmic=logarithmic,
        smooth=smooth,
    )
    for path in re.findall(r' d="M([^"]*)"', chart):
        for pair in path.split("L"):
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 640
            assert -1 <= y <= 251


@given(SPANS)
def test_the_x_axis_has_2_to_9_marks_for_any_number_of_iterations(span):
    chart = line_chart({"x": [(0, 0.0), (span, 1.0)]})
    marks = re.findall(r'text-anchor="middle">([^<]*)<', chart)
    assert marks[0] == "0"
    assert 2 <= len(marks) <= 9
    assert len(set(marks)) == len(marks)


@given(
    st.lists(st.floats(-1e9, 1e9) | st.floats(-1e-6, 1e-6) | st.floats(0, 1), min_size=1),
    st.booleans(),
    st.sampled_from([None, 0.0]),
)
def test_no_label_of_the_y_axis_occurs_twice(
    numbers: list[float], percent: bool, floor: float | None
):
    chart = line_chart({"x": list(enumerate(numbers))}, percent=percent, floor=floor)
    labels = re.findall(r'text-anchor="end">([^<]*)<', chart)
    assert len(set(labels)) == len(labels)


def test_a_constant_share_of_100_percent_has_an_axis():
    assert "100%" in line_chart({"x": [(0, 1.0), (1, 1.0)]}, percent=True)


def test_ticks_have_as_many_digits_as_they_need():
    assert tick_labels([0.0, 0.005, 0.01], percent=True) == ["0%", "0.5%", "1.0%"]
    assert tick_labels([1.0001, 1.0002]) == ["1.0001", "1.0002"]
    assert tick_labels([0.0, 2.5e-7, 5e-7]) == ["0", "2.5e-7", "5.0e-7"]
    assert tick_labels([0.0, 500.0, 1000.0]) == ["0", "500", "1,000"]


def test_labels_of_a_narrow_x_axis_do_not_overlap():
    chart = line_chart({"x": [(k, float(k)) for k in range(0, 2001, 500)]}, width=320)
    marks = [float(x) for x in re.findall(r'x="([\d.]+)" y="[\d.]+" text-anchor="middle"', chart)]
    assert len(marks) >= 3
    assert all(right - left >= 50 for left, right in itertools.pairwise(marks))


def test_a_long_curve_is_a_band_with_its_moving_average():
    points = [(k, math.sin(k)) for k in range(5000)]
    chart = line_chart({"x": points}, smooth=True)
    assert 'class="band f0"' in chart and "faint" not in chart
    assert "<title>mean of iterations 0 to 82:" in chart
    assert len(chart) < 30_000


def test_a_chart_without_values_is_empty():
    assert line_chart({}) == ""
    assert line_chart({"x": [(0, math.nan)]}) == ""
    assert line_chart({"x": [(0, -1.0)]}, logarithmic=True) == ""
    assert shares({"a": 0.0}) == ""


def test_percent_charts_do_not_go_above_100_percent():
    assert "100%" in line_chart({"x": [(0, 0.2), (1, 0.97)]}, percent=True, floor=0)
    assert "120%" not in line_chart({"x": [(0, 0.0), (1, 1.0)]}, percent=True, floor=0)


def test_a_moving_average_keeps_constants_and_shrinks_at_the_ends():
    assert moving_average([(k, 2.0) for k in range(9)]) == [(k, 2.0) for k in range(9)]
    assert moving_average([(0, 0.0), (1, 3.0), (2, 6.0)])[0] == (0, 3.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (1234.5, "1,234"),
        (3.2e-6, "3.2e-6"),
        (1e-6, "1e-6"),
        (2.5e7, "2.5e7"),
        (-0.25, "-0.25"),
    ],
)
def test_numbers_are_short_texts(value, text):
    assert number(value) == text


def with_pass_rates(iterations: int = 300) -> RunHistory:
    history = example_history(iterations)
    for record in history.iterations:
        never = max(0.0, 0.6 - record.iteration / 500)
        shares_ = dict.fromkeys(PARTS, 0.0) | {"0": never, "50_75": 0.25, "100": 0.75 - never}
        record.metrics |= {f"rollout/pass_rate/{part}": share for part, share in shares_.items()}
    return history


def heights(chart: str, part: int) -> list[float]:
    """Return the height of each column of a part in a stacked chart, in pixels."""
    [path] = re.findall(rf'<path class="q{part}"[^>]* d="([^"]*)"', chart)
    numbers = re.findall(r"M[\d.]+,([\d.]+)H[\d.]+V([\d.]+)H", path)
    return [float(low) - float(high) for low, high in numbers]


def test_the_page_shows_the_pass_rate_by_prompt_over_training():
    page = render(with_pass_rates())
    assert "Pass rate by prompt" in outline(page).text
    for name in PARTS.values():
        assert f"</span>{name}</span>" in page
    # 300 iterations have 240 columns.
    assert "<title>iteration 0: no sample 60%, below 25% 0%, 25 to 50% 0%, 50 to 75% 25%" in page


def test_rewards_of_another_scale_show_no_pass_rate():
    assert "Pass rate by prompt" not in render(example_history())
    history = with_pass_rates()
    for record in history.iterations[:160]:
        for part in PARTS:
            del record.metrics[f"rollout/pass_rate/{part}"]
    assert "Pass rate by prompt" not in render(history), "most iterations have other rewards"


def test_a_change_of_the_reward_is_a_line_in_each_curve_and_the_pass_rates_go_on():
    history = with_pass_rates(40)
    for record in history.iterations[30:]:
        for part in PARTS:
            del record.metrics[f"rollout/pass_rate/{part}"]
    unchanged = render(history)
    assert "new reward" not in unchanged
    history.reward_changes = {30: "reward.py:score has another source"}
    page = render(history)
    text = outline(page).text
    assert "another reward from iteration 30 (reward.py:score has another source) on" in text
    [pass_rates] = re.findall(r"<h3>Pass rate by prompt</h3>(<svg.*?</svg>)", page)
    assert "new reward" in pass_rates and ">40<" not in pass_rates and ">35<" in pass_rates
    assert "10 iterations have none" in text
    for title in ("Reward", "Entropy"):
        [chart] = re.findall(rf"<h3>{title}</h3>(<svg.*?</svg>)", page)
        assert "new reward" in chart
        assert len(re.findall('class="line s0"', chart)) == 2, "the curve is interrupted"


def test_a_reward_curve_compares_iterations_with_the_same_reward():
    history = example_history(40)
    history.evaluations = []
    for record in history.iterations[30:]:
        record.metrics[REWARD] = 5.0
    history.reward_changes = {30: "reward.function.type: math → python"}
    assert "first and the last iteration with the newest reward" in outline(render(history)).text
    assert "no change" not in render(history) and '<span class="from">5</span>' in render(history)


def test_a_run_whose_second_half_has_another_reward_shows_the_pass_rates_of_the_first():
    history = with_pass_rates()
    for record in history.iterations[100:]:
        for part in PARTS:
            del record.metrics[f"rollout/pass_rate/{part}"]
    assert "Pass rate by prompt" not in render(history)
    history.reward_changes = {100: "reward.function.type: math → python"}
    assert "Pass rate by prompt" in render(history)


@pytest.mark.parametrize("iterations", [1, 3, 240, 1000])
def test_the_columns_of_a_stacked_chart_add_up_to_its_height(iterations: int):
    shares_ = [(k, k / iterations) for k in range(iterations)]
    rest = [(k, 1 - share) for k, share in shares_]
    chart = stacked_chart({"a": shares_, "b": rest})
    plane = 250 - 12 - 26
    low = heights(chart, 0) if iterations > 1 else []
    high = heights(chart, 1)
    assert len(high) == min(iterations, 240)
    # A share of 0 draws nothing, so the first column has one part alone.
    low = [0.0] * (len(high) - len(low)) + low
    for first, second in zip(low, high, strict=True):
        assert first + second == pytest.approx(plane, abs=0.11)
    assert sum(low) / plane / len(low) == pytest.approx(
        sum(share for _, share in shares_) / iterations, abs=0.01
    )


def test_a_stacked_chart_without_values_is_empty():
    assert stacked_chart({}) == ""
    assert stacked_chart({"a": [], "b": []}) == ""
    assert stacked_chart({"a": [(0, math.nan)], "b": [(0, 0.5)]}) == ""


def test_the_page_has_mfu_and_else_tflops_and_nothing_of_gpus_on_cpus():
    history = example_history(30)
    assert "Engines and GPUs" not in render(history)
    for record in history.iterations:
        record.metrics |= {"perf/train_tflops": 0.02, "engine/prefix_cache_hit_rate": 0.5}
    text = outline(render(history)).text
    assert "Model FLOPs" in text and "Prefix cache" in text
    assert "MFU" not in text and "GPU memory" not in text
    for record in history.iterations:
        record.metrics |= {"perf/train_mfu": 0.34, "perf/train_gpu_used_bytes": 70.0 * 2**30}
    text = outline(render(history)).text
    assert "MFU" in text and "GPU memory" in text and "80" in text
    assert "Model FLOPs" not in text


def test_the_lengths_of_a_run_without_percentiles_are_their_mean():
    history = example_history(30)
    assert "longest" not in outline(render(history)).text
    for record in history.iterations:
        record.metrics |= dict.fromkeys(LENGTHS.values(), 7.0)
    text = outline(render(history)).text
    assert all(name in text for name in LENGTHS)
