"""Trajectories used again, against exact answers at the parameters where they were not taken.

Constant force: the weight of a path is log-normal in closed form. Linear chains: J and ∇J of the
Euler scheme at any parameters (tests/support/problems.py). Birth and death: the mean of the master
equation."""

import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom

import fluctua as fl
from fluctua.core.process import Step
from numeric import value_and_slope
from problems import (
    exact_return,
    flat,
    non_normal,
    ornstein_uhlenbeck,
    tolerance,
    without_noise_parameters,
)

SIGMA, HORIZON, STEPS = 0.7, 2.0, 16
PUSHED = fl.Process(lambda f, x: f * jnp.ones(1), lambda f, x: SIGMA * jnp.ones(1))
SQUARE = fl.Objective(terminal=lambda f, x: x[0] ** 2)
TIMES = np.linspace(0, HORIZON, STEPS + 1)
OLD, NEW = np.array(0.3), np.array(0.5)
FEW = 200
"""Trajectories of the small batches: what is compiled for one serves them all."""


@cache
def simulate_pushed(seed=0, count=20_000):
    z = np.random.default_rng(seed).normal(size=(count, STEPS))
    steps = OLD * HORIZON / STEPS + SIGMA * np.sqrt(HORIZON / STEPS) * z
    x = np.concatenate([np.zeros((count, 1)), np.cumsum(steps, axis=1)], axis=1)
    return fl.Trajectories(TIMES, x[..., None])


def pushed_weights(x, new, old):
    """dX = f dt + σ dW: ln w = Δf (X_T − f̄T)/σ², with f̄ the mean of the two forces."""
    return np.exp((new - old) * (x[:, -1, 0] - x[:, 0, 0] - (new + old) / 2 * HORIZON) / SIGMA**2)


# ----------------------------------------------------------------------------------- constant force


def test_weights_and_divergence_of_a_constant_force():
    paths = simulate_pushed()
    found = fl.reweighted(PUSHED, SQUARE, NEW, [(OLD, paths)])
    np.testing.assert_allclose(
        found.weights, pushed_weights(np.asarray(paths.x), NEW, OLD), rtol=1e-9
    )
    np.testing.assert_allclose(
        found.kl, float(NEW - OLD) ** 2 * HORIZON / (2 * SIGMA**2), rtol=1e-9
    )


def test_effective_number_of_log_normal_weights():
    """ESS/N = E[w]²/E[w²] = exp(−s²), s² = 2 KL; its error by the delta method, with E[wᵏ] =
    exp(k(k−1)s²/2).
    """
    found = fl.reweighted(PUSHED, SQUARE, NEW, [(OLD, simulate_pushed())])
    count = found.estimate.count
    s2 = 2 * found.kl[0]
    m1, m2, m3, m4 = (np.exp(k * (k - 1) * s2 / 2) for k in (1, 2, 3, 4))
    slope = np.array([2 * m1 / m2, -(m1**2) / m2**2])
    covariance = np.array([[m2 - m1**2, m3 - m1 * m2], [m3 - m1 * m2, m4 - m2**2]])
    error = np.sqrt(slope @ covariance @ slope / count)
    assert abs(found.ess / count - np.exp(-s2)) < 4 * error
    assert found.ess / count < 1 - 4 * error  # the test can tell a weight from none


def test_J_and_gradient_of_a_constant_force():
    for weights in ("normalised", "plain"):
        estimate = fl.reweighted(
            PUSHED, SQUARE, NEW, [(OLD, simulate_pushed())], weights=weights
        ).estimate
        value, slope = NEW**2 * HORIZON**2 + SIGMA**2 * HORIZON, 2 * NEW * HORIZON**2
        assert abs(estimate.value - value) < 4 * estimate.value_stderr
        assert abs(estimate.gradient - slope) < 4 * estimate.stderr
        assert (
            abs(2 * (NEW - OLD) * HORIZON**2) > 8 * estimate.stderr
        )  # nor is it the gradient where they were taken


def test_nothing_changes_where_the_trajectories_were_taken():
    paths = simulate_pushed(count=FEW)
    found = fl.reweighted(PUSHED, SQUARE, OLD, [(OLD, paths)])
    plain = fl.gradient(PUSHED, SQUARE, OLD, paths)
    assert found.ess == FEW
    assert found.kl == (0.0,)
    np.testing.assert_allclose(found.estimate.gradient, plain.gradient, rtol=1e-12)
    np.testing.assert_allclose(found.estimate.stderr, plain.stderr, rtol=1e-12)
    np.testing.assert_allclose(found.estimate.value, plain.value, rtol=1e-12)


