"""Processes start quickly: help needs no JAX, and an estimate nothing that it does not use."""

import subprocess
import sys

import pytest

from fluctua.compiled.cpu import find_compiler
from processes import environment_of_a_user

PROGRAM = """
import sys
from fluctua.cli.app import app
try:
    app({words!r}, prog_name="fluctua")
except SystemExit as end:
    assert not end.code, end.code
heavy = {{"jax", "numpy", "matplotlib"}} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"]], ids=" ".join)
def test_help_imports_no_arrays(words):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(words=words)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def run_program(program, **environment):
    """Run Python in a fresh process, as a user has it."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment_of_a_user(**environment),
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_package_alone_imports_no_arrays():
    done = run_program(
        "import sys, fluctua; assert not {'jax', 'numpy', 'scipy'} & set(sys.modules)"
    )
    assert done.returncode == 0, done.stderr


HEAVY = {
    "cupy",
    "equinox",
    "h5netcdf",
    "h5py",
    "lineax",
    "matplotlib",
    "netCDF4",
    "optax",
    "pandas",
    "ray",
    "scipy.linalg",
    "scipy.special",
    "scipy.stats",
    "xarray",
}

ESTIMATE = f"""
import sys, jax, jax.numpy as jnp, fluctua as fl
from fluctua.compiled import kernels

kernels.OPTIMISE = "-O0"
process = fl.Process(
    lambda theta, x: jnp.array([x[1], -theta["k"] * jnp.sin(x[0])]),
    lambda theta, x: jnp.array([0.0, theta["s"]]),
    noiseless=(0,),
    integrator="heun",
)
objective = fl.Objective(running=lambda theta, x: x[1] ** 2 / 2)
theta = {{"k": jnp.array(2.0), "s": jnp.array(0.4)}}
simulator = fl.simulator(process, jnp.array([1.0, 0.0]), jnp.linspace(0, 1, 9), backend="cpu")
key = jax.random.key(0)
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **rest: compiled.append(name) if "backend_compile" in name else None
)
print(fl.ppgt(simulator, objective)(key, theta, 20))
assert not compiled, compiled
loaded = {HEAVY!r} & set(sys.modules)
assert not loaded, loaded
jnp.arange(7) + 1  # the listener listens
assert compiled
"""


def run_estimate(program, folder):
    """Run a program on the CPU, without functions that JAX has kept. folder: of kernels."""
    return run_program(
        program,
        FLUCTUA_KERNELS=str(folder),
        JAX_ENABLE_COMPILATION_CACHE="false",
        JAX_PLATFORMS="cpu",
    )


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_a_first_estimate_loads_nothing_heavy_and_jax_compiles_nothing(tmp_path):
    done = run_estimate(ESTIMATE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "(20 trajectories)" in done.stdout


@pytest.mark.long
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_a_second_process_traces_and_compiles_nothing(tmp_path):
    first = run_estimate(ESTIMATE, tmp_path)
    assert first.returncode == 0, first.stderr
    untraced = ESTIMATE.replace(
        'kernels.OPTIMISE = "-O0"\n',
        'kernels.OPTIMISE = "-O0"\nkernels.trace.trace_step = kernels.cpu.find_or_build = None\n',
    )
    second = run_estimate(untraced, tmp_path)
    assert second.returncode == 0, second.stderr
    assert second.stdout == first.stdout
    changed = untraced.replace("jnp.sin(x[0])", "jnp.sin(1.01 * x[0])")
    assert "'NoneType' object is not callable" in run_estimate(changed, tmp_path).stderr
