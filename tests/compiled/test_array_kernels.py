"""Kernels on arrays give the sums over batches of JAX, on the same noise and to rounding."""

import functools
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
import problems
from fluctua.compiled import backend as backends
from fluctua.compiled.blocks import kernel as array_kernels
from fluctua.compiled.blocks import sums as array_sums
from fluctua.core import streamed
from fluctua.core.baselines import time_only
from fluctua.core.draws import no_noise, philox, philox7
from fluctua.core.estimation import batches
from fluctua.core.integrators import Exponential
from kernel_cases import know_table, problem_in_double
from schedules import SCHEDULES, make_schedule


def sum_by(backend, process, objective, start, t, theta, *, count, baseline="time", **options):
    """Sums over batches by JAX or by a kernel."""
    simulator = fl.simulator(process, start, t, backend=backend, **options)
    estimator = fl.ppgt(simulator, objective, process=process, baseline=baseline)
    call = estimator._call(jax.random.key(3), theta, count)
    assert batches.is_summable(call)
    return batches.sum_batches(call)


def sum_both(*case, **options):
    """Sums over batches by JAX and by a kernel."""
    return [sum_by(backend, *case, **options) for backend in ("jax", "cpu")]


def assert_equal(results, relative):
    by_jax, by_kernel = results
    for name in ("returns", "sums", "last"):
        expected, found = (np.asarray(getattr(r, name)) for r in (by_jax, by_kernel))
        assert found.shape == expected.shape
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=relative * scale)


@functools.cache
def make_network(widths):
    """A drift by layers of hyperbolic tangents, to be kept near a target."""
    rng = np.random.default_rng(0)
    theta = [
        {
            "W": np.asarray(rng.normal(size=(m, n)) / np.sqrt(n), np.float32),
            "b": np.asarray(rng.normal(size=m) / 4, np.float32),
        }
        for n, m in itertools.pairwise(widths)
    ]

    def drift(theta, x):
        h = x
        for layer in theta[:-1]:
            h = jnp.tanh(layer["W"] @ h + layer["b"])
        return theta[-1]["W"] @ h + theta[-1]["b"] - x

    process = fl.Process(drift, lambda theta, x: 0.3 * jnp.ones_like(x))
    target = fl.Objective(running=lambda theta, x: -jnp.sum((x - 0.5) ** 2))
    return process, target, theta


@pytest.fixture
def single():
    """Run a test in single precision."""
    with jax.enable_x64(False):
        yield


# products of 25 × 31 by tiles of all sizes, of 3 × 25 by elements; a last batch that is not full
@pytest.mark.parametrize("count", [100, 523])
def test_layers(count, single):
    process, target, theta = make_network((3, 25, 31, 3))
    t = np.linspace(0, 0.3, 14)
    assert_equal(sum_both(process, target, np.ones(3), t, theta, count=count), 5e-6)


@pytest.mark.long
def test_batches_of_several_blocks(single):
    process, target, theta = make_network((3, 25, 31, 3))
    t = np.linspace(0, 0.1, 5)
    assert_equal(sum_both(process, target, np.ones(3), t, theta, count=8207), 5e-6)


@pytest.mark.parametrize("wiener", [philox7, pytest.param(philox, marks=pytest.mark.long)])
def test_states_that_are_not_stored(monkeypatch, wiener, single):
    process, target, theta = make_network((3, 25, 31, 3))
    t = np.linspace(0, 0.3, 14)
    options = {"count": 100, "wiener": wiener, "baseline": know_table(t)}
    monkeypatch.setattr(array_kernels, "STORED_BYTES", 2**40)
    stored = sum_both(process, target, np.ones(3), t, theta, **options)
    monkeypatch.setattr(array_kernels, "STORED_BYTES", 0)
    again = sum_by("cpu", process, target, np.ones(3), t, theta, **options)
    np.testing.assert_array_equal(stored[1].sums, again.sums)
    assert_equal(stored, 5e-6)


def test_without_noise(single):
    process, target, theta = make_network((3, 25, 31, 3))
    t = np.linspace(0, 0.3, 14)
    both = sum_both(process, target, np.ones(3), t, theta, count=100, wiener=no_noise)
    # scores are zero to rounding
    assert_equal([each._replace(sums=each.last) for each in both], 5e-6)


