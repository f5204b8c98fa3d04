"""What every kernel needs beside generated code: the texts of native headers, and CuPy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

NATIVE = Path(__file__).parent / "native"

COMMON = ("inline.hpp", "polynomials.hpp", "philox.hpp")
"""Headers of native/common that kernels on the CPU and on GPUs begin with."""


def read_native(*names: str) -> str:
    """Return the texts of files of native/, one after the other, without includes.

    The caller gives files in the order of their includes: NVRTC finds no files.
    """
    texts = [(NATIVE / name).read_text(encoding="utf-8") for name in names]
    return re.sub(r'(?m)^#(pragma once|include ".*")\n', "", "\n".join(texts))


def read_common(*names: str) -> str:
    """Return the texts of headers of native/common."""
    return read_native(*(f"common/{name}" for name in names))


def require_cupy() -> Any:
    """Return CuPy if it has a working device; raise with what is missing otherwise."""
    try:
        import cupy as cp
    except ImportError:
        raise ImportError(
            "backend='cuda' needs CuPy: pip install 'fluctua[cuda13]' for CUDA 13, "
            "'fluctua[cuda12]' for CUDA 12 (`nvidia-smi` shows the version of the driver). "
            "backend='cpu' runs everywhere."
        ) from None
    try:
        if cp.cuda.runtime.getDeviceCount() > 0:
            return cp
    except cp.cuda.runtime.CUDARuntimeError:
        pass
    raise RuntimeError("backend='cuda' found no NVIDIA GPU here. backend='cpu' runs everywhere.")
