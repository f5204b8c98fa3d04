"""The scores against automatic differentiation of the Gaussian transition density."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from fluctua import NoiseProduct, Process
from fluctua.core import check, scores
from fluctua.core.process import Step
from fluctua.core.scores import drift_score, full_score
from problems import flat

RELATIVE = 1e-10


class Case:
    """A random nonlinear process of M components and W noises, with every argument used."""

    def __init__(self, seed: int, m: int, extra: int):
        w = m + extra
        normal = np.random.default_rng(seed).normal
        self.theta = {
            "a": normal(size=(m, m)),
            "b": 0.3 * normal(size=m),
            "s": {"diagonal": 0.2 * normal(size=m), "mixing": 0.15 * normal(size=(m, w))},
        }
        self.step = Step(
            x=normal(size=m),
            x_next=normal(size=m),
            t=np.asarray(0.7),
            dt=np.asarray(0.01),
            context=normal(size=m),
        )
        # A dominant diagonal keeps the condition number of Q modest, so 1e-10 is about the algebra.
        self.identity = np.eye(m, w)

    def drift(self, theta, x, t, context):
        return jnp.sin(theta["a"] @ x) + theta["b"] * context * jnp.cos(t)

    def diagonal(self, theta, x, t, context):
        return (
            jnp.exp(theta["s"]["diagonal"]) * (1 + 0.3 * jnp.sin(x) + 0.1 * t) + 0.05 * context**2
        )

    def dense(self, theta, x, t, context):
        tilt = theta["s"]["mixing"] * jnp.cos(x)[:, None]
        return self.identity * self.diagonal(theta, x, t, context)[:, None] + tilt

    def product(self, theta, x, t, context, dw):
        return self.dense(theta, x, t, context) @ dw

    def q_product(self, theta, x, t, context, v):
        sigma = self.dense(theta, x, t, context)
        return sigma @ (sigma.T @ v) / 2

    def processes(self):
        width = self.identity.shape[1]
        return {
            "diagonal": Process(self.drift, self.diagonal),
            "dense": Process(self.drift, self.dense),
            "noise product": Process(self.drift, NoiseProduct(self.product, width)),
            "Qv": Process(self.drift, None, self.q_product),
        }

    def by_autodiff(self, form: str, shift=None):
        """∂θ ln N(x'; x + μΔt, 2QΔt), the density written out by the statistics library."""
        x, x_next, t, dt, context = self.step[:5]

        def log_density(theta):
            a, b = (x, x_next) if shift is None else (x + shift(theta)[0], x_next + shift(theta)[1])
            sigma = (self.diagonal if form == "diagonal" else self.dense)(theta, a, t, context)
            sigma = jnp.diag(sigma) if sigma.ndim == 1 else sigma
            mean = a + self.drift(theta, a, t, context) * dt
            return jax.scipy.stats.multivariate_normal.logpdf(b, mean, sigma @ sigma.T * dt)

        return jax.grad(log_density)(self.theta)


FORMS = ["diagonal", "dense", "noise product", "Qv"]
PAIRS = [
    ("diagonal", (1, 0)),
    ("diagonal", (4, 0)),
    ("dense", (3, 2)),
    ("dense", (2, 1)),
    ("noise product", (3, 2)),
    ("Qv", (2, 1)),
]
seeds = st.integers(0, 2**31)


@cache
def compile_scores(score, form, shape):
    """(theta, step) -> (score, the same by automatic differentiation), compiled once per shape."""

    @jax.jit
    def both(theta, step):
        case = Case(0, *shape)
        case.theta, case.step = theta, step
        return score(case.processes()[form], theta, step), case.by_autodiff(form)

    return both


def assert_close(got, expected):
    got, expected = flat(got), flat(expected)
    assert np.abs(got - expected).max() <= RELATIVE * np.abs(expected).max()


@pytest.mark.parametrize(("form", "shape"), PAIRS)
@settings(max_examples=25)
@given(seed=seeds)
def test_full_score_is_the_derivative_of_the_log_density(form, shape, seed):
    case = Case(seed, *shape)
    assert_close(*compile_scores(full_score, form, shape)(case.theta, case.step))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25)
