"""Documents: sizes, links, commands, options, keys and paths that exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.audit import audit
from flows.convert import convert
from flows.evaluate import evaluate
from flows.fork import fork
from flows.reprocess import reprocess
from flows.train import train
from rlpipe.config import smoke
from rlpipe.config.load import load_run, validate
from rlpipe.config.run import RunConfig
from rlpipe.config.similar_keys import all_keys
from rlpipe.config.text import parse
from rlpipe.errors import ConfigError
from rlpipe.slime.args import FREE
from tools.command.main import options, parser_of
from tools.command.verbs import VERBS, Verb
from tools.init import make

ROOT = Path(__file__).parents[1]
ROOMS = [
    "rlpipe/store",
    "rlpipe/sync",
    "rlpipe/rollout",
    "rlpipe/algorithms",
    "rlpipe/config",
    "rlpipe/slime",
    "flows",
    "rlpipe/engines",
    "tools/bench",
    "deployments",
    "deployments/recipes",
]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / ".github").glob("*.md"),
        *(path for room in ROOMS for path in (ROOT / room).glob("*.md")),
    ]
    if path.name != "CHANGELOG.md"
)
GENERATED = "rlpipe/config/KEYS.md"
NOT_KEYS = ("preset", "overrides")
"""Words before "=" of a command that are no keys: a model's preset, and the parameter of a flow."""
INTERNAL = [
    "branch",
    "buffer",
    "commit",
    "conductor",
    "driver",
    "epoch",
    "icepop",
    "maker",
    "node",
    "opsm",
    "plan",
    "segment",
    "veto",
]
"""Words of the glossary that options and forms do without."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODULE = re.compile(r"python -m ([a-z_.]+)|nproc-per-node 2 (tools/[a-z_]+\.py)")
VERB = re.compile(
    r"(?:^(?:\w+=\S+ )*(?:\.venv/bin/)?|&& )rlpipe (?=[a-z])([a-z0-9-]+(?: (?:hf2dist|dist2hf))?)"
)
OPTION = re.compile(r"(?<!\S)(--[a-z][a-z-]*)")


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    """Return the fenced code of one language."""
    return [code for kind, code in FENCE.findall(text_of(document)) if kind == language]


def commands(document: str) -> list[str]:
    """Return the commands of a document, with continued lines joined and comments removed."""
    lines = "\n".join(blocks(document, "bash")).replace("\\\n", " ").splitlines()
    return [line.partition(" #")[0].strip() for line in lines if not line.startswith("#")]


def prose(document: str) -> str:
    return FENCE.sub("", text_of(document))


def anchors(document: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub derives them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(document)), re.MULTILINE)
    kept = ("".join(c for c in title.lower() if c.isalnum() or c in " -_") for title in titles)
    return {title.replace(" ", "-") for title in kept}


def links(document: str) -> Iterator[str]:
    """Yield the targets of a document's links, without addresses of other sites."""
    inline = re.findall(r"\]\(([^)\s]+)\)", prose(document))
    defined = re.findall(r"^\[[^\]]+\]: (\S+)$", prose(document), re.MULTILINE)
    yield from (target for target in [*inline, *defined] if "://" not in target)


def module_source(name: str) -> str:
    """Return the source of a command's module."""
    if name.endswith(".py"):
        return (ROOT / name).read_text(encoding="utf-8")
    path = ROOT / name.replace(".", "/")
    return (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text(
        encoding="utf-8"
    )


def test_the_readme_is_at_most_200_lines_of_100_columns():
    lines = text_of("README.md").splitlines()
    assert len(lines) <= 200
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_a_readme_that_begins_with_tasks(room):
    headings = re.findall(r"^## (.+)$", prose(f"{room}/README.md"), re.MULTILINE)
    assert headings[0] == "I want to ..."
    assert len(re.findall(r"^\*\*\.\.\. ", prose(f"{room}/README.md"), re.MULTILINE)) >= 5


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if document != GENERATED])
def test_lines_of_prose_have_at_most_100_columns(document):
    lines = (line for line in prose(document).splitlines() if not line.startswith("|"))
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_to_a_file_and_a_heading(document):
    broken = []
    for target in links(document):
        name, _, anchor = target.partition("#")
        path = (ROOT / document).parent / name if name else ROOT / document
        if not path.exists() or (
            anchor and anchor not in anchors(path.resolve().relative_to(ROOT).as_posix())
        ):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if document != GENERATED])
