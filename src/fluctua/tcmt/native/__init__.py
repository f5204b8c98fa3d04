"""The compiled kernels: `_native` for the CPU, and the CUDA sources that CuPy compiles at run
time.
"""
