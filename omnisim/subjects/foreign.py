"""``module:Class`` and ``file.py:Class``: somebody's own cache, by name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from omnisim.cache import OmniTensorPrefixCache
from omnisim.errors import UsageError
from omnisim.subjects.builtin import Builtin
from omnisim.subjects.contract import SURFACE, ByContract

__all__ = ["load_foreign"]


def load_foreign(name: str) -> ByContract:
    """The adapter of the class of this name. UsageError where it cannot be found, or is no cache."""
    module_name, _, class_name = name.rpartition(":")
    module = _load(module_name)
    cache_class = getattr(module, class_name, None)
    if not isinstance(cache_class, type):
        classes = ", ".join(known for known, value in vars(module).items() if isinstance(value, type)) or "none"
        raise UsageError(f"{module_name} has no class {class_name!r}", f"its classes: {classes}")
    if missing := [method for method in SURFACE if not callable(getattr(cache_class, method, None))]:
        raise UsageError(
            f"{name} is no cache of rows: it has no {', '.join(missing)}", "these are the methods that a replay calls"
        )
    if issubclass(cache_class, OmniTensorPrefixCache):
        return Builtin(cache_class, name)
    return ByContract(cache_class, name)


def _load(name: str) -> Any:
    """The module of this name, or in this file; whatever it raises when it is imported is told in one line."""
    try:
        if not name.endswith(".py"):
            sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(name)
        path = Path(name).resolve()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None, "a name that ends in .py has a loader"
        sys.path.insert(0, str(path.parent))
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:  # somebody's code, which may raise anything
        raise UsageError(
            f"{name!r} cannot be imported: {type(error).__name__}: {error}", "name it as module:Class or file.py:Class"
        ) from error
