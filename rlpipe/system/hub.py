"""Download models and files from the Hugging Face Hub, through the cache of `huggingface_hub`.

    model_reference("Qwen/Qwen3-0.6B@main")               a model; None for the path of a directory
    file_reference("hf://datasets/openai/gsm8k/a.parquet")  a file; None for another path
    resolved(reference, where)                            the same with the hash of its commit
    fetched_model(reference, where)                       local directory
    fetched_file(reference, where)                        local path

A revision (branch, tag or commit) follows the name of the repository: `org/name@revision`. The
environment variables of `huggingface_hub` apply: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE,
HF_HUB_DISABLE_PROGRESS_BARS. What is in the cache needs no network. The library is imported on
first use, because commands that need no model must start quickly.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.errors import ConfigError, ResourceError, RlpipeError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

SCHEME = "hf://"
COMMIT = re.compile(r"[0-9a-f]{40}")
_SEGMENT = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_MODEL = re.compile(rf"(?P<repo>{_SEGMENT}/{_SEGMENT})(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?")
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py")
"""Files of a model that trainer, engines and tokenizer read."""
PROGRESS_DELAY_S = 2.0
"""A shorter download shows no progress."""
PROGRESS_INTERVAL_S = 10.0
"""Seconds between two lines of progress, where standard error is no terminal."""
CURSOR_UP = "\x1b[A"
OTHER_FILES = ("*/*", "consolidated*.safetensors")
"""Files that would be downloaded in vain: folders with other formats, and Mistral's second copy of
the weights."""


@dataclass(frozen=True)
class HubReference:
    """A model, or a file of a repository, on the Hub."""

    repo: str
    """`org/name`."""
    revision: str | None = None
    """Branch, tag or commit; None: the default branch."""
    kind: str = "model"
    """Type of the repository: `model` or `dataset`."""
    file: str = ""
    """Path of the file in the repository; empty for a whole model."""

    def __str__(self) -> str:
        name = f"{self.repo}@{self.revision}" if self.revision else self.repo
        if not self.file:
            return name
        return f"{SCHEME}{'datasets/' if self.kind == 'dataset' else ''}{name}/{self.file}"

    @property
    def is_pinned(self) -> bool:
        """True if the revision is the hash of a commit."""
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None

    @property
    def page(self) -> str:
        """URL of the repository's page."""
        from huggingface_hub import constants

        prefix = "datasets/" if self.kind == "dataset" else ""
        return f"{constants.ENDPOINT}/{prefix}{self.repo}"

    def is_same_source(self, other: HubReference) -> bool:
        """True if both name the same model or file, in any revision."""
        return replace(self, revision=None) == replace(other, revision=None)


def model_reference(text: str) -> HubReference | None:
    """Return the model that `org/name`, `org/name@revision` or `hf://org/name` names on the Hub.

    None for the path of a directory: one that exists, or that is not of this form, such as
    `/models/a`, `./a` and `~/a`. Raises: ConfigError for a malformed `hf://` address.
    """
    if text.startswith(SCHEME):
        reference = _parsed(text)
        if reference.kind != "model" or reference.file:
            raise ConfigError(
                "not the address of a model", where=text, expected="hf://org/name[@revision]"
            )
        return reference
    match = _MODEL.fullmatch(text)
    if match is None or os.path.lexists(text):
        return None
    return HubReference(match["repo"], match["revision"])


def file_reference(text: str) -> HubReference | None:
    """Return the file that `hf://[datasets/]org/name[@revision]/path` names; None without `hf://`.

    Raises: ConfigError for a malformed address.
    """
    if not text.startswith(SCHEME):
        return None
    reference = _parsed(text)
    if not reference.file:
        raise ConfigError(
            "the address names no file of the repository",
            where=text,
            expected="hf://datasets/org/name[@revision]/path/of/file",
        )
    return reference


