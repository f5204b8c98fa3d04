"""The twin correction in the CPU kernel: its formulas step by step, its mean, its variance, its
memory.
"""

import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluctua import tcmt
from fluctua.tcmt import exact
from fluctua.tcmt.conversion import kernel_spec
from fluctua.tcmt.fused import Carried
from fluctua.tcmt.kernel import run as kernel
from fluctua.tcmt.kernel.twin import KernelTwin, run_twin
from fluctua.tcmt.native import _native
from in_turn import in_turn
from kernel_reference import rectangle
from processes import wait_until_busy
from twin_cases import CASES, FAMILIES, SEED, deviation, problem
from twin_reference import correct, curve

ENGINES = _native.engines()


@pytest.mark.parametrize(
    ("case", "dtype", "engine"), in_turn(CASES, ["float32", "float64"], ENGINES)
)
def test_every_part_of_every_family_is_the_references(case, dtype, engine):
    spec, options, count, reference = problem(case)
    run = run_twin(spec, SEED, count, dtype=dtype, engine=engine, **options)
    # Λ is a small difference of returns, so its rounding is that of the estimator without a twin.
    tolerance = 3e-5 if dtype == "float32" else 1e-11
    plain = reference.path.gradient() | {"gain": reference.direct["gain"]}
    assert deviation(run.returns, reference.returns) < tolerance
    assert (
        deviation(run.mean_lambda[1:], reference.lam.mean(0)[1:], reference.returns.max())
        < tolerance
    )
    for name in FAMILIES:
        scale = np.abs(plain[name]).max(initial=0.0)
        assert deviation(getattr(run.direct_samples, name), reference.direct[name]) < tolerance, (
            name
        )
        assert (
            deviation(getattr(run.correction_samples, name), reference.correction[name], scale)
            < tolerance
        ), name
        total = getattr(run.direct_samples, name) + getattr(run.correction_samples, name)
        np.testing.assert_array_equal(getattr(run.samples, name), total)


def test_double_precision_has_nine_digits_of_the_correction_itself():
    for case in CASES:
        spec, options, count, reference = problem(case)
        run = run_twin(spec, SEED, count, dtype="float64", **options)
        for name in FAMILIES:
            assert (
                deviation(getattr(run.correction_samples, name), reference.correction[name]) < 1e-9
            ), (case, name)


def test_the_adjoint_is_the_gradient_of_the_noise_free_return():
    spec = rectangle(lab=True).replace(noise=np.full(12, 1e-9))
    i, j = spec.bonds.T
    site, gain, weight = spec.port_sites, spec.port_gain, spec.port_weight
    with jax.enable_x64(True):

        def value(x0, omega, kappa, chi):
            def body(x, tables):
                drive, incoming = tables
                hop = jnp.zeros_like(x).at[i].add(kappa * x[j]).at[j].add(kappa * x[i])
                drift = -1j * (omega + chi * abs(x) ** 2) * x - 1j * hop - spec.damping * x
                g = weight @ abs(gain * x[site] - incoming) ** 2
                return x + spec.dt * drift.at[spec.drive_sites].add(drive), g * spec.dt

            return jax.lax.scan(body, x0, (jnp.asarray(spec.drive), jnp.asarray(spec.incoming)))[
                1
            ].sum()

        at = (jnp.asarray(spec.start), spec.omega, spec.kappa, spec.chi)
        of_start, omega, kappa, chi = jax.jit(jax.grad(value, argnums=(0, 1, 2, 3)))(
            *map(jnp.asarray, at)
        )
    q = correct(spec, SEED, 1, np.zeros(spec.steps + 1)).q[0, 0]
    assert (
        deviation(q, np.conj(of_start)) < 1e-12
    )  # JAX's gradient by a complex number is the conjugate
    direct = run_twin(spec, SEED, 1, dtype="float64", samples=True).direct_samples
    for actual, expected in ((direct.omega, omega), (direct.kappa, kappa), (direct.chi, chi)):
        assert deviation(actual[0], np.asarray(expected)) < 1e-6  # the noise is not quite zero


