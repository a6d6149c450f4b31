from __future__ import annotations

import os
import warnings

import pytest

from omnisim.batch import make_batch
from omnisim.errors import SetupError
from tests.batch.steps import GEOMETRY


@pytest.fixture(scope="session")
def vllm() -> None:
    """vLLM can be imported. `make test` takes no excuse."""
    try:
        make_batch("vllm", GEOMETRY)
    except SetupError as missing:
        if "OMNISIM_TEST_VLLM" in os.environ:
            raise
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def slot_kernel(vllm: None) -> None:
    """vLLM's slot kernel for the CPU is in place, as in a worker."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("only vLLM's CPU build computes slots on the CPU")
    current_platform.import_kernels()
    with warnings.catch_warnings(action="ignore"):  # it looks at every attribute of every module, deprecated ones too
        current_platform.register_triton_kernel_overrides()
