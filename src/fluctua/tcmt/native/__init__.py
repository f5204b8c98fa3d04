"""Compiled kernels: `_native` for the CPU, and CUDA sources that CuPy compiles at run time."""
