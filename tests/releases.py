"""The releases of vllm-omni, for tests that need them: ``make test`` fetches them, else they are skipped."""

from __future__ import annotations

import os

import pytest

from omnisim.errors import SetupError
from omnisim.subjects import store


def release(version: str) -> str:
    """The subject of a release that has been fetched."""
    try:
        store.folder(version)
    except SetupError as error:
        if "OMNISIM_TEST_RELEASES" in os.environ:
            raise
        pytest.skip(str(error))
    return f"vllm-omni:{version}"
