"""Chat templates of model directories, without loading the tokenizer.

Entry points: `check_template`, `has_chat_template`, `no_template_error`, `fields`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlpipe.config.model import MadeModel
from rlpipe.config.run import RunConfig
from rlpipe.data.prompts import PromptRow
from rlpipe.errors import ConfigError
from rlpipe.system.model_files import read_object
from rlpipe.types import Prompt

TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
"""Files and a folder, each of which can have the chat template."""


def has_chat_template(directory: Path) -> bool:
    """True if the directory's tokenizer may have a chat template.

    The tokenizer is not loaded, which takes seconds. Its own code (`auto_map`) may have a template.
    """
    if any((directory / name).exists() for name in TEMPLATES):
        return True
    path = directory / "tokenizer_config.json"
    settings = read_object(path, "model.source") if path.exists() else {}
    return bool(settings.get("chat_template") or settings.get("auto_map"))


def check_template(config: RunConfig, directory: Path, rows: Sequence[Sequence[PromptRow]]) -> None:
    """Check that the tokenizer has the chat template that prompts need. Raises: ConfigError."""
    row = next((checked[0] for checked in rows if checked), None)
    if row and config.data.apply_chat_template and not has_chat_template(directory):
        source = config.model.source
        maker = source.maker if isinstance(source, MadeModel) else None
        raise no_template_error(str(directory), row.prompt, row.where, maker=maker)


def no_template_error(
    directory: str, prompt: Prompt, where: str, *, maker: str | None = None
) -> ConfigError:
    """Return the error of a model directory without a chat template; `prompt` is at `where`.

    `maker`: the function that wrote the directory, which is made again after a change of it.
    """
    if isinstance(prompt, str):
        do = "set data.apply_chat_template=false: the prompts are text; or "
    else:
        do = ""
    return ConfigError(
        "the tokenizer has no chat template",
        where="data.apply_chat_template",
        found=f"no template in {directory}; the prompts are {fields(prompt)} ({where})",
        expected="chat_template.jinja in the model directory, "
        "or chat_template in its tokenizer_config.json",
        do=do
        + (
            "write a maker of your own that sets tokenizer.chat_template before it saves the "
            f"tokenizer, as {maker} does not"
            if maker
            else "use the model's instruct variant, or add its chat_template.jinja to the directory"
        ),
    )


def fields(prompt: Prompt) -> str:
    """Return the form of a prompt: text, or messages with their fields."""
    if isinstance(prompt, str):
        return "text"
    names = list(dict.fromkeys(name for message in prompt for name in message))
    return f"messages with the fields {', '.join(names)}"
