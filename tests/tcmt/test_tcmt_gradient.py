"""Gradients of networks against exact moments and common-noise finite differences, in standard
errors.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluctua.core.draws import no_noise
from fluctua.core.streamed import Run, collect_returns
from fluctua.tcmt import (
    Drive,
    Lead,
    chain,
    custom,
    exact,
    from_edges,
    isolation,
    outputs,
    paper,
    rectangular,
    stability,
    transmission,
)
from fluctua.tcmt.coupled_modes import condition
from fluctua.tcmt.drift import abs2
from fluctua.tcmt.network import parameters
from fluctua.tcmt.time_step import StabilityWatch, is_stable_by_bounds, warn_if_unstable

ALL = ("omega", "kappa", "chi", "gamma_e", "gamma")


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def make_parameters(network, train=ALL, spread=0.0, seed=3):
    """The network's own numbers, or random ones about them; χ = 0."""
    rng = np.random.default_rng(seed)
    scale = {"omega": 2.0, "kappa": 1.0, "chi": 0.0, "gamma_e": 0.5, "gamma": 0.1}
    return {
        n: getattr(network, n) + spread * scale[n] * rng.random(network.shape(n)) for n in train
    }


def returns(task, key, theta, count):
    estimator = task.estimator(baseline="none")
    run = task.simulator()
    rewards = estimator.method.model.objective
    return collect_returns(rewards, run.recipe, count, Run(key, theta, run.times, task.start))


def finite_differences(task, key, theta, count, h=1e-3):
    """(R(θ+h) − R(θ−h))/2h of every trajectory under common noise: mean and standard error."""

    def one(name, index):
        step = h * (np.arange(theta[name].size) == index)
        up, down = (
            np.asarray(returns(task, key, {**theta, name: theta[name] + change}, count))
            for change in (step, -step)
        )
        slope = (up - down) / (2 * h)
        return slope.mean(), slope.std() / np.sqrt(count)

    slopes = {
        name: np.array([one(name, i) for i in range(leaf.size)]) for name, leaf in theta.items()
    }
    return {name: v[:, 0] for name, v in slopes.items()}, {
        name: v[:, 1] for name, v in slopes.items()
    }


def assert_agree(estimate, expected, error=None, resolved=()):
    """Every component within 4.5 standard errors, and some of the families clearly not zero."""
    for name, value in expected.items():
        stderr = np.hypot(estimate.stderr[name], 0.0 if error is None else error[name])
        z = (np.asarray(estimate.gradient[name]) - value) / stderr
        assert np.abs(z).max() < 4.5, (name, z)
        if name in resolved:
            assert np.abs(value / stderr).max() > 6, f"the test cannot see a wrong sign of {name}"


def with_kerr(task, theta):
    value, gradient = exact.value_and_gradient(task, theta)
    return value, {**gradient, "chi": exact.kerr_gradient(task, theta)}


def kite(leads=(0, 3), **options):
    """Two triangles: not bipartite, so that even the uniform network has a detuning to prefer."""
    return from_edges([(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)], leads=leads, gamma=0.2, **options)


SEVERAL = (Lead({0: 0.8, 1: 0.6}), Lead({2: 0.5, 3: 1.0}))


@pytest.mark.parametrize(
    ("network", "spread", "resolved"),
    [
        (kite(), 1.0, ALL),
        (kite(SEVERAL), 1.0, ("omega", "kappa", "chi", "gamma_e")),
    ],
    ids=["random", "leads on several resonators"],
)
def test_gradient_against_exact_moments(network, spread, resolved):
    task = transmission(network, horizon=2.0, dt=0.02, drive=Drive(0, 8.0))
    theta = make_parameters(network, spread=spread)
    value, gradient = with_kerr(task, theta)
    estimate = task.estimator()(jax.random.key(1), theta, 4000)
    assert abs(estimate.value - value) < 4 * estimate.value_stderr
    assert_agree(estimate, gradient, resolved=resolved)


@pytest.mark.long
def test_binned_baseline_is_unbiased():
    network = kite()
    task = transmission(network, horizon=2.0, dt=0.1, drive=Drive(0, 8.0))
    theta = make_parameters(network, spread=1.0)
    _, gradient = with_kerr(task, theta)
    estimate = task.estimator(baseline="binned")(jax.random.key(2), theta, 500)
    assert_agree(estimate, gradient, resolved=("kappa",))


