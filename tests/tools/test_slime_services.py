"""Stand-ins for services of slime's examples (tools.slime_counts.services)."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tools.slime_counts import services
from tools.slime_counts.services import CODING_AGENT, SANDBOX, STOP, TAU_BENCH, TURNS


def _ask(url: str, turns: int) -> str:
    body = json.dumps({"contents": [{"role": "user"}] * turns}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=10) as answer:
        return json.load(answer)["candidates"][0]["content"]["parts"][0]["text"]


def test_the_simulated_user_ends_the_conversation():
    with services.simulated_user() as url:
        assert _ask(f"{url}:generateContent", 2) not in ("", STOP)
        assert _ask(f"{url}:generateContent", TURNS) == STOP


def test_only_services_of_the_launch_are_served(tmp_path: Path):
    with services.serving(["--custom-generate-function-path", "m.f"], tmp_path, tmp_path) as none:
        assert set(none) <= {"PYTHONPATH"}
    words = ["--custom-generate-function-path", TAU_BENCH]
    with services.serving(words, tmp_path, tmp_path) as variables:
        assert _ask(variables["GEMINI_API_BASE"], TURNS) == STOP
    words = ["--custom-generate-function-path", CODING_AGENT]
    with services.serving(words, tmp_path, tmp_path) as variables:
        assert (Path(variables["PYTHONPATH"]) / "e2b.py").is_file()
        assert Path(variables["SLIME_AGENT_CC_TARBALL"]).is_file()


@pytest.fixture
def e2b():
    """The stand-in, imported under the name of the package."""
    spec = importlib.util.spec_from_file_location("e2b", SANDBOX)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["e2b"] = module
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.split(".")[0] == "e2b"]:
        del sys.modules[name]


@pytest.fixture
def model():
    """An agent's model: URL and the requests that it got."""
    asked: list[tuple[str, str, dict]] = []

    class Model(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers["Authorization"], body))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_arguments: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    server.server_close()


async def test_an_agent_in_a_sandbox_asks_its_model_once(e2b, model):
    from e2b.sandbox.commands.command_handle import (  # pyright: ignore[reportMissingImports]
        CommandExitException,
    )

    assert issubclass(CommandExitException, Exception)
    url, asked = model
    sandbox = await e2b.AsyncSandbox.create(timeout=10, metadata={})
    body = "#!/bin/bash\n/usr/local/bin/claude -p x\necho $? > /tmp/.run.done\n"
    await sandbox.files.write("/tmp/.run.sh", body, user="agent")
    envs = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "session",
        "ANTHROPIC_MODEL": "slime",
    }
    await sandbox.commands.run("mkdir x; setsid bash /tmp/.run.sh < /dev/null &", envs=envs)
    path, token, message = asked[0]
    assert (path, token, message["model"]) == ("/v1/messages", "Bearer session", "slime")
    done = await sandbox.commands.run("test -f /tmp/.run.done && cat /tmp/.run.done")
    assert (done.stdout, done.exit_code) == ("0\n", 0)
    assert (await sandbox.commands.run("git diff")).stdout == ""
    with pytest.raises(FileNotFoundError):
        await sandbox.files.read("/nowhere")
