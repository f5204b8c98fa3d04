"""Rewards of a step and of the start, against exact moments; what each score meets is tried by
mutation.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fluctua as fl
from fluctua.core.streamed import split_key
from problems import driven_rotor, flat, problem, tolerance, without_noise_parameters, z_scores

BASELINES = {
    "optimal": fl.baselines.optimal(),
    "second order": fl.Twin(order=2),
}
E = 4000


def assert_exact(estimate, the):
    z = z_scores(estimate, the)
    assert np.abs(z).max() < tolerance(z.size), z


@pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES)
def test_streamed(key, baseline):
    the = problem(driven_rotor)
    assert_exact(the.estimator(baseline=baseline)(key, the.theta, E), the)


@pytest.mark.long
def test_reparameterised_starts(key):
    the = problem(driven_rotor, "fade part")  # displaced at first and then no longer
    assert_exact(the.estimator(baseline="twin")(key, the.theta, E), the)


@pytest.mark.long
def test_drift_score(key):
    the = without_noise_parameters(driven_rotor)
    estimator = the.estimator(baseline="mean", score=fl.scores.drift_score)
    assert_exact(estimator(key, the.theta, E), the)


@pytest.mark.long
@pytest.mark.parametrize("name", ["optimal", "twin"])
def test_recorded_is_streamed(key, name):
    """The same trajectories, stored and in chunks: the same numbers up to rounding."""
    the = problem(driven_rotor)
    streamed = the.estimator(baseline=name).samples(key, the.theta, E)
    t, x, *_ = the.simulator(split_key(key)[0], the.theta, E)
    x = np.asarray(x)  # whose slices compile nothing
    chunks = [fl.Trajectories(t, x[:1500]), fl.Trajectories(t, x[1500:])]
    for source, room in ((fl.Trajectories(t, x), 2**20), (chunks, 2**17)):
        recorded = fl.gradient_samples(
            the.process,
            the.objective,
            the.theta,
            source,
            start=the.start,
            baseline=name,
            block_bytes=room,
        )
        np.testing.assert_allclose(recorded.returns, streamed.returns, rtol=1e-9)
        for a, b in zip(
            jax.tree.leaves(recorded.gradient), jax.tree.leaves(streamed.gradient), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_recorded_halves(key):
    """The default for recordings, each half with the mean return-to-go of the other."""
    the = problem(driven_rotor)
    recorded = the.simulator(key, the.theta, E)
    assert_exact(fl.gradient(the.process, the.objective, the.theta, recorded, start=the.start), the)


def test_mean_return_to_go_begins_with_what_is_paid_on_arrival():
    """At every time the table is the mean of what the score before it meets, so that it takes
    off as much as it can.
    """
    the = problem(driven_rotor)
    trajectories, parts = many()
    table = np.asarray(fl.mean_return_to_go(the.objective, the.theta, trajectories))
    np.testing.assert_allclose(table, parts.to_go.mean(axis=0), rtol=1e-9)
    last = parts.running[:, -1].mean()  # the terminal reward
    assert abs(table[-1] - last) > 0.1  # the last step's reward is in it


@pytest.mark.long
def test_a_quadratic_twin_leaves_nothing_to_the_score(key):
    """Affine drift, rewards quadratic in both ends: E[r|X] and V are exact, and the correction
    is rounding.
    """
    the = problem(driven_rotor, "fixed")
    parts = the.estimator(baseline=fl.Twin(order=2, baseline=fl.baselines.none())).split(
        key, the.theta, 50
    )
    direct, correction = (
        flat(jax.tree.map(np.std, part)) for part in (parts.direct, parts.correction)
    )
    assert np.all(correction < 1e-9 * direct.max()), correction


@pytest.mark.long
def test_a_wrong_twin_is_unbiased(key):
    the = problem(driven_rotor)
    wrong = fl.Twin(theta=lambda th: {**th, "k": 1.3 * th["k"], "pull": 0.5 * th["pull"]}, order=2)
    measured = lambda key, theta, count: the.simulator(key, theta, count)
    estimator = fl.ppgt(
        measured, the.objective, process=the.process, start=the.start, baseline=wrong
    )
    parts = estimator.split(key, the.theta, E)
    gradient = jax.tree.map(np.add, parts.direct, parts.correction)
    both = fl.Samples(gradient, parts.returns)
    assert_exact(fl.reduce_samples(both), the)


@pytest.mark.long
def test_pathwise_reference(key):
    the = problem(driven_rotor)
    assert_exact(fl.reference.pathwise(the.objective, the.simulator)(key, the.theta, E), the)


@pytest.mark.long
def test_evaluate(key):
    the = problem(driven_rotor)
    for system in (the.simulator, lambda key, theta, count: the.simulator(key, theta, count)):
        found = fl.evaluate(system, the.theta, count=E, objective=the.objective)
        assert abs(found.J - the.exact_value) < 4 * found.J_stderr


# ---------------------------------------------------------------------------------------- mutations


class Parts:
    """The estimator written out: scores, explicit terms and what is paid when, all stored."""

    def __init__(self, score, initial, explicit, running, arrival):
        self.score, self.initial, self.explicit = (
            score,
            initial,
            explicit,
        )  # (E, T, P), (E, P), (E, P)
        self.running, self.arrival = running, arrival  # gΔt and g_T, (E, T+1); g_0 and r, (E, T+1)

    @property
    def to_go(self):
        """λ̂ₙ (E, T+1)."""
        return np.flip(np.cumsum(np.flip(self.running + self.arrival, 1), axis=1), 1)


def plain_parts(trajectories):
    the = problem(driven_rotor)
    t, x, *_ = trajectories
    dt, rewards = np.diff(t), the.objective

    def one(x):
        u = lambda x, x_next, t, dt: fl.scores.full_score(
            the.process, the.theta, fl.scores.Step(x, x_next, t, dt, None)
        )
        score = jax.vmap(lambda *step: ravel_pytree(u(*step))[0])(x[:-1], x[1:], t[:-1], dt)

        def sum_rewards(th):
            running = jax.vmap(lambda x, t: rewards.running(th, x, t, None))(x[:-1], t[:-1]) * dt
            step = jax.vmap(lambda x, x_next, t, dt: rewards.per_step(th, x, x_next, t, dt, None))(
                x[:-1], x[1:], t[:-1], dt
            )
            first, last = rewards.initial(th, x[0], None), rewards.terminal(th, x[-1], None)
            return jnp.append(running, last), jnp.concatenate([first[None], step])

        slope = lambda f: ravel_pytree(jax.grad(f)(the.theta))[0]
        explicit = slope(lambda th: sum(jnp.sum(part) for part in sum_rewards(th)))
        return (
            score,
            slope(lambda th: the.start.log_density(th, x[0], None)),
            explicit,
            *sum_rewards(the.theta),
        )

    return Parts(*(np.asarray(part) for part in jax.jit(jax.vmap(one))(x)))


@cache
def many():
    the = problem(driven_rotor)
    t, x, *_ = the.simulator(jax.random.key(5), the.theta, 20_000)
    trajectories = fl.Trajectories(t, np.asarray(x))
    return trajectories, plain_parts(trajectories)


def estimate_by_hand(parts, meets, at_start, explicit=1.0):
    """G (E, P): each score with what it meets, less its mean."""
    terms = np.einsum("en,enp->ep", meets - meets.mean(axis=0), parts.score)
    return terms + (at_start - at_start.mean())[:, None] * parts.initial + explicit * parts.explicit


MUTATIONS = {
    "a step's reward meets the next score": lambda p: (
        p.to_go[:, 1:] - p.arrival[:, 1:],
        p.to_go[:, 0],
    ),
    "no reward of the start": lambda p: (p.to_go[:, 1:], p.to_go[:, 0] - p.arrival[:, 0]),
}


def largest(samples):
    the = problem(driven_rotor)
    off = samples.mean(axis=0) - flat(the.exact_gradient)
    with np.errstate(divide="ignore"):  # an error may leave a component at 0 ± 0: infinitely wrong
        z = off / (samples.std(axis=0) / np.sqrt(len(samples)))
    return float(np.abs(z).max())


def test_written_out_it_is_the_library():
    the = problem(driven_rotor)
    trajectories, parts = many()
    assert largest(estimate_by_hand(parts, parts.to_go[:, 1:], parts.to_go[:, 0])) < tolerance(8)
    few = fl.Trajectories(trajectories.t, trajectories.x[:200])
    plain = (
        np.einsum("en,enp->ep", parts.to_go[:, 1:], parts.score)
        + parts.to_go[:, :1] * parts.initial
        + parts.explicit
    )
    ours = fl.gradient_samples(
        the.process, the.objective, the.theta, few, start=the.start, baseline="none"
    ).gradient
    ours = np.concatenate([np.reshape(leaf, (200, -1)) for leaf in jax.tree.leaves(ours)], axis=1)
    np.testing.assert_allclose(ours, plain[:200], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_mutations_are_rejected(mutation):
    _, parts = many()
    assert largest(estimate_by_hand(parts, *mutation(parts))) > 6


def test_without_explicit_terms_it_is_rejected():
    _, parts = many()
    assert largest(estimate_by_hand(parts, parts.to_go[:, 1:], parts.to_go[:, 0], explicit=0.0)) > 6


# -------------------------------------------------------------------------------------- other doors


def test_events_counted_by_steps(key):
    """Events at the rate θ: J = θT, and each is known to the score of its own step alone."""
    counter = fl.Jumps(lambda th, x: th["rate"][None], [[1.0]])
    simulator = fl.simulator(counter, jnp.zeros(1), jnp.linspace(0, 2, 9))
    counted = fl.Objective(per_step=lambda th, x, x_next: x_next[0] - x[0])
    estimate = fl.ppgt(simulator, counted)(key, {"rate": jnp.array(3.0)}, 2000)
    assert abs(estimate.gradient["rate"] - 2) < 4 * estimate.stderr["rate"] < 0.5
    assert abs(estimate.value - 6) < 4 * estimate.value_stderr


def test_filtered_keeps_rewards_of_its_own_state(key):
    the = problem(driven_rotor)
    added = fl.filters.filtered(the.process, the.objective, the.start, fl.filters.low_pass(0.5))
    assert added.objective.terminal is not None
    longer = lambda x: jnp.concatenate([x, jnp.ones(1)])
    x, y = jnp.array([0.3, -0.2]), jnp.array([0.5, 0.1])
    expected = the.objective.per_step(the.theta, x, y, 0.4, 0.1, None)
    assert added.objective.per_step(the.theta, longer(x), longer(y), 0.4, 0.1, None) == expected
    assert added.objective.initial(the.theta, longer(x), None) == the.objective.initial(
        the.theta, x, None
    )


def test_rewards_must_be_numbers(key):
    the = problem(driven_rotor)
    for name, bad in (
        ("step", fl.Objective(per_step=lambda th, x, x_next: x_next - x)),
        ("initial", fl.Objective(initial=lambda th, x: x)),
    ):
        with pytest.raises(ValueError, match=rf"{name} reward.*\(2,\)"):
            fl.ppgt(the.simulator, bad, process=the.process)(key, the.theta, 10)
    with pytest.raises(ValueError, match="`per_step` or `initial`"):
        fl.ppgt(the.simulator, fl.Objective(), process=the.process)
