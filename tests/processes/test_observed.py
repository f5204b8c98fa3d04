"""Processes seen in part and through noise, against closed moments, dense Gaussian likelihoods
and another filter.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import expm
from scipy.stats import multivariate_normal

import fluctua as fl
from fluctua import tcmt
from fluctua.core.estimator import gradient_samples
from fluctua.core.likelihood.guard import examine
from fluctua.core.scores import local_linear
from fluctua.core.simulate import Counted
from fluctua.core.streamed import split_key
from fluctua.processes.observed import log_likelihood
from fluctua.tcmt import exact as of_network

T = jnp.linspace(0.0, 1.0, 21)
COUNT = 4000
ONE = fl.Objective(terminal=lambda theta, y: jnp.ones(()))  # its gradient is ΣU, that of ln p(y)


def z_scores(estimate, exact):
    z = jax.tree.map(lambda g, e, s: (g - e) / s, estimate.gradient, exact, estimate.stderr)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(z)])


# ------------------------------------------------------------------ Ornstein–Uhlenbeck, one channel

OU = fl.Process(lambda th, x: -th["rate"] * x, lambda th, x: th["sigma"] * jnp.ones_like(x))
THETA = {
    "rate": jnp.array(1.0),
    "sigma": jnp.array(0.5),
    "readout": jnp.array(0.3),
    "start": jnp.array(1.0),
}
READ = lambda th: th["readout"] ** 2
STARTS = {
    "known": fl.Normal(lambda th: th["start"][None], 0.0),
    "drawn": fl.Normal(lambda th: th["start"][None], lambda th: 0.2 * th["start"]),
}
POWER = fl.Objective(running=lambda th, y: th["rate"] * y[0] ** 2, terminal=lambda th, y: y[0])


def exact_value(theta, spread):
    """J of the Euler scheme from X₀ with mean `start` and variance spread·start, from their
    recursion.
    """

    def step(now, dt):
        mean, variance, value = now
        value = value + theta["rate"] * (mean**2 + variance + theta["readout"] ** 2) * dt
        mean, variance = mean * (1 - theta["rate"] * dt), variance * (1 - theta["rate"] * dt) ** 2
        return (mean, variance + theta["sigma"] ** 2 * dt, value), None

    begin = (theta["start"], spread * theta["start"], jnp.zeros(()))
    (mean, _, value), _ = jax.lax.scan(step, begin, jnp.diff(T))
    return value + mean


exact_value_and_gradient = jax.jit(jax.value_and_grad(exact_value))


@pytest.mark.parametrize(
    ("baseline", "start"),
    [
        ("mean", "drawn"),
        ("optimal", "known"),
    ],
)
def test_drift_noise_readout_and_start_of_an_observed_process(key, baseline, start):
    process = fl.Observed(OU, observe=[[1.0]], noise=READ, start=STARTS[start])
    estimator = fl.ppgt(fl.simulator(process, t=T), POWER, baseline=baseline)
    estimate = estimator(key, THETA, COUNT)
    exact, gradient = exact_value_and_gradient(THETA, {"known": 0.0, "drawn": 0.2}[start])
    assert abs(estimate.value - exact) < 4 * estimate.value_stderr
    assert np.abs(z_scores(estimate, gradient)).max() < 4
    assert (
        max(np.abs(leaf) for leaf in jax.tree.leaves(estimate.stderr)) < 0.5
    )  # the zs say something


@pytest.mark.long
def test_a_recording_gives_what_the_stream_gave_and_blocks_change_nothing(key):
    process = fl.Observed(OU, observe=[[1.0]], noise=READ, start=STARTS["drawn"])
    substrate = fl.simulator(process, t=T)
    streamed = fl.ppgt(substrate, POWER, baseline="optimal").samples(key, THETA, 64)
    record = substrate(split_key(key)[0], THETA, 64)
    assert record.x.shape == (64, 21, 1)
    for block_bytes in (2**20, 64 * 8 * 3):  # whole, and three steps at a time
        recorded = gradient_samples(
            process, POWER, THETA, record, baseline="optimal", block_bytes=block_bytes
        )
        for name in THETA:
            np.testing.assert_allclose(
                recorded.gradient[name], streamed.gradient[name], rtol=1e-9, atol=1e-9
            )


# ------------------------------------------------------------------- three components, two channels

MIXED = {"a": jnp.array([0.7, 0.2, 0.5]), "sigma": jnp.array(0.4), "readout": jnp.array([0.1, 0.2])}


def drift(theta, x, t, context):
    a = theta["a"]
    force = 0.0 if context is None else context["force"]
    return jnp.array(
        [-a[0] * x[0] + x[1], -x[0] - a[1] * x[1] + a[2] * x[2], -x[2] + jnp.sin(t) + force]
    )


HIDDEN = fl.Process(drift, lambda th, x: jnp.array([0.3, 1.0, 0.5]) * th["sigma"])
C = np.array([[1.0, 0.0, 0.0], [0.0, 0.5, 1.0]])
CLOUD = fl.Normal([0.5, 0.0, -0.2], [[0.3, 0.1, 0.0], [0.1, 0.2, 0.0], [0.0, 0.0, 0.1]])
MIXTURE = fl.Observed(HIDDEN, observe=C, noise=lambda th: th["readout"] ** 2, start=CLOUD)
GRID = jnp.concatenate([jnp.linspace(0, 0.5, 6), jnp.array([0.7, 0.75, 1.0])])  # not uniform


def dense_moments(theta, t, step):
    """Mean and covariance of all samples together, from those of all states. step: (x -> mean,
    F, Σ) of an interval.
    """
    size = len(t)
    kicks = jnp.eye(3 * size).reshape(
        size, 3, 3 * size
    )  # the states as a sum of the start and of all kicks

    def interval(now, when):
        mean, row = now
        own, t, dt = when
        ahead, f, sigma = step(theta, t, dt)
        mean, row = ahead(mean), f @ row + own
        return (mean, row), (mean, row, sigma)

    begin = jnp.asarray(CLOUD.mean), kicks[0]
    _, (means, rows, sigmas) = jax.lax.scan(interval, begin, (kicks[1:], t[:-1], jnp.diff(t)))
    means, rows = jnp.concatenate([begin[0][None], means]), jnp.concatenate([begin[1][None], rows])
    each = jnp.concatenate([jnp.asarray(CLOUD.covariance)[None], sigmas])
    whole = jnp.einsum("iak,kl,jbl->iajb", rows, jax.scipy.linalg.block_diag(*each), rows)
    seen = jnp.einsum("ca,iajb,db->icjd", C, whole, C).reshape(2 * size, 2 * size)
    return (means @ C.T).ravel(), seen + jnp.kron(jnp.eye(size), jnp.diag(theta["readout"] ** 2))


def euler_interval(theta, t, dt):
    slope = jax.jacobian(lambda x: drift(theta, x, t, None))(jnp.zeros(3))
    sigma = jnp.array([0.3, 1.0, 0.5]) * theta["sigma"]
    return (
        lambda x: x + drift(theta, x, t, None) * dt,
        jnp.eye(3) + slope * dt,
        jnp.diag(sigma**2) * dt,
    )


def dense_log_likelihood(theta, y, t, step=euler_interval):
    mean, covariance = dense_moments(theta, t, step)
    return jax.scipy.stats.multivariate_normal.logpdf(y.ravel(), mean, covariance)


def test_likelihood_and_its_gradient_are_those_of_all_samples_together(key):
    record = fl.simulator(MIXTURE, t=GRID)(key, MIXED, 3)
    found = log_likelihood(MIXTURE, MIXED, record)
    score = gradient_samples(MIXTURE, ONE, MIXED, record, baseline="none").gradient
    mean, covariance = jax.jit(lambda theta: dense_moments(theta, GRID, euler_interval))(MIXED)
    of_all = jax.jit(jax.grad(lambda theta, y: dense_log_likelihood(theta, y, GRID)))
    for j, y in enumerate(record.x):
        assert found[j] == pytest.approx(
            multivariate_normal.logpdf(np.ravel(y), mean, covariance), rel=1e-10
        )
        exact = of_all(MIXED, y)
        for name in MIXED:
            np.testing.assert_allclose(score[name][j], exact[name], rtol=1e-8, atol=1e-8)


def test_likelihood_of_another_filter(key):
    kalman = pytest.importorskip("filterpy.kalman")
    record = fl.simulator(MIXTURE, t=GRID)(key, MIXED, 2)
    found = log_likelihood(MIXTURE, MIXED, record)

    @jax.jit
    def interval(t, dt):
        ahead, f, sigma = euler_interval(MIXED, t, dt)
        return ahead(jnp.zeros(3)), f, sigma

    for j, y in enumerate(np.asarray(record.x)):
        other = kalman.KalmanFilter(dim_x=3, dim_z=2)
        other.x, other.P = np.asarray(CLOUD.mean)[:, None], np.asarray(CLOUD.covariance)
        other.H, other.R = C, np.diag(np.asarray(MIXED["readout"]) ** 2)
        other.update(y[0][:, None])
        total = other.log_likelihood
        for n in range(len(GRID) - 1):
            constant, f, sigma = map(np.asarray, interval(GRID[n], GRID[n + 1] - GRID[n]))
            other.predict(u=np.ones((1, 1)), B=constant[:, None], F=f, Q=sigma)
            other.update(y[n + 1][:, None])
            total += other.log_likelihood
        assert found[j] == pytest.approx(total, rel=1e-9)


@pytest.mark.long
def test_samples_far_apart_with_the_exact_transition(key):
    """Local linearisation of a linear drift that is constant in time: the matrix exponential
    over any interval.
    """
    still = lambda theta, x, t, context: drift(theta, x, 0.0, context)
    process = fl.Observed(
        fl.Process(still, HIDDEN.noise),
        observe=C,
        noise=lambda th: th["readout"] ** 2,
        start=CLOUD,
        transition=local_linear,
    )
    t = jnp.array([0.0, 0.8, 2.0, 2.5])
    y = jax.random.normal(key, (1, 4, 2))

    def interval(theta, _, dt):
        slope = jax.jacobian(lambda x: still(theta, x, 0.0, None))(jnp.zeros(3))
        sigma = jnp.diag((jnp.array([0.3, 1.0, 0.5]) * theta["sigma"]) ** 2)
        big = jax.scipy.linalg.expm(
            jnp.block([[-slope, sigma], [jnp.zeros((3, 3)), slope.T]]) * dt
        )  # Van Loan
        f = big[3:, 3:].T
        rest = still(theta, jnp.zeros(3), 0.0, None)
        return (
            lambda x: f @ x + jnp.linalg.solve(slope, (f - jnp.eye(3)) @ rest),
            f,
            f @ big[:3, 3:],
        )

    slope = jax.jit(jax.jacobian(lambda x: still(MIXED, x, 0.0, None)))(jnp.zeros(3))
    assert np.allclose(
        jax.jit(lambda theta: interval(theta, 0, 0.5)[1])(MIXED), expm(0.5 * np.asarray(slope))
    )
    score = gradient_samples(process, ONE, MIXED, fl.Trajectories(t, y), baseline="none").gradient
    exact = jax.jit(jax.grad(lambda theta: dense_log_likelihood(theta, y[0], t, interval)))(MIXED)
    for name in MIXED:
        np.testing.assert_allclose(
            score[name][0], exact[name], rtol=1e-5, atol=1e-5
        )  # the series: 1e-7 of F


@pytest.mark.long
def test_one_covariance_serves_all_trajectories_of_a_linear_process():
    """Also with a force of each trajectory's own, which moves means alone; and it gives what
    each by itself gives.
    """
    context = {"force": jnp.array([0.3, -0.2])}
    y = jax.random.normal(jax.random.key(0), (2, len(GRID), 2))
    one = {"force": context["force"][0]}
    assert MIXTURE.check(MIXED, y[0, 0], GRID[0], one).shared
    together = gradient_samples(
        MIXTURE, ONE, MIXED, fl.Trajectories(GRID, y, context), baseline="none"
    ).gradient
    bent = fl.Process(lambda th, x, t, c: drift(th, x, t, c) + 1e-14 * x**2, HIDDEN.noise)
    apart = fl.Observed(bent, observe=C, noise=MIXTURE.noise, start=CLOUD)
    assert not apart.check(MIXED, y[0, 0], GRID[0], one).shared
    alone = gradient_samples(
        apart, ONE, MIXED, fl.Trajectories(GRID, y, context), baseline="none"
    ).gradient
    for name in MIXED:
        np.testing.assert_allclose(together[name], alone[name], rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_everything_observed_exactly_is_the_process_itself(key):
    """y = x: the filter's score is that of the increments, and the hidden path that of the
    process' own noise.
    """
    start = jnp.array([0.5, 0.0, -0.2])
    reward = fl.Objective(running=lambda th, x: x[0] * x[2], terminal=lambda th, x: x[1])
    theta = {name: MIXED[name] for name in ("a", "sigma")}
    process = fl.Observed(HIDDEN, observe=np.eye(3), start=start)
    seen = fl.ppgt(fl.simulator(process, t=T), reward, baseline="none").samples(key, theta, 20)
    plain = fl.ppgt(fl.simulator(HIDDEN, start, T), reward, baseline="none").samples(key, theta, 20)
    np.testing.assert_allclose(seen.returns, plain.returns, rtol=1e-12)
    for name in theta:
        np.testing.assert_allclose(seen.gradient[name], plain.gradient[name], rtol=1e-8, atol=1e-8)


@pytest.mark.long
def test_parameters_whose_components_are_all_observed_have_the_score_of_full_observation(key):
    """Component 2 is hidden; a[0] acts on component 0, whose drift sees 0 and 1 alone."""
    start = jnp.array([0.5, 0.0, -0.2])
    reward = fl.Objective(terminal=lambda th, x: x[0] + x[1])
    process = fl.Observed(HIDDEN, observe=np.eye(3)[:2], start=start)
    theta = {"a": MIXED["a"], "sigma": MIXED["sigma"]}
    seen = fl.ppgt(fl.simulator(process, t=T), reward, baseline="none").samples(key, theta, 20)
    plain = fl.ppgt(fl.simulator(HIDDEN, start, T), reward, baseline="none").samples(key, theta, 20)
    np.testing.assert_allclose(
        seen.gradient["a"][:, 0], plain.gradient["a"][:, 0], rtol=1e-8, atol=1e-8
    )
    assert np.abs(seen.gradient["a"][:, 2] - plain.gradient["a"][:, 2]).max() > 0.1


# ------------------------------------------------------------------------------- resonator networks


@pytest.mark.long
def test_a_network_with_hidden_resonators_and_noisy_readout(key):
    """Only the two lead sites are read, with noise: every ω and κ has its exact gradient, those
    of hidden sites too.
    """
    network = tcmt.chain(4)
    task = tcmt.transmission(network, horizon=2.0, dt=0.05, drive=tcmt.Drive(0, 3.0))
    theta = {"omega": jnp.array([0.3, -0.2, 0.1, 0.4]), "kappa": jnp.array([1.0, 0.7, 1.2])}
    sites, ends = network.sites, np.array([0, network.sites - 1])
    rows = np.concatenate([ends, ends + sites])
    variance = 0.05
    process = fl.Observed(
        task.process, observe=np.eye(2 * sites)[rows], noise=variance, start=task.start
    )

    def reward(th, y, t):  # other sites do not feed the lead
        return task.objective.running(th, jnp.zeros(2 * sites, y.dtype).at[rows].set(y), t)

    estimate = fl.ppgt(fl.simulator(process, t=task.t), fl.Objective(running=reward))(
        key, theta, 3000
    )
    exact, gradient = of_network.value_and_gradient(task, theta)
    lead = np.asarray(network.lead_weights)[:, 1] * np.sqrt(2 * np.asarray(network.gamma_e)[1])
    added = (
        np.sum(np.asarray(task.weights)[1] * lead**2) * 2 * variance * 2.0
    )  # the readout's own power
    assert abs(estimate.value - exact - added) < 4 * estimate.value_stderr
    z = z_scores(estimate, gradient)
    assert np.abs(z).max() < 4
    size = np.concatenate(
        [np.ravel(gradient[name]) / np.ravel(estimate.stderr[name]) for name in ("kappa", "omega")]
    )
    assert np.abs(size).max() > 5  # the gradient is not lost in its errors


# ---------------------------------------------------------------------------------- extended filter

KERR = {"omega": jnp.array(0.5), "chi": jnp.array(0.02), "sigma": jnp.array(0.4)}


def kerr_drift(th, x):
    frequency = th["omega"] + th["chi"] * (x[0] ** 2 + x[1] ** 2)
    return jnp.array([frequency * x[1] - 0.3 * x[0] + 1.0, -frequency * x[0] - 0.3 * x[1]])


@pytest.mark.long
def test_extended_filter_of_a_weakly_nonlinear_oscillator(key):
    """One quadrature is seen.

    A filter that took the drift at the mean would lose an eighth of ∂J/∂χ: ten errors.
    """
    oscillator = fl.Process(kerr_drift, lambda th, x: th["sigma"] * jnp.ones(2))
    process = fl.Observed(oscillator, observe=[[1.0, 0.0]], noise=0.04, start=jnp.array([0.5, 0.0]))
    objective = fl.Objective(running=lambda th, y: y[0], terminal=lambda th, y: y[0] ** 2)
    substrate = fl.simulator(process, t=jnp.linspace(0, 2, 21))
    estimate = fl.ppgt(substrate, objective)(key, KERR, 20_000)
    exact = fl.reference.finite_differences(objective, substrate)(
        jax.random.fold_in(key, 1), KERR, 10_000
    )
    error = jax.tree.map(lambda a, b: np.hypot(a, b), estimate.stderr, exact.stderr)
    for name in KERR:
        assert abs(estimate.gradient[name] - exact.gradient[name]) < 4 * error[name]
    assert error["chi"] < 0.02 * abs(exact.gradient["chi"])
    assert examine(process, KERR, substrate(key, KERR, 500)).cause == ""


@pytest.mark.long
def test_a_drift_that_bends_later_is_not_taken_for_linear(key):
    """−kx − c(t > ½)x³ + 1, against the densities of the Euler chain by quadrature: as linear
    ∂J/∂c was 0 ± 0.
    """
    drift = lambda th, x, t: -th["k"] * x - th["c"] * (t > 0.5) * x**3 + 1
    theta, spread, start, dt = {"k": jnp.array(1.0), "c": jnp.array(1.0)}, 0.6, 1.5, 0.05

    def value(th):  # a Gaussian of width 0.13 on a grid of 0.01: exact to rounding
        x = jnp.linspace(-3, 5, 801)
        ahead = lambda x, t: x + dt * drift(th, x, t)
        kick = lambda r: (
            jnp.exp(-(r**2) / (2 * spread**2 * dt)) / jnp.sqrt(2 * np.pi * spread**2 * dt)
        )
        density = kick(x - ahead(start, 0.0))
        advance = lambda n, density: kick(x[:, None] - ahead(x, n * dt)) @ density * 0.01
        return 4 * jnp.sum(jax.lax.fori_loop(1, 20, advance, density) * x) * 0.01

    exact = jax.jit(jax.jacfwd(value))(theta)
    cubic = fl.Process(drift, lambda th, x: spread * jnp.ones(1))
    process = fl.Observed(cubic, observe=[[1.0]], noise=0.01, start=jnp.array([start]))
    objective = fl.Objective(terminal=lambda th, y: 4 * y[0])
    estimate = fl.ppgt(fl.simulator(process, t=T), objective, baseline="mean")(key, theta, COUNT)
    assert np.abs(z_scores(estimate, exact)).max() < 4
    assert float(estimate.stderr["c"]) < 0.05 * abs(float(exact["c"]))  # the z says something


@pytest.mark.long
def test_a_known_start_that_moves_in_some_contexts_is_refused_by_name(key):
    """Context 1 begins at `start`, known exactly; the first trajectory has context 0 and begins
    at 1.
    """
    start = fl.Normal(lambda th, context: jnp.where(context > 0, th["start"], 1.0)[None], 0.0)
    process = fl.Observed(OU, observe=[[1.0]], noise=0.0, start=start)
    run = fl.simulator(
        process, t=T, context=Counted(lambda key, trajectory: 1.0 * (trajectory > 2))
    )
    with pytest.raises(ValueError, match="channel 0 at the start .*`start`, on trajectory 3"):
        fl.ppgt(run, POWER, baseline="mean")(key, THETA, 8)


@pytest.mark.long
def test_a_drift_that_bends_too_much_is_told_by_its_innovations(key):
    """A hidden phase that diffuses over several turns is no Gaussian."""
    turning = fl.Process(
        lambda th, x: jnp.array([-x[0] + jnp.sin(3 * x[1]), th]),
        lambda th, x: jnp.array([0.1, 1.0]),
    )
    process = fl.Observed(turning, observe=[[1.0, 0.0]], noise=0.001, start=jnp.zeros(2))
    record = fl.simulator(process, t=jnp.linspace(0, 4, 81))(key, 1.0, 100)
    with pytest.warns(RuntimeWarning, match="channel 0.*extended filter"):
        fl.gradient(process, ONE, 1.0, record)


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observe": [1.0, 0.0, 0.0]}, r"`observe`.*\(3,\)"),
        ({"observe": np.full((1, 3), np.nan)}, "`observe`.*finite"),
        ({"noise": -0.1}, "`noise`.*-0.1"),
        ({"noise": [[1.0, 2.0], [2.0, 1.0]]}, "`noise`.*-1"),
        ({"noise": [0.1, 0.1, 0.1]}, r"`noise`.*\(3,\)"),
        ({"noise": np.inf}, "`noise`.*inf"),
        ({"start": lambda th: jnp.zeros(3)}, "Normal"),
        ({"process": fl.Jumps(lambda th, x: x, [[1.0]])}, "Jumps"),
    ],
)
def test_bad_records_are_refused_when_made(options, message):
    arguments = {"process": HIDDEN, "observe": C, "noise": 0.1, "start": jnp.zeros(3)} | options
    with pytest.raises((ValueError, TypeError), match=message):
        fl.Observed(arguments.pop("process"), **arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observe": np.eye(4)[:2]}, r"4 columns.*\(3,\)"),
        ({"noise": lambda th: -(th["readout"] ** 2)}, "`noise`.*-0.04"),
        ({"start": fl.Normal(jnp.zeros(3), -1.0)}, "covariance of the start.*-1"),
        ({"observe": [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]], "noise": 0.0}, "channel 0.*noise"),
        ({"noise": 0.0, "start": fl.Normal(lambda th: th["a"], 0.0)}, r"channel 0.*a\[0\]"),
    ],
)
def test_what_cannot_be_filtered_is_named(key, options, message):
    process = fl.Observed(HIDDEN, **{"observe": C, "noise": 0.1, "start": jnp.zeros(3)} | options)
    with pytest.raises(ValueError, match=message):
        fl.ppgt(fl.simulator(process, t=GRID), ONE)(key, MIXED, 4)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (fl.Objective(running=lambda th, x: x[2] ** 2), "running reward.*2 channels.*index 2"),
        (fl.Objective(terminal=lambda th, x: jnp.ones(3) @ x), "terminal reward.*2 channels"),
        (
            fl.Objective(per_step=lambda th, x, x_next: x_next[2] - x[2]),
            "step reward.*2 channels.*index 2",
        ),
    ],
)
def test_a_reward_of_hidden_states_is_refused(key, objective, message):
    with pytest.raises(ValueError, match=message):
        fl.ppgt(fl.simulator(MIXTURE, t=GRID), objective)(key, MIXED, 4)


def test_what_does_not_go_with_an_observed_process():
    with pytest.raises(ValueError, match="`Observed` brings its own start"):
        fl.simulator(MIXTURE, jnp.zeros(3), GRID)
    seen = fl.Trajectories(GRID, np.zeros((4, len(GRID), 2)))
    with pytest.raises(ValueError, match="`Observed` brings its own start"):
        fl.gradient(MIXTURE, ONE, MIXED, seen, start=fl.Density(lambda th, x: 0.0))
    with pytest.raises(ValueError, match="Observed has none"):
        fl.ppgt(fl.simulator(MIXTURE, t=GRID), ONE, baseline="twin")
    with pytest.raises(ValueError, match="Observed brings its own score"):
        fl.ppgt(fl.simulator(MIXTURE, t=GRID), ONE, score=fl.scores.local_linear_score)
    with pytest.raises(ValueError, match="2 channels.*3 components"):
        fl.gradient(MIXTURE, ONE, MIXED, fl.Trajectories(GRID, jnp.zeros((4, len(GRID), 3))))
    trap = fl.Observed(OU, observe=[[1.0]], noise=0.1, start=jnp.zeros(1))
    trace = fl.Trajectories(
        np.linspace(0, 200, 2001), np.random.default_rng(0).normal(size=(1, 2001, 1))
    )
    with pytest.raises(ValueError, match="`Observed` depends on all samples before"):
        fl.stationary(trap, lambda th, y: y[0], THETA, trace, window=1.0)
    with pytest.raises(TypeError, match="start"):
        fl.simulator(HIDDEN, t=GRID)
