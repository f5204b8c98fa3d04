"""The properties of the estimator: the fits behind them, and figure 2 from beginning to end on
a small lattice.
"""

import jax
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from figures import assert_legible, texts
from fluctua import tcmt
from fluctua.cli.app import app
from fluctua.learn.repetitions import average_in_batches, jackknife, power_law
from fluctua.paper import fig2, panels, properties, training
from fluctua.plot import style
from fluctua.runs import noise
from fluctua.runs.reading import read_run
from fluctua.store import tables
from fluctua.tcmt import exact
from run_folders import write_figure_runs

SMALL = tcmt.rectangular(2, 3)


def test_the_jackknife_of_a_mean_is_its_standard_error():
    batches = np.random.default_rng(0).normal(size=(3, 40))
    value, error = jackknife(lambda y: y, batches)
    np.testing.assert_allclose(value, batches.mean(axis=1))
    np.testing.assert_allclose(error, batches.std(axis=1, ddof=1) / np.sqrt(40))
    with pytest.raises(ValueError, match="two batches"):
        jackknife(np.abs, np.ones((2, 1)))


def test_noise_that_points_share_does_not_enter_an_exponent():
    x, rng = np.logspace(-2, 0, 7), np.random.default_rng(1)
    shared = 1 + 0.1 * rng.normal(size=30)
    law = power_law(x, 3 * x[:, None] ** -2 * shared)
    assert law.exponent.value == pytest.approx(-2, abs=1e-12)
    assert law.exponent.error < 1e-12 < law.factor.error
    own = power_law(x, 3 * x[:, None] ** -2 * (1 + 0.1 * rng.normal(size=(7, 30))))
    # least squares: the error of a point over the spread of ln x
    expected = 0.1 / np.sqrt(30) / np.sqrt(np.sum((np.log(x) - np.log(x).mean()) ** 2))
    assert own.exponent.error == pytest.approx(
        expected, rel=0.5
    )  # 29 degrees of freedom: 13 %, seven points share it
    assert abs(own.exponent.value + 2) < 4 * own.exponent.error


def test_batches_leave_out_a_remainder():
    assert average_in_batches(np.arange(7.0), 3).tolist() == [0.5, 2.5, 4.5]
    with pytest.raises(ValueError, match="got 2"):
        average_in_batches(np.ones(2), 3)


