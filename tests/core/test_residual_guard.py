"""The residual guard: silent where the process is right, and it names the mistake where it is
not.
"""

import re
import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core.likelihood.alternatives import FITTED
from fluctua.core.likelihood.guard import Residuals, examine, examine_batch
from fluctua.core.scores import local_linear

THETA = {"k": jnp.array([1.0, 3.0])}
PROCESS = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: jnp.array([0.3, 1.1]))
OBJECTIVE = fl.Objective(terminal=lambda th, x: x[0] ** 2)
T = np.linspace(0, 1, 101)


def record(process, start, count, key, t=T):
    """Trajectories as arrays of NumPy, whose changes compile nothing."""
    run = fl.simulator(process, start, t)(jax.random.key(key), THETA, count)
    return fl.Trajectories(t, np.asarray(run.x))


DATA = record(PROCESS, np.ones(2), 101, key=0)
MIXED = fl.Process(PROCESS.drift, lambda th, x: jnp.array([[0.5, 0.1, 0.0], [-0.2, 0.3, 0.4]]))


@cache
def noise(scale):
    return PROCESS._replace(noise=lambda th, x: scale * PROCESS.noise(th, x))


def take_samples(x, t, process=PROCESS):
    return examine(process, THETA, fl.Trajectories(t, x))


def test_v_is_one_for_the_process_itself():
    for process in (PROCESS, MIXED):
        data = record(process, np.ones(2), 200, key=1)
        residuals = examine(process, THETA, data)
        assert residuals.steps == 20_000
        assert residuals.cause == ""
        assert np.abs((residuals.v - 1) / residuals.stderr).max() < 4
        # r² of one Gaussian component has variance 2
        assert residuals.stderr == pytest.approx(np.sqrt(2 / residuals.steps), rel=0.3)


@pytest.mark.long
def test_gradient_is_silent_where_nothing_is_wrong():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fl.gradient(PROCESS, OBJECTIVE, THETA, DATA)
        fl.gradient(PROCESS, OBJECTIVE, THETA, DATA, baseline="twin")


@pytest.mark.parametrize(
    ("data", "process", "cause"),
    [
        (DATA, noise(1 / 10), r"noise amplitude of every component is 9.*, 1.* times"),
        (fl.Trajectories(T, DATA.x * 1e3), PROCESS, r"state is multiplied by 0\.001"),
        (fl.Trajectories(T * 1e3, DATA.x), PROCESS, r"times are multiplied by 0\.001"),
        (fl.Trajectories(T, DATA.x.swapaxes(0, 1)), PROCESS, r"x\.swapaxes\(0, 1\)"),
        (fl.Trajectories(T, DATA.x[..., ::-1]), PROCESS, "components 0 and 1 are swapped"),
    ],
)
def test_gradient_warns_with_the_cause(data, process, cause):
    with pytest.warns(RuntimeWarning, match=cause):
        fl.gradient(process, OBJECTIVE, THETA, data)


CENTRED = fl.Process(lambda th, x: -th["k"] * (x - 100.0), lambda th, x: 28.0 * jnp.ones(1))
"""A trap at 100 nm, whose model has 8 % too much noise power."""


def record_trap(scale=1.0, slower=1.0, shaken=26.9):
    """Examine exact samples of that trap, every 0.1 ms, in another unit of state or time."""
    rng = np.random.default_rng(3)
    kept = np.exp(-0.5 * 0.1)
    x = [np.zeros(400)]
    for _ in range(50):
        kick = shaken * np.sqrt(1 - kept**2) * rng.normal(size=400)
        x.append(100 + kept * (x[-1] - 100) + kick)
    states = scale * np.array(x).T[..., None]
    data = fl.Trajectories(slower * 0.1 * np.arange(51), states)
    return examine(CENTRED, {"k": jnp.array(0.5)}, data).cause


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"scale": 1e-3}, "nearly fit if the state is multiplied by 1000 "),
        ({"scale": 1e-9}, r"nearly fit if the state is multiplied by 1e\+09 "),
        ({"slower": 1e3}, r"nearly fit if the times are multiplied by 0\.001 "),
        ({"shaken": 140.0}, "noise amplitude of every component is 4"),
        ({"shaken": 1.0}, "noise amplitude of every component is 0.03"),
    ],
)
def test_a_unit_is_named_where_noise_and_interval_are_off_too(change, cause):
    """The drift tells a unit from a noise of another amplitude."""
    assert re.search(cause, record_trap(**change))


@pytest.mark.long
def test_readout_noise_and_coarse_sampling():
    readout = DATA.x + 0.05 * np.random.default_rng(0).normal(size=DATA.x.shape)
    residuals = take_samples(readout, T)
    assert "noise of the readout" in residuals.cause
    assert residuals.v[0] == pytest.approx(1 + 2 * 0.05**2 / (0.3**2 * 0.01), rel=0.05)
    assert examine(PROCESS, THETA, fl.Trajectories(T, readout), readout=0.05**2).cause == ""
    long = record(PROCESS, np.ones(2), 20, key=1, t=np.linspace(0, 20, 4001))
    coarse = fl.Trajectories(long.t[::30], long.x[:, ::30])
    assert "too coarse" in examine(PROCESS, THETA, coarse).cause
    assert examine(PROCESS, THETA, coarse, transition=local_linear).cause == ""


