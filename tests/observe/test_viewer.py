"""The page of samples (rlpipe.observe.viewer)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpipe.lineage.token_rows import pieces
from rlpipe.observe.viewer import END_TOKENS, ShownSample, ShownSet, render
from tests.browser import run_in_browser


def shown(**changes: object) -> ShownSample:
    values = {
        "group": "g",
        "index": 0,
        "prompt": "<b>p</b>",
        "texts": ["a", "<i>", "\n"],
        "ids": [1, 2, 3],
        **changes,
    }
    return ShownSample(**values)  # type: ignore[arg-type]


def page_of(*samples: ShownSample) -> str:
    return render("t", "", [ShownSet("iteration 0", samples, len(samples))])


def data_of(page: str) -> dict[str, Any]:
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


def first_sample(page: str) -> dict[str, Any]:
    return data_of(page)["sets"][0]["groups"][0]["samples"][0]


def test_the_page_has_the_values_of_every_token():
    page = page_of(shown(advantages=[2.0, -1.0, 0.0], differences=[0.5, 0.5, 0.5], mask=[1, 0, 1]))
    sample = first_sample(page)
    assert sample["advantages"] == [2.0, -1.0, 0.0]
    assert sample["differences"] == 0.5, "a value that all tokens share is stored once"
    assert sample["masked"] == [1]
    assert data_of(page)["largest"] == {"advantage": 2.0, "difference": 0.5}


def test_sampled_text_cannot_end_the_script_element():
    evil = "</script><script>alert(1)</script><!--"
    sample = shown(texts=[evil], ids=[1], label=evil, error=evil, parts={evil: 1.0}, prompt=evil)
    page = render(evil, evil, [ShownSet(evil, [sample], 1)])
    assert page.count("</script>") == 2
    assert "<script>alert" not in page and "<!--" not in page
    assert first_sample(page)["texts"] == [evil]


def test_the_page_makes_no_request():
    page = page_of(shown())
    assert not any(part in page for part in (" src=", "url(", "@import", "http://", "https://"))


def test_a_prompt_has_its_pictures_once():
    digests = ("a" * 64, "b" * 64)
    samples = [
        shown(group="one", images=digests),
        shown(group="two", images=digests[:1]),
        shown(group="three", images=digests[:1]),
    ]
    sets = [ShownSet("iteration 0", samples, 3)]
    page = data_of(render("t", "", sets, pictures={"a" * 64: "data:image/png;base64,AA"}))
    assert [group["prompt"] for group in page["sets"][0]["groups"]] == [0, 1, 1]
    assert page["images"] == [list(digests), list(digests[:1])]
    assert page["pictures"] == {"a" * 64: "data:image/png;base64,AA"}
    assert page["prompts"] == ["<b>p</b>", "<b>p</b>"]


def test_a_long_response_keeps_its_ends_and_says_what_is_left_out():
    count = 3 * END_TOKENS
    sample = shown(
        texts=[f"{number} " for number in range(count)],
        ids=list(range(count)),
        log_probs=[-float(number) for number in range(count)],
        versions=[0] * END_TOKENS + [1] * 2 * END_TOKENS,
    )
    stored = first_sample(page_of(sample))
    assert (stored["tokens"], stored["cut"], len(stored["texts"])) == (
        count,
        END_TOKENS,
        2 * END_TOKENS,
    )
    assert (stored["ids"][0], stored["ids"][-1]) == (0, count - 1)
    assert stored["logProbs"][END_TOKENS] == -float(2 * END_TOKENS)
    assert stored["versions"] == [[END_TOKENS, 0], [END_TOKENS, 1]]


def test_values_that_json_does_not_have_are_missing():
    sample = first_sample(page_of(shown(reward=float("nan"), advantages=[float("inf"), 1.0, 0.0])))
    assert sample["reward"] is None
    assert sample["advantages"][0] is None


def test_the_page_opens_with_the_newest_set_whose_rewards_differ():
    same = [shown(index=0, reward=1.0), shown(index=1, reward=1.0)]
    differ = [shown(index=0, reward=1.0), shown(index=1, reward=0.0)]
    sets = [ShownSet(str(number), samples, 2) for number, samples in enumerate((differ, same))]
    assert data_of(render("t", "", sets))["first"] == 0
    assert data_of(render("t", "", sets[1:]))["first"] == 0
    assert data_of(render("t", "", []))["first"] == 0


def example_page() -> str:
    def group(name: str, prompt: str, rewards: tuple[float, ...], **changes: object):
        return [
            shown(
                group=name,
                index=index,
                prompt=prompt,
                reward=reward,
                texts=[f"{name}-{index} ", "end\n"],
                ids=[5, 6],
                advantages=[reward - 0.5] * 2,
                fate="trained",
                **changes,
            )
            for index, reward in enumerate(rewards)
        ]

    old = group("g0", "sum of 2 and 3", (0.0, 0.0)) + group("g1", "word", (0.0, 1.0))
    cut = [shown(group="g3", prompt="long", status="truncated", reward=None, fate="cut")]
    new = [*group("g2", "sum of 2 and 3", (1.0, 1.0)), *group("g4", "other", (1.0, 0.25)), *cut]
    sets = [ShownSet("iteration 0", old, 8), ShownSet("iteration 7", new, 5)]
    return render("t", "", sets, links={"Report": "report.html"})


SCRIPT = """
const heads = () => [...document.querySelectorAll(".group > h2")].map((head) => head.textContent);
const cards = () => document.querySelectorAll("article").length;
const counts = () => document.querySelector(".counts").textContent;
const look = (changes) => { change({ ...DEFAULTS, ...changes }); return heads(); };
const result = { opens: heads(), counts: counts() };
result.first_token = document.querySelector(".tokens i").title;
result.shaded = document.querySelector(".tokens i").getAttribute("style");
document.querySelector('[aria-label="previous"]').click();
result.previous = [heads(), counts()];
result.all = look({ set: "all" });
result.text = look({ set: "all", text: "SUM OF" });
result.response = look({ set: "all", text: "g4-1 end" });
result.matching = document.querySelector(".group > p").textContent;
result.reward = [look({ set: "all", rmin: "0.2", rmax: "0.3" }), cards()];
result.status = look({ set: "all", status: "truncated" });
result.outcome = look({ set: "all", fate: "cut" });
result.length = look({ set: "all", lmin: "3" });
document.querySelector(".toggle").click();
result.toggled = [document.querySelector(".chooser").classList.contains("open")];
document.querySelector(".toggle").click();
result.toggled.push(document.querySelector(".chooser").classList.contains("open"));
result.none = [look({ text: "absent" }), document.body.textContent.includes("No sample matches")];
result.hash = location.hash;
change({ ...DEFAULTS, view: "compare" });
result.compared = [...document.querySelectorAll(".two > div")].map((side) => [
  side.querySelector("h2").textContent, side.querySelector("p").textContent]);
