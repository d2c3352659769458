"""Token access to a Ray that this process starts.

Ray executes any code that a client sends. So a Ray that rlpipe starts for a home listens on the
loopback interface only and requires the token in `{home}/.ray/token`, which other users cannot
read. Token settings of the user (RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH) take
precedence. An existing Ray is joined with the user's environment.

Entry points: `settings` (the variables), `apply` and `restore` (set and reset them in this
process), `private_folder`.
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
"""On every operating system: 1 lets Ray use the machine's own address, 0 the loopback interface."""

_before: dict[str, str | None] = {}
"""Values of the variables before `apply`; None: not set."""


def settings(home: Path) -> dict[str, str]:
    """Return the environment variables for the Ray of this home and for processes that join it.

    Create the token if the user has configured none. Raises: ResourceError if the home belongs to
    another user.
    """
    mode = _user_value(MODE)
    path = _user_value(TOKEN_PATH)
    if path is None and mode is None and _user_value(TOKEN) is None:
        path = str(_token_file(home))
    variables = {BEYOND_THIS_MACHINE: "0", MODE: mode or "token"}
    if path:
        variables[TOKEN_PATH] = path
    return variables


def apply(variables: Mapping[str, str]) -> None:
    """Set these variables for this process and its children until `restore`.

    This process must not have a running Ray yet.
    """
    for name, value in variables.items():
        _before.setdefault(name, os.environ.get(name))
        os.environ[name] = value
    _reload_ray_settings()


def restore() -> None:
    """Reset the variables to their values before `apply`."""
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()
    _reload_ray_settings()


def private_folder(
    folder: Path,
    what: str = "Ray's folder",
    do: str = "give this user a home of their own: RLPIPE_HOME",
) -> Path:
    """Create this folder if it is missing, and close it to other users.

    Raises: ResourceError if the folder belongs to another user.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o777 != 0o700:
            folder.chmod(0o700)
        # a folder of another user may already have this mode
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError("it is another user's")
    except PermissionError as error:
        raise ResourceError(
            f"{what} cannot be made private", where=str(folder), found=str(error), do=do
        ) from error
    return folder


def _user_value(name: str) -> str | None:
    """Return the user's value of this variable, which `apply` may have replaced."""
    return _before[name] if name in _before else os.environ.get(name)


def _token_file(home: Path) -> Path:
    """Return the token file of this home. The first of several processes creates the token."""
    file = private_folder(home / ".ray") / "token"
    if not file.exists():
        # A link appears complete or not at all, so no process reads a token that is half written.
        draft = file.with_name(f".token-{secrets.token_hex(8)}")
        try:
            draft.touch(mode=0o600)
            draft.write_text(secrets.token_hex(32))
            os.link(draft, file)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            draft.rename(file)
        finally:
            draft.unlink(missing_ok=True)
    return file


def _reload_ray_settings() -> None:
    """Make Ray read the variables again.

    Ray reads them when it is imported, before the configuration says which Ray is used. It has no
    public function to read them again; these are the copies that Ray 2.60 keeps.
    """
    # Imported here: `settings` is also called by processes that need no Ray.
    from ray._common.utils import env_bool
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = env_bool(
        BEYOND_THIS_MACHINE, not ray_constants.IS_WINDOWS_OR_OSX
    )
    compiled = import_module("ray._raylet")
    compiled.Config.initialize("")
    compiled.AuthenticationTokenLoader.instance().reset_cache()
