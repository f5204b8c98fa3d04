"""The tests have power: deliberate errors, one at a time, are rejected by the same z that the
others use.

The estimator is written out once more, plainly, with every score and return stored. Unchanged it is
the library's, number by number; changed in one place it must miss the exact gradient by more than
six standard errors in some component, which chance does once in 10⁸ tests.
"""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fluctua
from problems import flat, multiplicative, problem, tolerance

E, FEW, REJECTED = 5000, 1000, 6.0
THE = problem(multiplicative)  # theta is in the drift, the noise, the start and the rewards


class Parts(NamedTuple):
    """All that the gradient is made of."""

    score: np.ndarray  # Uₙ (E, T, P)
    to_go: np.ndarray  # λ̂ₙ₊₁ (E, T), what each score meets
    state: np.ndarray  # Xₙ (E, T, M), what bins look at
    initial: np.ndarray  # ∂θ ln p₀ (E, P)
    returns: np.ndarray  # λ̂₀ (E,)
    explicit: np.ndarray  # ∂θ of the rewards (E, P)


@cache
def paths(count=E):
    record = THE.simulator(jax.random.key(11), THE.theta, count)
    return record._replace(x=np.asarray(record.x))  # slices of it compile nothing


def all_returns(x):
    """λ̂ₙ (E, T+1)."""
    each = jax.vmap(
        jax.vmap(lambda x, t: THE.objective.running(THE.theta, x, t, None)), in_axes=(0, None)
    )
    end = jax.vmap(lambda x: THE.objective.terminal(THE.theta, x, None))
    return fluctua.returns_to_go(each(x[:, :-1], THE.t[:-1]), end(x[:, -1]), jnp.diff(THE.t))


@cache
def parts(score=fluctua.scores.full_score, count=E):
    """Of one trajectory after the other; nothing here looks across trajectories."""
    x, t = paths(count).x, THE.t

    def one(x):
        step = lambda x, x_next, t, dt: fluctua.scores.Step(x, x_next, t, dt, None)
        u = lambda *ends: ravel_pytree(score(THE.process, THE.theta, step(*ends)))[0]
        slope = lambda f: ravel_pytree(jax.grad(f)(THE.theta))[0]

        def rewards(th):
            running = jax.vmap(lambda x, t: THE.objective.running(th, x, t, None))(x[:-1], t[:-1])
            return running @ jnp.diff(t) + THE.objective.terminal(th, x[-1], None)

        initial = slope(lambda th: THE.start.log_density(th, x[0], None))
        return jax.vmap(u)(x[:-1], x[1:], t[:-1], jnp.diff(t)), initial, slope(rewards)

    made = jax.jit(lambda x: (*jax.vmap(one)(x), all_returns(x)))(x)
    scores, initial, explicit, to_go = (np.asarray(part) for part in made)
    return Parts(scores, to_go[:, 1:], x[:, :-1], initial, to_go[:, 0], explicit)


def samples(made, baseline):
    """G of every trajectory (E, P): Eq. (13), with any function of a `Inputs` for a baseline."""

    def step(n, x, t, returns, score):
        kick = fluctua.baselines.Inputs(n, THE.theta, x, t, None, returns, score, None)
        return (returns[:, None] - baseline(kick)) * score

    each = jax.vmap(step, in_axes=(0, 1, 0, 1, 1))
    terms = each(jnp.arange(THE.t.size - 1), made.state, THE.t[:-1], made.to_go, made.score)
    return terms.sum(axis=0) + step(-1, None, THE.t[0], made.returns, made.initial) + made.explicit


compute_samples = jax.jit(samples, static_argnums=1)


def compute_z(made, baseline=None):
    """z of every component of the gradient; the default baseline is the library's."""
    baseline = fluctua.baselines.optimal() if baseline is None else baseline
    each = np.asarray(compute_samples(made, baseline.function))
    estimate = fluctua.reduce_samples(fluctua.Samples(each, made.returns))
    off = estimate.gradient - flat(THE.exact_gradient)
    with np.errstate(divide="ignore"):  # an error may leave a component at 0 ± 0: infinitely wrong
        return np.asarray(off) / np.asarray(estimate.stderr)


def is_accepted(z):
    return np.abs(z).max() < tolerance(z.size)


def first(count, made):
    return jax.tree.map(lambda leaf: leaf[:count], made)


# ------------------------------------------------------------------------------- nothing is changed

BINNED = fluctua.baselines.binned(lambda th, x: x[0], bins=20)


