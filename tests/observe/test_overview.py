"""The Markdown page of a run (rlpipe.observe.overview)."""

from __future__ import annotations

from pathlib import Path

from rlpipe.observe.overview import overview, sparkline
from rlpipe.observe.run_history import RunHistory
from tests.observe.histories import example_history


def test_the_page_has_learning_health_and_times():
    page = overview(example_history())
    learning, healthy, times = (part.partition("\n")[2] for part in page.split("## ")[1:])
    assert (
        "| heldout | accuracy | 0.360 | 0.740 after 300 | 0.740 after 300 |" in learning
        and "| reward | 0.3" in learning
    )
    assert "| gradient norm |" in healthy and "cut-off" not in healthy, (
        "metrics without values are omitted"
    )
    first = times.strip().splitlines()[2]
    assert first.startswith("| rollout | 285.0 | 0.95 | ") and "█" in first


def test_a_run_without_iterations_has_a_page():
    page = overview(RunHistory(run="new", status="0 of 3 iterations"))
    assert (
        "No held-out set was measured yet." in page
        and page.count("No iteration is committed yet.") == 2
    )


def test_a_sparkline_spans_the_range_and_a_constant_one_is_in_the_middle():
    assert (
        sparkline([0.0, 1.0, 0.5]) == "▁█▅"
        and sparkline([2.0, 2.0]) == "▄▄"
        and sparkline([]) == ""
    )
    assert len(sparkline(list(range(1000)))) == 16


def test_the_page_names_the_html_pages_that_exist():
    run = Path("/runs/r")
    assert "## Pages\n\n- `/runs/r/report.html`\n" in overview(RunHistory("r"), run)
    samples = RunHistory("r", links={"Samples": "samples.html"})
    assert "- `/runs/r/samples.html`" in overview(samples, run)
    assert "## Pages" not in overview(RunHistory("r"))
