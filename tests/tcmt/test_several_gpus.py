"""An ensemble on several GPUs: one result, the bits of one GPU. Where there are fewer, one
stands for several.
"""

import numpy as np
import pytest

from fluctua.tcmt.kernel import cuda, cuda_binned, cuda_twin, gpus
from fluctua.tcmt.kernel import run as kernel
from fluctua.tcmt.kernel.options import Binned
from fluctua.tcmt.kernel.twin import run_twin
from in_turn import in_turn
from kernel_reference import rectangle

pytestmark = pytest.mark.long

SEED = 7


def arrays(result):
    """Every array of a result."""
    for name, value in result._asdict().items():
        for field, array in (
            value._asdict().items() if hasattr(value, "_asdict") else ((name, value),)
        ):
            if array is not None:
                yield f"{name}.{field}", np.asarray(array)


def assert_same_bits(one, several):
    for (name, a), (_, b) in zip(arrays(one), arrays(several), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.fixture
def on(device, monkeypatch):
    """Run something with so many GPUs, in pieces of 8; -> its result and how many of them it
    was laid out on.
    """
    monkeypatch.setattr(gpus, "PIECE", 8)

    def run(many, function, kind=cuda.LoadedNetwork):
        made = []
        begin = kind.__init__
        with monkeypatch.context() as patch:
            patch.setattr(gpus, "list_gpus", lambda cp: [0] * many)
            patch.setattr(cuda, "_free", {})  # nothing is laid out before
            patch.setattr(
                kind, "__init__", lambda self, *a, **k: made.append(self) or begin(self, *a, **k)
            )
            return function(), len(made)

    return run


@pytest.mark.parametrize(
    "options",
    [
        {"samples": True, "record_every": 5},
        {"antithetic": True, "baseline": np.linspace(0.02, 0, 21)},
    ],
)
def test_one_pass(on, options):
    spec = rectangle(2, 2, steps=20, sigma_kappa=0.1)
    make = lambda: kernel.run(spec, SEED, 42, backend="cuda", first_trajectory=4, **options)
    (one, single), (several, many) = on(1, make), on(3, make)
    assert (single, many) == (1, 3)
    assert_same_bits(one, several)


def test_twin(on):
    spec = rectangle(2, 2, steps=20, sigma_kappa=0.2)
    make = lambda: run_twin(spec, SEED, 42, table=np.zeros(21), backend="cuda", samples=True)
    (one, single), (several, many) = (on(n, make, cuda_twin.TwinDevice) for n in (1, 3))
    assert (single, many) == (1, 3)
    assert_same_bits(one, several)


def test_groups_of_the_binned_baseline(on):
    spec = rectangle(2, 2, steps=12)
    make = lambda: kernel.run(
        spec, SEED, 50, backend="cuda", baseline=Binned(3, 4, 14), samples=True
    )
    (one, groups), (several, again) = (on(n, make, cuda_binned.SecondPass) for n in (1, 3))
    assert groups == again == 4
    assert_same_bits(one, several)


def test_more_trajectories_than_the_gpu_can_sort_are_split(device, monkeypatch):
    """The same numbers as groups of the largest size, asked for one by one."""
    limit = cuda.require_cupy().cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
    monkeypatch.setattr(cuda_binned, "SORT_RESERVE", limit - 4 * 40)  # leaves keys for 32
    spec = rectangle(2, 2, steps=12)
    whole = kernel.run(spec, SEED, 90, backend="cuda", baseline=Binned(3, 4, 10**6), samples=True)
    for first in (0, 30, 60):
        part = kernel.run(
            spec,
            SEED,
            30,
            backend="cuda",
            baseline=Binned(3, 4),
            samples=True,
            first_trajectory=first,
        )
        rows = slice(first, first + 30)
        np.testing.assert_array_equal(whole.returns[rows], part.returns)
        np.testing.assert_array_equal(whole.samples.kappa[rows], part.samples.kappa)


def test_a_large_binned_ensemble_fits_a_real_gpu(device):
    """40,000 trajectories share one baseline on the CPU and two on the GPU: the means agree
    within errors.
    """
    if device != "gpu":
        pytest.skip(
            "the emulation is too slow for 40,000 trajectories; the test above splits fewer"
        )
    spec = rectangle(2, 3, steps=200)
    on_gpu = kernel.run(spec, SEED, 40_000, backend="cuda", baseline=Binned(20, 20, 10**6))
    on_cpu = kernel.run(spec, SEED, 40_000, baseline=Binned(20, 20, 10**6))
    np.testing.assert_allclose(on_gpu.returns, on_cpu.returns, rtol=1e-3)
    # the same noise: what differs is the baseline's own noise, far below the standard error
    assert (np.abs(on_gpu.gradient.kappa - on_cpu.gradient.kappa) < on_cpu.stderr.kappa).all()


def test_pieces_are_even_fit_the_memory_and_are_alike():
    for count, most in in_turn(
        [2, 3, 999, 32_768, 32_769, 40_000, 65_536, 10**6 + 1], [100, 50_000, 10**6]
    ):
        piece = gpus.choose_piece(count, most)
        assert piece % 2 == 0
        assert piece <= max(2, most)
        if count <= gpus.PIECE or most <= gpus.PIECE:
            assert piece == max(2, min(count, most) // 2 * 2)  # as memory alone has it
        else:
            pieces = -(-count // piece)
            assert pieces == max(-(-count // gpus.PIECE), -(-count // most))
            assert piece <= gpus.PIECE
            assert count - (pieces - 1) * piece > piece - 2 * pieces


def test_every_gpu_is_used_the_current_one_first(device, monkeypatch):
    if device == "gpu":
        pytest.skip("of the emulation, which has any number")
    cp = cuda.require_cupy()
    monkeypatch.setattr(cp.cuda.runtime, "getDeviceCount", lambda: 3)
    with cp.cuda.Device(2):
        assert gpus.list_gpus(cp) == [2, 0, 1]
    seen = []
    results = gpus.map_over_gpus(lambda item: seen.append(item) or item**2, range(7))
    assert results == [n**2 for n in range(7)]
    assert sorted(seen) == list(range(7))