result.prompt = document.querySelector(".prompt").textContent;
return result;
"""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script draws in each of several states."""
    return run_in_browser(example_page(), SCRIPT, tmp_path_factory.mktemp("browser"))


@pytest.mark.browser
def test_groups_whose_rewards_differ_come_first(drawn: dict[str, Any]):
    assert drawn["opens"] == ["g4", "g2", "g3"]
    assert drawn["counts"].startswith("3 groups, 5 samples; rewards differ in 1 of the groups.")


@pytest.mark.browser
def test_a_token_has_its_values_as_tooltip_and_the_colour_of_its_advantage(drawn: dict[str, Any]):
    assert drawn["first_token"] == "5 · advantage 0.5"
    assert "color-mix(in srgb, var(--good) 70%" in drawn["shaded"]


@pytest.mark.browser
def test_buttons_move_between_iterations_and_the_page_says_what_is_left_out(drawn: dict[str, Any]):
    heads, counts = drawn["previous"]
    assert heads == ["g1", "g0"]
    assert "4 of 8 stored samples are left out of this page." in counts
    assert drawn["all"] == ["g1", "g4", "g0", "g2", "g3"]


@pytest.mark.browser
def test_filters_by_text_reward_status_outcome_and_length(drawn: dict[str, Any]):
    assert drawn["text"] == ["g0", "g2"]
    assert drawn["response"] == ["g4"] and "1 of 2 samples match" in drawn["matching"]
    assert drawn["reward"] == [["g4"], 1]
    assert drawn["status"] == drawn["outcome"] == drawn["length"] == ["g3"]
    assert drawn["none"] == [[], True]
    assert drawn["toggled"] == [True, False]
    assert drawn["hash"] == "#text=absent", "the address names the view"


@pytest.mark.browser
def test_two_iterations_of_one_prompt_are_compared(drawn: dict[str, Any]):
    assert drawn["prompt"] == "sum of 2 and 3"
    assert drawn["compared"] == [
        ["iteration 0", "mean reward 0 · 2 samples · trained"],
        ["iteration 7", "mean reward 1 · 2 samples · trained"],
    ]


@pytest.mark.browser
def test_a_page_at_its_bounds_stays_small_and_draws_a_part_at_once(tmp_path: Path):
    samples = [
        shown(
            group=f"g{number // 8}",
            index=number % 8,
            prompt=f"prompt {number // 8}",
            texts=[f" {token}" for token in range(75)],
            ids=list(range(1000, 1075)),
            log_probs=[-0.123456 * token for token in range(75)],
            differences=[1e-6 * token for token in range(75)],
            reward=float(number % 3 == 0),
        )
        for number in range(4000)
    ]
    page = render("t", "", [ShownSet("iteration 0", samples, 512_000)])
    assert len(page) < 15_000_000
    groups, left = run_in_browser(
        page, "return [drawn, document.querySelector('.more').textContent];", tmp_path
    )
    assert 0 < groups < 500
    assert left == f"Show more ({500 - groups} groups left)"


def test_a_character_of_several_tokens_stands_at_the_last_of_them():
    raw = "é!".encode()
    assert pieces(list(raw), lambda ids: bytes(ids).decode(errors="replace")) == ["", "é", "!"]
    assert pieces(list(raw[:1]), lambda ids: bytes(ids).decode(errors="replace")) == ["\ufffd"]
    assert pieces([5, 6], None) == [" 5", " 6"]
