"""The residual guard: silent where the process is right, and it names the mistake where it is not."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core.guard import examine
from fluctua.core.scores import local_linear

THETA = {"k": jnp.array([1.0, 3.0])}
PROCESS = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: jnp.array([0.3, 1.1]))
OBJECTIVE = fl.Objective(terminal=lambda th, x: x[0] ** 2)
T = jnp.linspace(0, 1, 101)
DATA = fl.simulator(PROCESS, jnp.ones(2), T)(jax.random.key(0), THETA, 101)
MIXED = fl.Process(PROCESS.drift, lambda th, x: jnp.array([[0.5, 0.1, 0.0], [-0.2, 0.3, 0.4]]))


def noise(scale):
    return PROCESS._replace(noise=lambda th, x: scale * PROCESS.noise(th, x))


def sampled(x, t, process=PROCESS):
    return examine(process, THETA, fl.Trajectories(t, x))


def test_v_is_one_for_the_process_itself():
    for process in (PROCESS, MIXED):
        data = fl.simulator(process, jnp.ones(2), T)(jax.random.key(1), THETA, 200)
        residuals = examine(process, THETA, data)
        assert residuals.steps == 20_000
        assert residuals.cause == ""
        assert np.abs((residuals.v - 1) / residuals.stderr).max() < 4
        # r² of one Gaussian component has variance 2
        assert residuals.stderr == pytest.approx(np.sqrt(2 / residuals.steps), rel=0.3)


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


def test_readout_noise_and_coarse_sampling():
    readout = DATA.x + 0.05 * np.random.default_rng(0).normal(size=DATA.x.shape)
    residuals = sampled(readout, T)
    assert "noise of the readout" in residuals.cause
    assert residuals.v[0] == pytest.approx(1 + 2 * 0.05**2 / (0.3**2 * 0.01), rel=0.05)
    assert examine(PROCESS, THETA, fl.Trajectories(T, readout), readout=0.05**2).cause == ""
    long = fl.simulator(PROCESS, jnp.ones(2), jnp.linspace(0, 20, 4001))(jax.random.key(1), THETA, 20)
    coarse = fl.Trajectories(long.t[::30], long.x[:, ::30])
    assert "too coarse" in examine(PROCESS, THETA, coarse).cause
    assert examine(PROCESS, THETA, coarse, transition=local_linear).cause == ""


def test_noise_wrong_by_ten_gave_a_confident_wrong_gradient():
    with pytest.warns(RuntimeWarning, match="noise amplitude"):
        wrong = fl.gradient(noise(1 / 10), OBJECTIVE, THETA, DATA)
    right = fl.gradient(PROCESS, OBJECTIVE, THETA, DATA)
    ratio = np.asarray(wrong.gradient["k"])[0] / np.asarray(right.gradient["k"])[0]
    assert ratio == pytest.approx(100, rel=0.01)
