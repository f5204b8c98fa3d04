"""Records of the kernels are right when they are made."""

import dataclasses
import sys

import numpy as np
import pytest

from fluctua import tcmt
from fluctua.tcmt.kernel.options import KernelJob, KernelOptions, measure_memory
from fluctua.tcmt.kernel.run import run
from fluctua.tcmt.kernel.twin import run_twin
from kernel_reference import rectangle

WRONG = [
    ({"dtype": "float16"}, "float16"),
    ({"threads": 0}, "`threads`.*got 0"),
    ({"threads": 2.5}, "`threads`.*got 2.5"),
    ({"record_every": -1}, "`record_every`.*got -1"),
    ({"engine": "avx1024"}, "`engine`.*avx1024"),
]


def test_wrong_options_are_refused_when_they_are_made():
    for options, message in WRONG:
        with pytest.raises(ValueError, match=message):
            KernelOptions(**options)
        task = tcmt.transmission(tcmt.chain(3), horizon=0.1, dt=0.01)
        with pytest.raises(ValueError, match=message):
            task.estimator("cpu", **options)


def test_an_estimator_refuses_at_construction():
    for options, error, message in [
        ({"thread": 2}, TypeError, "no option thread; it has dtype, threads"),
        ({"noise": False}, TypeError, "no option noise"),
        ({"antithetic": "yes"}, TypeError, "`antithetic`.*'yes'"),
        ({"baseline": np.zeros(10)}, ValueError, r"\(11,\); got \(10,\)"),
        ({"baseline": np.full(11, np.nan)}, ValueError, "not finite"),
        ({"baseline": "twin", "record_every": 5}, ValueError, "`record_every`"),
    ]:
        task = tcmt.transmission(tcmt.chain(3), horizon=0.1, dt=0.01)
        with pytest.raises(error, match=message):
            task.estimator("cpu", **options)


def test_a_twin_is_refused_at_construction():
    task = tcmt.transmission(tcmt.chain(3), horizon=0.1, dt=0.01)
    with pytest.raises(ValueError, match="got -1"):
        tcmt.KernelTwin(rank=-1)
    with pytest.raises(ValueError, match="got 0"):
        tcmt.KernelTwin(segment=0)
    with pytest.raises(ValueError, match="at most 3.*got 4"):
        task.estimator("cpu", baseline=tcmt.KernelTwin(rank=4))


def test_more_than_the_memory_is_refused_with_both_numbers():
    for call in [
        lambda spec: run(spec, 0, 10**9, samples=True),
        lambda spec: run(spec, 0, 10**9, record_every=1, scores=False),
        lambda spec: run_twin(spec, 0, 10**9, samples=True),
    ]:
        with pytest.raises(
            ValueError,
            match=rf"1,000,000,000 trajectories.*has {measure_memory() / 2**30:,.0f} GiB",
        ):
            call(rectangle())


def test_a_table_that_is_not_finite_is_refused():
    table = np.zeros(65)
    table[7] = np.nan
    with pytest.raises(ValueError, match="not finite at time 7"):
        run(rectangle(), 0, 4, baseline=table)


def test_records_cannot_be_changed_and_copies_are_checked():
    ensemble = KernelJob(rectangle(), 0, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ensemble.count = 5
    assert ensemble.replace(count=6, dtype="float64").options.dtype == "float64"
    with pytest.raises(ValueError, match="pairs"):
        ensemble.replace(count=5, antithetic=True)
    with pytest.raises(ValueError, match="`omega`"):
        rectangle().replace(omega=np.full(12, np.inf))
    spec = rectangle()
    moved = spec.replace(chi=spec.chi + 1)
    assert (moved.chi == spec.chi + 1).all()
    assert moved.omega is spec.omega
    with pytest.raises(
        ValueError, match=rf"`kappa` must have shape \({len(spec.bonds)},\); got \(2,\)"
    ):
        spec.replace(kappa=np.ones(2))


def test_cuda_without_cupy_names_both_extras(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    task = tcmt.transmission(tcmt.chain(3), horizon=0.1, dt=0.01)
    with pytest.raises(ImportError, match=r"fluctua\[cuda13\].*fluctua\[cuda12\].*backend='cpu'"):
        task.estimator("cuda")