@pytest.mark.long
def test_kerr_and_modulation_against_common_noise_differences():
    network = chain(3, gamma=0.2, sigma_w=0.25)
    task = transmission(network, horizon=2.0, dt=0.04, drive=Drive(0, 3.0), sigma_kappa=0.4)
    theta = {
        "omega": np.array([0.6, -0.5, 0.9]),
        "kappa": np.array([1.0, 0.7]),
        "chi": np.array([0.2, -0.27, 0.33]),
        "gamma_e": np.array([1.0, 0.8]),
    }
    expected, error = finite_differences(task, jax.random.key(3), theta, 1000)
    estimate = task.estimator()(jax.random.key(4), theta, 16000)
    assert_agree(estimate, expected, error, resolved=("omega", "kappa", "chi", "gamma_e"))


def test_kerr_gradient_against_differences_of_the_noise_free_run():
    network = chain(3, gamma=0.2, sigma_w=0.0)
    task = transmission(network, horizon=2.0, dt=0.02, drive=Drive(0, 2.0))
    theta = {"omega": np.array([0.6, -0.5, 0.9]), "chi": np.zeros(3)}
    run = task.simulator(no_noise)

    reward = jax.jit(jax.vmap(lambda x, t: task.objective.running(theta, x, t)))

    def value(chi):
        x = np.asarray(run(jax.random.key(0), {**theta, "chi": chi}, 1).x)[0]
        return np.asarray(reward(x[:-1], np.asarray(task.t)[:-1])).sum() * 0.02

    h = 1e-4
    slope = [(value(h * e) - value(-h * e)) / (2 * h) for e in np.eye(3)]
    np.testing.assert_allclose(exact.kerr_gradient(task, theta), slope, rtol=1e-5)


def test_exact_rewards_are_those_of_the_moments():
    """The vector recursion of the noise power against the covariance recursion."""
    network = kite(SEVERAL)
    task = transmission(
        network, horizon=1.0, dt=0.02, drive=Drive(0, 2.0, frequency=10.0), frame="lab"
    )
    theta = make_parameters(network, spread=1.0)
    mean, covariance = exact.moments(task, theta)
    d = network.lead_weights[:, 1] * np.sqrt(2 * np.asarray(theta["gamma_e"])[1])
    power = np.abs(mean @ d) ** 2 + np.einsum("a,nab,b->n", d, covariance, d).real
    np.testing.assert_allclose(exact.rewards(task, theta), power[:-1] / 4.0, rtol=1e-10, atol=1e-15)


def test_exact_gradient_against_differences():
    network = kite()
    task = transmission(network, horizon=1.0, dt=0.02, drive=Drive(0, 2.0))
    theta = {
        name: np.asarray(v)
        for name, v in make_parameters(network, spread=1.0).items()
        if name != "chi"
    }
    _, gradient = exact.value_and_gradient(task, theta)
    h = 1e-5
    for name in theta:
        up, down = (
            {**theta, name: theta[name] + s * h * (np.arange(theta[name].size) == 1)}
            for s in (1, -1)
        )
        slope = (exact.value(task, up) - exact.value(task, down)) / (2 * h)
        assert abs(gradient[name][1] - slope) < 1e-8


@pytest.mark.long
def test_exact_of_the_papers_lattice():
    """ΔJ ≈ 0.01 from the instrument noise (Fig. 2d), and no detuning to prefer on the uniform
    lattice.
    """
    network = paper()
    task = transmission(network)
    theta = {"omega": network.omega, "kappa": network.kappa}
    value, gradient = exact.value_and_gradient(task, theta)
    quiet = exact.value(transmission(network.replace(sigma_e=0.0, sigma_r=0.0)), theta)
    assert 0.005 < value - quiet < 0.011
    assert np.abs(gradient["omega"]).max() < 1e-9  # ω -> −ω mirrors a bipartite lattice
    assert np.abs(gradient["kappa"]).max() > 0.1


@pytest.mark.parametrize("first", ["float32", "exact"])
def test_exact_beside_a_float32_run_of_the_same_network(first):
    """JAX confuses the precisions of an array that both use, while the compiled run is alive:
    see `exact._numbers`.
    """
    network = kite()
    task = transmission(network, horizon=1.0, dt=0.02, drive=Drive(0, 2.0))
    theta = {"omega": network.omega}
    run = jax.jit(lambda x: task.process.drift(theta, x, jnp.zeros(()), None))

    def in_float32():
        with jax.enable_x64(False):
            return run(jnp.ones(2 * network.sites))

    drift = in_float32() if first == "float32" else None
    value, gradient = exact.value_and_gradient(task, theta)
    drift = in_float32() if drift is None else drift
    assert drift.dtype == jnp.float32
    other = kite().replace(
        positions=0.0
    )  # the same physics, compiled afresh; float32 would show at 1e-7
    again, expected = exact.value_and_gradient(
        transmission(other, horizon=1.0, dt=0.02, drive=Drive(0, 2.0)), {"omega": other.omega}
    )
    assert value == pytest.approx(again, rel=1e-12)
    np.testing.assert_allclose(gradient["omega"], expected["omega"], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("task", "theta", "message"),
    [
        (transmission(chain(3)), {"chi": np.ones(3)}, "need χ = 0"),
        (transmission(chain(3), sigma_kappa=0.1), {}, "need σ_κ = 0"),
        (custom(chain(3), Drive(0), lambda theta, x: x[0]), {}, "this task has another"),
    ],
)
def test_exact_refuses_what_it_cannot_solve(task, theta, message):
    with pytest.raises(ValueError, match=message):
        exact.value(task, theta)


