"""Training with the twin: it goes on where it stopped, learns from few trajectories, and
certifies its twin.
"""

import jax
import numpy as np
import pytest

from estimators import wrong_by
from fluctua import tcmt
from fluctua.core.twin.correction import Twin
from fluctua.learn.shrunk_correction import ShrunkCorrection
from fluctua.runs import lattice as runs
from fluctua.runs.build import build
from fluctua.runs.config import PRESETS, apply_changes
from fluctua.tcmt.exact import value_and_gradient
from fluctua.tcmt.kernel.twin import KernelTwin
from lattice_runs import TINY, assert_same_run

CONFIG = apply_changes(PRESETS["fast"], {**TINY, "ensemble.trajectories": 4})
EULER = {"task.integrator": "euler", "task.dt": 0.0025}


def test_a_run_with_a_twin_goes_on_to_the_bit(tmp_path):
    """How much of the correction is taken follows from all iterations: what is remembered of
    them must survive.
    """
    config = apply_changes(CONFIG, {"task.sigma_kappa": 0.2})
    runs.complete(config, tmp_path / "whole")
    for row, _ in runs.run(config, tmp_path / "cut"):
        if row.iteration == 5:
            break
    list(runs.resume(tmp_path / "cut"))
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_summary_certifies_the_twin(tmp_path):
    summary = runs.complete(CONFIG, tmp_path / "run")
    assert set(summary["twin"]) == {"omega", "kappa", "chi"}
    assert (
        "twin       its error in the gradient, rms: "
        in (tmp_path / "run" / "summary.txt").read_text()
    )


def test_the_quadratic_term_is_refused_with_modulation():
    with pytest.raises(
        ValueError, match=r"`baseline.rank` = 8.*set it to 0, or `task.sigma_kappa` to 0"
    ):
        build(apply_changes(CONFIG, {"baseline.rank": 8, "task.sigma_kappa": 0.2}))


def split_with_both(changes, count):
    """Parts of the gradient with a wrong twin, by JAX and by the CPU kernel on the same noise."""
    rng = np.random.default_rng(0)  # off the symmetric start, where the gradient of ω vanishes
    theta = {
        "omega": 0.2 * rng.normal(size=6),
        "kappa": 1 + 0.2 * rng.normal(size=7),
        "chi": 0.01 * np.ones(6),
    }
    parts = []
    for backend, twin in {"jax": Twin, "cpu": KernelTwin}.items():
        task = build(apply_changes(CONFIG, {"backend": backend, **changes})).task
        estimator = task.estimator(backend, baseline=twin(theta=wrong_by(0.1, 0)))
        parts.append(estimator.split(jax.random.key(1), theta, count))
    return parts


@pytest.mark.long
def test_jax_and_the_kernel_have_the_same_direct_part():
    ours, kernel = split_with_both({"task.sigma_kappa": 0.2, **EULER}, 4)
    for name in ("omega", "kappa", "chi"):
        # float32 over 100 steps: 100 roundings of 6e-8, with room
        size = np.abs(np.asarray(ours.direct[name])).max()
        np.testing.assert_allclose(kernel.direct[name], ours.direct[name], atol=1e-4 * size)


@pytest.mark.long
def test_with_heun_only_the_sums_of_both_parts_have_the_same_mean():
    """JAX expands the half of a reward that a step ends with about the mean of that step, the
    kernel about the path of the twin: the parts differ, and both sums are unbiased.
    """
    ours, kernel = split_with_both({}, 2000)
    for name in ("omega", "kappa", "chi"):
        first, second = (
            np.asarray(part.direct[name], float) + np.asarray(part.correction[name])
            for part in (ours, kernel)
        )
        difference = first - second
        z = difference.mean(0) / (difference.std(0, ddof=1) / np.sqrt(len(difference)))
        assert np.abs(z).max() < 4, name


def test_the_weighted_correction_mends_a_wrong_twin():
    """At fixed θ: with a twin 20 % wrong the direct part is off by many standard errors, the
    mean step is not.
    """
    error = 0.2
    network = tcmt.rectangular(3, 4)
    task = tcmt.transmission(network, horizon=6.0, dt=5e-3)
    rng = np.random.default_rng(0)  # off the symmetric start, where the gradient of ω vanishes
    theta = {
        "omega": 0.3 * rng.normal(size=12),
        "kappa": 1 + 0.2 * rng.normal(size=17),
        "chi": np.zeros(12),
    }
    _, true = value_and_gradient(task, theta)
    splits = task.estimator("cpu", baseline=KernelTwin(theta=wrong_by(error, 0) if error else None))
    weighted = ShrunkCorrection(splits, forget_after=1e9, carry=True)
    estimates = [
        weighted(jax.random.fold_in(jax.random.key(1), i), theta, 256).gradient for i in range(40)
    ]
    mean = jax.tree.map(
        lambda *each: np.mean(each, axis=0), *estimates[1:]
    )  # the first had no table
    for name in ("omega", "kappa"):
        scale = np.sqrt(np.mean(np.asarray(true[name]) ** 2))
        direct = weighted.certificate.gradient[name] - weighted.certificate.correction[name]
        off, left = (
            np.sqrt(np.mean((np.asarray(v) - true[name]) ** 2)) / scale
            for v in (direct, mean[name])
        )
        noise = np.sqrt(np.mean(np.asarray(weighted.certificate.stderr[name]) ** 2)) / scale
        rows = {row[0]: row for row in weighted.certificate.rows}
        if error:
            assert off > 5 * noise  # else this would not be a test
            assert rows[name][3] > 9  # chi²: the certificate says so
            assert (
                left < 2 * noise
            )  # rms of P Gaussian errors, with room for one in a million at P = 12
        else:
            assert off < 2 * noise
            assert left < 2 * noise