def test_tables_read_back_exactly(tmp_path):
    columns = {"x": np.array([1 / 3, 1e-300]), "kind": np.array(["none", "binned"])}
    tables.write(tmp_path / "t.csv", columns, {"site": 3, "w": [0.1, 0.5], "what": "σ = 1"})
    back = tables.read(tmp_path / "t.csv")
    assert back.header == {"site": 3, "w": [0.1, 0.5], "what": "σ = 1"}
    assert back.columns["x"].tolist() == columns["x"].tolist()
    assert back.where(kind="binned")["x"].tolist() == [1e-300]
    tables.write(tmp_path / "t.csv.gz", columns, {"site": 3}, digits=4)
    assert (tmp_path / "t.csv.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert tables.read(tmp_path / "t.csv.gz").columns["x"].tolist() == [0.3333, 1e-300]
    (tmp_path / "t.csv.gz").unlink()
    assert (
        tables.read(tmp_path / "t.csv.gz").columns["x"].tolist() == columns["x"].tolist()
    )  # that of before
    (tmp_path / "t.csv").write_text("# x\n1,2\n")
    with pytest.raises(ValueError, match="--replace"):
        tables.read(tmp_path / "t.csv")


def test_bias_of_a_linear_network_is_exact(key):
    """Without Kerr effect the noise adds its own power, J(σ) − J(0) = cσ² with c from the exact
    moments.
    """
    task = tcmt.transmission(SMALL, horizon=4.0, dt=1e-2)
    theta = {"omega": np.linspace(-0.3, 0.3, 6), "kappa": np.linspace(0.6, 1.4, 7)}
    sigma_w = (0.01, 0.5)
    measured = noise.measure_returns(key, task, theta, sigma_w, count=4000)
    noiseless = exact.value(tcmt.with_noise(task, sigma_w=0.0), theta)
    assert measured.noiseless == pytest.approx(noiseless, rel=1e-9)
    for i, sigma in enumerate(sigma_w):
        expected = exact.value(tcmt.with_noise(task, sigma_w=sigma), theta) - noiseless
        value, error = jackknife(lambda y: y, measured.bias[i])
        assert abs(value - expected) < 4 * error
        assert (
            error < 0.05 * expected
        )  # resolved at σ_W = 0.01 as well as at 0.5: only pairs of ± noise do that
    law = power_law(np.array(sigma_w), measured.bias)
    assert law.exponent.value == pytest.approx(2, abs=1e-6)  # the pairs cancel all but the square


def test_difference_is_the_slope_of_the_exact_return(key):
    task = tcmt.transmission(SMALL, horizon=4.0, dt=1e-2)
    theta = {"omega": np.linspace(-0.3, 0.3, 6), "kappa": np.ones(7)}
    _, gradient = exact.value_and_gradient(task, theta)
    value, error = panels.finite_difference(key, task, theta, 2, count=400)
    assert abs(value - gradient["omega"][2]) < 4 * error
    assert error < 0.02 * abs(value)


def test_groups_go_on_where_the_last_ended(key):
    task = tcmt.transmission(SMALL, horizon=1.0, dt=1e-2)
    theta = tcmt.initial_parameters(key, SMALL)
    run = panels.estimate_running(key, task, theta, 1, 400, group=200, block=50)
    assert run.trajectories.tolist() == [50 * k for k in range(1, 9)]
    assert len(np.unique(run.mean)) == 8
    samples = (
        task.estimator("cpu", baseline="none").samples(key, theta, 400).gradient["omega"][:, 1]
    )
    assert run.estimate[-1] == pytest.approx(
        float(samples.mean()), abs=4 * float(samples.std()) / 20
    )
    with pytest.raises(ValueError, match="whole groups"):
        panels.estimate_running(key, task, theta, 1, 300, group=200, block=50)


def test_the_middle_of_a_training_is_where_half_of_its_gain_is(tmp_path):
    write_figure_runs(tmp_path, network=SMALL, iterations=160, dt=1e-2)
    run = read_run(tmp_path / "sigma-0")
    lattice = training.select_midway(run)
    history = run.history
    half = (history.J[0] + history.J.max()) / 2
    first = history.iteration[np.argmax(half < history.J)]
    assert abs(lattice.iteration - first) < 20  # records every 5 iterations, J smoothed
    assert training.select_midway(run, 50).iteration == 50
    with pytest.raises(ValueError, match="got iteration 900"):
        training.select_midway(run, 900)
    all_runs = training.from_runs(tmp_path, 50)
    assert [one.sigma_kappa for one in all_runs] == [0, 0.05, 0.1, 0.2]
    assert training.find_nearest(all_runs, 0.19).task.modulation.sigma_kappa == 0.19
    np.savez(tmp_path / "theta.npz", omega=np.zeros(143))
    (one,) = training.from_file(tmp_path / "theta.npz")
    assert one.task.network == tcmt.paper()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("fig2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "save", lambda figure, stem: [])  # it is drawn by a test below
        done = CliRunner().invoke(
            app, ["reproduce", "fig2", "--quick", "--out", str(out), "--set", "backend=cpu"]
        )
    assert done.exit_code == 0, done.output
    return out, done.output


@pytest.mark.long
def test_quick_figure_agrees_with_theory(measured):
    result = properties.read(measured[0])
    assert all(abs(one.z) < 4 for one in result.convergence)
    for (sigma, name), curve in result.variance.items():
        expected = 0 if name == "binned" and sigma == 0 else -2
        # Var = A/σ² + B: the flat part is below 3 % of the whole at σ_W ≤ 0.05, which bends a line
        # over 1.3 decades (the points are 0.67 apart) by at most 0.03 / ln 10^0.67 = 0.02
        allowed = 0.02 if name == "binned" and sigma > 0 else 1e-3
        assert abs(curve.law.exponent.value - expected) < 4 * curve.law.exponent.error + allowed, (
            sigma,
            name,
        )
    for curve in result.bias.values():
        # χ|ψ|² of the noise is 1e-3 of a coupling at σ_W = 0.5
        assert abs(curve.law.exponent.value - 2) < 4 * curve.law.exponent.error + 1e-3
    assert (
        abs(result.spread[0.0].law.exponent.value - 1) < 1e-2
    )  # noise on noise: of order σ_W/s⁺ = 0.05, squared
    assert result.crossover[0.05].value < result.crossover[0.2].value


@pytest.mark.long
def test_a_panel_that_is_there_is_not_measured_again(measured, monkeypatch):
    out, text = measured
    monkeypatch.setattr(style, "save", lambda figure, stem: [])  # it is drawn by other tests
    assert "exponent of ΔJ" in text
    assert (out / "summary.txt").read_text() in text
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("panel_*.csv.gz")}
    (out / "panel_d.csv.gz").unlink()
    quick = ["reproduce", "fig2", "--quick", "--out", str(out), "--set", "backend=cpu"]
    done = CliRunner().invoke(app, quick)
    assert done.exit_code == 0
    assert "panel d: 21,000 trajectories" in done.output
    assert "panel a: 10" not in done.output
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("panel_*.csv.gz")}
    assert [name for name in before if before[name] != after[name]] == ["panel_d.csv.gz"]
    done = CliRunner().invoke(app, [*quick, "--set", "seed=1"])
    assert done.exit_code == 2
    assert "was measured with seed = 0, not 1" in done.output


@pytest.mark.long
def test_the_figure_is_drawn_from_its_tables(measured, tmp_path):
    figure = fig2.draw(properties.read(measured[0]))
    assert_legible(figure)
    assert [t.get_text() for t in texts(figure) if t.get_fontweight() == "bold"] == [
        "a",
        "b",
        "c",
        "d",
    ]
    done = CliRunner().invoke(
        app, ["reproduce", "fig2", "--from-tables", "--out", str(measured[0])]
    )
    assert done.exit_code == 0
    with Image.open(measured[0] / "fig2.png") as picture:
        assert picture.width == 910
        assert 64 < len(picture.getcolors()) <= 128
    done = CliRunner().invoke(app, ["reproduce", "fig2", "--from-tables", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "no table of panel a, b, c, d" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--runs is missing"),
        (["--quick", "--set", "trajectories=2500"], "multiple of 2,000"),
        (["--quick", "--set", "backend=tpu"], '"auto", "cpu" or "cuda"'),
        (["--quick", "--set", "site=12"], "one of 0 … 11"),
        (["--runs", "nowhere"], "no runs in nowhere"),
    ],
)
def test_what_is_wrong_is_said(arguments, message, tmp_path):
    done = CliRunner().invoke(app, ["reproduce", "fig2", "--out", str(tmp_path), *arguments])
    assert done.exit_code == 2
    assert message in done.output


def test_the_clearest_site_is_no_lead(key):
    task = tcmt.transmission(SMALL, horizon=2.0, dt=1e-2)
    theta = {**tcmt.initial_parameters(key, SMALL), "omega": jax.numpy.linspace(-1, 1, 6)}
    assert panels.find_clearest_site(key, task, theta, count=50) not in (0, 5)