def test_moments_are_those_of_the_samples():
    run = run_twin(rectangle(), 3, 50, samples=True)
    for part, samples in (
        ("", run.samples),
        ("direct", run.direct_samples),
        ("correction", run.correction_samples),
    ):
        mean = getattr(run, part or "gradient")
        stderr = getattr(run, f"{part}_stderr" if part else "stderr")
        for name in ("omega", "kappa", "chi"):
            g = getattr(samples, name).astype(float)
            np.testing.assert_allclose(getattr(mean, name), g.mean(0), rtol=1e-6, atol=1e-9)
            np.testing.assert_allclose(
                getattr(stderr, name), g.std(0, ddof=1) / np.sqrt(50), rtol=1e-5
            )
    np.testing.assert_allclose(
        run.second_moment.omega, (run.samples.omega.astype(float) ** 2).mean(0), rtol=1e-5
    )


def test_a_run_is_a_slice_of_a_longer_one_and_threads_do_not_matter():
    for network, options in (({"sigma_kappa": 0.1}, {}), ({}, {"rank": 4})):
        spec = rectangle(**network)
        whole = run_twin(spec, 5, 70, threads=1, samples=True, **options)
        again = run_twin(spec, 5, 70, threads=3, samples=True, **options)
        part = run_twin(spec, 5, 30, first_trajectory=40, samples=True, **options)
        np.testing.assert_array_equal(whole.gradient.kappa, again.gradient.kappa)
        np.testing.assert_array_equal(whole.mean_lambda, again.mean_lambda)
        np.testing.assert_array_equal(
            whole.correction_samples.kappa[40:], part.correction_samples.kappa
        )


# ------------------------------------------------------------------------------------------- mean


def make_scaled(amount):
    """A twin whose detunings are too large and couplings too small by `amount`."""
    if not amount:
        return None
    return lambda theta: {
        **theta,
        "omega": theta["omega"] * (1 + amount),
        "kappa": theta["kappa"] * (1 - amount),
    }


def start(network, train, chi_std=0.0):
    rng = np.random.default_rng(1)
    theta = {name: getattr(network, name) + 0.1 * rng.random(network.shape(name)) for name in train}
    if "chi" in theta:
        theta["chi"] = chi_std * rng.normal(size=network.sites)
    return theta


@pytest.mark.parametrize(("error", "rank"), [(0.0, 0), (0.2, 4)])
def test_the_mean_is_exact_however_wrong_the_twin(error, rank):
    task = tcmt.transmission(tcmt.rectangular(3, 3), horizon=2.0, dt=0.01)
    theta = start(task.network, ("omega", "kappa", "gamma_e", "gamma"))
    _, expected = exact.value_and_gradient(task, theta)
    estimator = task.estimator("cpu", baseline=KernelTwin(theta=make_scaled(error), rank=rank))
    estimate = estimator(jax.random.key(3), theta, 4096)
    z = np.concatenate([(estimate.gradient[n] - expected[n]) / estimate.stderr[n] for n in theta])
    assert np.abs(z).max() < 4
    assert 0.6 < z.std() < 1.5  # the errors are errors
    if error == 0.2:  # and the first sum alone is not enough
        direct = np.asarray(estimator.split(jax.random.key(3), theta, 512).direct["kappa"])
        bias = (direct.mean(0) - expected["kappa"]) / (direct.std(0, ddof=1) / np.sqrt(512))
        assert np.abs(bias).max() > 10


