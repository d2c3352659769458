"""A Hugging Face Hub on loopback: the requests that `huggingface_hub` makes for downloads.

    with hub_server({"org/name": HubRepo({"config.json": b"{}"})}) as hub:
        ...                     # HF_ENDPOINT=hub.url, or `hub.use(monkeypatch, cache)`

Repositories are in memory. `hub.requests` counts answers by method and path.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_test_token"
"""The token that opens gated repositories."""


@dataclass
class HubRepo:
    """A repository with one commit a state of its files."""

    files: dict[str, bytes]
    kind: str = "model"
    gated: bool = False
    tags: dict[str, str] = field(default_factory=dict)
    """Name of a revision → commit, in addition to `main`."""
    _history: dict[str, dict[str, bytes]] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        """Hash of the present files; a change of `files` makes another commit."""
        content = json.dumps({name: data.hex() for name, data in sorted(self.files.items())})
        commit = hashlib.sha1(content.encode()).hexdigest()
        self._history.setdefault(commit, dict(self.files))
        return commit

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return commit and files of a revision; None if there is no such revision."""
        commit = {"main": self.commit, **self.tags}.get(revision, revision)
        return (commit, self._history[commit]) if commit in self._history else None


@dataclass
class Hub:
    """A running server."""

    url: str
    repos: dict[str, HubRepo]
    requests: Counter[str]

    def use(self, monkeypatch: pytest.MonkeyPatch, cache: Path, *, offline: bool = False) -> None:
        """Make `huggingface_hub` of this process and its children use the server and a cache."""
        use_hub(monkeypatch, self.url, cache, offline=offline)


def use_hub(
    monkeypatch: pytest.MonkeyPatch, url: str, cache: Path, *, offline: bool = False
) -> None:
    """Set endpoint, cache and offline mode, which the library reads once at its import."""
    import huggingface_hub.constants as constants
    from huggingface_hub.utils import close_session

    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_HOME", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", str(int(offline)))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    close_session()


@contextmanager
def hub_server(repos: Mapping[str, HubRepo]) -> Iterator[Hub]:
    """Serve repositories by `org/name` until the end of the context."""
    hub = Hub("", dict(repos), Counter())

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.served.requests[f"{self.command} {path}"] += 1
        parts = path.strip("/").split("/")
        if parts[0] == "api":
            kind, name, rest = parts[1].removesuffix("s"), "/".join(parts[2:4]), parts[4:]
        else:
            kind = "dataset" if parts[0] == "datasets" else "model"
            parts = parts[kind == "dataset" :]
            name, rest = "/".join(parts[:2]), parts[2:]
        repo = self.served.repos.get(name)
        if repo is None or repo.kind != kind:
            # The real Hub does not tell strangers whether a private repository exists.
            return self._answer(401, error="RepoNotFound")
        is_open = not repo.gated or self.headers.get("authorization") == f"Bearer {TOKEN}"
        if rest[:1] in (["revision"], []):
            found = repo.at("/".join(rest[1:]) or "main")
            if found is None:
                return self._answer(404, error="RevisionNotFound")
            return self._answer(200, {"id": name, "sha": found[0], "siblings": []})
        found = repo.at(rest[1])
        if found is None:
            return self._answer(404, error="RevisionNotFound")
        commit, files = found
        if rest[0] == "tree":
            return self._answer(200, [_entry(path, data) for path, data in files.items()])
        if not is_open:
            return self._answer(403, error="GatedRepo", commit=commit)
        data = files.get("/".join(rest[2:]))
        if data is None:
            return self._answer(404, error="EntryNotFound", commit=commit)
        return self._answer(200, data, commit=commit)

    def _answer(
        self, status: int, content: object = b"", *, error: str = "", commit: str = ""
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"X-Error-Code": error, "X-Repo-Commit": commit}
        if commit and not error:
            headers["ETag"] = f'"{_blob(body)}"'
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


def _entry(path: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(data), "oid": _blob(data)}


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
