"""The twin's tests have power: one deliberate error at a time is rejected by the z that the others
use.

The estimator is written out once more, plainly, with everything stored and V from another source:
the exact expected return of the twin from the recursion of its moments, a parabola.
Unchanged it is the library's, number by number. Changed in one place it must miss the exact
gradient by more than six standard errors in some component."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fluctua as fl
from fluctua.core.estimator import gradient_samples
from problems import exact_return, flat, multiplicative, problem, tolerance

E, FEW, REJECTED = 20_000, 500, 6.0
THE = problem(multiplicative)  # theta is in the drift, the noise, the start and the rewards
TIMES = np.asarray(THE.t)
WRONG = lambda th: jax.tree.map(
    lambda v: 1.2 * v, th
)  # with a right twin an error in the correction would not show


class Parts(NamedTuple):
    """All that the two parts are made of, for E trajectories of a state with one component."""

    score: np.ndarray  # Uₙ (E, T, P)
    initial: np.ndarray  # ∂θ ln p₀ (E, P)
    explicit: np.ndarray  # ∂θ of the rewards (E, P)
    rewards: np.ndarray  # g(Xₙ)Δt (E, T)
    terminal: np.ndarray  # g_T (E,)
    v: np.ndarray  # (E, T+1), and so are p, s and d
    p: np.ndarray
    s: np.ndarray
    d: np.ndarray  # Xₙ − x̄ₙ
    e: np.ndarray  # m(Xₙ) − x̄ₙ₊₁ (E, T)
    q: np.ndarray  # QΔt (E, T)
    d_mean: np.ndarray  # ∂θ μΔt (E, T, P)
    d_q: np.ndarray  # ∂θ QΔt (E, T, P)


@cache
def paths():
    return np.asarray(THE.simulator(jax.random.key(12), THE.theta, E).x)[..., 0]


def twin_value(n, x):
    """The twin's expected return from x at time n, rewards at θ."""
    wrong = WRONG(THE.theta)
    twin = fl.Process(
        lambda th, x, t, c: THE.process.drift(wrong, x, t, c),
        lambda th, x, t, c: THE.process.noise(wrong, x, t, c),
    )
    since = jnp.maximum(TIMES, jnp.asarray(TIMES)[n])  # steps before n take no time
    return exact_return(twin, THE.objective, since, THE.theta, x[None], jnp.zeros((1, 1)), 0.0, 0.0)


@cache
def parts():
    x, t, dt, theta = paths(), TIMES, np.diff(TIMES), THE.theta
    slope = lambda f: ravel_pytree(jax.grad(f)(theta))[0]
    mean = lambda th, x, t, dt: (x + THE.process.drift(th, x[None], t, None) * dt)[0]
    power = lambda th, x, t, dt: jnp.sum(THE.process.noise(th, x[None], t, None) ** 2) / 2 * dt

    def step(x, x_next, t, dt):
        u = fl.scores.full_score(
            THE.process, theta, fl.scores.Step(x[None], x_next[None], t, dt, None)
        )
        reward = lambda th: THE.objective.running(th, x[None], t, None) * dt
        return (
            ravel_pytree(u)[0],
            slope(reward),
            slope(lambda th: mean(th, x, t, dt)),
            slope(lambda th: power(th, x, t, dt)),
            reward(theta),
            mean(theta, x, t, dt),
            power(theta, x, t, dt),
        )

    def one(x):
        of_steps = jax.vmap(step)(x[:-1], x[1:], t[:-1], dt)
        initial = slope(lambda th: THE.start.log_density(th, x[:1], None))
        reward = lambda th: THE.objective.terminal(th, x[-1:], None)
        advance = lambda x, when: (mean(WRONG(theta), x, *when),) * 2
        _, bar = jax.lax.scan(advance, x[0], (t[:-1], dt))
        bar = jnp.append(x[:1], bar)
        return of_steps, initial, slope(reward), reward(theta), bar

    made = jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(x))
    (score, explicit, d_mean, d_q, rewards, ahead, q), initial, last, terminal, bar = made
    # the twin's return is quadratic in where it begins: three values have its slope and its bend
    around = jax.jit(jax.vmap(jax.vmap(twin_value, in_axes=(None, 0)), in_axes=(0, None)))
    down, middle, up = np.asarray(around(np.arange(t.size), np.array([-1.0, 0.0, 1.0]))).T
    s = np.broadcast_to(up + down - 2 * middle, bar.shape)
    p = (up - down) / 2 + s * bar
    v = middle + (up - down) / 2 * bar + s * bar**2 / 2
    return Parts(
        score,
        initial,
        explicit.sum(1) + last,
        rewards,
        terminal,
        v,
        p,
        s,
        x - bar,
        ahead - bar[:, 1:],
        q,
        d_mean,
        d_q,
    )


