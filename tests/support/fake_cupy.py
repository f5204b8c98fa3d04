"""The few names of CuPy that the kernels use, on the CPU: modules are compiled with
`emulated_device.hpp`.

With it the whole CUDA path, host code and device code, is tested where there is no GPU.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import types
from pathlib import Path

import numpy as np

COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
HERE = Path(__file__).parent


class Address(int):
    @property
    def ptr(self):
        return int(self)

    def copy_from_device_async(self, source, size):
        ctypes.memmove(int(self), int(source), size)


class FakeArray(np.ndarray):
    def __new__(cls, shape, dtype=float, memptr=None):
        if memptr is None:
            return np.full(shape, 77, dtype).view(cls)  # not zero: what is not written must show
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = (ctypes.c_char * size).from_address(int(memptr))
        return np.frombuffer(raw, dtype).reshape(shape).view(cls)

    @property
    def data(self):
        return Address(self.ctypes.data)

    def get(self):
        return np.array(self)

    def set(self, value):
        self[...] = value


ndarray = FakeArray
empty = FakeArray


def zeros(shape, dtype=float):
    return np.zeros(shape, dtype).view(FakeArray)


def full(shape, value, dtype=float):
    return np.full(shape, value, dtype).view(FakeArray)


def asarray(value, dtype=None):
    return np.array(value, dtype).view(FakeArray)


def from_dlpack(array):
    return asarray(np.asarray(array))


class Kernel:
    def __init__(self, function):
        self.function = function
        self.max_dynamic_shared_size_bytes = 0

    def __call__(self, grid, block, args, shared_mem=0):
        assert shared_mem <= 1 << 20
        grid = (*grid, 1, 1)[:3]
        self.function(
            *(ctypes.c_uint(v) for v in (*grid, block[0])), *(self.argument(a) for a in args)
        )

    @staticmethod
    def argument(value):
        if isinstance(value, np.ndarray):
            return ctypes.c_void_p(value.ctypes.data)
        return np.ctypeslib.as_ctypes_type(value.dtype)(value.item())


class RawModule:
    def __init__(self, code, options):
        # device.cuh of the lattice is what the emulation replaces; it ends where the next source
        # begins. Kernels of own processes begin with their macros.
        if not code.startswith("#define REAL "):
            code = code[max(0, code.find("// How a function of this folder is compiled")) :]
        code = code.replace(
            "extern __shared__ __align__(16) unsigned char shared[];", ""
        )  # is a global there
        wrappers = []
        for clustered, name, arguments in re.findall(
            r'extern "C" __global__ '
            r"void\s+(CLUSTERED\s+)?(?:__launch_bounds__\(.*?\)\s+)?(\w+)\((.*?)\)\s*{",
            code,
            re.S,
        ):
            names = ", ".join(
                re.search(r"(\w+)$", a.strip()).group(1) for a in arguments.split(",")
            )
            wrappers.append(
                f'extern "C" void launch_{name}(unsigned gx, unsigned gy, unsigned gz, unsigned n, '
                f"{arguments}) "
                f"{{ launch(gx, gy, gz, n, {'CLUSTER' if clustered else 1}, [=] {{ "
                f"{name}({names}); }}); }}"
            )
        # there are no headers there
        names = "#define uint32_t not_known_to_nvrtc\n#define int64_t not_known_to_nvrtc\n"
        text = (HERE / "emulated_device.hpp").read_text() + names + code + "\n".join(wrappers)
        tag = hashlib.sha256((text + repr(options)).encode()).hexdigest()[:24]
        folder = Path(tempfile.gettempdir()) / f"fluctua-emulated-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        library = folder / f"{tag}.so"
        if not library.exists():
            # `extern "C"` is already said in the text; -w: CUDA pragmas mean nothing here; a
            # checked longjmp refuses to change stacks, which is what the emulated threads do.
            source = folder / f"{tag}.{os.getpid()}.cpp"
            built = source.with_suffix(".so")
            source.write_text(text)
            flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-pthread", "-U_FORTIFY_SOURCE"]
            macros = [o for o in options if o.startswith("-D")]
            subprocess.run([COMPILER, *flags, *macros, str(source), "-o", str(built)], check=True)
            built.replace(library)
            source.unlink()
        self.library = ctypes.CDLL(str(library))

    def get_function(self, name):
        return Kernel(getattr(self.library, f"launch_{name}"))

    def get_global(self, name):
        return Address(ctypes.addressof(ctypes.c_char.in_dll(self.library, name)))


class _Device:
    current = 0

    def __init__(self, id=None):
        self.id = _Device.current if id is None else id

    def __enter__(self):
        self.before, _Device.current = _Device.current, self.id
        return self

    def __exit__(self, *_):
        _Device.current = self.before

    attributes = {  # noqa: RUF012
        "MultiProcessorCount": 2,
        "MaxThreadsPerMultiProcessor": 2048,
        "MaxRegistersPerMultiprocessor": 65536,
        "MaxSharedMemoryPerMultiprocessor": 233472,
        "MaxSharedMemoryPerBlockOptin": 232448,
    }
    compute_capability = "90"


cuda = types.SimpleNamespace(
    Device=_Device,
    runtime=types.SimpleNamespace(
        getDeviceCount=lambda: 1, CUDARuntimeError=RuntimeError, memGetInfo=lambda: (2**34, 2**34)
    ),
)
