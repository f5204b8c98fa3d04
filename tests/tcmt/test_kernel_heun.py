"""Heun's step in the CPU kernel, against the mean of that step and its derivatives by JAX, on
the same noise.
"""

import numpy as np
import pytest

from fluctua.tcmt.kernel import layout
from fluctua.tcmt.kernel import run as kernel
from fluctua.tcmt.kernel.cpu import sum_measured_scores
from fluctua.tcmt.kernel.options import Binned, KernelJob, KernelOptions
from fluctua.tcmt.kernel.twin import run_twin
from fluctua.tcmt.native import _native
from heun_reference import corrected_heun, simulate_heun
from in_turn import in_turn
from kernel_reference import rectangle

SEED = 0x1234_5678_9ABC_DEF0
STRONG = 20.0  # times the lattice's χ: 2χ|ψ|² turns a state by a fraction of a radian a step
CASES = {
    "rotating frame": {},
    "a drive that changes in time": {"lab": True},
    "modulated, pieces of two steps": {"sigma_kappa": 0.2, "steps": 41, "dt": 0.03},
    "modulated, longer pieces and a drive": {"sigma_kappa": 0.2, "dt": 2e-3, "lab": True},
    "a piece of the modulation that ends with the run": {
        "sigma_kappa": 0.2,
        "dt": 1e-3,
        "steps": 24,
        "harmonics": 10,
    },
}
TOLERANCE = {"float32": 3e-5, "float64": 1e-11}


def heun(**case):
    """A lattice with a strong Kerr effect."""
    spec = rectangle(**{"steps": 40, "dt": 0.02, **case}, integrator="heun")
    return spec.replace(chi=STRONG * spec.chi)


def deviation(actual, expected):
    return np.abs(actual - expected).max() / np.abs(expected).max()


def assert_close(actual, expected, tolerance):
    for name in expected:
        assert deviation(getattr(actual, name), expected[name]) < tolerance, name


@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, TOLERANCE))
def test_every_step_and_every_score_is_the_references(case, dtype):
    spec = heun(**CASES[case])
    path = simulate_heun(spec, SEED, 19)  # not a multiple of the block
    expected = {**path.gradient(), "gain": path.explicit.sum(1)}
    for engine in _native.engines():
        run = kernel.run(
            spec, SEED, 19, dtype=dtype, engine=engine, rates=True, record_every=1, samples=True
        )
        assert deviation(run.trajectories, path.psi) < TOLERANCE[dtype]
        assert deviation(run.returns, path.rewards.sum(1)) < TOLERANCE[dtype]
        assert_close(run.samples, expected, TOLERANCE[dtype])


def test_the_pieces_of_a_modulation_reach_the_end_of_the_last_step():
    spec = heun(**CASES["a piece of the modulation that ends with the run"])
    steps, table = layout.fit_modulation(spec, layout.MAX_MODULATION_ERROR)
    assert spec.steps % steps == 0
    assert len(table) == spec.steps // steps + 1


def test_a_time_only_baseline_meets_the_reward_of_the_end():
    spec = heun()
    path = simulate_heun(spec, SEED, 32)
    table = path.rewards.mean(0)[::-1].cumsum()[::-1]
    assert abs(table[-1]) > 1e-3
    run = kernel.run(spec, SEED, 32, baseline=table + 0.01, dtype="float64", samples=True)
    expected = path.gradient(table[None, 1:, None] + 0.01)
    assert_close(run.samples, {name: expected[name] for name in ("omega", "kappa", "chi")}, 1e-11)
    np.testing.assert_allclose(run.mean_return_to_go, table, rtol=1e-11)


def test_antithetic_pairs_and_the_skeleton():
    spec = heun(sigma_kappa=0.2)
    path = simulate_heun(spec, SEED, 20, antithetic=True)
    run = kernel.run(spec, SEED, 20, antithetic=True, dtype="float64", record_every=1, samples=True)
    assert deviation(run.trajectories, path.psi) < 1e-11
    expected = path.gradient()
    assert_close(run.samples, {name: expected[name] for name in ("omega", "kappa", "chi")}, 1e-11)
    still = kernel.run(spec, SEED, 2, noise=False, dtype="float64", record_every=8)
    assert (
        deviation(still.trajectories, simulate_heun(spec, SEED, 2, noise=False).psi[:, ::8]) < 1e-12
    )
    assert still.gradient is None


