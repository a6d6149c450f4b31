from __future__ import annotations

import warnings

import pytest


@pytest.fixture(scope="session")
def slot_kernel(vllm: None) -> None:
    """vLLM's slot kernel for the CPU is in place, as in a worker."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("only vLLM's CPU build computes slots on the CPU")
    current_platform.import_kernels()
    with warnings.catch_warnings(action="ignore"):  # it looks at every attribute of every module, deprecated ones too
        current_platform.register_triton_kernel_overrides()
