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
"""The kernel's twin with Heun's step has a reference of its own (`heun_reference.py`)."""


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


@pytest.mark.long
def test_backends_train_with_the_same_twin():
    """JAX and the CPU kernel see the same noise and the same twin; their λ̄ differ, so the
    direct parts are compared.
    """
    rng = np.random.default_rng(0)  # off the symmetric start, where the gradient of ω vanishes
    key, of_each = jax.random.key(1), []
    for backend in ("jax", "cpu"):
        changes = {"backend": backend, "task.sigma_kappa": 0.2, **EULER}
        task = build(apply_changes(CONFIG, changes)).task
        twin = (
            Twin(theta=wrong_by(0.1, 0)) if backend == "jax" else KernelTwin(theta=wrong_by(0.1, 0))
        )
        theta = {
            "omega": 0.2 * rng.normal(size=6),
            "kappa": 1 + 0.2 * rng.normal(size=7),
            "chi": 0.01 * np.ones(6),
        }
        rng = np.random.default_rng(0)
        of_each.append(task.estimator(backend, baseline=twin).split(key, theta, 4).direct)
    for name in ("omega", "kappa", "chi"):
        size = np.abs(
            np.asarray(of_each[0][name])
        ).max()  # float32 over 100 steps: 100 roundings of 6e-8, with room
        np.testing.assert_allclose(of_each[1][name], of_each[0][name], atol=1e-4 * size)


def test_the_weighted_correction_mends_a_wrong_twin():
    error = 0.2
    """At fixed θ: with a twin 20 % wrong the direct part is off by many standard errors, the
    mean step is not.
    """
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