# -------------------------------------------------------------------------------------------- tasks


def diode(**options):
    """Two Kerr resonators with unequal leads: the intensities, so the detunings, depend on the
    side.
    """
    return chain(2, leads=[0, Lead(1, 0.3)], gamma=0.1, **options)


def noise_free_value(task, theta):
    x = np.asarray(task.simulator(no_noise)(jax.random.key(0), theta, 1).x)[0, :-1]
    t = np.asarray(task.t)
    rewards = jax.jit(jax.vmap(lambda x, t: task.objective.running(theta, x, t)))(x, t[:-1])
    return float(np.asarray(rewards) @ np.diff(t))


def test_isolation_is_zero_by_reciprocity_without_kerr():
    theta = {"omega": np.array([0.5, -0.2]), "kappa": np.array([0.8])}
    value, gradient = exact.value_and_gradient(
        isolation(diode(sigma_w=0.0), horizon=2.0, dt=0.02), theta
    )
    assert abs(value) < 1e-12
    assert max(np.abs(leaf).max() for leaf in gradient.values()) < 1e-12


OPTIONS = {"horizon": 4.0, "dt": 0.04}


@pytest.mark.long
def test_isolation_of_a_kerr_network_is_forward_minus_backward():
    network = diode(sigma_w=0.2)
    theta = {
        "omega": np.array([1.9, -3.0]),
        "kappa": np.array([1.3]),
        "chi": np.array([-0.93, 0.46]),
    }
    both = isolation(network, drive=Drive(0, 2.0), **OPTIONS)
    forward = noise_free_value(transmission(network, drive=Drive(0, 2.0), to=1, **OPTIONS), theta)
    backward = noise_free_value(transmission(network, drive=Drive(1, 2.0), to=0, **OPTIONS), theta)
    assert abs(noise_free_value(both, theta) - (forward - backward)) < 1e-12
    assert forward - backward > 0.1  # nonreciprocal

    theta["gamma_e"] = np.asarray(network.gamma_e)
    expected, error = finite_differences(both, jax.random.key(5), theta, 1000)
    estimate = both.estimator()(jax.random.key(6), theta, 4000)
    assert_agree(estimate, expected, error, resolved=ALL[:3])
    x = np.arange(8.0)  # Re of (forward, backward), then Im
    np.testing.assert_allclose(
        jax.jit(both.condition)(theta, x)["omega"], [0 + 16 + 4 + 36, 1 + 25 + 9 + 49]
    )


@pytest.mark.long
def test_copies_share_their_parameters_noise_included():
    network = diode(sigma_w=0.2)
    theta = make_parameters(network, ALL[:4], spread=1.0)
    task = isolation(network, drive=Drive(0, 2.0), **OPTIONS)
    value, gradient = with_kerr(task, theta)  # unequal leads emit unequal noise
    estimate = task.estimator()(jax.random.key(0), theta, 4000)
    assert abs(estimate.value - value) < 4 * estimate.value_stderr
    assert_agree(estimate, gradient)


@pytest.mark.long
def test_a_reward_of_ones_own():
    """As in the example of the module: reflection, which `transmission` also has, with its
    exact gradient.
    """
    network, theta = chain(2, gamma=0.2), {"omega": np.array([0.3, -0.1]), "gamma_e": np.ones(2)}
    drive = Drive(lead=0, amplitude=8.0)
    s_minus = outputs(network, drive)
    mine = custom(
        network, drive, lambda th, x, t: abs2(s_minus(th, x, t)[0]) / 64.0, horizon=1.0, dt=0.02
    )
    reflection = transmission(network, drive=Drive(0, 8.0), to=0, horizon=1.0, dt=0.02)
    _, gradient = exact.value_and_gradient(reflection, theta)
    assert_agree(mine.estimator()(jax.random.key(0), theta, 2000), gradient, resolved=("gamma_e",))
    assert (
        abs(exact.rewards(reflection, theta)[0] - 1) < 1e-12
    )  # all is reflected before the network fills