def test_rewards_that_are_numbers_of_python(single):
    process, _, theta = make_network((3, 25, 31, 3))
    numbers = fl.Objective(
        running=lambda theta, x: 2, per_step=lambda theta, x, y: 0.5, terminal=lambda theta, x: 1.0
    )
    t = np.linspace(0, 0.3, 14)
    both = sum_both(process, numbers, np.ones(3), t, theta, count=100)
    assert_equal([each._replace(sums=each.last) for each in both], 5e-6)
    for each in both:  # J = 2 T + 13/2 + 1, whatever θ is
        np.testing.assert_allclose(each.returns, 2 * 0.3 + 13 / 2 + 1, rtol=1e-6)
        assert np.abs(each.sums).max() < 1e-4  # λ̂ is 8.1 to rounding, and the scores are of order 1


@pytest.mark.long
def test_a_pilot_by_the_kernel():
    with jax.enable_x64(True):
        (process, objective, start, t, theta), _ = problem_in_double(
            problems.driven_rotor, "density"
        )
        simulator = fl.simulator(process, start, t, backend="cpu")
        estimator = fl.ppgt(simulator, objective, baseline=time_only(pilot=75))
        call = estimator._call(jax.random.key(3), theta, 45)
        assert call.needs_pilot
        kernel = array_kernels.find_array_kernel(call, 16)
        table = streamed.pilot_table(call.model, call.plans, simulator, call.key, theta)
        np.testing.assert_allclose(array_kernels.run_pilot(kernel, call, 16), table, rtol=1e-10)
        filled = call._replace(tables=call.tables.fill_missing(table))
        results = [array_kernels.sum_batches_by_kernel(c, 16) for c in (filled, call)]
        assert_equal(results, 1e-10)


def test_couplings(single):
    sites = 9

    def drift(theta, x):
        return jnp.sum(theta * jnp.sin(x[None, :] - x[:, None]), axis=1)

    process = fl.Process(drift, lambda theta, x: 0.3 * jnp.ones_like(x))
    order = fl.Objective(running=lambda theta, x: jnp.mean(jnp.cos(x)) ** 2)
    rng = np.random.default_rng(1)
    theta = np.asarray(rng.normal(size=(sites, sites)), jnp.float32)
    start = jnp.linspace(0, 3, sites)
    t = np.linspace(0, 0.3, 14)
    results = sum_both(process, order, start, t, theta, count=70, baseline="none")
    assert_equal(results, 5e-6)


@pytest.mark.parametrize(
    ("make", "start"),
    [
        (problems.non_normal, "density"),  # dense noise, a context, a random start, uneven steps
        (problems.driven_rotor, "density"),  # running, step, initial and terminal rewards
        (problems.multiplicative, "fixed"),  # noise of the state, more noises than components
    ],
)
def test_double_precision(make, start):
    with jax.enable_x64(True):
        case, context = problem_in_double(make, start)
        assert_equal(sum_both(*case, count=45, context=context), 1e-10)


@pytest.mark.long
@pytest.mark.parametrize("integrator", ["heun", "rk4", Exponential(lambda theta: -jnp.ones(3))])
def test_integrators(integrator, single):
    process, target, theta = make_network((3, 25, 31, 3))
    t = np.linspace(0, 1, 9)
    options = {"count": 40, "integrator": integrator, "baseline": know_table(t)}
    assert_equal(sum_both(process, target, np.ones(3), t, theta, **options), 1e-5)