@pytest.mark.filterwarnings("ignore:Euler steps")
@pytest.mark.parametrize(("make", "error"), [(tcmt.transmission, 0.2), (tcmt.isolation, 0.05)])
def test_the_mean_with_kerr_effect_and_modulation(make, error):
    """Against differences on common noise, which is not that of the estimate."""
    task = make(tcmt.rectangular(2, 3), horizon=2.0, dt=0.01, sigma_kappa=0.3)
    theta = start(task.network, ("omega", "kappa", "chi", "gamma_e", "gamma"), chi_std=0.02)
    estimate = task.estimator("cpu", baseline=KernelTwin(theta=make_scaled(error)))(
        jax.random.key(5), theta, 2048
    )

    def returns(name, index, by):
        moved = {**theta, name: theta[name] + by * (np.arange(theta[name].size) == index)}
        return kernel.run(kernel_spec(task, moved), 77, 4096, scores=False, dtype="float64").returns

    for name, index in (("omega", 4), ("kappa", 2), ("chi", 0), ("gamma_e", 1), ("gamma", 3)):
        by = 1e-3 * (0.1 if name == "chi" else 1.0)
        each = (returns(name, index, by) - returns(name, index, -by)) / (2 * by)
        error_of = np.hypot(each.std() / 64, float(estimate.stderr[name][index]))
        assert abs(each.mean() - float(estimate.gradient[name][index])) < 4 * error_of, name


# --------------------------------------------------------------------------------------- variance


def spread(families):
    """Variance of a trajectory's gradient, averaged over each family."""
    of = lambda name: np.asarray(getattr(families, name), float).var(0, ddof=1).mean()
    return {name: of(name) for name in ("omega", "kappa", "chi")}


def test_variance_is_far_below_that_of_a_time_only_baseline():
    """Measured on this lattice: 26 to 40, and 110 to 180 with the quadratic term."""
    task = tcmt.transmission(tcmt.rectangular(4, 4), horizon=5.0, dt=5e-3)
    spec = kernel_spec(task, start(task.network, ("omega", "kappa", "chi"), chi_std=1e-4))
    pilot = kernel.run(spec, 1, 128, scores=False).mean_return_to_go
    plain = spread(kernel.run(spec, 0, 256, baseline=pilot, samples=True).samples)
    linear = spread(run_twin(spec, 0, 256, samples=True).samples)
    bent = spread(run_twin(spec, 0, 256, samples=True, rank=16).samples)
    for name, variance in plain.items():
        assert variance / linear[name] > 10, name
        assert linear[name] / bent[name] > 3, name


def test_a_twin_that_is_told_the_state_at_every_step_leaves_next_to_nothing():
    """Full rank, linear, exact: what is left of Λ are squares of single kicks, 1/T of the
    squares of their sum.
    """
    spec = rectangle(steps=400).replace(chi=np.zeros(12))
    options = {"samples": True, "dtype": "float64"}
    linear = spread(run_twin(spec, 0, 64, **options).correction_samples)
    bent = spread(run_twin(spec, 0, 64, rank=12, segment=1, **options).correction_samples)
    for name in linear:
        assert bent[name] < 20 / spec.steps * linear[name], name


def test_the_quadratic_term_is_the_references():
    from fluctua.tcmt.kernel.twin import compute_responses, project_curvature

    spec = rectangle(steps=40)
    for rank in (4, 12):
        ends = np.array([7, 14, 40])
        basis, curvature = project_curvature(compute_responses(spec, dtype="float64"), rank, ends)
        expected = curve(spec, rank).at
        for end, c in zip(ends, curvature, strict=True):
            np.testing.assert_allclose(basis @ c @ basis.conj().T, expected(end), atol=1e-12)


def test_leading_directions_of_a_large_network_are_nearly_those_of_a_small_one(monkeypatch):
    from fluctua.tcmt.kernel import twin

    response = twin.compute_responses(rectangle(5, 6, steps=400, dt=0.02), dtype="float64")
    exactly = twin.project_curvature(response, 6, np.array([100]))
    monkeypatch.setattr(twin, "DENSE", 4)
    nearly = twin.project_curvature(response, 6, np.array([100]))
    np.testing.assert_allclose(nearly.basis.conj().T @ nearly.basis, np.eye(6), atol=1e-12)
    assert np.trace(nearly.curvature[0]).real > 0.999 * np.trace(exactly.curvature[0]).real


