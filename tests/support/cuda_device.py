"""A GPU where there is one, and its emulation everywhere: what tests of CUDA kernels run on."""

import functools
import sys

import pytest

import fake_cupy
from fluctua.tcmt.kernel import cuda


def has_gpu():
    try:
        cuda.require_cupy()
    except (ImportError, RuntimeError):
        return False
    return True


@pytest.fixture(params=["emulated", "gpu"])
def device(request, monkeypatch):
    if request.param == "gpu":
        if not has_gpu():
            pytest.skip("no GPU, or no CuPy")
    elif fake_cupy.COMPILER is None:
        pytest.skip("no C++ compiler")
    else:
        monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
        monkeypatch.setattr(cuda, "_free", {})
        # of its own, but one module for all that share its constants, as on a GPU
        monkeypatch.setattr(cuda, "compiled", functools.cache(cuda.compiled.__wrapped__))
        monkeypatch.setattr(cuda, "resident_clusters", lambda *_: 2)
    return request.param
