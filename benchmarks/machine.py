"""The machine that a measurement ran on, in words."""

from __future__ import annotations

import platform

import jax

from fluctua.tcmt.kernel.options import count_cores


def describe_machine(backend: str) -> str:
    """Cores and processor, the GPU for backend "cuda", and the version of JAX."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        pass
    text = f"{count_cores()} cores of {name}"
    if backend == "cuda":
        import cupy

        text = f"{cupy.cuda.runtime.getDeviceProperties(0)['name'].decode()}; host {text}"
    return f"{text}; jax {jax.__version__}"