def wrong(spec):
    return spec.replace(omega=1.05 * spec.omega + 0.01, kappa=0.95 * spec.kappa, chi=1.2 * spec.chi)


TWINS = {
    "exact, one table of every step": ({}, {}),
    "a drive that changes in time, wrong": ({"lab": True}, {"wrong": True}),
    "in segments": ({}, {"segment": 7, "wrong": True}),
    "modulated": ({"sigma_kappa": 0.2, "steps": 41, "lab": True}, {"segment": 8}),
    "modulated, longer pieces, antithetic": (
        {"sigma_kappa": 0.2, "dt": 2e-3},
        {"antithetic": True, "wrong": True},
    ),
    "knows no modulation": ({"sigma_kappa": 0.2}, {"knows_modulation": False}),
}


@pytest.mark.parametrize("case", TWINS)
def test_every_part_of_the_twin_correction_is_the_references(case):
    network, options = TWINS[case]
    spec, options = heun(**network), dict(options)
    twin = wrong(spec) if options.pop("wrong", False) else None
    table = np.linspace(0.3, 0.1, spec.steps + 1)
    same = {
        "antithetic": options.get("antithetic", False),
        "knows": options.get("knows_modulation", True),
    }
    reference = corrected_heun(spec, SEED, 18, table, twin=twin, **same)
    for dtype, tolerance in (("float64", 1e-9), ("float32", 3e-5)):
        run = run_twin(
            spec, SEED, 18, twin=twin, table=table, rates=True, samples=True, dtype=dtype, **options
        )
        assert deviation(run.returns, reference.path.rewards.sum(1)) < tolerance
        scale = np.abs(reference.path.rewards.sum(1)).max()
        assert np.abs(run.mean_lambda - reference.lam.mean(0)).max() < tolerance * scale
        plain = reference.path.gradient() | {"gain": reference.direct["gain"]}
        for name, expected in reference.direct.items():
            if np.abs(expected).any():
                assert deviation(getattr(run.direct_samples, name), expected) < tolerance, name
            apart = np.abs(getattr(run.correction_samples, name) - reference.correction[name]).max()
            assert apart < tolerance * np.abs(plain[name]).max(), name


def test_a_quadratic_term_leaves_the_mean_as_it_is():
    """Bent and straight twins on other noise: the same gradient in standard errors, and less
    variance.
    """
    spec = heun(steps=60)
    spec = spec.replace(chi=spec.chi / STRONG)  # the term is that of the linear network
    straight, bent = (run_twin(spec, seed, 1024, rank=rank) for seed, rank in ((1, 0), (2, 6)))
    for name in ("omega", "kappa", "chi"):
        a, b = getattr(straight.gradient, name), getattr(bent.gradient, name)
        errors = np.hypot(getattr(straight.stderr, name), getattr(bent.stderr, name))
        assert np.abs((a - b) / errors).max() < 4
        assert np.mean(getattr(bent.stderr, name)) < np.mean(getattr(straight.stderr, name))


def test_overflow_names_its_step():
    spec = heun(steps=400)
    with pytest.raises(FloatingPointError, match=r"trajectory 7 .* after step (\d+) "):
        kernel.run(spec.replace(damping=spec.damping - 60.0), 0, 40, first_trajectory=7)


def test_what_has_no_heun_says_so():
    for refused, message in [
        (lambda: kernel.run(heun(), 0, 4, baseline=Binned(2)), "binned.*heun"),
        (lambda: run_twin(heun(), 0, 4, twin=rectangle(steps=40, dt=0.02)), "`integrator` differs"),
        (
            lambda: sum_measured_scores(
                KernelJob(heun(), 0, 1, KernelOptions()), np.zeros((1, 2, 24)), 1
            ),
            "measured.*heun",
        ),
        (lambda: rectangle().replace(integrator="rk4"), "rk4.*jax"),
        (lambda: heun(lab=True).replace(steps=41), r"\(42, 1\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            refused()