def test_every_reference_link_is_defined(document):
    text = re.sub(r"`[^`]*`", "", prose(document))
    used = set(re.findall(r"\]\[([a-z]+)\]", text)) | set(
        re.findall(r"(?<![\]\w])\[([a-z]+)\](?![\[(:])", text)
    )
    assert used - set(re.findall(r"^\[([^\]]+)\]: ", text, re.MULTILINE)) == set()


def verb_and_words(command: str) -> tuple[Verb, str] | None:
    """Return a verb of `rlpipe` and its words; None for any other command."""
    if found := VERB.search(command):
        assert found[1] in VERBS, f"{command}: rlpipe has no {found[1]}"
        return VERBS[found[1]], command[found.end() :]
    if found := MODULE.search(command):
        module = (found[1] or found[2]).removesuffix(".py").replace("/", ".")
        verb = next((verb for verb in VERBS.values() if verb.module == module), None)
        return (verb, command[found.end() :]) if verb else None
    return None


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_target_of_make_exists(document):
    targets = set(re.findall(r"^([a-z0-9-]+):", text_of("Makefile"), re.MULTILINE))
    used = [
        found[1]
        for command in commands(document)
        if (found := re.match(r"(?:\w+=\S+ )*make ([a-z0-9-]+)", command))
    ]
    assert [target for target in used if target not in targets] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_verb_exists_and_has_the_options(document):
    for command in commands(document):
        if given := verb_and_words(command):
            verb, words = given
            missing = [option for option in OPTION.findall(words) if option not in options(verb)]
            # Flags of slime are those of its table.
            assert verb.name in ("train", "from-slime") or missing == [], f"{command}: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_other_module_exists_and_has_the_options(document):
    for command in commands(document):
        if verb_and_words(command) or not (found := MODULE.search(command)):
            continue
        name = found[1] or found[2]
        if not name.startswith(("tools", "deployments")):
            assert importlib.util.find_spec(name) is not None, command
            continue
        source = module_source(name)
        missing = [
            option
            for option in OPTION.findall(command[found.end() :])
            if f'"{option}"' not in source
        ]
        assert missing == [], f"{command}: {name} has no {missing}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_override_and_every_key_in_the_text_is_a_key(document):
    keys = set(all_keys())
    sections = "|".join(
        sorted({key for key in keys if "." not in key and f"{key}." in " ".join(keys)})
    )
    overrides = {
        word.partition("=")[0]
        for command in commands(document)
        for word in shlex.split(
            command.replace("ARGS=", "ARGS= ").replace('"', " ").replace("'", " "), posix=False
        )
        if re.match(r"[a-z_.]+=", word)
    }
    named = re.findall(rf"`((?:{sections})\.(?!py`)[a-z_.]+?)[`=:]", prose(document))
    wrong = [
        key
        for key in [*overrides, *named]
        if key not in keys and not key.startswith((*FREE, *NOT_KEYS))
    ]
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_yaml_example_is_a_configuration_or_a_part_of_one(document):
    base = {
        "run": "run",
        "num_rollout": 1,
        "model": {"source": {"type": "huggingface", "hf_checkpoint": "/models/m"}},
        "data": {"prompts": {"type": "file", "paths": ["train.jsonl"]}},
        "rollout": {"rollout_batch_size": 32, "n_samples_per_prompt": 8},
        "reward": {"function": {"type": "math"}},
    }
    for code in blocks(document, "yaml"):
        values, _ = parse(code, document)
        values = smoke.merged(values.pop(smoke.SECTION, {}), values)
        if document.startswith("deployments/") and "pool" in values:
            continue
        merged = {**base, **values}
        merged["rollout"] = {**base["rollout"], **values.get("rollout", {})}
        if "gates" in values:
            heldout = {"name": "heldout", "prompts": base["data"]["prompts"]}
            merged["evaluation"] = {"datasets": [heldout], "eval_interval": 1}
        assert isinstance(validate(merged), RunConfig)