def test_conditions_are_the_intensities_on_the_parameters_sites():
    network = chain(3, leads=[0, Lead({1: 1.0, 2: 0.5})])
    x = np.array([1.0, 2.0, 3.0, 0.0, 1.0, 0.0])
    got = jax.jit(condition(network))(dict.fromkeys(ALL), x)
    power = np.array([1.0, 5.0, 9.0])
    for name in ("omega", "chi", "gamma"):
        np.testing.assert_allclose(got[name], power)
    np.testing.assert_allclose(got["kappa"], [6.0, 14.0])
    np.testing.assert_allclose(got["gamma_e"], [1.0, 14.0])


# ---------------------------------------------------------------------------------------- stability


def growth_of_the_recursion(task, theta):
    """The largest factor a step by brute force: powers of the propagator."""
    network, dt = task.network, float(task.t[1])
    p = {name: np.asarray(theta.get(name, getattr(network, name))) for name in ALL}
    step = jax.jit(jax.vmap(lambda e: exact.propagator(network, p, dt, 0.0, e), out_axes=1))
    f = step(np.eye(network.sites, dtype=complex))
    return float(np.abs(np.linalg.eigvals(np.asarray(f))).max())


def test_stability_is_the_spectrum_of_the_propagator():
    network = rectangular(3, 3)
    theta = {"omega": np.linspace(-2, 2, 9)}
    task = transmission(network, horizon=2.0, dt=0.02)
    verdict = stability(task, theta)
    assert np.isclose(verdict.radius, growth_of_the_recursion(task, theta), rtol=1e-12)
    for factor, stable in ((0.99, True), (1.01, False)):
        dt = factor * verdict.largest_dt
        assert (
            growth_of_the_recursion(transmission(network, horizon=100 * dt, dt=dt), theta) <= 1
        ) is stable


@pytest.mark.long
def test_stability_sees_the_lab_frame():
    rotating, lab = (
        stability(transmission(paper(), frame=frame), {}) for frame in ("rotating", "lab")
    )
    assert rotating.stable
    assert rotating.kerr == 0
    assert not lab.stable
    assert lab.growth > 2
    with pytest.warns(RuntimeWarning, match="rotating frame"):
        warn_if_unstable(transmission(paper(), frame="lab"), {})


def test_stability_counts_the_kerr_detuning():
    task = transmission(chain(3), dt=5e-3)
    assert stability(task, {}).stable
    strong = stability(task, {"chi": np.full(3, 0.5)})
    assert strong.kerr > 10
    assert not strong.stable


@pytest.mark.parametrize("integrator", ["euler", "heun"])
def test_bounds_prove_stability_only_where_the_eigenvalues_are_stable(integrator):
    network = rectangular(3, 4, gamma=0.1)
    rng = np.random.default_rng(0)
    proofs = []
    for dt in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5):
        task = transmission(network, horizon=20 * dt, dt=dt, integrator=integrator)
        for spread in (0.5, 2.0, 5.0):
            theta = {
                "omega": spread * rng.uniform(-1, 1, network.sites),
                "kappa": rng.uniform(0, 2, len(network.bonds)),
                "chi": 1e-3 * spread * rng.normal(size=network.sites),
            }
            p = {name: np.asarray(v) for name, v in parameters(network, theta).items()}
            proven = is_stable_by_bounds(task, p)
            assert stability(task, theta).stable or not proven
            proofs.append(proven)
    assert any(proofs)
    assert not all(proofs)


def test_bounds_see_a_strongly_damped_mode():
    # Euler's step is stable for the slow, turning corner, and not for a lead of 2/Δt
    network = chain(2, leads=[Lead(0, 300.0), Lead(1, 1.0)], gamma=50.0)
    task = transmission(network, horizon=0.1, dt=0.01)
    p = {name: np.asarray(v) for name, v in parameters(network, {}).items()}
    assert not stability(task, {}).stable
    assert not is_stable_by_bounds(task, p)


def test_a_watch_without_eigenvalues_still_warns():
    task = transmission(paper(), integrator="heun", dt=0.02)
    watch = StabilityWatch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch(task, {})
    with pytest.warns(RuntimeWarning, match="unstable"):
        watch(task, {"omega": np.linspace(-30, 30, task.network.sites)})


def test_stability_bounds_large_networks():
    exact_spectrum = stability(transmission(rectangular(5, 5)), {})
    bounded = stability(transmission(rectangular(40, 40)), {})
    assert bounded.bound
    assert bounded.largest_dt <= exact_spectrum.largest_dt
    assert "possibly" in str(stability(transmission(rectangular(40, 40), dt=0.01), {}))
