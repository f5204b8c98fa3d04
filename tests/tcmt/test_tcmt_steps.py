"""Better steps than Euler's of a task: the kernels against JAX, their reward, and how long a
step may be.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua import tcmt
from fluctua.core import check
from fluctua.core.streamed import split_key
from fluctua.tcmt import exact
from fluctua.tcmt.kernel.options import Binned
from fluctua.tcmt.time_step import SERIES, largest_step

KEY = jax.random.key(4)
LAB_DRIVE = tcmt.Drive(0, frequency=3.0, envelope=jnp.cos)
NETWORK = tcmt.rectangular(2, 3)
THETA = {
    "omega": np.linspace(-0.5, 0.8, 6),
    "kappa": np.linspace(0.7, 1.2, 7),
    "chi": np.linspace(-0.04, 0.06, 6),
    "gamma_e": np.array([1.0, 0.8]),
    "gamma": np.linspace(0.02, 0.05, 6),
}


def assert_same(fused, reference, rtol=1e-9):
    for name in reference.gradient:
        size = np.abs(reference.gradient[name]).max()
        np.testing.assert_allclose(
            fused.gradient[name], reference.gradient[name], 0, rtol * size, err_msg=name
        )
    np.testing.assert_allclose(fused.returns, reference.returns, rtol=rtol)


@pytest.mark.parametrize(
    ("make", "options", "baseline"),
    [
        # whose table has a reward of the end
        pytest.param(tcmt.transmission, {}, "time", marks=pytest.mark.long),
        (
            tcmt.isolation,
            {"sigma_kappa": 0.2, "frame": "lab", "drive": LAB_DRIVE},
            "none",
        ),
    ],
)
def test_every_family_of_a_heun_task_equals_the_reference(make, options, baseline):
    task = make(NETWORK, horizon=0.9, dt=0.03, integrator="heun", **options)
    reference = task.estimator("jax", baseline=baseline).samples(KEY, THETA, 6)
    assert_same(
        task.estimator("cpu", baseline=baseline, dtype="float64").samples(KEY, THETA, 6), reference
    )
    single = task.estimator("cpu", baseline=baseline).samples(KEY, THETA, 6)
    assert_same(single, reference, rtol=3e-5)


@pytest.mark.long
def test_the_twin_of_a_heun_task_equals_the_reference():
    """By its direct part, which knows no λ̄; tests of the kernel have the other one.

    The kernel's guess has half of the last reward at the end and no rewards of steps, which is the
    same sum."""
    task = tcmt.transmission(NETWORK, horizon=0.9, dt=0.03, sigma_kappa=0.2, integrator="heun")
    rate = tcmt.transmission(NETWORK, horizon=0.9, dt=0.03).objective.running
    by_ends = fl.Objective(
        running=lambda theta, x, t: rate(theta, x, t) * jnp.where(t > 0, 1.0, 0.5),
        terminal=lambda theta, x: rate(theta, x, jnp.asarray(0.9)) * 0.015,
    )
    estimator = fl.ppgt(task.simulator(), by_ends, process=task.process, baseline="twin")
    model = estimator.method.model._replace(objective=check.objective(by_ends))  # a left sum
    estimator = replace(estimator, method=estimator.method._replace(model=model))
    reference = estimator.split(KEY, THETA, 6)
    parts = task.estimator("cpu", baseline="twin", dtype="float64").split(KEY, THETA, 6)
    for name in THETA:
        size = np.abs(reference.direct[name]).max()
        np.testing.assert_allclose(
            parts.direct[name], reference.direct[name], 0, 1e-9 * size, err_msg=name
        )
    np.testing.assert_allclose(parts.returns, reference.returns, rtol=1e-9)


def test_the_reward_is_the_trapezoid_sum():
    """On measured states too, by the kernels' door."""
    task = tcmt.transmission(NETWORK, horizon=0.9, dt=0.03, integrator="heun")
    path = task.simulator()(split_key(KEY)[0], THETA, 4)
    rate = tcmt.transmission(NETWORK, horizon=0.9, dt=0.03).objective.running
    rates = jax.vmap(jax.vmap(lambda x, t: rate(THETA, x, t), (0, 0)), (0, None))
    expected = np.trapezoid(jax.jit(rates)(path.x, path.t), path.t)
    np.testing.assert_allclose(
        task.estimator("cpu", dtype="float64").returns(THETA, path), expected, rtol=1e-12
    )
    simulated = (
        task.estimator("cpu", baseline="none", dtype="float64").samples(KEY, THETA, 4).returns
    )
    np.testing.assert_allclose(simulated, expected, rtol=1e-12)