def make_shapes():
    """Slices, rolls, choices, running sums, powers, and θ behind functions of its own.

    Factors that depend on θ alone wait until the sums are formed.
    """
    rng = np.random.default_rng(2)
    theta = {
        "low": jnp.asarray(rng.normal(size=(24, 2)) / 3, np.float32),
        "rank": np.asarray(rng.normal(size=(2, 24)) / 3, np.float32),
        "log": np.asarray(rng.normal(size=24) / 5, np.float32),
        "mix": np.asarray(rng.normal(size=(4, 4)) / 3, np.float32),
        "one": np.asarray(0.7, np.float32),
    }
    swap = np.array([3, 0, 2, 1])

    def drift(theta, x, t, c):
        matrix = jnp.exp(theta["log"])[:, None] * (theta["low"] @ theta["rank"])
        square = x.reshape(6, 4)[:, swap] @ theta["mix"]
        bent = jnp.where(x > 0, x**3, jnp.abs(x)) / (1 + x**2)
        shifted = jnp.roll(x, 2) * theta["one"] + x[::-1] * jnp.cos(t) * theta["one"]
        softened = jax.nn.sigmoid(x) * jnp.max(x) + jax.nn.relu(x - 0.2)
        kinked = jax.lax.cond(x[0] > 0, jax.nn.elu, jnp.cumsum, x) / 24
        put = jnp.zeros(24).at[jnp.array([2, 5, 7])].add(x[:3] * theta["low"][:3, 0])
        return (
            matrix @ bent
            + square.ravel()
            - shifted
            - softened
            + put
            + kinked
            + c * jnp.arange(24) / 24
        )

    def noise(theta, x, t, c):
        return 0.5 + 0.1 * jax.nn.softplus(x) + theta["one"] ** 2

    objective = fl.Objective(
        running=lambda theta, x, t, c: jnp.prod(x[:2]) * theta["one"] + jnp.min(x),
        terminal=lambda theta, x, c: c * x[3] * theta["mix"][0, 1],
        per_step=lambda theta, x, x_next, t, dt, c: jnp.vdot(x_next - x, x) * theta["one"],
    )
    return fl.Process(drift, noise), objective, theta


@pytest.mark.parametrize("double", [False, pytest.param(True, marks=pytest.mark.long)])
def test_many_operations(monkeypatch, double):
    monkeypatch.setattr(array_sums, "OUTER_ELEMENTS", 64)
    process, objective, theta = make_shapes()
    with jax.enable_x64(double):
        theta = jax.tree.map(lambda leaf: np.asarray(leaf, float if double else np.float32), theta)
        t = np.linspace(0, 0.2, 9)
        options = {"count": 50, "context": jax.random.normal}
        options["baseline"] = know_table(t) if double else "time"
        results = sum_both(process, objective, np.linspace(-1, 1, 24), t, theta, **options)
        assert_equal(results, 1e-11 if double else 1e-5)


def make_forces():
    """dX_i = (Σ θ_ij − X_i) dt + σ dW, J = E[Σ a_i X_i(T)], with the exact gradient."""
    states = 20
    a = np.linspace(-1, 1, states)

    def drift(theta, x):
        return theta.sum(axis=1) - x

    process = fl.Process(drift, lambda theta, x: 0.5 * jnp.ones_like(x))
    objective = fl.Objective(terminal=lambda theta, x: jnp.sum(a * x))
    theta = np.linspace(-1, 1, 7 * states).reshape(states, 7)
    t = np.linspace(0, 1, 21)
    exact = np.repeat(a * (1 - (1 - t[1]) ** 20), 7).reshape(states, 7)
    return process, objective, theta, t, exact


@pytest.mark.parametrize("name", SCHEDULES)
def test_tables_that_are_read_by_the_time(name):
    process, objective = make_schedule(SCHEDULES[name])
    theta = np.sin(np.arange(150))
    t = np.linspace(0, 1, 41)
    options = {"count": 140, "baseline": know_table(t)}
    results = sum_both(process, objective, np.array([0.2, 0.1]), t, theta, **options)
    assert_equal(results, 1e-12)
    assert np.count_nonzero(np.abs(results[0].sums).max(axis=0)) > 25


def test_a_table_that_is_read_by_the_state_has_no_kernel():
    process = fl.Process(
        lambda theta, x: theta[jnp.clip(100 * x[0], 0, 149).astype(int)] - x,
        lambda theta, x: jnp.ones(1),
    )
    objective = fl.Objective(terminal=lambda theta, x: x[0])
    simulator = fl.simulator(process, jnp.zeros(1), np.linspace(0, 1, 5), backend="cpu")
    with pytest.raises(ValueError, match="no kernel can be made of this process"):
        fl.ppgt(simulator, objective)(jax.random.key(0), jnp.zeros(150), 140)