# ------------------------------------------------------------------------------------ linear chains


@cache
def compile_exact(make, kind):
    """J and ∇J of a linear chain as a function of its parameters."""
    system = make()
    the = without_noise_parameters(make, kind)

    def value(th):
        mean, spread = th.get("mean", system.theta["mean"]), th.get("spread", 0.0)
        covariance = spread**2 * jnp.eye(mean.size)
        return exact_return(
            the.process,
            the.objective,
            the.t,
            th,
            mean,
            covariance,
            system.force[0],
            system.force[1] ** 2,
        )

    return jax.jit(jax.value_and_grad(value))


def move(theta, seed, size):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda v: np.asarray(v) + size * rng.normal(size=v.shape), theta)


def z_at(estimate, exact):
    value, slope = exact
    z = (flat(estimate.gradient) - flat(slope)) / flat(estimate.stderr)
    return np.append(z, (estimate.value - value) / estimate.value_stderr)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        pytest.param(non_normal, "fixed", marks=pytest.mark.long),
        (ornstein_uhlenbeck, "density"),
    ],
)
def test_linear_chains_at_other_parameters(make, kind):
    the = without_noise_parameters(make, kind)
    new = move(the.theta, 1, 0.15 if kind == "fixed" else 0.1)
    paths = the.simulator(jax.random.key(2), the.theta, 20_000)
    exact = compile_exact(make, kind)(new)
    for weights in ("normalised", "plain"):
        found = fl.reweighted(
            the.process,
            the.objective,
            new,
            [(the.theta, paths)],
            weights=weights,
            start=the.moving_start,
        )
        z = z_at(found.estimate, exact)
        assert np.abs(z).max() < tolerance(z.size), (weights, z)
        if kind == "fixed":  # the other start moves J too little for 20,000 trajectories
            old = z_at(found.estimate, (the.exact_value, the.exact_gradient))
            assert np.abs(old).max() > 5, (weights, old)  # it is another place
        error = found.weights.std() / np.sqrt(len(found.weights))
        assert abs(found.weights.mean() - 1) < 4 * error


@pytest.mark.long
def test_two_batches_by_the_balance_heuristic():
    the = without_noise_parameters(ornstein_uhlenbeck, "density")
    thetas = [move(the.theta, seed, 0.15) for seed in (3, 4)]
    new = jax.tree.map(lambda a, b: (a + b) / 2, *thetas)
    paths = [the.simulator(jax.random.key(n), th, 20_000) for n, th in enumerate(thetas)]
    half = paths[0]._replace(x=np.asarray(paths[0].x)[:10_000])
    batches = list(zip(thetas, [half, paths[1]], strict=True))
    both = fl.reweighted(the.process, the.objective, new, batches, start=the.moving_start)
    z = z_at(both.estimate, compile_exact(ornstein_uhlenbeck, "density")(new))
    assert np.abs(z).max() < tolerance(z.size), z
    assert abs(both.weights.mean() - 1) < 4 * both.weights.std() / np.sqrt(30_000)
    alone = [
        fl.reweighted(the.process, the.objective, new, [pair], start=the.moving_start)
        for pair in batches
    ]
    np.testing.assert_allclose(both.kl, [one.kl[0] for one in alone], rtol=1e-9)
    assert both.ess > sum(one.ess for one in alone)
    # by hand: w = p/(Σ n_b p_b/N) = 1/Σ_b (n_b/N)/ratio_b on the trajectories of the first batch
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # the first batch was not taken at the second parameters
        ratios = [
            fl.reweighted(
                the.process,
                the.objective,
                new,
                [(th, batches[0][1])],
                weights="plain",
                start=the.moving_start,
                minimum_ess=0,
            ).weights
            for th in thetas
        ]
    np.testing.assert_allclose(
        both.weights[:10_000], 3 / (1 / ratios[0] + 2 / ratios[1]), rtol=1e-9
    )


