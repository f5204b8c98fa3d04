"""Bad input: a clear error at the boundary, before work starts. Each test reads the message."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl

THETA = {"k": jnp.asarray(1.0), "f": jnp.asarray([0.5, -0.5])}
T = np.linspace(0, 1, 11)
OBJECTIVE = fl.Objective(running=lambda theta, x: jnp.sum(x**2))
KEY = jax.random.key(0)


def drift(theta, x, t, context):
    return -theta["k"] * x + theta["f"]


def noise(theta, x, t, context):
    return 0.3 * jnp.ones(2)


PROCESS = fl.Process(drift, noise)


def trajectories(count=6):
    return fl.simulator(PROCESS, jnp.zeros(2), T)(KEY, THETA, count)


def estimate(process=PROCESS, objective=OBJECTIVE, theta=THETA, count=4, **options):
    return fl.ppgt(fl.simulator(process, jnp.zeros(2), T), objective, **options)(KEY, theta, count)


# ------------------------------------------------------------------------------------- diffusion


def test_singular_diagonal_diffusion_names_the_component():
    silent = fl.Process(drift, lambda theta, x: jnp.array([0.3, 0.0]))
    with pytest.raises(
        ValueError,
        match=r"singular at the first state: state component 1 has no noise.*instrumented",
    ):
        estimate(silent)


def test_singular_dense_diffusion_names_the_component():
    shared = fl.Process(drift, lambda theta, x: jnp.array([[0.3, 0.2], [0.0, 0.0]]))
    with pytest.raises(ValueError, match="state component 1 has no noise"):
        estimate(shared)
    with pytest.raises(ValueError, match="singular"):
        fl.gradient(shared, OBJECTIVE, THETA, trajectories())


def test_too_few_noises_are_singular():
    with pytest.raises(ValueError, match="singular"):
        estimate(fl.Process(drift, lambda theta, x: jnp.array([[0.3], [0.1]])))


def test_singular_matrix_free_diffusion():
    only = fl.Process(drift, None, lambda theta, x, t, context, v: jnp.array([0.04, 0.0]) * v)
    with pytest.raises(ValueError, match="state component 1 has no noise"):
        fl.gradient(only, OBJECTIVE, THETA, trajectories())


def test_diffusion_that_vanishes_later_is_located():
    """Noise dies where x[0] passes 0.2; the start is fine."""
    dying = fl.Process(drift, lambda theta, x: 0.3 * jnp.where(x[0] < 0.2, 1.0, 0.0) * jnp.ones(2))
    with pytest.raises(ValueError, match=r"singular on trajectory \d+ at time index [1-9]"):
        estimate(dying)
    with pytest.raises(ValueError, match=r"singular on trajectory \d+ at time index [1-9]"):
        fl.gradient(dying, OBJECTIVE, THETA, fl.simulator(dying, jnp.zeros(2), T)(KEY, THETA, 6))


def test_infinite_gradient_of_a_finite_path_is_reported():
    cusp = fl.Objective(running=lambda theta, x: jnp.sqrt(theta["k"] * 0.0 * x[0] ** 2))
    with pytest.raises(
        FloatingPointError, match=r"gradients of 4 of 4 trajectories are not finite"
    ):
        estimate(objective=cusp)


# ------------------------------------------------------------------------------------ trajectories


def test_non_finite_trajectories_are_counted_and_named():
    t, x, context = trajectories()[:3]
    x = np.array(x)
    x[2, 4, 1], x[5, 0, 0] = np.nan, np.inf
    with pytest.raises(
        ValueError, match=r"2 of 6 trajectories are not finite: 2, 5 .*time index 4, component 1"
    ):
        fl.gradient(PROCESS, OBJECTIVE, THETA, fl.Trajectories(t, x))
    chunks = [fl.Trajectories(t, x[:3]), fl.Trajectories(t, x[3:])]
    with pytest.raises(ValueError, match=r"2 of 6 trajectories are not finite: 2, 5"):
        fl.gradient(PROCESS, OBJECTIVE, THETA, chunks)


def test_overflowing_simulation():
    explosive = fl.Process(lambda theta, x: 1e30 * (1 + x**2), noise)
    with pytest.raises(
        FloatingPointError, match="4 of 4 simulated trajectories overflowed.*time step"
    ):
        estimate(explosive)


@pytest.mark.parametrize(
    ("t", "x", "message"),
    [
        (
            T,
            np.zeros((11, 2)),
            r"must be \(trajectories, 11, state\).*got \(11, 2\). For one trajectory pass "
            r"x\[None\]",
        ),
        (
            T,
            np.zeros((4, 10, 2)),
            r"must be \(trajectories, 11, state\) to match `t`; got \(4, 10, 2\)",
        ),
        (T, np.zeros((0, 11, 2)), "holds no trajectories"),
        (
            T[::-1],
            np.zeros((4, 11, 2)),
            r"increase strictly; t\[0\] = 1 is followed by t\[1\] = 0.9 \(10 such places\)",
        ),
        (
            np.r_[0, 0, T[2:]],
            np.zeros((4, 11, 2)),
            r"t\[0\] = 0 is followed by t\[1\] = 0 \(1 such place\)",
        ),
        (np.r_[np.nan, T[1:]], np.zeros((4, 11, 2)), r"`t` is not finite at indices \[0\]"),
        (T[:1], np.zeros((4, 1, 2)), "at least two times"),
    ],
)
def test_shapes_and_times_that_do_not_match(t, x, message):
    with pytest.raises(ValueError, match=message):
        fl.gradient(PROCESS, OBJECTIVE, THETA, fl.Trajectories(t, x))


def test_complex_states_are_told_to_split():
    with pytest.raises(TypeError, match=r"`x` .*complex128.*imaginary"):
        fl.gradient(PROCESS, OBJECTIVE, THETA, fl.Trajectories(T, np.zeros((4, 11, 2), complex)))


def test_context_has_one_row_per_trajectory():
    t, x = trajectories()[:2]
    with pytest.raises(
        ValueError,
        match=r"`context\['phase'\]` must have one row per trajectory, \(6, ...\); got \(5,\)",
    ):
        fl.gradient(PROCESS, OBJECTIVE, THETA, fl.Trajectories(t, x, {"phase": np.zeros(5)}))


def test_chunks_must_agree_and_be_re_readable():
    t, x = trajectories()[:2]
    with pytest.raises(ValueError, match=r"share one time grid.*chunk 1 has 10 and 2"):
        fl.gradient(
            PROCESS, OBJECTIVE, THETA, [fl.Trajectories(t, x), fl.Trajectories(t[:-1], x[:, :-1])]
        )
    with pytest.raises(ValueError, match="chunk 1 .* other times"):
        fl.gradient(PROCESS, OBJECTIVE, THETA, [fl.Trajectories(t, x), fl.Trajectories(t * 2, x)])
    with pytest.raises(TypeError, match="generator"):
        fl.gradient(PROCESS, OBJECTIVE, THETA, (piece for piece in [fl.Trajectories(t, x)]))
    with pytest.raises(ValueError, match="no trajectories"):
        fl.gradient(PROCESS, OBJECTIVE, THETA, [])
    with pytest.raises(TypeError, match="expected fluctua.Trajectories"):
        fl.gradient(PROCESS, OBJECTIVE, THETA, [x])


def test_coarse_states_are_warned_about():
    t, x = trajectories()[:2]
    with pytest.warns(RuntimeWarning, match="rounded to about.*float64"):
        fl.gradient(
            PROCESS, OBJECTIVE, THETA, fl.Trajectories(t, (np.asarray(x) + 1e5).astype(np.float32))
        )


# --------------------------------------------------------------------------------------- ensemble


@pytest.mark.parametrize(
    "baseline",
    [fl.baselines.mean(), fl.baselines.optimal(), fl.baselines.binned(lambda theta, x: x[0])],
)
def test_leave_one_out_needs_two(baseline):
    with pytest.raises(ValueError, match="needs at least 2 trajectories; got 1"):
        estimate(count=1, baseline=baseline)
    with pytest.raises(ValueError, match="needs at least 2 trajectories; got 1"):
        fl.gradient(PROCESS, OBJECTIVE, THETA, trajectories(1), baseline=baseline)


@pytest.mark.parametrize("count", [0, -3, 2.5, True])
def test_count_is_a_whole_number(count):
    with pytest.raises(ValueError, match=rf"`count` .*got {count}"):
        estimate(count=count)


def test_a_table_that_does_not_fit_the_grid():
    with pytest.raises(ValueError, match=r"at each of the 11 times, shape \(11,\); got \(7,\)"):
        estimate(baseline=fl.baselines.time_only(jnp.zeros(7)))


def test_one_recorded_trajectory_has_no_other_for_its_baseline():
    with pytest.raises(ValueError, match=r"there is 1 trajectory.*time_only\(values\)"):
        fl.gradient(PROCESS, OBJECTIVE, THETA, trajectories(1), baseline=fl.baselines.time_only())


# ---------------------------------------------------------------------------- parameters, callables


def test_parameters_must_be_floating_point_and_finite():
    with pytest.raises(TypeError, match=r"`theta\['n'\]` is int"):
        estimate(theta={**THETA, "n": jnp.asarray(3)})
    with pytest.raises(ValueError, match=r"`theta\['k'\]` is not finite"):
        estimate(theta={**THETA, "k": jnp.asarray(jnp.nan)})
    with pytest.raises(ValueError, match="no parameters"):
        estimate(theta={})


def test_wrong_shapes_from_the_user_functions():
    with pytest.raises(
        ValueError, match=r"drift must have the shape of the state, \(2,\); got \(3,\)"
    ):
        estimate(fl.Process(lambda theta, x: jnp.zeros(3), noise))
    with pytest.raises(ValueError, match=r"noise must be \(2,\).*got \(\). For equal noise"):
        estimate(fl.Process(drift, lambda theta, x: jnp.asarray(0.3)))
    with pytest.raises(ValueError, match=r"noise must be \(2,\).*or \(2, W\); got \(3, 3\)"):
        estimate(fl.Process(drift, lambda theta, x: jnp.eye(3)))
    with pytest.raises(ValueError, match=r"noise product σ dw must have shape \(2,\); got \(3,\)"):
        estimate(fl.Process(drift, fl.NoiseProduct(lambda theta, x, t, c, dw: dw, 3)))
    with pytest.raises(ValueError, match=r"Q v must have shape \(2,\); got \(1,\)"):
        fl.gradient(
            fl.Process(drift, None, lambda th, x, t, c, v: v[:1]), OBJECTIVE, THETA, trajectories()
        )
    with pytest.raises(
        ValueError, match=r"running reward must be one number per state.*got shape \(2,\)"
    ):
        estimate(objective=fl.Objective(running=lambda theta, x: x))
    with pytest.raises(ValueError, match=r"terminal reward .*\(2,\)"):
        estimate(objective=fl.Objective(terminal=lambda theta, x: x))
    with pytest.raises(TypeError, match=r"terminal reward must be a real number; got bool"):
        estimate(objective=fl.Objective(terminal=lambda theta, x: x[0] > 1))


def test_callables_with_the_wrong_arguments():
    with pytest.raises(TypeError, match="takes 5 arguments; it is called with up to 4"):
        fl.simulator(fl.Process(lambda a, b, c, d, e: a, noise), jnp.zeros(2), T)
    with pytest.raises(TypeError, match="expected a function of up to 4 arguments; got float"):
        fl.simulator(fl.Process(drift, 0.3), jnp.zeros(2), T)
    with pytest.raises(TypeError, match=r"must be a fluctua.Process"):
        fl.simulator((drift, noise), jnp.zeros(2), T)
    with pytest.raises(TypeError, match=r"must be a fluctua.Objective"):
        estimate(objective=lambda theta, x: x)


def test_records_that_say_too_little():
    with pytest.raises(ValueError, match="`running`.*none of them"):
        estimate(objective=fl.Objective())
    with pytest.raises(ValueError, match="needs `noise`, or `diffusion`"):
        fl.gradient(fl.Process(drift, None), OBJECTIVE, THETA, trajectories())
    measured = fl.Process(drift, None, lambda theta, x, t, c, v: 0.045 * v)
    with pytest.raises(ValueError, match="no `noise`"):
        fl.simulator(measured, jnp.zeros(2), T)


def test_starts():
    with pytest.raises(ValueError, match=r"one state \(M,\); got shape \(4, 2\)"):
        fl.simulator(PROCESS, jnp.zeros((4, 2)), T)
    with pytest.raises(ValueError, match=r"non-finite components: \[1\]"):
        fl.simulator(PROCESS, jnp.array([0.0, jnp.nan]), T)
    with pytest.raises(TypeError, match="wrap it in fluctua.Reparameterised"):
        fl.simulator(PROCESS, lambda theta: theta["f"], T)
    with pytest.raises(ValueError, match="needs `sample`"):
        fl.simulator(PROCESS, fl.Density(lambda theta, x0: -jnp.sum(x0**2)), T)
    with pytest.raises(ValueError, match=r"`Reparameterised.fade` .*-1\.0"):
        fl.simulator(PROCESS, fl.Reparameterised(lambda theta: theta["f"], fade=-1.0), T)
    moving = fl.simulator(PROCESS, fl.Reparameterised(lambda theta: theta["f"]), T)
    with pytest.raises(ValueError, match="use score=full_score"):
        fl.ppgt(moving, OBJECTIVE, score=fl.scores.drift_score)


def test_references_need_a_simulator():
    for make in (fl.reference.pathwise, fl.reference.finite_differences, fl.reference.spsa):
        with pytest.raises(TypeError, match=r"needs a simulator.*use `ppgt`"):
            make(OBJECTIVE, lambda key, theta, count: trajectories(count))
    with pytest.raises(ValueError, match=r"`step` .*0\.0"):
        fl.reference.spsa(OBJECTIVE, fl.simulator(PROCESS, jnp.zeros(2), T), step=0.0)


@pytest.mark.long
def test_comparison_needs_two_samples_of_each():
    run = fl.simulator(PROCESS, jnp.zeros(2), T)
    with pytest.raises(
        ValueError, match=r"costs 7 trajectories per sample; 10 .* give 1.*trajectories=14"
    ):
        fl.reference.compare(
            KEY,
            THETA,
            {"fd": fl.reference.finite_differences(OBJECTIVE, run)},
            trajectories=10,
            reference="fd",
        )
    with pytest.raises(ValueError, match="reference `x` is not among the estimators: spsa"):
        fl.reference.compare(
            KEY,
            THETA,
            {"spsa": fl.reference.spsa(OBJECTIVE, run)},
            trajectories=10,
            reference="x",
            repeats=1,
        )


@pytest.mark.long
@pytest.mark.parametrize(
    ("parameters", "states"), [(jnp.float32, np.float64), (jnp.float64, np.float32)]
)
def test_mixed_precision_is_no_error(parameters, states):
    theta = jax.tree.map(lambda v: v.astype(parameters), THETA)
    run = fl.simulator(PROCESS, jnp.zeros(2, states), T)
    estimator = fl.ppgt(run, OBJECTIVE)
    recorded = fl.gradient(
        PROCESS, OBJECTIVE, theta, fl.Trajectories(T, np.asarray(trajectories().x, states))
    )
    for gradient in (estimator(KEY, theta, 5).gradient, recorded.gradient):
        assert gradient["f"].dtype == parameters
