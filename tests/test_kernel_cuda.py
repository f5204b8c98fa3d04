"""The CUDA kernel against the CPU kernel, on a GPU where there is one and emulated everywhere."""

import sys

import numpy as np
import pytest

import fake_cupy
from fluctua.tcmt import cuda, kernel
from kernel_reference import rectangle, simulate

SEED = 0x1234_5678_9ABC_DEF0


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
        monkeypatch.setattr(cuda, "compiled", cuda.compiled.__wrapped__)
    return request.param


def deviation(found, expected):
    scale = np.abs(expected).max() if np.size(expected) else 1.0
    return np.abs(found - expected).max() / scale if np.size(expected) else 0.0


def both(spec, count, **options):
    cpu = kernel.run(spec, SEED, count, **options)
    return cpu, kernel.run(spec, SEED, count, backend="cuda", **options)


CASES = {
    "plain": ({}, {}),
    "lab frame": ({"lab": True}, {}),
    "odd steps": ({"steps": 61}, {}),
    "modulated": ({"sigma_kappa": 0.2, "steps": 50}, {}),
    "antithetic": ({"sigma_kappa": 0.2, "steps": 40}, {"antithetic": True}),
    "rates": ({"lab": True}, {"rates": True}),
    "chain": ({"rows": 1, "columns": 5}, {"baseline": True}),
    "one resonator": ({"rows": 1, "columns": 1}, {}),
    "no scores": ({}, {"scores": False}),
    "no noise": ({}, {"noise": False}),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES)
def test_cuda_and_cpu_take_the_same_steps(device, case, dtype):
    network, options = CASES[case]
    spec = rectangle(**network)
    if options.get("baseline"):
        options = {"baseline": np.linspace(0.02, 0, spec.steps + 1)}
    cpu, gpu = both(spec, 6, dtype=dtype, record_every=1, samples=True, **options)
    tolerance = 2e-5 if dtype == "float32" else 1e-11
    assert deviation(gpu.trajectories, cpu.trajectories) < tolerance
    assert deviation(gpu.returns, cpu.returns) < tolerance
    assert deviation(gpu.mean_return_to_go, cpu.mean_return_to_go) < tolerance
    for name, expected in (cpu.samples._asdict() if cpu.samples else {}).items():
        if expected is None:
            continue
        assert deviation(getattr(gpu.samples, name), expected) < tolerance, name
        for field in ("gradient", "stderr", "second_moment"):
            a, b = getattr(getattr(gpu, field), name), getattr(getattr(cpu, field), name)
            assert deviation(a, b) < 5 * tolerance, (field, name)


def test_any_degree(device):
    spec = rectangle(1, 12)
    bonds = np.stack([np.full(11, 3), np.delete(np.arange(12), 3)], 1)  # a star: degree 11
    cpu, gpu = both(spec._replace(bonds=bonds, kappa=np.linspace(0.5, 1.5, 11)), 4, dtype="float64", samples=True)
    assert deviation(gpu.samples.kappa, cpu.samples.kappa) < 1e-11


def test_several_sites_a_thread(device):
    if device == "emulated":
        pytest.skip("1,024 threads a block are too many to emulate")
    spec = rectangle(40, 40, steps=40)
    cpu, gpu = both(spec, 3, samples=True)
    assert deviation(gpu.samples.kappa, cpu.samples.kappa) < 2e-5


def test_trajectories_in_several_launches_and_several_waves(device, monkeypatch):
    monkeypatch.setattr(cuda, "CHUNK_BYTES", 2000)
    spec = rectangle(steps=10)
    cpu, gpu = both(spec, 26, samples=True)
    assert deviation(gpu.samples.omega, cpu.samples.omega) < 2e-5
    assert deviation(gpu.gradient.kappa, cpu.gradient.kappa) < 2e-5


def test_modulation_in_global_memory_when_it_is_too_large_to_share(device, monkeypatch):
    attributes = {**cuda.require_cupy().cuda.Device().attributes}
    monkeypatch.setattr(fake_cupy._Device, "attributes", {**attributes, "MaxSharedMemoryPerMultiprocessor": 20_000})
    if device == "gpu":
        pytest.skip("needs a device with little shared memory")
    spec = rectangle(sigma_kappa=0.2, steps=40)
    cpu, gpu = both(spec, 4, dtype="float64", samples=True)
    assert deviation(gpu.samples.kappa, cpu.samples.kappa) < 1e-11


def test_overflow_is_explained(device):
    spec = rectangle(steps=400)
    with pytest.raises(FloatingPointError, match=r"trajectory 8 .* after step \d+ "):
        kernel.run(spec._replace(damping=spec.damping - 60.0), 0, 4, first_trajectory=8, backend="cuda")


def test_the_reference_itself(device):
    spec = rectangle(sigma_kappa=0.1, steps=30)
    path = simulate(spec, SEED, 3)
    run = kernel.run(spec, SEED, 3, backend="cuda", dtype="float64", samples=True)
    assert deviation(run.samples.kappa, path.gradient()["kappa"]) < 1e-11


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_the_message_says_what_to_do():
    with pytest.raises((ImportError, RuntimeError), match="backend='cpu'"):
        kernel.run(rectangle(), 0, 2, backend="cuda")
