"""Speed of own processes: the kernel by hand does the library's work, missing parts are named."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import own_speed
from fluctua.core import check
from own_processes import PROCESSES

pytestmark = pytest.mark.long

KERNELS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_the_pendulum_by_hand_has_the_librarys_numbers():
    own, count, steps = PROCESSES["pendulum"](), 70, 51
    gradient, value = own_speed.by_hand(own, "cpu", count, steps, KERNELS)()
    estimate = own_speed.estimate(own, "time", count, steps, "jax", "philox")()
    expected = np.array([estimate.gradient[name] for name in ("friction", "shaking", "stiffness")])
    rounding = 1e-5 * steps**0.5  # float32 sums of `steps` terms
    assert np.abs(gradient - expected).max() < rounding * np.abs(expected).max()
    assert abs(value - float(estimate.value)) < rounding * abs(value)
    assert (
        np.array([1e-310]) * np.array([0.5]) > 0
    )  # the library that was loaded left the processor as it was


@pytest.mark.parametrize("name", PROCESSES)
def test_drift_and_noise_for_torchsde_are_those_of_the_process(name):
    own = PROCESSES[name]()
    process = check.process(own.process)
    y = np.asarray(own.start) + np.random.default_rng(0).normal(size=(3, own.start.size)) / 10
    drift, noise = own.torch(TorchNames, jax.tree.map(np.asarray, own.theta), y)
    for j in range(3):
        np.testing.assert_allclose(
            drift[j], process.drift(own.theta, y[j], 0.0, None), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(noise[j], process.noise(own.theta, y[j], 0.0, None), rtol=1e-5)


class TorchNames:
    """The few names of torch that the processes use, by NumPy: torch is not needed to test them."""

    sin, sqrt, abs, tanh, roll, concatenate, stack = (
        np.sin,
        np.sqrt,
        np.abs,
        np.tanh,
        np.roll,
        np.concatenate,
        np.stack,
    )

    @staticmethod
    def as_tensor(value, dtype, device):
        return value


def test_a_kernel_that_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="pendulum.cpp"):
        own_speed.by_hand(PROCESSES["pendulum"](), "cpu", 2, 2, tmp_path)


def test_ratios_are_to_the_kernel_with_the_same_baseline():
    row = {"process": "pendulum", "trajectories": 10, "steps": 5, "median_ns": 1.0, "first": 1.0}
    rows = [
        {**row, "who": "JAX", "what": "time", "ns": 60.0},
        {**row, "who": "JAX", "what": "optimal", "ns": 150.0},
        {**row, "who": "kernel", "what": "time", "ns": 4.0},
        {**row, "who": "kernel", "what": "optimal", "ns": 5.0},
        {**row, "who": "diffrax", "what": "simulation only", "ns": 48.0},
    ]
    result = {
        "rows": rows,
        "starts": {},
        "skipped": {"torchsde": "no torch"},
        "machine": "here",
        "quick": False,
    }
    text = own_speed.report(result)
    last = {
        line.split(",")[0].strip() + line.split(",")[1][:8]: line.split()[-1]
        for line in text.splitlines()[2:7]
    }
    assert last == {
        "JAX time   ": "15",
        "JAX optimal": "30",
        "kernel time   ": "1",
        "kernel optimal": "1",
        "diffrax simulat": "12",
    }
    assert "torchsde: left out, no torch" in text