def _parsed(text: str) -> HubReference:
    from huggingface_hub.errors import HfUriError
    from huggingface_hub.utils import parse_hf_uri

    try:
        uri = parse_hf_uri(text)
        if uri.type not in ("model", "dataset"):
            raise ConfigError(
                "not a repository of models or data",
                where=text,
                found=uri.type,
                expected="hf://datasets/org/name/path, or hf://org/name",
            )
    except HfUriError as error:
        raise ConfigError(
            "not an address of the Hugging Face Hub",
            where=text,
            found=error,
            expected="hf://datasets/org/name[@revision]/path, or hf://org/name[@revision]",
        ) from error
    return HubReference(uri.id, uri.revision, uri.type, uri.path_in_repo)


def resolved(reference: HubReference, where: str) -> HubReference:
    """Return the reference with the commit that its revision stands for now.

    Without a network it is the commit that the cache has for the revision. `where`: configuration
    key, for errors. Raises: ConfigError if the Hub refuses; ResourceError if it does not answer.
    """
    if reference.is_pinned:
        return reference
    from huggingface_hub import HfApi

    with _explained(reference, where):
        revision = HfApi().resolve_revision(
            reference.repo, repo_type=reference.kind, revision=reference.revision
        )
    return replace(reference, revision=revision.resolved)


def fetched_model(reference: HubReference, where: str) -> Path:
    """Return the local directory of a model, after downloading what is missing.

    Raises: as `resolved`; ConfigError for a model without safetensors files.
    """
    from huggingface_hub import snapshot_download

    pinned = resolved(reference, where)
    with _explained(reference, where):
        directory = Path(
            _from_hub_or_cache(
                snapshot_download,
                pinned,
                allow_patterns=list(MODEL_FILES),
                ignore_patterns=list(OTHER_FILES),
            )
        )
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(
            "this model on the Hub has no safetensors files",
            where=where,
            found=reference,
            expected="*.safetensors files at the top of the repository",
            do="choose a repository or revision that has them, or convert the model yourself",
        )
    return directory


