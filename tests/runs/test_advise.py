"""Advice on noise and trajectories, against linear networks whose returns, gradients and biases
are exact.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from fluctua import tcmt
from fluctua.cli.app import app
from fluctua.runs.advise import Pilots, advise
from fluctua.runs.noise import Tradeoff, VarianceLaw, find_optimum, fit_variance, squared_norm
from fluctua.tcmt import exact

TASK = tcmt.transmission(tcmt.rectangular(2, 3), horizon=4.0, dt=1e-2)
THETA = {"omega": jnp.linspace(-0.8, 0.9, 6), "kappa": jnp.linspace(0.6, 1.4, 7)}


@pytest.mark.parametrize(
    "law", [(2.0, 0.0, 0.0), (0.0, 3.0, 0.5), (1.0, 2.0, 3.0), (0.0, 5.0, 0.0)]
)
def test_a_variance_law_is_found_again(law):
    sigma = np.array([0.1, 0.3, 1.0, 3.0])
    np.testing.assert_allclose(fit_variance(sigma, VarianceLaw(*law)(sigma)), law, atol=1e-9)


def test_what_would_be_negative_is_left_out():
    sigma = np.array([0.5, 1.0, 2.0])
    law = fit_variance(sigma, np.array([1.0, 1.0, 0.9]))
    assert min(law) >= 0
    np.testing.assert_allclose(law(sigma), [1.0, 0.96, 0.95], rtol=0.1)


def test_the_norm_of_a_gradient_is_not_raised_by_noise():
    """Over 400 repetitions: the mean is |g|² and the stated error is the spread."""
    rng, g, sd = np.random.default_rng(3), np.array([0.3, -0.2, 0.1]), np.array([1.0, 0.5, 2.0])
    scale = np.array([1.0, 2.0, 1.5, 1.0])[:, None] * sd
    norms = [squared_norm(g + scale * rng.normal(size=(4, 3)), scale**2) for _ in range(400)]
    value, error = np.array(norms).T
    assert abs(value.mean() - g @ g) < 4 * value.std() / 20
    assert 0.8 < value.std() / error.mean() < 1.2
    with pytest.raises(ValueError, match="two independent"):
        squared_norm(g[None], scale[:1])


def test_the_optimum_is_the_one_on_paper():
    t = Tradeoff(VarianceLaw(2.0, 0.0, 0.0), bias=1e-4, ceiling=np.inf, low=1e-2, high=100.0)
    best = find_optimum(t, trajectories=1000)
    assert best.sigma_w == pytest.approx(
        (2.0 / (2 * 1000 * 1e-4)) ** (1 / 6), rel=5e-3
    )  # the grid's spacing
    assert best.limited_by == "gradient"
    same = find_optimum(t, error=best.error)  # the dual problem has the same answer
    assert (same.sigma_w, same.trajectories) == (
        pytest.approx(best.sigma_w, rel=0.02),
        pytest.approx(1000, rel=1e-3),
    )
    assert find_optimum(t._replace(ceiling=1.0), trajectories=1000)[0::3] == (
        pytest.approx(1.0),
        "return bias",
    )
    assert find_optimum(t._replace(high=0.5), trajectories=1000)[0::3] == (
        pytest.approx(0.5),
        "range",
    )
    with pytest.raises(ValueError, match="below the bias"):
        find_optimum(t._replace(low=10.0), error=0.05)
    with pytest.raises(ValueError, match="either"):
        find_optimum(t)


@pytest.fixture(scope="module")
def advice():
    return advise(jax.random.key(5), TASK, THETA, error=0.2, pilots=Pilots(3000))


def test_what_is_measured_is_exact(advice):
    quiet, quiet_slope = exact.value_and_gradient(tcmt.with_noise(TASK, sigma_w=0.0), THETA)
    loud, loud_slope = exact.value_and_gradient(tcmt.with_noise(TASK, sigma_w=1.0), THETA)
    assert advice.J_noiseless == pytest.approx(quiet, rel=1e-9)
    assert abs(advice.bias.value - (loud - quiet)) < 4 * advice.bias.error
    for f in advice.families:
        # estimates at several σ_W are pooled; their gradients differ by the bias, which is small
        # here
        assert abs(f.norm2.value - np.sum(quiet_slope[f.name] ** 2)) < 4 * f.norm2.error
        bias = np.linalg.norm(loud_slope[f.name] - quiet_slope[f.name])
        # 16 squares of projections: a relative error √(2/16)/2 = 18 % of the norm, and some from 32
        # trajectories
        assert abs(f.bias - bias) < 4 * (0.18 * bias + 0.005 * np.sqrt(f.norm2.value))


def test_as_many_trajectories_as_advised_give_the_error_asked_for(advice):
    task = tcmt.with_noise(TASK, sigma_w=advice.best.sigma_w)
    _, gradient = exact.value_and_gradient(tcmt.with_noise(TASK, sigma_w=0.0), THETA)
    count = round(advice.best.trajectories)
    w = {f.name: 1 / float(f.variance(0.5)) for f in advice.families}
    size = sum(w[n] * np.sum(g**2) for n, g in gradient.items())
    got = []
    for k in range(8):
        estimate = task.estimator("cpu")(jax.random.key(100 + k), THETA, count)
        got.append(
            sum(w[n] * np.sum((estimate.gradient[n] - g) ** 2) for n, g in gradient.items()) / size
        )
    # ε² is a sum of some ten squares: 8 repetitions know it to √(2/(8·5)) = 22 %, the pilot |∇J|²
    # to a tenth or so
    assert np.mean(got) == pytest.approx(0.2**2, rel=0.7)


PILOT = ("--set", "pilot=600", "--set", "backend=cpu")


def invoke(*arguments):
    return CliRunner().invoke(app, ["advise", *map(str, arguments)])


@pytest.fixture
def small(tmp_path):
    (tmp_path / "config.toml").write_text(
        'preset = "demo"\n[lattice]\nrows = 2\ncolumns = 3\n[task]\nhorizon = 4.0\ndt = 1e-2\n'
    )
    np.savez(tmp_path / "theta.npz", **{n: np.asarray(v) for n, v in THETA.items()})
    return [tmp_path / "config.toml", "--params", tmp_path / "theta.npz"]


@pytest.mark.long
def test_the_command_for_people_and_programs(small):
    done = invoke(*small, *PILOT, "--rate", 1000, "--error", 0.3)
    assert done.exit_code == 0, done.output
    for words in ("recommended", "as it is", "at 1000 Hz", "not measured here"):
        assert words in done.output
    assert "…" not in done.output  # nothing is cut off
    done = invoke(*small, *PILOT, "--trajectories", 500, "--json")
    report = json.loads(done.output)
    assert report["recommended"]["trajectories"] == 500
    assert (
        report["recommended"]["error"] <= report["own"]["error"] * 1.001
        or report["recommended"]["limited_by"] != "gradient"
    )
    assert set(report["families"]) == {"omega", "kappa", "chi"}
    assert set(report["recommended"]["seconds"]) == {"here", "h200"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--error", 0.1, "--trajectories", 10], "give one of them"),
        (["--error", 0], "--error must be positive"),
        (["--set", "backend=tpu"], '"auto", "cpu" or "cuda"'),
        (["--set", "sigma_w=0.5"], "two amplitudes"),
    ],
)
def test_what_is_wrong_is_said(arguments, message, small):
    done = invoke(*small, *arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_an_unknown_source_is_named():
    done = invoke("papre")
    assert done.exit_code == 2
    assert "neither a preset" in done.output