@pytest.mark.long
def test_error_bars_cover():
    """100 repeats of 200 trajectories with an ESS of about 150: of 95 % intervals, no fewer
    hold than chance allows. With half of the errors 67 would hold, ten standard errors fewer.
    """
    repeats, count, truth = 100, FEW, exact_force(NEW)
    paths = simulate_pushed(seed=5, count=repeats * count)
    x, held = np.asarray(paths.x), np.zeros(2, int)
    for k in range(repeats):
        some = fl.Trajectories(paths.t, x[k * count : (k + 1) * count])
        estimate = fl.reweighted(PUSHED, SQUARE, NEW, [(OLD, some)]).estimate
        spans = (estimate.value_interval, estimate.interval)
        held += [int(low <= exact <= high) for (low, high), exact in zip(spans, truth, strict=True)]
    assert held.min() >= binom.ppf(1e-3, repeats, 0.93), (
        held
    )  # `interval` itself covers 93 to 97 % (docs/theory.md)


def exact_force(f):
    return f**2 * HORIZON**2 + SIGMA**2 * HORIZON, 2 * f * HORIZON**2


# ------------------------------------------------------------------------------------ other laws


@pytest.mark.long
def test_samples_far_apart_by_local_linearisation():
    """An Ornstein–Uhlenbeck process seen every 0.5: the law is exact, Euler's is not."""
    process = fl.Process(lambda th, x: -th["k"] * (x - th["m"]), lambda th, x: 0.8 * jnp.ones(1))
    objective = POSITION
    old, new = ({"k": np.array(k), "m": np.array(m)} for k, m in ((1.0, 0.4), (1.2, 0.5)))
    x, decay, rng = np.full((4000, 5, 1), 1.5), np.exp(-0.5), np.random.default_rng(0)
    for n in range(4):  # the exact transition at k = 1, m = 0.4
        spread = 0.8 * np.sqrt((1 - decay**2) / 2)
        x[:, n + 1] = 0.4 + (x[:, n] - 0.4) * decay + spread * rng.normal(size=(4000, 1))
    coarse = fl.Trajectories(0.5 * np.arange(5), x)
    found = fl.reweighted(
        process,
        objective,
        new,
        [(old, coarse)],
        score=fl.scores.local_linear_score,
        weights="plain",
    )
    k, m = float(new["k"]), float(new["m"])
    exact = m + (1.5 - m) * np.exp(-2 * k)
    assert abs(found.estimate.value - exact) < 4 * found.estimate.value_stderr
    assert abs(found.weights.mean() - 1) < 4 * found.weights.std() / np.sqrt(4000)


@pytest.mark.long
def test_births_and_deaths():
    process = fl.Jumps(lambda th, x: jnp.array([th["b"], th["d"] * x[0]]), [[1.0], [-1.0]])
    objective = POSITION
    old, new = ({"b": np.array(b), "d": np.array(d)} for b, d in ((3.0, 0.5), (3.4, 0.6)))
    paths = fl.simulator(process, jnp.array([4.0]), np.linspace(0, 2, 9))(
        jax.random.key(0), old, 10_000
    )
    mean = lambda th: th["b"] / th["d"] * (1 - np.exp(-2 * th["d"])) + 4 * np.exp(-2 * th["d"])
    found = fl.reweighted(process, objective, new, [(old, paths)])
    z = z_at(found.estimate, value_and_slope(mean, new))
    assert np.abs(z).max() < tolerance(z.size), z
    assert abs(found.weights.mean() - 1) < 4 * found.weights.std() / 100
    # KL of the path: ∫ E[Σ a ln(a/a') − a + a'] dt, with E[X] at the old rates
    t = np.linspace(0, 2, 2001)
    x = 6 + (4 - 6) * np.exp(-0.5 * t)
    rate = 3 * np.log(3 / 3.4) + 0.4 + x * (0.5 * np.log(0.5 / 0.6) + 0.1)
    assert abs(found.kl[0] - np.trapezoid(rate, t)) < 4 * np.log(found.weights).std() / 100


@pytest.mark.long
def test_jumps_with_diffusion_between():
    """dX = −kX dt + σ dW + events of size 1 at rate a: E[X_T] of the chain, which is linear."""
    smooth = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: 0.5 * jnp.ones(1))
    process = fl.Jumps(lambda th, x: jnp.array([th["a"]]), [[1.0]], diffusion=smooth)
    old, new = ({"k": np.array(k), "a": np.array(a)} for k, a in ((0.7, 1.0), (0.9, 1.2)))
    steps, dt = 20, 0.1
    paths = fl.simulator(process, jnp.array([1.0]), dt * np.arange(steps + 1.0))(
        jax.random.key(1), old, 10_000
    )
    found = fl.reweighted(process, POSITION, new, [(old, paths)])

    def mean(th):
        shrink = 1 - th["k"] * dt
        return shrink**steps + th["a"] * dt * (1 - shrink**steps) / (1 - shrink)

    z = z_at(found.estimate, value_and_slope(mean, new))
    assert np.abs(z).max() < tolerance(z.size), z


