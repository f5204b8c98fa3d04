"""Better steps than Euler's: their order, their score, and estimates against the exact moments
of linear chains.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import expm

import fluctua as fl
from fluctua.core.draws import no_noise
from fluctua.core.integrators import (
    MAPS,
    _diagonal_phi,
    _phi,
    map_step_parameters,
    match_quadrature,
    mean_rate,
    reward_rate,
)
from fluctua.core.process import STEPS
from fluctua.core.scores import Gaussian, euler
from numeric import value_and_slope
from problems import flat, tolerance

SPIRAL = {"k": jnp.array(0.4), "turn": jnp.array(2.0), "push": jnp.array(0.7)}
DT = 0.1
T = DT * np.arange(21)
START = np.array([1.0, -0.5])


def matrix(theta, *_):
    """−k on the diagonal, and a rotation."""
    return -theta["k"] * np.eye(2) + theta["turn"] * np.array([[0.0, 1.0], [-1.0, 0.0]])


def spiral(theta, x, t):
    return matrix(theta) @ x + theta["push"] * jnp.array([1.0, t])


def pendulum(theta, x, t):
    return jnp.array([x[1], -(theta["turn"] ** 2) * x[0] - theta["k"] * x[1] + theta["push"] * t])


OBJECTIVE = fl.Objective(running=lambda theta, x: x[0] ** 2, terminal=lambda theta, x: x[1])
ONE, HALF = np.array([0.5, 0.8]), np.array([0.0, 0.8])
CASES = {
    "heun": fl.Process(spiral, lambda theta, x: ONE, integrator="heun"),
    "rk4": fl.Process(spiral, lambda theta, x: jnp.diag(ONE), integrator="rk4"),
    "exponential": fl.Process(
        spiral, lambda theta, x: ONE * theta["k"], integrator=fl.integrators.Exponential(matrix)
    ),
    "leapfrog": fl.Process(
        pendulum, lambda theta, x: HALF * theta["k"], noiseless=(0,), integrator="heun"
    ),
}


@cache
def exact(name):
    """∫E[x₀²]dt + E[x₁] by the trapezoid rule, of the chain whose first two moments are closed,
    and its gradient.
    """
    process = CASES[name]

    @jax.jit
    def value(theta):
        sigma = process.noise(theta, START)
        kick = DT * (jnp.diag(sigma**2) if sigma.ndim == 1 else sigma @ sigma.T)
        reward = lambda mean, covariance: mean[0] ** 2 + covariance[0, 0]

        def advance(carry, t):
            m = lambda x: x + DT * mean_rate(checked, theta, x, t, DT, None)
            mean, covariance = carry
            slope = jax.jacfwd(m)(mean)
            after = m(mean), slope @ covariance @ slope.T + kick
            return after, DT / 2 * (reward(*carry) + reward(*after))

        checked = fl.core.check.process(process)
        (mean, _), rewards = jax.lax.scan(advance, (START, jnp.zeros((2, 2))), T[:-1])
        return rewards.sum() + mean[1]

    with jax.enable_x64(True):
        return value_and_slope(value, SPIRAL)


def z_scores(estimate, name):
    value, gradient = exact(name)
    off = flat(estimate.gradient) - flat(gradient)
    z = (float(estimate.value) - value) / float(estimate.value_stderr)
    return np.append(off / flat(estimate.stderr), z)


def fit_slope(errors):
    return np.log2(np.array(errors[:-1]) / np.array(errors[1:]))


BENDING = fl.Process(
    lambda theta, x: jnp.array([x[1], -jnp.sin(x[0])]) - theta["k"] * x,
    lambda theta, x: jnp.ones(2),
)
REFERENCE_STEPS = 640


@cache
def find_end(n, step):
    """The state at t = 2 without noise, after n steps. (2,)"""
    run = fl.simulator(BENDING, START, np.linspace(0, 2, n + 1), wiener=no_noise, integrator=step)
    return np.asarray(run(jax.random.key(0), SPIRAL, 1).x)[0, -1]


@pytest.mark.parametrize(
    ("step", "order"),
    [
        ("euler", 1),
        ("heun", 2),
        ("rk4", 4),
        (fl.integrators.Exponential(lambda theta: -theta["k"] * jnp.ones(2)), 2),
    ],
)
def test_the_order_of_a_step(step, order):
    with jax.enable_x64(True):
        errors = [
            np.abs(find_end(n, step) - find_end(REFERENCE_STEPS, "rk4")).max() for n in (20, 40, 80)
        ]
    np.testing.assert_allclose(fit_slope(errors), order, atol=0.15)


def test_an_exponential_step_is_exact_for_a_linear_drift():
    process = fl.Process(lambda theta, x: matrix(theta) @ x, lambda theta, x: ONE)
    with jax.enable_x64(True):
        for linear in (matrix, lambda theta: -theta["k"] * jnp.ones(2)):
            theta = SPIRAL if linear is matrix else SPIRAL | {"turn": jnp.array(0.0)}
            run = fl.simulator(
                process,
                START,
                np.array([0.0, 3.0]),
                wiener=no_noise,
                integrator=fl.integrators.Exponential(linear),
            )
            exactly = expm(3.0 * np.asarray(matrix(theta))) @ START
            found = np.asarray(run(jax.random.key(0), theta, 1).x)[0, -1]
            np.testing.assert_allclose(found, exactly, rtol=1e-12)


def test_an_exponential_step_of_a_stiff_part_and_beside_a_silent_component():
    with jax.enable_x64(True):
        stiff = lambda theta: jnp.array([[-1000.0, 1.0], [0.0, -1.0]])
        process = fl.Process(
            lambda theta, x: stiff(theta) @ x,
            lambda theta, x: ONE,
            integrator=fl.integrators.Exponential(stiff),
        )
        x, t = (
            fl.simulator(process, START, jnp.array([0.0, 2.0]), wiener=no_noise)(
                jax.random.key(0), SPIRAL, 1
            ).x[0, -1],
            2.0,
        )
        slow = -0.5 * np.exp(-t)  # the fast component follows it: x₀ = x₁/(1000 − 1)
        np.testing.assert_allclose(x, [slow / 999, slow], rtol=1e-8)
        # a position goes first, and its velocity decays from there as if that were fixed
        whole = lambda theta: jnp.array([[0.0, 1.0], [-4.0, -0.5]])
        leapfrog = fl.Process(
            lambda theta, x: whole(theta) @ x,
            lambda theta, x: HALF,
            noiseless=(0,),
            integrator=fl.integrators.Exponential(whole),
        )
        x = fl.simulator(leapfrog, START, jnp.array([0.0, 0.7]), wiener=no_noise)(
            jax.random.key(0), SPIRAL, 1
        ).x[0, -1]
        position = 1 - 0.5 * 0.7
        velocity = -0.5 * np.exp(-0.35) - 4 * position * (1 - np.exp(-0.35)) / 0.5
        np.testing.assert_allclose(x, [position, velocity], rtol=1e-12)


def test_the_functions_of_an_exponential_step():
    """φ₁ and φ₂ as ∫e^{(1−s)z}ds and ∫e^{(1−s)z}s ds, on either side of where the series ends,
    and of a matrix.
    """
    z = np.array([-20.0, -0.11, -0.09, 0.0, 0.05, 0.3])
    s, weight = np.polynomial.legendre.leggauss(40)
    s, weight = (s + 1) / 2, weight / 2
    expected = [np.exp(np.outer(z, 1 - s)) @ weight, np.exp(np.outer(z, 1 - s)) @ (weight * s)]
    np.testing.assert_allclose(jax.jit(_diagonal_phi)(z), expected, rtol=1e-12)
    found = [np.diag(phi) for phi in jax.jit(_phi)(np.diag(z))]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_every_name_has_a_map():
    assert {"euler", *MAPS} == set(STEPS)


def test_a_step_at_other_parameters():
    inner = fl.integrators.Exponential(lambda theta: -theta["k"] * jnp.ones(2))
    moved = map_step_parameters(inner, lambda theta, context: {"k": 2 * theta["k"]})
    drift = lambda theta, x, t, context: -2 * theta["k"] * x
    rates = [
        step(f, theta, START, 0.0, 0.5, None)
        for step, f, theta in (
            (moved, drift, SPIRAL),
            (inner, lambda theta, x, *_: -theta["k"] * x, {"k": 2 * SPIRAL["k"]}),
        )
    ]
    np.testing.assert_array_equal(*rates)
    assert map_step_parameters("heun", None) == "heun"


@pytest.mark.long
def test_a_twin_takes_the_step_of_what_it_explains():
    plain = CASES["heun"]._replace(integrator="euler")
    run = fl.simulator(plain, START, T, integrator="heun")
    errors = [
        fl.ppgt(run, OBJECTIVE, process=plain, baseline=twin)(jax.random.key(0), SPIRAL, 50).stderr
        for twin in (fl.Twin(), fl.Twin(process=plain))
    ]
    assert jax.tree.all(jax.tree.map(np.array_equal, *errors))


def advance_position_first(theta, x, t):
    """One Heun step of the pendulum without its noise: x₀' = x₀ + x₁Δt, then x₁ by Heun at x₀'."""
    position = x[0] + x[1] * DT

    def accelerate(speed, t):
        return pendulum(theta, jnp.array([position, speed]), t)[1]

    here = accelerate(x[1], t)
    there = accelerate(x[1] + here * DT, t + DT)
    return jnp.array([position, x[1] + DT / 2 * (here + there)])


def advance_together(theta, x, t):
    """One Heun step of the pendulum in which its position is a component like the other."""
    here = pendulum(theta, x, t)
    return x + DT / 2 * (here + pendulum(theta, x + here * DT, t + DT))


def test_the_gradient_of_a_step_whose_position_goes_first():
    """E[x₀x₁] at the end, from the moments of the step as written above, not by `mean_rate`."""
    sigma = 0.8

    def value(theta, advance):
        def move(carry, t):
            mean, covariance = carry
            slope = jax.jacfwd(lambda x: advance(theta, x, t))(mean)
            kick = jnp.diag(jnp.array([0.0, sigma**2 * DT]))
            return (advance(theta, mean, t), slope @ covariance @ slope.T + kick), None

        (mean, covariance), _ = jax.lax.scan(move, (START, jnp.zeros((2, 2))), T[:-1])
        return mean[0] * mean[1] + covariance[0, 1]

    process = fl.Process(
        pendulum, lambda theta, x: jnp.array([0.0, sigma]), noiseless=(0,), integrator="heun"
    )
    objective = fl.Objective(terminal=lambda theta, x: x[0] * x[1])
    estimator = fl.ppgt(fl.simulator(process, START, T), objective)
    estimate = estimator(jax.random.key(5), SPIRAL, 20_000)

    def compute_z_scores(advance):
        _, exactly = value_and_slope(jax.jit(lambda theta: value(theta, advance)), SPIRAL)
        return (flat(estimate.gradient) - flat(exactly)) / flat(estimate.stderr)

    z = compute_z_scores(advance_position_first)
    assert np.abs(z).max() < tolerance(z.size), z
    assert np.abs(compute_z_scores(advance_together)).max() > 2 * tolerance(z.size)


@pytest.mark.parametrize(("noiseless", "order"), [((0,), 1), ((), 2)])
def test_the_order_at_samples_of_one_time(noiseless, order):
    """Position first, the velocity is off by ½Δt ∂μ₁/∂x₀ x₁ where both are of the same time."""
    with jax.enable_x64(True):
        whole = np.array([[0.0, 1.0], [-4.0, -0.5]])
        process = fl.core.check.process(
            fl.Process(
                lambda theta, x: whole @ x,
                lambda theta, x: HALF if noiseless else ONE,
                noiseless=noiseless,
                integrator="heun",
            )
        )
        intervals = np.array([0.04, 0.02, 0.01])
        find_rate = jax.jit(lambda dt: mean_rate(process, SPIRAL, START, 0.0, dt, None))

        def measure_error(dt):
            after = expm(whole * dt) @ START
            rate = np.asarray(find_rate(dt))
            return float((rate - (after - START) / dt)[1])

        errors = np.array([measure_error(dt) for dt in intervals])
    np.testing.assert_allclose(fit_slope(np.abs(errors)), order, atol=0.1)
    if noiseless:
        slopes = errors / intervals  # c + bΔt: twice the finer less the coarser leaves c
        expected = -4.0 * float(START[1]) / 2
        np.testing.assert_allclose(2 * slopes[2] - slopes[1], expected, rtol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_the_score_is_the_derivative_of_the_density(name):
    with jax.enable_x64(True):
        process = fl.core.check.process(CASES[name])
        step = fl.scores.Step(START, np.array([0.9, -0.8]), 0.3, 0.1)
        others = np.setdiff1d(np.arange(2), process.noiseless)

        def log_density(theta):
            law: Gaussian = euler(process, theta, step)
            r, c = (step.x_next - law.mean)[others], law.covariance[np.ix_(others, others)]
            return -r @ jnp.linalg.solve(c, r) / 2 - jnp.linalg.slogdet(c)[1] / 2

        @jax.jit
        def find_both(theta):
            score = fl.scores.full_score(process, theta, step)
            return score, jax.grad(log_density)(theta)

        np.testing.assert_allclose(*(flat(tree) for tree in find_both(SPIRAL)), rtol=1e-10)


@pytest.mark.parametrize(
    ("name", "baseline"),
    [
        pytest.param("rk4", "optimal", marks=pytest.mark.long),
        ("heun", "twin"),
        pytest.param("exponential", "none", marks=pytest.mark.long),
        pytest.param("leapfrog", "twin of order 2", marks=pytest.mark.long),
    ],
)
def test_estimates_against_exact_gradients(name, baseline):
    process = CASES[name]
    baseline = fl.Twin(order=2) if baseline == "twin of order 2" else baseline
    estimator = fl.ppgt(fl.simulator(process, START, T), OBJECTIVE, baseline=baseline)
    z = z_scores(estimator(jax.random.key(2), SPIRAL, 4000), name)
    assert np.abs(z).max() < tolerance(z.size), z


@pytest.mark.long
def test_recorded_trajectories_have_the_score_of_their_step():
    process = CASES["heun"]
    paths = fl.simulator(process, START, T)(jax.random.key(4), SPIRAL, 4000)
    z = z_scores(fl.gradient(process, OBJECTIVE, SPIRAL, paths), "heun")
    assert np.abs(z).max() < tolerance(z.size), z
    of_euler = z_scores(
        fl.gradient(process._replace(integrator="euler"), OBJECTIVE, SPIRAL, paths), "heun"
    )
    assert np.abs(of_euler).max() > 2 * tolerance(z.size)


def test_an_estimator_takes_the_step_of_its_simulator():
    plain = CASES["heun"]._replace(integrator="euler")
    gradients = [
        fl.ppgt(fl.simulator(simulated, START, T, integrator="heun"), OBJECTIVE, process=process)(
            jax.random.key(0), SPIRAL, 50
        ).gradient
        for process, simulated in ((plain, plain), (CASES["heun"], plain))
    ]
    assert jax.tree.all(jax.tree.map(np.array_equal, *gradients))
    with pytest.raises(ValueError, match="'heun'.*'rk4'"):
        fl.ppgt(fl.simulator(CASES["heun"], START, T), OBJECTIVE, process=CASES["rk4"])
    leapfrog = CASES["leapfrog"]
    with pytest.raises(
        ValueError, match=r"noiseless=\(0,\)"
    ):  # a map that moves all components is another one
        fl.ppgt(
            fl.simulator(leapfrog._replace(noiseless=()), START, T), OBJECTIVE, process=leapfrog
        )
    jumping = lambda process: fl.Jumps(lambda theta, x: theta["k"][None], np.ones((1, 2)), process)
    with pytest.raises(ValueError, match="'heun'.*'euler'"):
        fl.ppgt(fl.simulator(jumping(CASES["heun"]), START, T), OBJECTIVE, process=jumping(plain))


def test_the_trapezoid_rule():
    objective = fl.Objective(
        running=lambda theta, x, t: x[0] * t, per_step=lambda theta, x, y: y[0] - x[0]
    )
    t, x = np.array([0.0, 0.5, 2.0]), np.array([[[1.0], [2.0], [5.0]]])
    process = fl.Process(lambda theta, x: theta * x, lambda theta, x: 2 * jnp.ones(1))
    paths = fl.Trajectories(t, np.concatenate([x, x]))

    def returns(process):
        samples = fl.gradient_samples(process, objective, jnp.array(0.0), paths, baseline="none")
        return samples.returns

    np.testing.assert_allclose(returns(process), 1.5 * 1 + 4)  # Euler: the left sum
    better = process._replace(integrator="heun")
    np.testing.assert_allclose(returns(better), 0.5 / 2 * (0 + 1) + 1.5 / 2 * (1 + 10) + 4)
    plain = fl.core.check.objective(objective)
    halved = match_quadrature(plain, better)
    assert reward_rate(halved) == reward_rate(plain) == plain.running
    assert match_quadrature(halved, better) == halved
    terminal = fl.core.check.objective(fl.Objective(terminal=lambda theta, x: x[0]))
    assert match_quadrature(terminal, better) == terminal


def test_a_component_without_noise_is_named():
    process = CASES["leapfrog"]
    for wrong in ((), (1,), (0, 1)):
        unnamed = process._replace(noiseless=wrong)
        with pytest.raises(ValueError, match=r"components \[0\] have no noise"):
            fl.ppgt(fl.simulator(unnamed, START, T), OBJECTIVE)(jax.random.key(0), SPIRAL, 4)
    jumps = fl.Jumps(
        lambda theta, x: theta["k"][None], np.ones((1, 2)), process._replace(noiseless=())
    )
    with pytest.raises(ValueError, match=r"components \[0\] have no noise"):
        fl.ppgt(fl.simulator(jumps, START, T), OBJECTIVE)(jax.random.key(0), SPIRAL, 4)
    slanted = fl.Process(
        lambda theta, x: theta * jnp.ones(2) + jnp.array([x[1], -x[0]]),
        lambda theta, x: jnp.ones((2, 1)),
        integrator="heun",
    )
    with pytest.raises(ValueError, match="1 directions"):
        fl.ppgt(fl.simulator(slanted, START, T), OBJECTIVE)(jax.random.key(0), jnp.array(1.0), 4)


def test_steps_that_there_are_not():
    with pytest.raises(ValueError, match="'huen'.*heun"):
        fl.simulator(CASES["heun"], START, T, integrator="huen")
    scalar = fl.Process(
        spiral, lambda theta, x: ONE, integrator=lambda drift, theta, x: jnp.zeros(())
    )
    with pytest.raises(ValueError, match=r"\(2,\) of the state; got \(\)"):
        fl.simulator(scalar, START, T)(jax.random.key(0), SPIRAL, 1)
    bare = scalar._replace(integrator=fl.integrators.Exponential(lambda theta: jnp.nan * ONE))
    with pytest.raises(
        FloatingPointError, match="`integrator` of the process.*trajectory 0 at time index 0"
    ):
        fl.ppgt(fl.simulator(bare, START, T), OBJECTIVE)(jax.random.key(0), SPIRAL, 4)
    with pytest.raises(ValueError, match="Observed"):
        fl.Observed(CASES["heun"], observe=np.eye(2), start=START)
    with pytest.raises(ValueError, match="coloured noise"):
        fl.filters.coloured(CASES["heun"], START, tau=1.0)
    jumps = fl.Jumps(lambda theta, x: theta["k"][None], np.ones((1, 2)))
    with pytest.raises(ValueError, match="Jumps"):
        fl.simulator(jumps, START, T, integrator="heun")