def test_a_reward_of_ones_own_is_of_second_order_too():
    """∫|s⁻|² of a noise-free decay of a drive: halving Δt quarters the error."""
    drive, rate = tcmt.Drive(0, envelope=jnp.cos), lambda theta, x, t: jnp.sum(x**2) * jnp.exp(-t)

    def value(dt):
        task = tcmt.custom(NETWORK, drive, rate, horizon=1.2, dt=dt, integrator="heun")
        path = task.simulator(fl.core.draws.no_noise)(KEY, THETA, 2)
        return fl.mean_return_to_go(task.objective, THETA, path)[0]

    coarse, middle, fine = (value(dt) for dt in (0.04, 0.02, 0.01))
    assert (coarse - middle) / (middle - fine) == pytest.approx(4, abs=0.4)


def test_another_noise_keeps_the_step():
    task = tcmt.with_noise(tcmt.transmission(NETWORK, dt=0.02, integrator="heun"), sigma_w=0.1)
    assert task.integrator == "heun"
    assert task.objective.per_step is not None


def test_doors_without_a_step_refuse_it_by_name():
    heun, rk4 = (
        tcmt.transmission(NETWORK, horizon=0.9, dt=0.03, integrator=step)
        for step in ("heun", "rk4")
    )
    for task, backend, baseline, message in (
        (heun, "cpu", Binned(2), 'binned.*integrator="heun"'),
        (heun, "cpu", "optimal", 'binned.*integrator="heun"'),
        (rk4, "cpu", "time", "rk4.*jax"),
    ):
        with pytest.raises(ValueError, match=message):
            task.estimator(backend, baseline=baseline)
    with pytest.raises(ValueError, match="heun"):
        exact.value(heun, {})
    with pytest.raises(ValueError, match="`integrator`.*'midpoint'"):
        tcmt.transmission(NETWORK, integrator="midpoint")


@pytest.mark.parametrize("step", SERIES)
def test_the_largest_step_is_where_a_mode_begins_to_grow(step):
    """Of modes damped by anything from 1e-4 of their frequency to all of it, turning either way."""
    loss = np.geomspace(1e-4, 1, 9)
    modes = np.concatenate([-loss + 1j, -3 * loss - 2j, [-1.0]])
    edge = largest_step(step, modes)
    growth = lambda dt: np.abs(np.polyval(SERIES[step][::-1], dt * modes))
    assert (growth(edge * (1 - 1e-6)) < 1).all()
    assert (growth(edge * (1 + 1e-6)) > 1).all()
    shorter = np.linspace(1e-3, 1, 500)[:, None] * edge
    assert (growth(shorter) <= 1 + 1e-12).all()
    assert largest_step(step, np.array([0j])) == np.inf
    assert largest_step(step, np.array([0.1 + 1j])) <= 0


def test_undamped_modes_are_never_stable_but_with_rk4():
    free = np.array([1j])
    assert largest_step("heun", free) < 1e-12
    assert largest_step("rk4", free) == pytest.approx(np.sqrt(8))


@pytest.mark.long
def test_stability_names_the_step():
    euler, heun, rk4 = (
        tcmt.stability(tcmt.transmission(tcmt.paper(), dt=0.05, integrator=step), {})
        for step in ("euler", "heun", "rk4")
    )
    assert (euler.stable, heun.stable, rk4.stable) == (False, True, True)
    assert 'integrator="heun"' in str(euler)
    assert str(heun).startswith("Heun steps of 0.05")
    assert 20 * euler.largest_dt < heun.largest_dt < rk4.largest_dt
    network, theta = tcmt.rectangular(3, 3), {"omega": np.linspace(-2, 2, 9)}
    verdict = tcmt.stability(
        tcmt.transmission(network, horizon=2.0, dt=0.1, integrator="heun"), theta
    )
    p = {
        name: np.asarray(theta.get(name, getattr(network, name)))
        for name in tcmt.parameters(network, {})
    }
    advance = jax.vmap(lambda e: exact.propagator(network, p, 0.1, 0.0, e), out_axes=1)
    z = np.asarray(jax.jit(advance)(np.eye(9, dtype=complex))) - np.eye(9)
    grown = np.abs(np.linalg.eigvals(np.eye(9) + z + z @ z / 2)).max()
    assert verdict.radius == pytest.approx(grown, rel=1e-12)