def test_the_exact_gradient_of_many_forces():
    process, objective, theta, t, exact = make_forces()
    simulator = fl.simulator(process, np.zeros(20), t, backend="cpu")
    estimate = fl.ppgt(simulator, objective)(jax.random.key(0), theta, 4000)
    assert estimate.batches == 63
    z = (np.asarray(estimate.gradient) - exact) / np.asarray(estimate.stderr)
    # seven forces on a state have one score: 20 numbers of Student's t, 62 degrees
    assert np.abs(z).max() < 4.5
    assert 0.6 < np.std(z) < 1.5


@pytest.mark.long
def test_states_that_overflow_are_refused():
    process, objective, theta, _, _ = make_forces()
    stiff = fl.Process(lambda theta, x: -1e6 * theta.sum() * x**3, process.noise)
    simulator = fl.simulator(stiff, np.ones(20), np.linspace(0, 10, 21), backend="cpu")
    with pytest.raises(FloatingPointError, match="600 of 600"):
        fl.ppgt(simulator, objective, baseline="none")(jax.random.key(0), theta + 1, 600)


def test_an_estimate_takes_the_kernel(monkeypatch):
    process, target, theta = make_network((3, 25, 31, 3))
    calls = []
    run = array_kernels.sum_batches_by_kernel
    monkeypatch.setattr(
        array_kernels,
        "sum_batches_by_kernel",
        lambda call, size: calls.append(size) or run(call, size),
    )
    t = np.linspace(0, 0.3, 14)
    estimate = fl.ppgt(fl.simulator(process, np.ones(3), t, backend="cpu"), target)(
        jax.random.key(0), theta, 600
    )
    assert calls == [16]
    assert estimate.batches == 38


def test_auto_compiles_for_less_work_than_single_gradients(monkeypatch):
    monkeypatch.setattr(backends, "MIN_KERNEL_WORK", 4_000_000)
    process, target, theta = make_network((3, 25, 31, 3))
    simulator = fl.simulator(process, np.ones(3), np.linspace(0, 1, 101))
    estimator = fl.ppgt(simulator, target)
    few, enough = (estimator._call(jax.random.key(0), theta, count) for count in (999, 1000))
    assert simulator.backend.batch_sums(few, 16) is None
    assert simulator.backend.batch_sums(enough, 16) is not None
    assert simulator.backend.samples(enough) is None


def test_cores_change_no_bit(monkeypatch):
    process, target, theta = make_network((3, 25, 31, 3))
    t = np.linspace(0, 0.3, 14)
    rows = []
    for cores in (1, 3):
        monkeypatch.setattr("fluctua.core.host.threads.count_cores", lambda cores=cores: cores)
        rows.append(sum_by("cpu", process, target, np.ones(3), t, theta, count=100).sums)
    np.testing.assert_array_equal(*rows)


def test_single_gradients_where_arrays_have_no_rule():
    """Complex numbers are known to kernels whose arrays are written out."""

    def drift(theta, x):
        wave = jnp.exp(1j * theta) @ (x[:2] + 1j * x[2:])
        return -x + jnp.stack([wave.real, wave.imag, wave.real, -wave.imag])

    process = fl.Process(drift, lambda theta, x: 0.3 * jnp.ones_like(x))
    target = fl.Objective(terminal=lambda theta, x: x[0])
    theta = np.array([0.3, 0.5])
    t = np.linspace(0, 0.3, 14)
    options = {"count": 40, "baseline": know_table(t)}
    assert_equal(sum_both(process, target, np.ones(4), t, theta, **options), 1e-5)


def test_an_operation_without_a_rule_is_named():
    process, target, theta = make_network((3, 25, 31, 3))
    sorted_drift = fl.Process(lambda theta, x: process.drift(theta, jnp.sort(x)), process.noise)
    simulator = fl.simulator(sorted_drift, np.ones(3), np.linspace(0, 0.3, 14), backend="cpu")
    with pytest.raises(ValueError, match="`sort`"):
        fl.ppgt(simulator, target)(jax.random.key(0), theta, 600)


def test_code_does_not_grow_with_the_weights():
    sizes = []
    for width in (25, 125):
        process, target, theta = make_network((3, width, width, 3))
        simulator = fl.simulator(process, np.ones(3), np.linspace(0, 0.3, 14), backend="cpu")
        sizes.append(len(fl.ppgt(simulator, target).source(theta)))
    assert abs(sizes[1] - sizes[0]) < 200


