from __future__ import annotations

import os

import pytest

from omnisim.errors import SetupError


@pytest.fixture(scope="session")
def vllm() -> None:
    """vLLM can be imported. `make test` takes no excuse."""
    from omnisim.sim.engine import load_vllm

    try:
        load_vllm()
    except SetupError as missing:
        if "OMNISIM_TEST_VLLM" in os.environ:
            raise
        pytest.skip(str(missing))