def test_responses_at_every_few_steps_are_enough(monkeypatch):
    from fluctua.tcmt.kernel import twin

    spec = rectangle(steps=1000, dt=2e-3)
    ends = np.array([96, 500, 990])
    _, whole = twin.project_curvature(twin.compute_responses(spec), 12, ends)
    table = twin.compute_mean_lambda(
        *twin.compute_arriving_power(twin.compute_responses(spec), spec.noise), 1000
    )
    monkeypatch.setattr(twin, "RECORDS", 125)
    few = twin.compute_responses(spec)
    assert few.every == 8
    sparse = twin.project_curvature(few, 12, ends)[1]
    assert (
        np.abs(np.linalg.eigvalsh(sparse) - np.linalg.eigvalsh(whole)).max()
        < 0.02 * np.abs(whole).max()
    )
    np.testing.assert_allclose(
        twin.compute_mean_lambda(*twin.compute_arriving_power(few, spec.noise), 1000),
        table,
        atol=1e-3 * table[0],
    )


@pytest.mark.parametrize(("rank", "segment"), [(0, None), (12, 7)])
def test_the_default_table_is_the_mean_of_lambda(rank, segment):
    spec = rectangle(steps=200).replace(chi=np.zeros(12))
    lam = correct(spec, 1, 512, np.zeros(201), rank=rank, segment=segment).lam
    table = run_twin(spec, 1, 2, rank=rank, segment=segment, dtype="float64").table
    z = (lam.mean(0) - table)[:-1] / (lam.std(0)[:-1] / np.sqrt(512))
    assert np.abs(z[1:]).max() < 4


# ----------------------------------------------------------------------------------- the estimator


def test_split_adds_up_to_the_samples_and_may_be_of_one_trajectory():
    task = tcmt.isolation(tcmt.rectangular(2, 3), horizon=0.5, dt=5e-3)
    theta = start(task.network, ("omega", "kappa", "chi", "gamma_e", "gamma"), chi_std=0.02)
    estimator = task.estimator("cpu", baseline="twin", dtype="float64")
    parts = estimator.split(jax.random.key(0), theta, 6)
    samples = estimator.samples(jax.random.key(0), theta, 6)
    for name in theta:
        assert parts.direct[name].shape == (6, *theta[name].shape)
        np.testing.assert_allclose(
            parts.direct[name] + parts.correction[name], samples.gradient[name], rtol=1e-5
        )
    assert parts.mean_lambda.shape == task.t.shape
    one = estimator.split(jax.random.key(0), theta, 1)
    for name in theta:
        np.testing.assert_array_equal(one.direct[name][0], parts.direct[name][0])
    pairs = task.estimator("cpu", baseline=KernelTwin(rank=3), antithetic=True).split(
        jax.random.key(0), theta, 4
    )
    np.testing.assert_allclose(pairs.returns.mean(), parts.returns.mean(), rtol=0.5)


def test_noise_is_that_of_the_other_estimators():
    task = tcmt.transmission(tcmt.rectangular(2, 3), horizon=0.5, dt=5e-3, sigma_kappa=0.2)
    theta = start(task.network, ("omega", "kappa"))
    twin, plain = (task.estimator("cpu", baseline=b, dtype="float64") for b in ("twin", "none"))
    a, b = (estimator.samples(jax.random.key(0), theta, 5).returns for estimator in (twin, plain))
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_what_was_measured_of_lambda_is_carried_to_the_next_iteration():
    task = tcmt.transmission(tcmt.rectangular(2, 3), horizon=0.5, dt=5e-3)
    theta = start(task.network, ("omega", "kappa"))
    carried = Carried(task.estimator("cpu", baseline="twin"))
    carried(jax.random.key(0), theta, 64)
    first = carried.table
    expected = carried.fused.split(jax.random.key(0), theta, 64).mean_lambda
    np.testing.assert_allclose(first, expected)
    again = carried.fused.run(*(jax.random.key(1), theta, 16), first)
    np.testing.assert_array_equal(again.table, first)


# -------------------------------------------------------------------------------- memory, refusals

