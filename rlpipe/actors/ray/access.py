"""Who may use a Ray that is started here: processes of this machine that can read its token.

Ray runs whatever it is sent. One that is started for a home listens on the loopback interface
alone, and takes nothing without the token in `{home}/.ray/token`, a file that nobody else can read.
What the user has said of tokens (RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH) stays. A Ray
that others started is joined as the environment says.

Ray reads these variables when it is imported, before a configuration can say which Ray it will be:
so they are put here where Ray
2.60 keeps them as well, which it has no public function for.

Not here: starting and joining one (`local_ray`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from rlpipe.errors import ResourceError

MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
BEYOND_THIS_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""What makes Ray, of any system, take a machine's own address (1) or the loopback interface (0)."""

_before: dict[str, str | None] = {}


def settings(home: Path) -> dict[str, str]:
    """Environment variables of a Ray that is started for this home, and of every process that joins
    it. Makes the token.

    Raises: ResourceError if the home is somebody else's.
    """
    mode = _users(MODE)
    path = _users(TOKEN_PATH)
    if path is None and mode is None and _users(TOKEN) is None:
        path = str(_token(home))
    return {BEYOND_THIS_MACHINE: "0", MODE: mode or "token", **({TOKEN_PATH: path} if path else {})}


def use(values: Mapping[str, str]) -> None:
    """Have this process, and what it starts, go by these variables until `restore`. There must be
    no Ray in it yet."""
    for name, value in values.items():
        _before.setdefault(name, os.environ.get(name))
        os.environ[name] = value
    _heed()


def restore() -> None:
    """Have them as they were."""
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()
    _heed()


def private(
    folder: Path,
    what: str = "Ray's folder",
    do: str = "give this user a home of their own: RLPIPE_HOME",
) -> Path:
    """This folder, made if it is not there, closed to everybody else. Raises: ResourceError if it
    is somebody else's."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o777 != 0o700:
            folder.chmod(0o700)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError("it is another user's")
    except PermissionError as error:
        raise ResourceError(
            f"{what} cannot be ours alone", where=str(folder), found=str(error), do=do
        ) from error
    return folder


def _users(name: str) -> str | None:
    """What the user has set it to."""
    return _before[name] if name in _before else os.environ.get(name)


def _token(home: Path) -> Path:
    """The file of the home's token; the first of several processes makes it."""
    file = private(home / ".ray") / "token"
    if not file.exists():
        own = file.with_name(f".token-{secrets.token_hex(8)}")
        try:
            own.touch(mode=0o600)
            own.write_text(secrets.token_hex(32))
            os.link(own, file)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            own.rename(file)
        finally:
            own.unlink(missing_ok=True)
    return file


def _heed() -> None:
    from ray._common.utils import env_bool  # here: who only asks for the settings needs no Ray
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = env_bool(
        BEYOND_THIS_MACHINE, not ray_constants.IS_WINDOWS_OR_OSX
    )
    compiled = import_module("ray._raylet")
    compiled.Config.initialize("")
    compiled.AuthenticationTokenLoader.instance().reset_cache()