def value_at(made, n, d):
    """V at time n, departure d. (E,)"""
    return made.v[:, n] + made.p[:, n] * d + made.s[:, n] * d**2 / 2


def residuals(made, omit=()):
    """Λₙ (E, T+1)."""
    steps = made.e.shape[1]
    lam = [
        made.terminal - (0 if "terminal guess" in omit else value_at(made, steps, made.d[:, steps]))
    ]
    for k in reversed(range(steps)):
        worth = 0 if "worth of noise" in omit else made.s[:, k + 1] * made.q[:, k]
        ahead = made.d[:, k + 1] if "kick in the prediction" in omit else made.e[:, k]
        expected = value_at(made, k + 1, ahead) + worth
        before = 0 if "value before" in omit else value_at(made, k, made.d[:, k])
        lam.append(lam[-1] + made.rewards[:, k] + expected - before)
    return np.stack(lam[::-1], axis=1)


def samples(made, omit=(), *, sign=1, late=0, full=True):
    """Direct and correction of every trajectory (E, P). omit: what is left out."""
    bend = 0 if "bend" in omit else made.s[:, 1:, None] * made.e[..., None]
    noise = 0 if "noise" in omit else made.s[:, 1:, None] * made.d_q
    direct = made.explicit + ((made.p[:, 1:, None] + bend) * made.d_mean + noise).sum(axis=1)
    lam = residuals(made, omit)
    meets = lam[:, :-1] if late else lam[:, 1:]
    correction = sign * np.einsum("en,enp->ep", meets, made.score) if full else 0.0
    start = made.v[:, 0] * ("start" not in omit) + lam[:, 0]
    return direct, correction + start[:, None] * made.initial


def compute_z(parts):
    each = np.asarray(parts[0] + parts[1])
    return (each.mean(axis=0) - flat(THE.exact_gradient)) / (
        each.std(axis=0, ddof=1) / np.sqrt(len(each))
    )


@pytest.mark.long
def test_written_out_it_is_the_librarys():
    twin = fl.Twin(WRONG, order=2, baseline=fl.baselines.none())
    data = fl.Trajectories(THE.t, paths()[:FEW, :, None])
    options = {"start": THE.start, "baseline": twin, "initial_baseline": fl.baselines.none()}
    theirs = gradient_samples(THE.process, THE.objective, THE.theta, data, **options).gradient
    ours = sum(samples(parts()))[:FEW]
    np.testing.assert_allclose(
        np.concatenate([v.reshape(FEW, -1) for v in jax.tree.leaves(theirs)], 1), ours, rtol=1e-8
    )


@pytest.mark.long
def test_unchanged_it_is_accepted():
    z = compute_z(samples(parts()))
    assert np.abs(z).max() < tolerance(z.size), z


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        {"sign": -1},  # of the correction
        {"full": False},  # no correction at all: the twin's own gradient
        {"omit": ("bend",)},
        {"omit": ("noise",)},
        {"omit": ("terminal guess",)},
        {"omit": ("value before",)},
        {"omit": ("worth of noise",)},  # in the prediction; a function of X_k, and not only of time
        {"omit": ("start",)},
    ],
    ids=str,
)
def test_an_error_is_rejected(change):
    z = compute_z(samples(parts(), **change))
    assert np.abs(z).max() > REJECTED, z


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        {"late": 1},  # Λₙ for Λₙ₊₁ adds δₙUₙ, and δₙ is settled before the kick
        {
            "omit": ("kick in the prediction", "worth of noise")
        },  # V(X_{k+1}) for its expectation adds later kicks
    ],
    ids=str,
)
def test_what_only_adds_noise_is_accepted(change):
    z = compute_z(samples(parts(), **change))
    assert np.abs(z).max() < tolerance(z.size), z
