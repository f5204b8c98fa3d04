"""Coloured noise and filtered rewards against the exact moments of the augmented linear chains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import signal

import fluctua as fl
from fluctua.processes.filters import (
    coloured,
    filtered,
    linear_filter,
    lock_in,
    low_pass,
    moving_average,
)

DT = 0.05
T = DT * jnp.arange(31)
THETA = {"k": jnp.array(1.2), "s": jnp.array(0.7)}
OU = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: th["s"] * jnp.ones(1))


def moments(step, kick, mean, covariance, steps):
    """Mean and covariance of X' = AX + noise, at the end."""
    return jax.lax.fori_loop(
        0, steps, lambda _, now: (step @ now[0], step @ now[1] @ step.T + kick), (mean, covariance)
    )


def z_scores(estimate, exact):
    z = jax.tree.map(lambda g, e, s: (g - e) / s, estimate.gradient, exact, estimate.stderr)
    return np.array(jax.tree.leaves(z))


@pytest.mark.long
def test_coloured_noise(key):
    """Parameters of the drift and of the noise of the coloured component."""
    tau, x0 = 0.4, 1.0

    def value(th):
        k, s = th["k"], th["s"]
        a = jnp.eye(2) + DT * jnp.array([[0.0, 1.0], [-k / tau, -k - 1 / tau]])
        start = jnp.array([x0, -k * x0]), jnp.diag(jnp.array([0.0, s**2 / (2 * tau)]))
        mean, covariance = moments(
            a, DT * jnp.diag(jnp.array([0.0, (s / tau) ** 2])), *start, len(T) - 1
        )
        return mean[0] ** 2 + covariance[0, 0]

    colour = coloured(OU, jnp.array([x0]), tau=tau)
    square = fl.Objective(terminal=lambda th, x: x[0] ** 2)
    run = fl.simulator(colour.process, colour.start, T)
    estimate = fl.ppgt(run, square, process=colour.process, baseline="mean")(key, THETA, 8000)
    exact, slope = jax.jit(jax.value_and_grad(value))(THETA)
    assert np.abs(z_scores(estimate, slope)).max() < 4
    assert abs(estimate.value - exact) < 4 * estimate.value_stderr


FILTERS = {
    "low-pass": (low_pass(0.3), lambda y, g: jnp.array([(g - y[0]) / 0.3]), lambda y, g: y[0]),
    "butterworth": (signal.butter(2, 3.0, analog=True), None, None),
    "moving average": (
        moving_average(4 * DT, DT),
        lambda y, g: (jnp.array([g, *y[:3]]) - y) / DT,
        lambda y, g: y.mean(),
    ),
}


@pytest.mark.parametrize("name", FILTERS)
def test_reward_through_a_linear_filter(key, name):
    """A linear filter of the reward x: the mean goes through it by itself."""
    through, change, output = FILTERS[name]
    if change is None:
        space = signal.TransferFunction(*through).to_ss()
        a, b, c = jnp.asarray(space.A), jnp.asarray(space.B)[:, 0], jnp.asarray(space.C)[0]
        change, output = lambda y, g: a @ y + b * g, lambda y, g: c @ y
    size = (through if hasattr(through, "size") else linear_filter(through)).size

    def value(th):
        def step(_, now):
            x, y, total = now
            return x * (1 - th["k"] * DT), y + DT * change(y, x), total + DT * output(y, x)

        return jax.lax.fori_loop(
            0, len(T) - 1, step, (jnp.ones(()), jnp.zeros(size), jnp.zeros(()))
        )[-1]

    seen = filtered(OU, fl.Objective(running=lambda th, x: x[0]), jnp.array([1.0]), through)
    run = fl.simulator(seen.process, seen.start, T)
    estimate = fl.ppgt(run, seen.objective, process=seen.process, baseline="mean")(key, THETA, 2000)
    exact, slope = jax.jit(jax.value_and_grad(value))(THETA)
    assert np.abs(z_scores(estimate, slope)).max() < 4
    assert abs(estimate.value - exact) < 4 * estimate.value_stderr


def test_lock_in_sees_its_frequency():
    """A signal cos ωt settles at X = 1, Y = 0; one at another frequency at nothing."""
    through = lock_in(2.0, 1.0)

    def seen(frequency):
        y, dt = jnp.zeros(2), 1e-3
        step = lambda y, t: (
            y + dt * through.change(y, jnp.cos(2 * jnp.pi * frequency * t), t),
            None,
        )
        y, _ = jax.lax.scan(step, y, dt * jnp.arange(10_000))
        return float(through.output(y, 0.0, 0.0))

    assert abs(seen(2.0) - 1) < 0.1
    assert seen(3.1) < 0.1


def test_bad_input_is_named(key):
    with pytest.raises(ValueError, match="`tau`.*-1"):
        coloured(OU, jnp.array([1.0]), tau=-1.0)
    with pytest.raises(ValueError, match="unstable.*0.5"):
        linear_filter(([1.0], [1.0, -0.5]))
    with pytest.raises(ValueError, match="discrete"):
        linear_filter(signal.dlti([1.0], [1.0, -0.5]))
    with pytest.raises(ValueError, match="whole number"):
        moving_average(0.12, 0.05)
    with pytest.raises(ValueError, match="`running`"):
        filtered(OU, fl.Objective(terminal=lambda th, x: x[0]), jnp.array([1.0]), low_pass(0.3))
    seen = filtered(
        OU, fl.Objective(running=lambda th, x: th["k"] * x[0]), jnp.array([1.0]), low_pass(0.3)
    )
    with pytest.raises(ValueError, match="component 1 has no noise.*`k`"):
        fl.ppgt(fl.simulator(seen.process, seen.start, T), seen.objective)(key, THETA, 10)
