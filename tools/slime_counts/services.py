"""Stand-ins for packages and services that slime's examples use besides the engines.

    serving(words, checkout, folder)     yields environment variables for a run of these words

The services are the user that tau-bench's tasks simulate with Gemini, the sandboxes of coding
agents, and slime's own rollout buffer. The package is torchvision, which SGLang imports and which a
machine without a GPU does not have.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rlpipe.system.ports import free_port

TURNS = 4
"""Turns of a conversation, after which the simulated user ends it."""
STOP = "###STOP###"
TAU_BENCH = "generate_with_tau.generate"
CODING_AGENT = "examples.coding_agent_rl.generate.generate"
ROLLOUT_BUFFER = "slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout"
SANDBOX = Path(__file__).with_name("sandbox_stand_in.py")
BUFFER_SERVER = "slime_plugins/rollout_buffer/buffer.py"
"""Server of a checkout, on port 8889."""
SITE = """\
from rlpipe.engines.sglang.cpu_launch import install

install()
"""
"""Python file that every process imports first: stand-ins as in an engine on CPUs."""


@contextmanager
def serving(words: Sequence[str], checkout: Path, folder: Path) -> Iterator[dict[str, str]]:
    """Serve what the functions of a launch need until the block ends.

    Yields variables of the environment; PYTHONPATH is to come before the other folders.
    """
    variables: dict[str, str] = {}
    (folder / "site").mkdir(exist_ok=True)
    if importlib.util.find_spec("torchvision") is None:
        (folder / "site" / "sitecustomize.py").write_text(SITE, encoding="utf-8")
        variables["PYTHONPATH"] = str(folder / "site")
    with ExitStack() as services:
        if TAU_BENCH in words:
            variables["GEMINI_API_BASE"] = services.enter_context(simulated_user())
        if CODING_AGENT in words:
            variables |= sandboxes(folder)
        if ROLLOUT_BUFFER in words:
            services.enter_context(rollout_buffer(checkout, folder))
        yield variables


def sandboxes(folder: Path) -> dict[str, str]:
    """Put the stand-in of `e2b` on the path of a run; return the variables of the example."""
    shutil.copy(SANDBOX, folder / "site" / "e2b.py")
    archive = folder / "empty.tar"
    archive.touch()
    return {
        "PYTHONPATH": str(folder / "site"),
        "SLIME_AGENT_NODE_TARBALL": str(archive),
        "SLIME_AGENT_CC_TARBALL": str(archive),
        "SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY": "image",
        "ADAPTER_PUBLIC_HOST": "127.0.0.1",
        "ADAPTER_BIND_HOST": "127.0.0.1",
        "ADAPTER_PORT": str(free_port()),
    }


@contextmanager
def rollout_buffer(checkout: Path, folder: Path) -> Iterator[None]:
    """Run slime's server of a rollout buffer, which starts processes that call the engines."""
    paths = [str(checkout), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with (folder / "buffer.txt").open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, BUFFER_SERVER],
            cwd=checkout,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@contextmanager
def simulated_user() -> Iterator[str]:
    """Serve Gemini's `generateContent` on a free port; yield the URL of a model.

    The user asks for an exchange, and ends the conversation after TURNS turns.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _User)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1beta/models/user"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _User(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        turns = len(json.loads(self.rfile.read(length)).get("contents", ()))
        text = STOP if turns >= TURNS else "I want to exchange an item."
        counts = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
        content = {"role": "model", "parts": [{"text": text}]}
        answer = {
            "candidates": [{"index": 0, "content": content, "finishReason": "STOP"}],
            "usageMetadata": counts,
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Print nothing for a request."""