MEMORY = """
import jax, jax.numpy as jnp, numpy as np, fluctua as fl
widths = (8, 216, 216, 8)
rng = np.random.default_rng(0)
theta = [jnp.asarray(rng.normal(size=(m, n)) / n, jnp.float32) for n, m in zip(widths, widths[1:])]

def drift(theta, x):
    h = jnp.tanh(theta[1] @ jnp.tanh(theta[0] @ x))
    return theta[2] @ h - x

process = fl.Process(drift, lambda theta, x: 0.3 * jnp.ones_like(x))
target = fl.Objective(running=lambda theta, x: -jnp.sum(x**2))
simulator = fl.simulator(process, jnp.ones(8), np.linspace(0, 0.1, 5), backend="cpu")
estimate = fl.ppgt(simulator, target, baseline="none")(jax.random.key(0), theta, 100_000)
assert estimate.batches == 49
# of this program alone: `ru_maxrss` begins with that of the program that started it
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) / 2**20)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_does_not_grow_with_trajectories_times_weights():
    """Of 50,000 × 100,000: one number each would be 19 GiB."""
    run = [sys.executable, "-c", MEMORY]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.0


def order_booleans(v):
    """Booleans of a state, each as a factor of it."""
    w = v[::-1]
    factors = [
        jnp.maximum(v > 0, w > 0.2),
        jnp.minimum(v > 0, w > -0.2),
        jnp.max(v > 0.5),
        jnp.min(v > -0.5),
        (v > 0) == (w > 0),
    ]
    return sum((k + 1) * v * factor for k, factor in enumerate(factors))


def compare_booleans(v):
    """What kernels on arrays refuse, and those of single numbers do."""
    w = v[::-1]
    return (
        order_booleans(v)
        + v * ((v > 0) < (w > 0))
        + 2 * v * ((v > 0) >= (w > 0))
        + v * jnp.argmax(v > 0)
        + v * jnp.argmin(v > 0)
        + jnp.select([v > 0.5, v > 0, v > -0.5], [v, 2 * v, -v], 3 * v)
        + v * (300 * jnp.abs(v)).astype(jnp.uint8).astype(v.dtype) / 100
        + v * (100 * v).astype(jnp.int8).astype(v.dtype) / 100
        + jax.checkpoint(jnp.sin)(v)
    )


@pytest.mark.parametrize("many", [False, True], ids=["numbers", "arrays"])
def test_booleans_and_short_integers_are_those_of_jax(many, single):
    """C++ has an order of its own for the masks that booleans are."""
    rng = np.random.default_rng(5)
    theta = np.asarray(rng.normal(size=(22, 6) if many else (6,)) / 2, np.float32)

    def drift(theta, x):
        factors = order_booleans if many else compare_booleans
        return factors(theta[:6] @ x + theta[6:].sum(0) if many else theta * x)

    process = fl.Process(drift, lambda theta, x: 0.7 * jnp.ones_like(x))
    objective = fl.Objective(running=lambda theta, x: jnp.sum(x**2) + x[0])
    start = np.asarray([0.4, -0.7, 1.1, -0.2, 0.05, 0.9], np.float32)
    t = np.linspace(0, 0.2, 5)
    estimates = []
    for backend in ("jax", "cpu"):
        simulator = fl.simulator(process, start, t, backend=backend)
        estimator = fl.ppgt(simulator, objective, baseline=know_table(t))
        estimates.append(estimator(jax.random.key(0), theta, 300))
    expected, found = (np.ravel(each.gradient) for each in estimates)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("many", [False, True], ids=["numbers", "arrays"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda n: n.astype(jnp.int8),
        lambda n: (70 * n).astype(jnp.int16),
        lambda n: (n.astype(jnp.uint32) * jnp.uint32(2_654_435_761)).astype(jnp.int32) // 2**24,
    ],
    ids=["int8", "int16", "hash"],
)
def test_integers_of_the_time_wrap_as_in_jax(wrap, many):
    def drift(theta, x, t):
        n = jnp.round(1000 * t).astype(jnp.int32)
        return wrap(n).astype(x.dtype) / 100 - theta[:3] * x + theta[3:].sum()

    theta = np.linspace(0.1, 1, 3 + (160 if many else 1))
    process = fl.Process(drift, lambda theta, x: 0.3 * jnp.ones(3))
    t = np.linspace(0, 1, 6)
    estimates = []
    for backend in ("jax", "cpu"):
        simulator = fl.simulator(process, np.ones(3), t, backend=backend)
        estimator = fl.ppgt(simulator, fl.Objective(terminal=lambda theta, x: x[0]))
        estimates.append(estimator(jax.random.key(0), theta, 300))
    np.testing.assert_allclose(estimates[1].value, estimates[0].value, rtol=1e-9)


@pytest.mark.parametrize("many", [False, True], ids=["numbers", "arrays"])
@pytest.mark.parametrize(
    "hide",
    [
        lambda x: jnp.maximum(jnp.sqrt(x), 0.1),
        lambda x: jnp.minimum(jnp.sqrt(x), x),
        lambda x: jax.nn.relu(jnp.log(x)),
        lambda x: jnp.max(jnp.log(x)) + 0 * x,
    ],
    ids=["maximum", "minimum", "relu", "max"],
)
def test_larger_and_smaller_numbers_do_not_hide_nan(hide, many):
    def drift(theta, x):
        return theta[:3] * hide(x) + theta[3:].sum()

    theta = np.full(3 + (160 if many else 1), 1e-3)
    process = fl.Process(drift, lambda theta, x: jnp.ones(3))
    simulator = fl.simulator(process, 0.1 * np.ones(3), np.linspace(0, 1, 9), backend="cpu")
    estimator = fl.ppgt(simulator, fl.Objective(terminal=lambda theta, x: x[0]))
    with pytest.raises(FloatingPointError, match="not finite"):
        estimator(jax.random.key(0), theta, 300)


def to_bytes(x):
    return (128 + 100 * jnp.tanh(x)).astype(jnp.uint8)


@pytest.mark.parametrize("many", [False, True], ids=["numbers", "arrays"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: to_bytes(x) - to_bytes(x[::-1]),
        lambda x: (x > 0).astype(jnp.uint8) - (x > 0.5).astype(jnp.uint8),
        lambda x: (40 * x).astype(jnp.int8) * jnp.int8(5),
        lambda x: -to_bytes(x),
        lambda x: to_bytes(x).astype(jnp.int8),
        lambda x: (4 * x).astype(jnp.int8).astype(jnp.uint32),
        lambda x: (60_000 * x).astype(jnp.int32) ** 2,
        lambda x: (60_000 * x).astype(jnp.int32) * (50_000 * x).astype(jnp.int32),
        lambda x: (0.1 * x + 100).astype(jnp.float16),
    ],
)
def test_numbers_that_wrap_or_have_fewer_bits_are_refused(wrap, many):
    """Kernels hold them as floats of the kernel's precision: they would give other numbers."""

    def drift(theta, x):
        return theta[:3] * wrap(x).astype(x.dtype) + (theta[3:].reshape(-1, 3) @ x)[:3]

    theta = np.ones(3 + 3 * (44 if many else 3)) / 100
    process = fl.Process(drift, lambda theta, x: jnp.ones(3))
    simulator = fl.simulator(process, np.ones(3), np.linspace(0, 1, 4), backend="cpu")
    estimator = fl.ppgt(simulator, fl.Objective(terminal=lambda theta, x: x[0]))
    with pytest.raises(ValueError, match="no kernel can be made"):
        estimator(jax.random.key(0), theta, 300)


@pytest.mark.parametrize(
    "cut",
    [lambda x: jax.lax.reduce_precision(x, 8, 7), lambda x: x.astype(jnp.bfloat16) * 1.0],
    ids=["reduce_precision", "bfloat16"],
)
def test_numbers_of_fewer_bits_are_refused(cut):
    process = fl.Process(lambda theta, x: theta * cut(x), lambda theta, x: jnp.ones(1))
    simulator = fl.simulator(process, jnp.ones(1), np.linspace(0, 1, 4), backend="cpu")
    estimator = fl.ppgt(simulator, fl.Objective(terminal=lambda theta, x: x[0]))
    with pytest.raises(ValueError, match="fewer bits"):
        estimator(jax.random.key(0), jnp.ones(1), 300)
