"""The CPU kernel against the step-by-step reference, on the same noise."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fluctua.tcmt.kernel import layout
from fluctua.tcmt.kernel import run as kernel
from fluctua.tcmt.native import _native
from in_turn import in_turn
from kernel_reference import rectangle, simulate
from processes import wait_until_busy

SEED = 0x1234_5678_9ABC_DEF0  # both halves of the key matter
ENGINES = _native.engines()
CASES = {
    "rotating frame": {},
    "lab frame with an envelope": {"lab": True},
    "modulated": {"sigma_kappa": 0.2, "steps": 150, "dt": 2e-3},
    "odd number of steps": {"steps": 63},
    "a chain": {"rows": 1, "columns": 5},
    "one resonator": {"rows": 1, "columns": 1},
}
TOLERANCE = {"float32": 3e-5, "float64": 1e-11}


def deviation(actual, expected):
    """Largest deviation in units of the largest value of the family."""
    scale = np.abs(expected).max() if expected.size else 1.0
    return np.abs(actual - expected).max() / scale if expected.size else 0.0


def assert_close(actual, expected, tolerance):
    for name in ("omega", "kappa", "chi"):
        assert deviation(getattr(actual, name), expected[name]) < tolerance, name


@pytest.mark.parametrize(
    ("case", "dtype", "engine"), in_turn(CASES, ["float32", "float64"], ENGINES)
)
def test_every_step_and_every_score_is_the_references(case, dtype, engine):
    spec = rectangle(**CASES[case])
    path = simulate(spec, SEED, 19)  # not a multiple of the block
    run = kernel.run(spec, SEED, 19, dtype=dtype, engine=engine, record_every=1, samples=True)
    tolerance = TOLERANCE[dtype]
    assert deviation(run.trajectories, path.psi) < tolerance
    assert deviation(run.returns, path.rewards.sum(1)) < tolerance
    assert_close(run.samples, path.gradient(), tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_time_only_baseline(dtype):
    spec = rectangle()
    path = simulate(spec, SEED, 32)
    table = np.append(path.rewards.mean(0)[::-1].cumsum()[::-1], 0.0) + 0.01
    run = kernel.run(spec, SEED, 32, baseline=table, dtype=dtype, samples=True)
    assert_close(run.samples, path.gradient(table[None, 1:, None]), TOLERANCE[dtype])
    np.testing.assert_allclose(run.mean_return_to_go, table - 0.01, atol=1e-6)


def test_mean_second_moment_and_error_are_those_of_the_samples():
    run = kernel.run(rectangle(), 3, 50, samples=True)
    for name in ("omega", "kappa", "chi"):
        g = getattr(run.samples, name).astype(float)
        np.testing.assert_allclose(getattr(run.gradient, name), g.mean(0), rtol=1e-10, atol=1e-15)
        np.testing.assert_allclose(getattr(run.second_moment, name), (g**2).mean(0), rtol=1e-10)
        np.testing.assert_allclose(
            getattr(run.stderr, name), g.std(0, ddof=1) / np.sqrt(50), rtol=1e-8
        )
    np.testing.assert_allclose(run.value_stderr, run.returns.std(ddof=1) / np.sqrt(50))


def test_antithetic_pairs_share_words_with_opposite_sign():
    spec = rectangle(sigma_kappa=0.2)
    path = simulate(spec, SEED, 20, antithetic=True)
    run = kernel.run(spec, SEED, 20, antithetic=True, dtype="float64", record_every=1, samples=True)
    assert deviation(run.trajectories, path.psi) < 1e-11
    assert_close(run.samples, path.gradient(), 1e-11)
    pairs = run.samples.omega.reshape(10, 2, -1).mean(1)
    np.testing.assert_allclose(run.stderr.omega, pairs.std(0, ddof=1) / np.sqrt(10), rtol=1e-9)


def test_without_noise_all_trajectories_are_the_skeleton():
    spec = rectangle()
    path = simulate(spec, SEED, 2, noise=False)
    run = kernel.run(spec, SEED, 2, noise=False, dtype="float64", record_every=8)
    assert deviation(run.trajectories, path.psi[:, ::8]) < 1e-12
    assert run.gradient is None


def test_scores_of_the_rates():
    spec = rectangle(lab=True)
    path = simulate(spec, SEED, 16)
    run = kernel.run(spec, SEED, 16, rates=True, dtype="float64", samples=True)
    expected = path.gradient()
    for name in ("damping", "log_diffusion", "drive"):
        assert deviation(getattr(run.samples, name), expected[name]) < 1e-11, name
    assert deviation(run.samples.gain, path.explicit.sum(1)) < 1e-11


@pytest.mark.parametrize("step", ["euler", "heun"])
def test_a_run_is_a_slice_of_a_longer_one_and_threads_do_not_matter(step):
    spec = rectangle(sigma_kappa=0.1).replace(integrator=step)
    whole = kernel.run(spec, 5, 70, threads=1, samples=True)
    again = kernel.run(spec, 5, 70, threads=3, samples=True)
    part = kernel.run(spec, 5, 30, first_trajectory=40, samples=True)
    np.testing.assert_array_equal(whole.gradient.kappa, again.gradient.kappa)
    np.testing.assert_array_equal(whole.mean_return_to_go, again.mean_return_to_go)
    np.testing.assert_array_equal(whole.samples.kappa[40:], part.samples.kappa)


def test_modulation_is_the_exact_sine_to_single_precision():
    """Coupled only through δκ, two resonators show its error directly: ψ₁ = −i∫δκ dt ψ₀."""
    spec = rectangle(2, 2, sigma_kappa=0.2, steps=2000, dt=1e-3)
    single = kernel.run(spec, SEED, 16, record_every=50).trajectories
    double = kernel.run(spec, SEED, 16, record_every=50, dtype="float64").trajectories
    assert np.abs(single - double).max() / np.abs(double).max() < 1e-5
    spec = spec.replace(Omega=0.1, harmonics=10)
    steps, table = layout.fit_modulation(spec, layout.MAX_MODULATION_ERROR)
    assert steps > 10
    rng = np.random.default_rng(0)
    a = rng.standard_normal(10)
    a /= np.linalg.norm(a)
    phase = rng.uniform(0, 2 * np.pi, 10)
    wave = np.stack([a * np.cos(phase), a * np.sin(phase)], -1).ravel()
    n = np.arange(spec.steps)
    tau = (2 * (n % steps) + 1 - steps) / steps
    piece = table[n // steps] @ wave
    sine = piece[:, 0] + tau * (piece[:, 1] + tau * piece[:, 2])
    exact = (a * np.sin(0.1 * np.arange(1, 11) * n[:, None] * 1e-3 + phase)).sum(-1)
    assert np.abs(sine - exact).max() < layout.MAX_MODULATION_ERROR


def test_overflow_names_the_first_trajectory_and_its_step():
    spec = rectangle(steps=400)
    spec = spec.replace(damping=spec.damping - 60.0)
    with pytest.raises(FloatingPointError, match=r"trajectory 7 .* after step (\d+) "):
        kernel.run(spec, 0, 40, first_trajectory=7)


def test_bad_input_is_refused_with_a_reason():
    for change, options, message in [
        ({"omega": np.zeros(11)}, {}, "`omega`.*12.*11"),
        ({"noise": np.zeros(12)}, {}, "site 0 has no noise"),
        ({"steps": 0}, {}, "`steps`"),
        ({"bonds": np.array([[0, 0]]), "kappa": np.ones(1)}, {}, "itself"),
        ({"bonds": np.array([[0, 1], [1, 0]]), "kappa": np.ones(2)}, {}, "twice"),
        ({"drive_sites": np.array([12])}, {}, "from 0 to 11"),
        ({"drive": np.ones((7, 1))}, {}, "`drive` must have shape"),
        ({"chi": np.full(12, np.nan)}, {}, "not finite"),
        ({}, {"baseline": np.zeros(64)}, r"\(65,\)"),
        ({}, {"antithetic": True}, "pairs"),
        ({}, {"dtype": "float16"}, "float16"),
        ({}, {"backend": "tpu"}, "tpu"),
        ({}, {"engine": "avx1024"}, "avx1024"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernel.run(rectangle().replace(**change), 0, 3, **options)


LONG_RUN = """
import signal, sys
sys.path.insert(0, {folder!r})
from kernel_reference import rectangle
from fluctua.tcmt.kernel import run as kernel
signal.signal(signal.SIGINT, signal.default_int_handler)
print("running", flush=True)
try:
    kernel.run(rectangle(11, 13, steps=2_000_000, dt=1e-3), 0, 1000)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.long
def test_an_interrupt_ends_a_long_run():
    """In a process of its own: test runners that spread over processes ignore the signal."""
    code = LONG_RUN.format(folder=str(Path(__file__).parents[1] / "support"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "running\n"
        wait_until_busy(run)
        run.send_signal(signal.SIGINT)
        assert run.communicate(timeout=60)[0] == "interrupted\n"