def overrides_of(command: str) -> tuple[str, list[str]] | None:
    """Return recipe and overrides of a command that trains; None for any other."""
    if not re.search(r"\bmake train\b|\brlpipe train\b|tools\.train\b", command):
        return None
    words = [
        word for part in shlex.split(command) for word in shlex.split(part.removeprefix("ARGS="))
    ]
    recipe = next((word.partition("=")[2] for word in words if word.startswith("RECIPE=")), None)
    recipe = words[words.index("--recipe") + 1] if "--recipe" in words else recipe
    if recipe is None and "rlpipe train" in command:
        first = words[words.index("train") + 1]
        recipe = first if first[0] not in "-$" else None
    overrides = [word for word in words if re.match(r"[a-z][a-z_.]+=", word)]
    return (recipe, overrides) if recipe else None


@pytest.mark.parametrize(
    "document", [document for document in DOCUMENTS if "bash" in text_of(document)]
)
def test_every_training_command_has_a_valid_configuration(document, tmp_path, monkeypatch):
    example = next(code for code in blocks("README.md", "yaml") if code.startswith("# my_run.yaml"))
    (tmp_path / "my_run.yaml").write_text(example, encoding="utf-8")
    for name in ("my_run", "first_run"):
        make(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for command in commands(document):
        if given := overrides_of(command):
            assert isinstance(load_run(*given, "any"), RunConfig), command


def test_a_wrong_key_in_an_example_is_found():
    with pytest.raises(ConfigError):
        validate({"run": "run", "num_rollout": 1, "rollout": {"rollout_batch": 1}})


def test_every_python_example_compiles():
    examples = [(document, code) for document in DOCUMENTS for code in blocks(document, "python")]
    assert len(examples) >= 5
    for document, code in examples:
        compile(code, document, "exec")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_of_the_project_in_the_text_exists(document):
    folders = "rlpipe|flows|tasks|tools|tests|deployments"
    paths = re.findall(rf"`((?:{folders})/[A-Za-z0-9_./*-]+)`", prose(document))
    assert [path for path in paths if not list(ROOT.glob(path.rstrip("/")))] == []


@pytest.mark.parametrize(
    "document", [GENERATED, "README.md", *(f"{room}/README.md" for room in ROOMS)]
)
def test_every_page_leads_to_the_glossary(document):
    found = [target for target in links(document) if target.endswith("#glossary")]
    assert found or document == "rlpipe/store/README.md"


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_the_help_of_a_verb_has_no_internal_word(verb):
    # A machine with several GPUs is a node, too.
    allowed = {"audit": ("commit",), "bench": ("node",)}.get(verb.name, ())
    words = [word for word in INTERNAL if word not in allowed]
    assert re.findall(rf"\b(?:{'|'.join(words)})s?\b", parser_of(verb).format_help()) == []


@pytest.mark.parametrize("flow", [audit, convert, evaluate, fork, reprocess, train])
def test_the_form_of_a_flow_has_no_internal_word(flow):
    texts = [field.get("description", "") for field in flow.parameters.properties.values()]
    words = "|".join(word for word in INTERNAL if flow is not audit or word != "commit")
    assert re.findall(rf"\b(?:{words})s?\b", " ".join(texts)) == []


def test_the_glossary_explains_the_internal_words():
    glossary = text_of("rlpipe/store/README.md").split("## Layout")[0].lower()
    assert [word for word in INTERNAL if f"\n| {word} | " not in glossary] == []


def test_the_glossary_has_each_term_once():
    rows = re.findall(
        r"^\| ([a-z][a-z -]+) \| ",
        text_of("rlpipe/store/README.md").split("## Layout")[0],
        re.MULTILINE,
    )
    terms = [row for row in rows if row != "term"]
    assert len(terms) >= 40
    assert len(set(terms)) == len(terms)
