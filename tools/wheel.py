"""Build step of the wheel: `flows`, `tasks`, `tools` and `deployments` move into `rlpipe/_project`.

An installed wheel must not add top-level packages called `tools` and `tasks`: they would hide those
of the user. `rlpipe.system.project` makes the folder importable in rlpipe's own processes. An
editable installation leaves everything where it is. pyproject.toml names these classes.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

LIBRARY = "rlpipe"
FOLDER = f"{LIBRARY}._project"
VERSIONS = "constraints.txt"
"""Tested versions of packages; `rlpipe doctor` compares with them."""


class BuildPy(build_py):
    """`build_py` with the project's packages below `rlpipe._project`."""

    def run(self) -> None:
        """Copy the packages to the folder of the wheel."""
        if not self.editable_mode:
            self._move_packages()
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, *FOLDER.split("."), VERSIONS)
            self.copy_file(VERSIONS, str(target))

    def _move_packages(self) -> None:
        """Give every package but the library's own a new name, from the same folder."""
        moved = {name: f"{FOLDER}.{name}" for name in self.packages if not _is_library(name)}
        self.packages = [moved.get(name, name) for name in self.packages]
        self.package_dir = {
            **self.package_dir,
            **{new: name.replace(".", "/") for name, new in moved.items()},
        }
        self.package_data = {moved.get(name, name): p for name, p in self.package_data.items()}


class EggInfo(egg_info):
    """`egg_info` that names the only top-level package of the wheel."""

    def run(self) -> None:
        """Write the metadata."""
        super().run()
        Path(self.egg_info, "top_level.txt").write_text(f"{LIBRARY}\n")


def _is_library(package: str) -> bool:
    return package.partition(".")[0] == LIBRARY