def cached_model(reference: HubReference) -> Path | None:
    """Return the directory of a model in the cache; None if it is not there completely."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        directory = snapshot_download(
            reference.repo,
            revision=reference.revision,
            local_files_only=True,
            allow_patterns=list(MODEL_FILES),
            ignore_patterns=list(OTHER_FILES),
        )
    except LocalEntryNotFoundError:
        return None
    return Path(directory)


def fetched_file(reference: HubReference, where: str) -> Path:
    """Return the local path of a file, after downloading it if it is missing.

    Raises: as `resolved`.
    """
    from huggingface_hub import hf_hub_download

    pinned = resolved(reference, where)
    with _explained(reference, where):
        return Path(_from_hub_or_cache(hf_hub_download, pinned, filename=reference.file))


def _from_hub_or_cache(download, pinned: HubReference, **arguments) -> str:
    """Call a download function; if the Hub does not answer, return what the cache has."""
    from httpx import TransportError
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    arguments |= {
        "repo_type": pinned.kind,
        "revision": pinned.revision,
        "tqdm_class": _progress_bar(),
    }
    try:
        return download(pinned.repo, **arguments)
    except (TransportError, OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        # The list of a repository's files is cached too, but not by every version of the library.
        try:
            return download(pinned.repo, local_files_only=True, **arguments)
        except LocalEntryNotFoundError:
            raise error from None


def _progress_bar() -> type | None:
    """Return a progress bar that prints lines; None on a terminal, where the library draws one."""
    if sys.stderr.isatty():
        return None
    from huggingface_hub.utils import tqdm

    class Lines(tqdm):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            # The library also counts files, and bytes of its own transfer protocol.
            is_main = settings.get("unit") == "B" and not str(settings.get("name")).endswith(
                ".transfer"
            )
            settings |= {
                "file": _LineFile(),
                "disable": settings.get("disable") if is_main else True,
            }
            super().__init__(*arguments, **settings)

    return Lines


class _LineFile:
    """Prints what a progress bar draws as lines, not too often."""

    def __init__(self) -> None:
        self._next_s = time.monotonic() + PROGRESS_DELAY_S

    def write(self, text: str) -> None:
        line = text.replace(CURSOR_UP, "").strip()
        if line and time.monotonic() >= self._next_s:
            print(line, file=sys.stderr, flush=True)
            self._next_s = time.monotonic() + PROGRESS_INTERVAL_S

    def flush(self) -> None:
        """Do nothing: `write` flushes."""


@contextmanager
def _explained(reference: HubReference, where: str) -> Iterator[None]:
    """Turn errors of `huggingface_hub` into ones that say what to do."""
    from httpx import TransportError
    from huggingface_hub import errors

    try:
        yield
    except (
        TransportError,
        errors.OfflineModeIsEnabled,
        errors.LocalEntryNotFoundError,
        errors.RevisionResolutionError,
    ) as error:
        raise _unreachable(reference, where, error) from error
    except errors.HfHubHTTPError as error:
        raise _refused(reference, where, error) from error
    except OSError as error:
        raise ResourceError(
            "the download could not be stored",
            where=where,
            found=f"{reference}: {error.strerror or error}",
            do="check the disk and the folder of HF_HOME",
        ) from error


def _refused(reference: HubReference, where: str, error: HfHubHTTPError) -> RlpipeError:
    """Return the error for an answer of the Hub that is not the requested file."""
    from huggingface_hub import errors

    name = "data set" if reference.kind == "dataset" else "model"
    found = f"{reference}: HTTP status {error.response.status_code}"
    login = "set HF_TOKEN to a token of that account (or log in: hf auth login)"
    # GatedRepoError is a RepositoryNotFoundError too.
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(
            f"access to this {name} is restricted",
            where=where,
            found=found,
            expected="an account that has accepted its terms",
            do=f"accept the terms at {reference.page}, then {login}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(
            f"this {name} has no such revision on the Hub",
            where=where,
            found=found,
            expected=f"a branch, tag or commit of {reference.page}",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        local = "" if reference.file else "no directory of this path, and "
        return ConfigError(
            f"{local}the Hub has no such {name}",
            where=where,
            found=found,
            expected=f"an existing path, or a {name} at {reference.page}",
            do=f"correct the name; if {reference.repo} is private to an account, {login}",
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return ConfigError(
            "the repository has no such file",
            where=where,
            found=found,
            expected=f"a file of {reference.page}/tree/{reference.revision or 'main'}",
        )
    return ResourceError(
        "the Hugging Face Hub refused the download",
        where=where,
        found=found,
        do="try again later; HF_TOKEN raises the limit of requests",
    )


def _unreachable(reference: HubReference, where: str, error: Exception) -> ResourceError:
    """Return the error for a Hub that does not answer, or that must not be asked."""
    from huggingface_hub import constants

    kind = " --repo-type dataset" if reference.kind == "dataset" else ""
    command = f"hf download{kind} {reference.repo}"
    if constants.HF_HUB_OFFLINE:
        found = "HF_HUB_OFFLINE is set, and the cache does not have all files"
        do = f"unset HF_HUB_OFFLINE; or run `{command}` with a network, into the same HF_HOME"
    else:
        reason = error.__cause__ or error
        found = f"{constants.ENDPOINT} does not answer ({type(reason).__name__}: {reason})"
        do = (
            "check the network, the proxy and HF_ENDPOINT; or give the path of a local copy; "
            f"or run `{command}` where there is a network and copy the folder "
            f"{constants.HF_HUB_CACHE} to this machine"
        )
    local = "" if reference.file else "no directory of this path, and "
    return ResourceError(
        f"{local}the Hugging Face Hub cannot be reached",
        where=where,
        found=f"{reference}: {found}",
        expected=f"a network, or the files in {constants.HF_HUB_CACHE}",
        do=do,
    )