def test_unchanged_it_is_the_estimator_of_the_library():
    each = np.asarray(compute_samples(first(FEW, parts()), fluctua.baselines.optimal().function))
    few = paths()._replace(x=paths().x[:FEW])
    estimate = fluctua.gradient(
        THE.process,
        THE.objective,
        THE.theta,
        few,
        start=THE.start,
        baseline=fluctua.baselines.optimal(),
    )
    np.testing.assert_allclose(flat(estimate.gradient), each.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(flat(estimate.second_moment), (each**2).mean(axis=0), rtol=1e-9)


def test_unchanged_it_is_accepted():
    assert is_accepted(compute_z(parts(), fluctua.baselines.none()))
    assert is_accepted(compute_z(parts(), fluctua.baselines.optimal()))
    assert is_accepted(compute_z(first(FEW, parts()), BINNED))


# --------------------------------------------------------------------------------- a wrong equation

WRONG_SUM = {
    "score with the other sign": lambda p: p._replace(score=-p.score),
    "score doubled": lambda p: p._replace(score=2 * p.score),
    "score halved": lambda p: p._replace(score=p.score / 2),
    "initial score with the other sign": lambda p: p._replace(initial=-p.initial),
    "initial score left out": lambda p: p._replace(initial=0 * p.initial),
    "explicit terms left out": lambda p: p._replace(explicit=0 * p.explicit),
    "λ̂ₙ₊₂: the reward that the kick earned first is lost": lambda p: p._replace(
        to_go=np.append(p.to_go[:, 1:], 0 * p.to_go[:, :1], axis=1)
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG_SUM)
def test_wrong_sum(name):
    z = compute_z(WRONG_SUM[name](parts()))
    assert np.abs(z).max() > REJECTED, z


def without_drift_in_the_residual(process, theta, step):
    mu = process.drift(theta, step.x, step.t, step.context)
    return fluctua.scores.full_score(
        process, theta, step._replace(x_next=step.x_next + mu * step.dt)
    )


def with_q_twice_as_large(process, theta, step):
    noise = lambda *args: np.sqrt(2) * process.noise(*args)
    return fluctua.scores.full_score(process._replace(noise=noise), theta, step)


def without_the_trace(process, theta, step):
    """U + ½Tr[Q⁻¹∂Q]; one dimension, so that the trace is ln Q."""
    log_q = lambda th: jnp.log(jnp.sum(process.noise(th, step.x, step.t, step.context) ** 2))
    score = fluctua.scores.full_score(process, theta, step)
    return jax.tree.map(lambda u, d: u + d / 2, score, jax.grad(log_q)(theta))


def with_derivatives_after_the_kick(process, theta, step):
    """½rᵀQ⁻¹∂μ(x') and so on: taken at the end of the step, where Itô asks for its beginning."""
    x = step.x_next
    r = fluctua.scores.residual(process, theta, step)
    x_next = x + process.drift(theta, x, step.t, step.context) * step.dt + r
    return fluctua.scores.full_score(process, theta, step._replace(x=x, x_next=x_next))


@pytest.mark.long
@pytest.mark.parametrize(
    "score",
    [
        without_drift_in_the_residual,
        with_q_twice_as_large,
        without_the_trace,
        with_derivatives_after_the_kick,
        fluctua.scores.drift_score,  # right for the drift, but the noise has parameters here
    ],
)
def test_wrong_score(score):
    z = compute_z(parts(score))
    assert np.abs(z).max() > REJECTED, z


@pytest.mark.long
def test_a_constant_in_the_score_shows_best_without_baseline():
    # ½Tr[Q⁻¹∂Q] is 1/σ for a constant noise, the same for all trajectories. A baseline takes from
    # the return what such a constant multiplies, and with it the bias: the trace of σ alone is seen
    # where there is none.
    sigma = sorted(THE.theta).index("sigma")
    plain, based = (
        np.abs(compute_z(parts(without_the_trace), b))[sigma]
        for b in (fluctua.baselines.none(), fluctua.baselines.optimal())
    )
    assert plain > 5 * based
    assert plain > REJECTED


# --------------------------------------------------------------------------------- a wrong baseline


@pytest.mark.long
def test_bins_of_the_state_after_the_kick():
    # The bin then knows the kick, and what is subtracted is the very signal.
    made = parts()._replace(state=paths().x[:, 1:])
    z = compute_z(first(FEW, made), BINNED)
    assert np.abs(z).max() > REJECTED, z


def with_itself_mean(kick):
    return kick.returns.mean()


def with_itself_optimal(kick):
    total = jnp.sum(kick.score**2, axis=0)
    return kick.returns @ kick.score**2 / jnp.where(total > 0, total, 1)


def compute_z_of_small_ensembles(baseline, size=4):
    """z from the means of many ensembles of four, where leaving oneself out matters."""
    each = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), parts(count=40_000))
    means = np.asarray(jax.jit(jax.vmap(lambda made: samples(made, baseline).mean(axis=0)))(each))
    return (means.mean(axis=0) - flat(THE.exact_gradient)) / (means.std(axis=0) / len(means) ** 0.5)


@pytest.mark.long
@pytest.mark.parametrize("baseline", [with_itself_mean, with_itself_optimal])
def test_baseline_that_includes_the_trajectory_itself(baseline):
    # Of four, a trajectory makes up a quarter of its own baseline: the mean takes 1/4 of the signal
    # away.
    z = compute_z_of_small_ensembles(baseline)
    assert np.abs(z).max() > REJECTED, z


@pytest.mark.long
@pytest.mark.parametrize("baseline", [fluctua.baselines.mean(), fluctua.baselines.optimal()])
def test_leave_one_out_baselines_are_right_even_for_four_trajectories(baseline):
    assert is_accepted(compute_z_of_small_ensembles(baseline.function))


# --------------------------------------------------------------------------------- what is no error


@pytest.mark.long
@pytest.mark.parametrize("baseline", [fluctua.baselines.none(), fluctua.baselines.mean()])
def test_earlier_rewards_only_add_variance(baseline):
    # λ̂ₙ or even λ̂₀ in place of λ̂ₙ₊₁ is NOT an error of the mean: rewards before the kick are
    # independent of it, with any admissible baseline. The z-test must not reject it. It costs
    # variance, nothing else.
    made = parts()
    whole = np.broadcast_to(made.returns[:, None], made.to_go.shape)
    at_n = np.append(made.returns[:, None], made.to_go[:, :-1], axis=1)
    for to_go in (at_n, whole):
        assert is_accepted(compute_z(made._replace(to_go=to_go), baseline))
