"""First mistakes: what was expected, what came, and what to write instead."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl

THETA = {"k": jnp.array(1.0), "f": jnp.array(0.5)}
PROCESS = fl.Process(lambda th, x: th["f"] - th["k"] * x, lambda th, x: 0.3 * jnp.ones_like(x))
OBJECTIVE = fl.Objective(terminal=lambda th, x: x[0])
T = jnp.linspace(0, 1, 11)
KEY = jax.random.key(0)


def run(process=PROCESS, objective=OBJECTIVE, theta=THETA, key=KEY, count=4, x0=1.0, **options):
    simulated = fl.simulator(process, jnp.full(2, x0), T)
    return fl.ppgt(simulated, objective, process=process, baseline="none", **options)(
        key, theta, count
    )


def data():
    return fl.simulator(PROCESS, jnp.ones(2), T)(KEY, THETA, 4)


def test_states_as_nested_lists():
    with pytest.raises(TypeError, match=r"\(trajectories, 11, state\); got a list.*np\.asarray"):
        fl.gradient(PROCESS, OBJECTIVE, THETA, fl.Trajectories(T, np.asarray(data().x).tolist()))


def test_a_missing_entry_of_theta():
    with pytest.raises(ValueError, match=r"the drift uses theta\['kappa'\].*'f', 'k'"):
        run(PROCESS._replace(drift=lambda th, x: -th["kappa"] * x))
    with pytest.raises(
        ValueError, match=r"the terminal reward uses theta\['ff'\].*Did you mean \"f\""
    ):
        run(objective=fl.Objective(terminal=lambda th, x: th["ff"] * x[0]))


def test_swapped_arguments():
    def drift(x, theta):
        return -theta["k"] * x

    with pytest.raises(TypeError, match=r"`drift\(x, theta\)` has its arguments swapped"):
        run(PROCESS._replace(drift=drift))

    def reward(x, theta):
        return -((x[0] - 1) ** 2)

    with pytest.raises(TypeError, match=r"`running\(x, theta\)` has its arguments swapped"):
        run(objective=fl.Objective(running=reward))


@pytest.mark.parametrize(
    "reward",
    [lambda th, x: 1.0 if x[0] > 1 else 0.0, lambda th, x: math.exp(-x[0])],
    ids=["if", "math"],
)
def test_python_that_needs_the_number(reward):
    with pytest.raises(TypeError, match=r"the running reward needs the number.*jnp\.where"):
        run(objective=fl.Objective(running=reward))


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((4, 11), r"x\[\.\.\., None\]"),
        ((11, 4), r"times first, x\.T\[\.\.\., None\]"),
        ((11,), r"x\[None, :, None\]"),
        ((11, 4, 2), r"x\.swapaxes\(0, 1\)"),
    ],
)
def test_records_that_lack_an_axis(shape, hint):
    with pytest.raises(ValueError, match=rf"got {re.escape(str(shape))}.*{hint}"):
        fl.gradient(PROCESS, OBJECTIVE, THETA, fl.Trajectories(T, np.zeros(shape)))


def test_counts_of_a_converter_and_arrays_without_times():
    x = np.asarray(data().x)
    with pytest.raises(TypeError, match=r"it is int64.*x\.astype\(float\)"):
        fl.gradient(PROCESS, OBJECTIVE, THETA, fl.Trajectories(T, (1000 * x).astype(np.int64)))
    with pytest.raises(TypeError, match=r"got ndarray.*gradient\(process, objective, theta, Traj"):
        fl.gradient(PROCESS, OBJECTIVE, THETA, x)


def test_a_start_of_another_size_than_the_noise():
    noise = PROCESS._replace(noise=lambda th, x: 0.3 * jnp.ones(3))
    with pytest.raises(ValueError, match=r"got \(3,\)\. The start or the record has 2 components"):
        run(noise)
    with pytest.raises(ValueError, match=r"got shape \(\)\..*jnp\.array\(\[0\.0\]\)"):
        fl.simulator(PROCESS, 0.0, T)
    with pytest.raises(ValueError, match=r"`t` .*got shape \(\)\..*jnp\.linspace"):
        fl.simulator(PROCESS, jnp.ones(2), 100)


def test_a_function_for_the_matrix_of_an_observation():
    with pytest.raises(TypeError, match=r"`observe` is the matrix C.*np\.eye\(M\)"):
        fl.Observed(PROCESS, observe=lambda x: x[:1], noise=0.01, start=np.zeros(2))


@pytest.mark.parametrize("count", [1e3, 2.5, True, 0])
def test_counts(count):
    with pytest.raises(
        ValueError, match=rf"got {count}" + (r".*Write 1000" if count == 1e3 else "")
    ):
        run(count=count)


def test_a_number_for_a_key():
    with pytest.raises(TypeError, match=r"got 7\. Write jax\.random\.key\(7\)"):
        run(key=7)
    with pytest.raises(TypeError, match=r"jax\.random\.key\(0\)"):
        fl.simulator(PROCESS, jnp.ones(2), T)(0, THETA, 4)
    assert run(key=jax.random.PRNGKey(7)).count == 4


def test_a_drift_that_is_not_a_number_is_not_a_time_step_too_large():
    nan = PROCESS._replace(drift=lambda th, x: jnp.log(-jnp.abs(x)))
    with pytest.raises(
        FloatingPointError, match=r"drift is not finite at the first state.*x = \[1\. 1\.\]"
    ):
        run(nan)


def test_the_root_of_a_negative_state():
    root = PROCESS._replace(drift=lambda th, x: -3 * jnp.sqrt(x))
    with pytest.raises(
        FloatingPointError,
        match=r"drift is not finite on trajectory \d+ at time index \d+.*negative",
    ):
        run(root, count=50)
    growing = PROCESS._replace(drift=lambda th, x: 1e30 * x**3)
    with pytest.raises(FloatingPointError, match=r"overflowed.*time step"):
        run(growing)


def test_time_before_trajectory():
    with pytest.raises(ValueError, match=r"\(time, trajectory, state\): pass x\.swapaxes\(0, 1\)"):
        fl.gradient(PROCESS, OBJECTIVE, THETA, fl.Trajectories(T, data().x.swapaxes(0, 1)))
    with pytest.raises(ValueError, match=r"x\[None\]"):
        fl.gradient(PROCESS, OBJECTIVE, THETA, fl.Trajectories(T, data().x[0]))


def test_a_function_among_the_parameters():
    with pytest.raises(TypeError, match=r"`theta\['activation'\]` is a function.*eqx\.partition"):
        run(theta={**THETA, "activation": jnp.tanh})
