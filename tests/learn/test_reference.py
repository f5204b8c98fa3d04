"""Reference estimators against closed forms, and the policy gradient against them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fluctua as fl
from fluctua.core import streamed

THETA = {"k": jnp.asarray(0.9), "f": jnp.asarray(0.7), "m": jnp.asarray(0.4)}
T = np.linspace(0, 1, 26)
PROCESS = fl.Process(lambda th, x: -th["k"] * x + th["f"], lambda th, x: 0.5 * jnp.ones_like(x))
OBJECTIVE = fl.Objective(terminal=lambda th, x: x[0])
START = fl.Density(
    log_density=lambda th, x0: -jnp.sum((x0 - th["m"]) ** 2) / 2 / 0.3**2,
    sample=lambda key, th: th["m"] + 0.3 * jax.random.normal(key, (1,)),
)
RUN = fl.simulator(PROCESS, START, T)


def mean_at_end(theta):
    """E[X_T] of the Euler scheme: m → (1 − kΔt)m + fΔt."""
    dt = T[1] - T[0]
    return jax.lax.fori_loop(
        0, len(T) - 1, lambda _, m: m - theta["k"] * m * dt + theta["f"] * dt, theta["m"]
    )


EXACT = jax.jit(jax.grad(mean_at_end))(THETA)
ESTIMATORS = {
    "ppgt": fl.ppgt(RUN, OBJECTIVE),
    "pathwise": fl.reference.pathwise(OBJECTIVE, RUN),
    "finite differences": fl.reference.finite_differences(OBJECTIVE, RUN),
    "spsa": fl.reference.spsa(OBJECTIVE, RUN),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_finds_the_exact_gradient(name):
    estimate = ESTIMATORS[name](jax.random.key(1), THETA, 4000)
    g, error, exact = (
        np.asarray(ravel_pytree(tree)[0]) for tree in (estimate.gradient, estimate.stderr, EXACT)
    )
    # Along a linear path R is linear in f and m, so pathwise derivatives have no variance there.
    assert np.all(np.abs(g - exact) < 4 * error + 1e-8)
    assert abs(estimate.value - mean_at_end(THETA)) < 4 * estimate.value_stderr


def test_pathwise_and_finite_differences_agree_path_by_path():
    """The same key gives the same noise, so the two differ by the truncation of the difference
    alone.
    """
    curved = fl.Objective(running=lambda th, x: jnp.sum(jnp.sin(x) * th["k"]))
    run = fl.simulator(PROCESS, jnp.zeros(1), T)
    a = fl.reference.pathwise(curved, run)(jax.random.key(2), THETA, 50)
    b = fl.reference.finite_differences(curved, run)(jax.random.key(2), THETA, 50)
    for left, right in zip(jax.tree.leaves(a[:2]), jax.tree.leaves(b[:2]), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-7, atol=1e-9)


def test_finite_differences_hold_few_copies_of_theta():
    """Of 2P + 1 θ, 4,096 numbers at a time and not P²."""
    size = 3000
    theta = {"k": jnp.asarray(0.9), "f": jnp.ones(size), "m": jnp.asarray(0.4)}
    process = fl.Process(lambda th, x: jnp.mean(th["f"]) - x, lambda th, x: jnp.ones_like(x))
    simulated = fl.simulator(process, START, T)
    estimator = fl.reference.finite_differences(OBJECTIVE, simulated)
    run = streamed.Run(jax.random.key(0), theta, simulated.times, simulated.x0)
    h = jnp.full(size + 2, 1e-3)
    made = estimator.kernel.lower(estimator.objective, simulated.recipe, 4, run, h).compile()
    assert made.memory_analysis().temp_size_in_bytes < 100 * theta["f"].nbytes


def test_cost_counts_trajectories():
    assert {name: estimator.cost(THETA) for name, estimator in ESTIMATORS.items()} == {
        "ppgt": 1,
        "pathwise": 1,
        "finite differences": 7,
        "spsa": 2,
    }


@pytest.mark.long
def test_comparison_is_at_equal_cost_and_prints():
    result = fl.reference.compare(
        jax.random.key(0), THETA, ESTIMATORS, trajectories=600, reference=EXACT, repeats=4
    )
    rows = {row.name: row for row in result.rows}
    assert [row.trajectories for row in result.rows] == [600, 600, 595, 600]
    assert rows["finite differences"].samples == 85
    assert rows["ppgt"].samples == 600 - 128
    noisy = [rows[name] for name in ("ppgt", "spsa")]
    assert all(np.abs(row.z).max() < 4 for row in noisy)
    assert rows["pathwise"].variance.mean() < rows["ppgt"].variance.mean()
    text = str(result)
    assert "the exact gradient" in text
    assert all(name in text for name in ESTIMATORS)


class Remembering:
    """Its first call runs a pilot, and every call adds to what the next one knows.

    A stand-in: nothing is run.
    """

    def __init__(self, forgets=True):
        self.forgets, self.seen, self.pilot, self.calls = forgets, 0, 0, []

    def cost(self, theta):
        return 1

    @property
    def state(self):
        return {"seen": np.array(self.seen)} if self.seen else {}

    def restore(self, state, theta):
        if self.forgets or state:
            self.seen = int(state.get("seen", 0))

    def __call__(self, key, theta, count):
        self.pilot = 0 if self.seen else 30
        self.calls.append((self.seen, count))
        self.seen += count
        each = jax.tree.map(lambda leaf: jnp.full((count,), leaf) + jnp.arange(count), theta)
        return fl.reduce_samples(fl.Samples(each, jnp.arange(float(count))))


def test_a_comparison_counts_the_pilot_and_begins_every_repeat_with_the_state_it_came_with():
    fresh = Remembering()
    result = fl.reference.compare(
        jax.random.key(0), THETA, {"fresh": fresh}, trajectories=100, reference=EXACT, repeats=3
    )
    assert fresh.calls == [
        (0, 100),
        (0, 70),
        (0, 70),
        (0, 70),
        (0, 70),
    ]  # two to warm up: the pilot is new to it
    assert (result.rows[0].samples, result.rows[0].trajectories) == (70, 100)
    assert fresh.state == {}

    used = Remembering()
    used.seen = 5
    result = fl.reference.compare(
        jax.random.key(0), THETA, {"used": used}, trajectories=100, reference=EXACT, repeats=2
    )
    assert used.calls == [(5, 100)] * 3
    assert (result.rows[0].trajectories, used.seen) == (100, 5)


def test_a_comparison_refuses_what_cannot_be_reset():
    with pytest.raises(ValueError, match=r"`a` has a state that `restore\(state\)`"):
        fl.reference.compare(
            jax.random.key(0), THETA, {"a": Remembering(False)}, trajectories=100, reference=EXACT
        )


def test_a_pilot_larger_than_the_budget_is_named():
    with pytest.raises(
        ValueError, match=r"`a` costs 1 .* and 128 for its pilot; 100 .*trajectories=130"
    ):
        fl.reference.compare(
            jax.random.key(0), THETA, {"a": ESTIMATORS["ppgt"]}, trajectories=100, reference=EXACT
        )
