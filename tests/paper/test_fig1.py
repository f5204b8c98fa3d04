"""Figure 1 from run folders and from its tables."""

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from figures import assert_legible, texts
from fluctua import tcmt
from fluctua.cli.app import app
from fluctua.paper import fig1, training
from fluctua.plot import style
from run_folders import write_figure_runs, write_run

SMALL = tcmt.rectangular(4, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_figure_runs(
        tmp_path_factory.mktemp("runs"), network=SMALL, iterations=160, dt=1e-2
    )


def test_opacity_is_the_logarithm_within_a_family():
    got = fig1.scale_opacity(np.array([1.0, 10.0, 100.0, 0.0]))
    middle = (1 + fig1.FAINTEST) / 2
    np.testing.assert_allclose(got, [fig1.FAINTEST, middle, 1.0, fig1.FAINTEST])
    assert fig1.scale_opacity(np.full(3, 2.0)).tolist() == [1, 1, 1]


def test_the_breakpoint_is_where_budgets_part(folder, tmp_path):
    assert training.find_breakpoint(training.gather(folder, count=1).inset) == 60
    for name, late in (("a", 2000), ("b", 500)):
        budget = lambda i, late=late: 1000 if i < 7 else late
        write_run(tmp_path / name, network=SMALL, iterations=20, ensemble=budget)
    runs = training.gather(tmp_path, count=1).runs
    assert training.find_breakpoint(runs) == 7
    assert training.find_breakpoint(runs[:1] * 2) is None


@pytest.mark.long
def test_fig1_is_whole(folder, tmp_path, monkeypatch):
    results = training.gather(folder, count=4)
    assert [run.sigma_kappa for run in results.runs] == [0, 0.05, 0.1, 0.2]
    assert results.notes == []
    figure = fig1.draw(results)
    assert_legible(figure)
    assert [t.get_text() for t in texts(figure) if t.get_fontweight() == "bold"] == [
        "a",
        "b",
        "c",
        "d",
        "e",
        "f",
    ]
    a, b = figure.axes[:2]
    assert len(a.lines) == len(b.lines) == 4
    inset = b.child_axes[0]
    assert [t.get_text() for t in inset.get_legend().get_texts()] == ["25k", "20k", "1k"]
    pdf, png = style.save(fig1.draw(results), tmp_path / "one" / "fig1")
    monkeypatch.setattr(style, "save_png", lambda figure, path: None)
    again, _ = style.save(fig1.draw(results), tmp_path / "two" / "fig1")
    assert pdf.read_bytes() == again.read_bytes()
    with Image.open(png) as picture:
        assert picture.width == 910
        assert 64 < len(picture.getcolors()) <= 128


def test_fig1_drawn_from_its_tables_is_fig1(folder, tmp_path):
    results = training.gather(folder, count=4)
    training.write(results, tmp_path)
    back = training.read(tmp_path)
    for one, other in zip([*results.runs, *results.inset], [*back.runs, *back.inset], strict=True):
        assert (one.name, one.sigma_kappa, one.trajectories) == (
            other.name,
            other.sigma_kappa,
            other.trajectories,
        )
        np.testing.assert_allclose(one.J, other.J, atol=5e-6)  # five digits
        np.testing.assert_array_equal(one.ensemble, other.ensemble)
    np.testing.assert_allclose(
        back.trained.kappa, results.trained.kappa, rtol=2**-11
    )  # courses in half precision
    np.testing.assert_allclose(
        back.trained.theta["kappa"], results.trained.theta["kappa"], rtol=1e-6
    )
    np.testing.assert_array_equal(back.trained.network.bonds, SMALL.bonds)
    drawn = [[t.get_text() for t in texts(fig1.draw(one))] for one in (results, back)]
    assert drawn[0] == drawn[1]
    assert (
        sum("\\sigma_\\kappa=0.2" in text for text in drawn[0]) == 4
    )  # c, d, e and f say which run they show


def test_a_table_stands_for_run_folders_that_are_gone(folder, tmp_path):
    whole = training.gather(folder, count=1)
    training.write(whole, tmp_path)
    write_run(tmp_path / "more", network=SMALL, iterations=20, sigma_kappa=0.3)
    results = training.gather(tmp_path, count=1)
    assert [run.sigma_kappa for run in results.runs] == [0, 0.05, 0.1, 0.2, 0.3]
    assert [run.name for run in results.inset] == [run.name for run in whole.inset]
    np.testing.assert_allclose(results.runs[0].J, whole.runs[0].J, atol=0.5 * 10**-training.DIGITS)


def test_fig1_needs_runs_or_tables(tmp_path):
    done = CliRunner().invoke(app, ["reproduce", "fig1", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "--runs" in done.output
    done = CliRunner().invoke(app, ["reproduce", "fig1", "--from-tables", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "curves.csv" in done.output


@pytest.mark.long
def test_the_command_draws_what_there_is_and_says_what_is_missing(folder, tmp_path):
    done = CliRunner().invoke(
        app,
        [
            "reproduce",
            "fig1",
            "--runs",
            str(folder),
            "--out",
            str(tmp_path),
            "--set",
            "trajectories=2",
        ],
    )
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "fig1.pdf") in done.output
    assert "note" not in done.output
    few = tmp_path / "few"
    write_run(few / "only", network=SMALL, iterations=30)
    (few / "broken").mkdir()
    (few / "broken" / "history.csv").write_text("")
    done = CliRunner().invoke(
        app, ["reproduce", "fig1", "--runs", str(few), "--out", str(tmp_path / "few-out")]
    )
    assert done.exit_code == 0, done.output
    for words in (
        "panel b has no inset",
        "no run has σ_κ = 0.2; there are 0",
        "broken is left out",
    ):
        assert words in done.output
    assert (tmp_path / "few-out" / "fig1.png").exists()
    done = CliRunner().invoke(app, ["reproduce", "fig1", "--runs", str(tmp_path / "nowhere")])
    assert done.exit_code == 2
    assert "fluctua train" in done.output