@given(seed=seeds)
def test_drift_score_agrees_where_parameters_enter_the_drift_only(form, seed):
    case = Case(seed, 3, 2)
    got, expected = compile_scores(drift_score, form, (3, 2))(case.theta, case.step)
    for family in ("a", "b"):
        assert_close(got[family], expected[family])
    assert not ravel_pytree(got["s"])[0].any()


@pytest.mark.parametrize("form", ["diagonal", "dense", "Qv"])
def test_full_score_differentiates_moving_ends(form):
    case = Case(seed=5, m=3, extra=1)
    shift = lambda theta: (
        0.7 * (theta["b"] - case.theta["b"]),
        0.2 * (theta["b"] - case.theta["b"]),
    )
    score = jax.jit(
        lambda theta, step: full_score(case.processes()[form], theta, step, shift=shift)
    )
    assert_close(score(case.theta, case.step), jax.jit(lambda: case.by_autodiff(form, shift))())


def test_score_has_zero_mean_and_the_fisher_covariance():
    """E[U] = 0 and E[U²] = −E[∂²ln p] for one parameter in the noise: (1/2)·(∂ln Q)² = 2 at σ =
    1.
    """
    process = Process(lambda th, x, t, c: -x, lambda th, x, t, c: th * jnp.ones_like(x))
    z = jax.random.normal(jax.random.key(0), (200_000,))
    x, dt = jnp.ones(1), jnp.asarray(0.01)

    def one(z):
        return full_score(
            process, jnp.asarray(1.0), Step(x, x - x * dt + jnp.sqrt(dt) * z, 0.0, dt)
        )

    u = np.asarray(jax.jit(jax.vmap(one))(z))
    assert abs(u.mean()) < 4 * np.sqrt(2 / len(u))
    assert abs((u**2).mean() - 2) < 4 * np.sqrt(
        56 / len(u)
    )  # u = z² − 1, whose fourth moment is 60 = 56 + 2²


def test_noise_that_is_the_same_everywhere_is_inverted_once():
    """The same score as where it might depend on the state, to rounding: and no factorisation a
    trajectory.
    """
    sigma = jnp.array([[1.0, 0.3, 0.1], [0.2, 0.8, -0.4], [0.0, 0.5, 1.1]])
    drift = lambda k, x: -k * x
    constant = check.process(Process(drift, lambda k, x: sigma * k[0]))
    hidden = check.process(Process(drift, lambda k, x: sigma * k[0] + 0 * x[0]))
    k, x = jnp.array([0.7, 1.1, 0.4]), jax.random.normal(jax.random.key(0), (2, 50, 3))
    score = lambda process: jax.vmap(
        lambda a, b: full_score(process, k, Step(a, b, 0.0, 0.1)), in_axes=(0, 0)
    )
    np.testing.assert_allclose(
        jax.jit(score(constant))(*x), jax.jit(score(hidden))(*x), rtol=1e-9, atol=1e-10
    )
    shapes = lambda process: str(jax.make_jaxpr(score(process))(*x))
    assert "50,3,3] = cholesky" in shapes(hidden).replace("f64[", "").replace("f32[", "")
    assert "50,3,3] = cholesky" not in shapes(constant).replace("f64[", "").replace("f32[", "")


def test_functions_of_the_process_may_leave_off_arguments():
    """The scores are called by users too, with a process as they wrote it: dX = −θx dt + dW."""
    process = Process(lambda theta, x: -theta * x, lambda theta, x: jnp.ones(1))
    step = Step(x=jnp.array([2.0]), x_next=jnp.array([2.5]), t=0.0, dt=0.1)
    kick = 2.5 - 2.0 + 3.0 * 2.0 * 0.1
    np.testing.assert_allclose(scores.residual(process, 3.0, step), [kick])
    for score in (drift_score, full_score):
        np.testing.assert_allclose(score(process, 3.0, step), -2.0 * kick)
    law = scores.euler(process, 3.0, step)
    np.testing.assert_allclose([law.mean[0], law.covariance[0, 0]], [1.4, 0.1])
    law = scores.local_linear(process, 3.0, step)
    np.testing.assert_allclose(law.mean, 2.0 * np.exp(-0.3))