MEMORY = """
import sys
sys.path.insert(0, {folder!r})
from kernel_reference import rectangle
from processes import peak_memory
from fluctua.tcmt.kernel.twin import run_twin
for network, options in (({{}}, {{}}), ({{"sigma_kappa": 0.2}}, {{}}), ({{}}, {{"rank": 8}})):
    run_twin(rectangle(11, 13, steps=40, dt=1e-3, **network), 0, 16, **options)
    before = peak_memory()
    run_twin(rectangle(11, 13, steps=6000, dt=1e-3, **network), 0, 64, threads=2, **options)
    print((peak_memory() - before) / 2**20, flush=True)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_does_not_grow_with_trajectories_times_steps():
    """All of E·T·N would be 439 MB in float32."""
    text = MEMORY.format(folder=str(Path(__file__).parents[1] / "support"))
    out = subprocess.run(
        [sys.executable, "-c", text], check=True, capture_output=True, text=True
    ).stdout
    assert all(float(line) < 60 for line in out.split()), out


LONG_RUN = """
import signal, sys
sys.path.insert(0, {folder!r})
from kernel_reference import rectangle
from fluctua.tcmt.kernel.twin import run_twin
import numpy as np
signal.signal(signal.SIGINT, signal.default_int_handler)
spec = rectangle(11, 13, steps=200_000, dt=1e-3, sigma_kappa={sigma})
print("running", flush=True)
try:
    run_twin(spec, 0, 1000, table=np.zeros(200_001))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.long
def test_an_interrupt_ends_a_long_run():
    text = LONG_RUN.format(folder=str(Path(__file__).parents[1] / "support"), sigma=0.2)
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "running\n"
        wait_until_busy(process)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "interrupted\n"


def test_overflow_of_the_network_and_of_the_twin_are_told_apart():
    spec = rectangle(steps=400)
    gain = spec.replace(damping=spec.damping - 60.0)
    with pytest.raises(FloatingPointError, match=r"trajectory 7 .* after step (\d+) "):
        run_twin(gain, 0, 40, twin=spec, first_trajectory=7)
    table = np.zeros(401)
    for options in ({}, {"table": table}, {"rank": 3}):
        with pytest.raises(FloatingPointError, match="the twin's noise-free path"):
            run_twin(spec, 0, 4, twin=gain, **options)
    modulated = spec.replace(sigma_kappa=0.1)
    with pytest.raises(FloatingPointError, match="the twin's noise-free path"):
        run_twin(modulated, 0, 4, twin=gain, table=table)


def test_bad_input_is_refused_with_a_reason():
    for network, options, message in [
        ({}, {"twin": rectangle(steps=32)}, "its `steps` differs"),
        ({}, {"twin": rectangle(3, 5)}, "its `bonds` differs"),
        ({}, {"rank": -1}, "`rank`"),
        ({}, {"rank": 13}, "at most 12.*got 13"),
        ({"sigma_kappa": 0.1}, {"rank": 2}, "knows_modulation=False"),
        ({}, {"segment": 0}, "`segment`"),
        ({}, {"table": np.zeros(64)}, r"\(65,\)"),
        ({}, {"antithetic": True}, "pairs"),
        ({}, {"dtype": "float16"}, "float16"),
        ({}, {"backend": "tpu"}, "tpu"),
        ({}, {"engine": "avx1024"}, "avx1024"),
    ]:
        with pytest.raises(ValueError, match=message):
            run_twin(rectangle(**network), 0, 3, **options)


def test_estimators_refuse_what_has_no_twin():
    task = tcmt.transmission(tcmt.chain(3), horizon=0.1, dt=0.01)
    theta = start(task.network, ("omega",))
    with pytest.raises(ValueError, match='baseline="twin"'):
        task.estimator("cpu").split(jax.random.key(0), theta, 2)
    with pytest.raises(ValueError, match="`record_every` is not an option"):
        task.estimator("cpu", baseline="twin").run(jax.random.key(0), theta, 2, record_every=1)
    with pytest.raises(ValueError, match='backend="cpu"'):
        task.estimator("jax", baseline=KernelTwin())