def test_noise_wrong_by_ten_gave_a_confident_wrong_gradient():
    with pytest.warns(RuntimeWarning, match="noise amplitude"):
        wrong = fl.gradient(noise(1 / 10), OBJECTIVE, THETA, DATA)
    right = fl.gradient(PROCESS, OBJECTIVE, THETA, DATA)
    ratio = np.asarray(wrong.gradient["k"])[0] / np.asarray(right.gradient["k"])[0]
    assert ratio == pytest.approx(100, rel=0.01)


@pytest.mark.long
def test_numbers_beyond_single_precision_are_wrong():
    """v = 1e20 and more: squares of squares overflow float32, and an infinite error excused
    every unit.
    """
    tiny = noise(1e-10)
    data = fl.Trajectories(T, np.asarray(DATA.x, np.float32))
    residuals = examine(tiny, THETA, data)
    assert np.isfinite(residuals.v).all()
    assert np.isfinite(residuals.stderr).all()
    np.testing.assert_allclose(residuals.v, 1e20, rtol=0.1)
    assert "noise amplitude" in residuals.cause
    assert "fit" not in residuals.cause
    assert set(residuals.wrong) == {0, 1}


def test_what_is_not_finite_is_wrong():
    from_nowhere = Residuals(np.array([1.0, 1.0, np.nan]), np.array([0.01, np.inf, 0.01]), 1000)
    assert from_nowhere.wrong.tolist() == [1, 2]
    broken = PROCESS._replace(drift=lambda th, x: jnp.sqrt(-1 - x**2))
    assert "not finite" in examine(broken, THETA, DATA).cause


COUPLED = fl.Process(lambda th, x: -th["k"] * x + 0.8 * x[::-1], PROCESS.noise)
STARTS = np.array([1.0, -0.5])
RUN = record(COUPLED, STARTS, 200, key=3)
STUCK = RUN.x.copy()
STUCK[:, 50:, 0] = RUN.x[:, 50:51, 0]


def drifting(extra):
    process = fl.Process(lambda th, x: COUPLED.drift(th, x) + extra(x), PROCESS.noise)
    return record(process, STARTS, 200, key=4)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (RUN, "^$"),
        (
            RUN._replace(x=RUN.x * np.array([1.0, 1.05])),
            r"noise amplitude of component 1 is 1\.0[56]",
        ),
        (RUN._replace(x=RUN.x[:, ::-1]), "if time is reversed|begin where"),
        (RUN._replace(x=np.roll(RUN.x, 20, axis=1)), "shifted or cut together"),
        (RUN._replace(x=STUCK), "component"),
        (RUN._replace(x=RUN.x[:5].repeat(2, axis=0) + 1e-6), "read twice"),
        (drifting(lambda x: -12 * x**3), "drift|rate"),
        (drifting(lambda x: 1.5 * jnp.array([0.0, x[0]])), "drift of component 1"),
    ],
)
def test_faults_that_v_does_not_name(data, cause):
    assert re.search(cause, examine(COUPLED, THETA, data).cause)


def test_a_device_that_moves_on_within_a_sample_passes():
    """Sampled every ten steps, kΔ = 0.03: what an Euler step leaves out of the drift is no
    fault.
    """
    fine = record(COUPLED, STARTS, 200, key=5, t=np.linspace(0, 1, 1001))
    sampled_every_ten = fl.Trajectories(T, fine.x[:, ::10])
    batch = examine_batch(COUPLED, THETA, sampled_every_ten, limits=FITTED)
    assert batch.residuals.cause == ""


def test_a_record_that_begins_late_is_seen_by_its_start():
    long = record(COUPLED, STARTS, 50, key=6, t=np.arange(104) * 0.01)
    late = fl.Trajectories(T, long.x[:, 3:])
    assert examine(COUPLED, THETA, late).cause == ""  # an autonomous process: nothing else shows it
    assert "begin where" in examine_batch(COUPLED, THETA, late, start=STARTS).residuals.cause
    whole = fl.Trajectories(T, long.x[:, :101])
    assert examine_batch(COUPLED, THETA, whole, start=STARTS).residuals.cause == ""


@pytest.mark.long
def test_noise_that_is_not_known_is_that_of_the_trajectories():
    batch = examine_batch(noise(1.5), THETA, DATA, known_noise=False)
    assert batch.residuals.cause == ""
    np.testing.assert_allclose(batch.residuals.v, 1, rtol=1e-9)
    assert examine_batch(noise(10), THETA, DATA, known_noise=False).residuals.cause
