"""Gradients from states measured with noise, against the exact answers of linear chains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua import insitu
from problems import tolerance

PROCESS = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: th["s"][None])
OBJECTIVE = fl.Objective(running=lambda th, x: x[0] ** 2, terminal=lambda th, x: 0.5 * x[0] ** 2)
THETA = {"k": jnp.array(0.8), "s": jnp.array(0.7)}
DT, STEPS = 0.1, 20


def exact():
    """∂J/∂k, ∂J/∂s of the Euler chain dX = −kX Δt + s dW from X = 1: J = Σ E[X²]Δt + E[X_T²]/2."""

    def value(th):
        def step(_, now):
            second, total = now
            return (1 - th["k"] * DT) ** 2 * second + th["s"] ** 2 * DT, total + second * DT

        second, total = jax.lax.fori_loop(0, STEPS, step, (jnp.ones(()), jnp.zeros(())))
        return total + second / 2

    return jax.jit(jax.grad(value))(THETA)


@pytest.mark.long
def test_noise_parameters_are_corrected_for(tmp_path):
    """The score of s is quadratic in the residual, and so is the reward: Cov[ε², ε²] = 2S² is due, not 4S².

    Twice as much would put −Σ_n 2S²/s³ − S²/(s³Δt) on ∂J/∂s: −5.8 at S = 0.2, where ∂J/∂s is 1.9.
    """
    t, variance = DT * np.arange(STEPS + 1), 0.2
    data = fl.simulator(PROCESS, jnp.ones(1), jnp.asarray(t))(jax.random.key(3), THETA, 20_000)
    noisy = np.asarray(data.x + np.sqrt(variance) * jax.random.normal(jax.random.key(4), data.x.shape))
    insitu.save(tmp_path / "r.nc", insitu.Description(t, ("x",), parameters=THETA), noisy)
    with insitu.open_recording(tmp_path / "r.nc") as r:
        result = insitu.estimate(r, PROCESS, OBJECTIVE, observation_noise=variance).estimate
    truth = exact()
    z = [float((result.gradient[n] - truth[n]) / result.stderr[n]) for n in ("k", "s")]
    assert np.abs(z).max() < tolerance(2), z
    twice = 2 * variance**2 / 0.7**3 * (STEPS - 1) + variance**2 / (0.7**3 * DT)
    assert twice > 10 * float(result.stderr["s"])
