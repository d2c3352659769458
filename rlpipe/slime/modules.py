"""Modules of slime that user files import.

    from slime.utils.types import Sample                    rlpipe's Sample with slime's keywords
    from slime.utils.http_utils import post, get            JSON over HTTP, with retries
    from slime.rollout.sglang_rollout import GenerateState, generate, generate_and_rm_group, ...
    from slime.rollout.base_types import RolloutFnTrainOutput, RolloutFnEvalOutput
    from slime.rollout.rm_hub import async_rm, grade_answer_verl, ...   and from its modules

`provide()` makes them importable, with or without slime. `MODULES` has the modules that rlpipe
provides. A name that rlpipe does not provide comes from slime's source, if slime is installed or a
checkout is on `sys.path`; this source then imports rlpipe's modules in place of its own. So all of
slime's code shares one `Sample` and one HTTP client with rlpipe. Without the source, the import of
such a name raises ImportError.

Entry points: `provide`, `is_provided`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "slime"
_OUTPUTS = "rlpipe.slime.outputs"
_UTILITIES = "rlpipe.slime.utilities"
_VERIFIERS = "rlpipe.rewards.slime_verifiers"
_DATA = "rlpipe.data.slime_data"
_LOSSES = "rlpipe.algorithms.logits_loss"
MODULES: dict[str, str] = {
    "slime": "",
    "slime.backends": "",
    "slime.backends.megatron_utils": "",
    "slime.backends.megatron_utils.cp_utils": _LOSSES,
    "slime.backends.megatron_utils.loss": _LOSSES,
    "slime.rollout": "",
    "slime.rollout.base_types": _OUTPUTS,
    "slime.rollout.data_source": _DATA,
    "slime.rollout.filter_hub": "",
    "slime.rollout.filter_hub.base_types": _OUTPUTS,
    "slime.rollout.filter_hub.dynamic_sampling_filters": _OUTPUTS,
    "slime.rollout.on_policy_distillation": "rlpipe.rewards.slime_distillation",
    "slime.rollout.rm_hub": _VERIFIERS,
    "slime.rollout.rm_hub.deepscaler": _VERIFIERS,
    "slime.rollout.rm_hub.f1": _VERIFIERS,
    "slime.rollout.rm_hub.gpqa": _VERIFIERS,
    "slime.rollout.rm_hub.math_dapo_utils": _VERIFIERS,
    "slime.rollout.rm_hub.math_utils": _VERIFIERS,
    "slime.rollout.sample_hooks": _UTILITIES,
    "slime.utils": "",
    "slime.utils.async_utils": _UTILITIES,
    "slime.utils.data": _DATA,
    "slime.utils.http_utils": _UTILITIES,
    "slime.utils.mask_utils": _DATA,
    "slime.utils.misc": _UTILITIES,
    "slime.utils.ppo_utils": _LOSSES,
    "slime.utils.processing_utils": _DATA,
    "slime.utils.types": "rlpipe.slime.sample",
}
"""slime's module → rlpipe's module with its functions; empty: a package without functions."""
ALIASES = {
    "slime.rollout.sglang_rollout": "rlpipe.rollout.slime_rollout",
    "slime.rollout.sglang_streaming_rollout": "rlpipe.rollout.slime_rollout",
}
"""slime's module → rlpipe's module that is imported as this module.

Functions of such a module call each other through its global names, and user code replaces them
there, as in slime.
"""


def provide() -> None:
    """Make the modules importable in this process."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    # slime's own modules that were imported before have other classes than rlpipe's.
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())


def is_provided(module: str, name: str) -> bool:
    """True if rlpipe, and not slime's source, has this name of a module of slime."""
    target = ALIASES.get(module) or MODULES.get(module)
    return bool(target) and hasattr(importlib.import_module(target), name)


class _Finder(MetaPathFinder, Loader):
    """Importer of the package `slime`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULES or fullname in ALIASES:
            spec = ModuleSpec(fullname, self, is_package=fullname in MODULES)
            source = source_spec(fullname)
            spec.origin = source.origin if source is not None else None
            return spec
        return source_spec(fullname) if fullname.startswith(f"{PACKAGE}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None if spec.name in ALIASES else _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in ALIASES:
            # The import system returns the module that is in `sys.modules` after this call.
            sys.modules[module.__name__] = importlib.import_module(ALIASES[module.__name__])


class _Module(ModuleType):
    """A module with the names of an rlpipe module, then of slime's source."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # such as __file__, which tools look for in every module
        if target := MODULES[self.__name__]:
            values = vars(importlib.import_module(target))
            if name in values:
                return values[name]
        return source_attribute(self.__name__, name)


_source_modules: dict[str, ModuleType] = {}


def source_attribute(module: str, name: str) -> Any:
    """Return a name of slime's source. Raises: AttributeError if there is none."""
    source = _source_modules.get(module)
    if source is None:
        spec = source_spec(module)
        if spec is None or spec.loader is None:
            raise AttributeError(f"rlpipe has no {module}.{name}, and slime's source is not found")
        source = module_from_spec(spec)
        # Registered before the execution, which may import from rlpipe's module of this name.
        _source_modules[module] = source
        try:
            spec.loader.exec_module(source)
        except BaseException:
            del _source_modules[module]
            raise
    return getattr(source, name)


def source_spec(module: str) -> ModuleSpec | None:
    """Return the spec of a module in slime's source; None if `sys.path` has no such source."""
    package = PathFinder.find_spec(PACKAGE)
    folders = package.submodule_search_locations if package is not None else None
    # The folder of a git checkout, which the current folder may contain, is no package.
    if folders is None or package is None or package.origin is None:
        return None
    if module == PACKAGE:
        return package
    parents = module.split(".")[1:-1]
    return PathFinder.find_spec(module, [str(Path(folder, *parents)) for folder in folders])