@pytest.mark.long
def test_a_pendulum_whose_angle_has_no_noise():
    process = fl.Process(
        lambda th, x: jnp.array([x[1], -th["k"] * x[0] - th["c"] * x[1]]),
        lambda th, x: jnp.array([0.0, 0.6]),
    )
    old, new = ({"k": np.array(k), "c": np.array(c)} for k, c in ((1.0, 0.4), (1.15, 0.5)))
    t = np.linspace(0, 2, 41)
    paths = fl.simulator(process, jnp.array([1.0, 0.0]), t)(jax.random.key(0), old, 10_000)
    objective = POSITION
    found = fl.reweighted(process, objective, new, [(old, paths)])

    def mean(th):
        step = np.eye(2) + 0.05 * np.array([[0.0, 1.0], [-th["k"], -th["c"]]])
        return np.linalg.matrix_power(step, 40)[0, 0]

    z = z_at(found.estimate, value_and_slope(mean, new))
    assert np.abs(z).max() < tolerance(z.size), z
    assert abs(found.weights.mean() - 1) < 4 * found.weights.std() / 100


# ------------------------------------------------------------------------------------ refusals


GEARED = fl.Process(
    lambda th, x: jnp.array([x[1] * th.get("geared", 1.0), -th["k"] * x[0]]),
    lambda th, x: jnp.array([0.0, th["sigma"]]),
)
TRAP = {"k": np.array(1.0), "sigma": np.array(0.5)}
POSITION = fl.Objective(terminal=lambda th, x: x[0])


@cache
def simulate_geared():
    """X₀ = (1, 1), ten steps of Euler."""
    rng = np.random.default_rng(0)
    x = np.ones((50, 11, 2))
    for n in range(10):
        x[:, n + 1, 0] = x[:, n, 0] + 0.1 * x[:, n, 1]
        x[:, n + 1, 1] = x[:, n, 1] - 0.1 * x[:, n, 0] + 0.5 * np.sqrt(0.1) * rng.normal(size=50)
    return fl.Trajectories(np.linspace(0, 1, 11), x)


def reweigh_geared(old, **changes):
    new = old | {name: np.array(value) for name, value in changes.items()}
    return fl.reweighted(GEARED, POSITION, new, [(old, simulate_geared())])


@pytest.mark.long
def test_parameters_of_the_noise_are_refused_by_name():
    with pytest.raises(ValueError, match=r"noise differs.*`sigma`"):
        reweigh_geared(TRAP, sigma=0.6)
    same = reweigh_geared(TRAP, k=1.01)
    assert set(same.estimate.gradient) == {"k", "sigma"}  # as long as it stays what it was


def test_drifts_of_silent_components_are_refused_by_name():
    with pytest.raises(ValueError, match=r"component 0 has no noise.*`geared`"):
        reweigh_geared(TRAP | {"geared": np.array(1.0)}, geared=1.1)


def test_drifts_of_silent_components_that_differ_on_the_way_are_refused_by_name():
    """For one step, between those that are looked at beforehand; and noise that differs for as
    long.
    """
    once = lambda t: (t > 0.25) & (t < 0.35)
    old = {"f": np.array(1.0), "k": np.array(1.0), "sigma": np.array(0.1)}
    process = fl.Process(
        lambda th, x, t: jnp.array([x[1] + th["f"] * once(t), -th["k"] * x[1]]),
        lambda th, x, t: jnp.array([0.0, 0.5 + th["sigma"] * once(t)]),
    )
    paths = fl.simulator(process, np.ones(2), np.linspace(0, 1, 11))(jax.random.key(0), old, 50)
    objective = POSITION
    for name, message in (
        ("f", r"component 0 has no noise.*index 3, by `f`"),
        ("sigma", r"noise differs.*index 3, by `sigma`"),
    ):
        with pytest.raises(ValueError, match=message):
            fl.reweighted(process, objective, old | {name: np.array(1.1)}, [(old, paths)])


def test_a_start_that_moves_is_refused():
    start = fl.Reparameterised(lambda th: th * jnp.ones(1))
    paths = simulate_pushed(count=50)
    paths = paths._replace(x=paths.x + OLD)
    with pytest.raises(ValueError, match="`Reparameterised` start differs"):
        fl.reweighted(PUSHED, SQUARE, NEW, [(OLD, paths)], start=start)


