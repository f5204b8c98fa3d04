"""A GPU where there is one, else its emulation: what tests of CUDA kernels run on."""

import functools
import sys

import pytest

import fake_cupy
from fluctua.tcmt.kernel import cuda, cuda_binned


def has_gpu():
    try:
        cuda.require_cupy()
    except (ImportError, RuntimeError):
        return False
    return True


@pytest.fixture
def device(monkeypatch):
    """The GPU where there is one, else its emulation."""
    if has_gpu():
        return "gpu"
    if fake_cupy.COMPILER is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    monkeypatch.setattr(cuda, "_free", {})
    # of its own, but one module for all that share its constants, as on a GPU
    monkeypatch.setattr(cuda, "compile_module", functools.cache(cuda.compile_module.__wrapped__))
    monkeypatch.setattr(cuda, "resident_clusters", lambda *_: 2)
    monkeypatch.setattr(cuda_binned, "resident_clusters", lambda *_: 2)
    return "emulated"