def test_a_batch_that_is_worth_nothing_is_refused_with_the_numbers():
    far = np.array(20.3)
    with pytest.raises(
        ValueError, match=r"200 trajectories are worth .* `minimum_ess` is 20.*KL = 816"
    ):
        fl.reweighted(PUSHED, SQUARE, far, [(OLD, simulate_pushed(count=FEW))])
    assert (
        fl.reweighted(PUSHED, SQUARE, far, [(OLD, simulate_pushed(count=FEW))], minimum_ess=0).ess
        < 10
    )


def test_plain_weights_keep_their_value_and_lose_their_error_bar():
    """What is discarded for its large weights would be missing from the mean."""
    paths, far = simulate_pushed(count=100), np.array(1.4)
    found = fl.reweighted(PUSHED, SQUARE, far, [(OLD, paths)], weights="plain")
    known = fl.reweighted(PUSHED, SQUARE, far, [(OLD, paths)], weights="plain", minimum_ess=0)
    assert found.ess < 20
    assert (found.estimate.value, found.estimate.gradient) == (
        known.estimate.value,
        known.estimate.gradient,
    )
    assert np.isfinite(known.estimate.stderr)
    assert np.isnan(
        [found.estimate.stderr, found.estimate.value_stderr, *found.estimate.interval]
    ).all()
    assert "too few for an error bar" in repr(found)
    assert "± ?" in repr(found)
    assert "too few" not in repr(known)


@pytest.mark.long
def test_plain_weights_are_unbiased_over_all_batches_and_not_over_those_with_an_error_bar():
    """KL = 1, 100 trajectories: ESS is below 20 for some of the batches, those with the largest
    weights.
    """
    seeds, count, far = 100, 100, OLD + SIGMA
    paths = simulate_pushed(seed=8, count=seeds * count)
    x = np.asarray(paths.x).reshape(seeds, count, *paths.x.shape[1:])
    found = [
        fl.reweighted(
            PUSHED, SQUARE, far, [(OLD, fl.Trajectories(paths.t, batch))], weights="plain"
        )
        for batch in x
    ]
    gradients = np.array([one.estimate.gradient for one in found])
    kept = np.array([one.ess >= 20 for one in found])
    exact = 2 * float(far) * HORIZON**2
    z = lambda g: (g.mean() - exact) / (g.std(ddof=1) / np.sqrt(len(g)))
    assert 0.4 < kept.mean() < 0.9
    assert abs(z(gradients)) < 4
    assert z(gradients[kept]) < -8


def test_trajectories_of_other_parameters_than_said_are_warned_of():
    """Here the force is 20 σ/√Δt from what it is message to be: the residual guard looks where
    they were taken.
    """
    with pytest.warns(RuntimeWarning, match="not those of the process"):
        fl.reweighted(
            PUSHED, SQUARE, OLD + 40, [(OLD + 40, simulate_pushed(count=FEW))], minimum_ess=0
        )


def test_mistakes_are_named():
    paths = simulate_pushed(count=50)
    with pytest.raises(TypeError, match="pairs"):
        fl.reweighted(PUSHED, SQUARE, NEW, (OLD, paths))
    with pytest.raises(ValueError, match=r"batch 0.*\(2,\)"):
        fl.reweighted(PUSHED, SQUARE, NEW, [(np.zeros(2), paths)])
    with pytest.raises(ValueError, match="'best'"):
        fl.reweighted(PUSHED, SQUARE, NEW, [(OLD, paths)], weights="best")
    with pytest.raises(ValueError, match="17 and 9 times"):
        fl.reweighted(
            PUSHED,
            SQUARE,
            NEW,
            [(OLD, paths), (OLD, fl.Trajectories(paths.t[::2], paths.x[:, ::2]))],
        )
    with pytest.raises(ValueError, match="`own`"):
        fl.reweighted(PUSHED, SQUARE, NEW, [(OLD, paths)], score=own)


def own(process, theta, step: Step):
    return fl.scores.full_score(process, theta, step)


def test_prints_what_it_is_worth():
    text = repr(fl.reweighted(PUSHED, SQUARE, NEW, [(OLD, simulate_pushed(count=FEW))]))
    assert f"of {FEW} trajectories" in text
    assert "KL from where they were taken: 0.0816" in text
    assert "∂J/∂theta" in text
