"""Figures from run folders: what is read, what the scales mean, and that nothing is clipped, tiny or missing."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from typer.testing import CliRunner

from fluctua import tcmt
from fluctua.cli.app import app
from fluctua.core.simulate import noise_seed
from fluctua.core.wiener import silent
from fluctua.paper import fig1
from fluctua.plot.before_after import draw_before_after, draw_run
from fluctua.plot.continuations import breakpoint_of, rolling_mean
from fluctua.plot.network import diagram, draw_network, scales
from fluctua.plot.runs import effective, find_runs, read_history, read_run
from fluctua.plot.style import save
from fluctua.store.history import kept
from fluctua.tcmt.exposure import exposure
from run_folders import history_rows, trained, write_figure_runs, write_run

SMALL = tcmt.rectangular(4, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_figure_runs(tmp_path_factory.mktemp("runs"), network=SMALL, iterations=160, dt=1e-2)


def texts(figure):
    return [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]


def assert_legible(figure):
    """No text under 7 points, and nothing beyond the edge of the paper."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # the layout is made now
    assert min(text.get_fontsize() for text in texts(figure)) >= 7
    box = figure.get_tightbbox(canvas.get_renderer())
    width, height = figure.get_size_inches()
    assert min(box.x0, box.y0, width - box.x1, height - box.y1) > -0.005


# ---------------------------------------------------------------------------------------- run folders


@pytest.mark.parametrize(
    ("iteration", "rows"),
    [
        ([0, 1, 2], [0, 1, 2]),
        ([0, 1, 2, 3, 1, 2, 3, 4], [0, 4, 5, 6, 7]),
        ([0, 1, 2, 3, 1, 2], [0, 4, 5]),  # iteration 3 was undone and not reached again
        ([0, 1, 2, 3, 2, 3, 1], [0, 6]),
        ([5, 5, 5], [2]),
        ([], []),
    ],
)
def test_rewound_rows_are_left_out(iteration, rows):
    assert kept(np.array(iteration, int)).tolist() == rows


def test_effective_history_is_the_last_row_of_each_iteration(folder):
    whole = read_history(folder / "sigma-0")
    last = {int(i): r for r, i in enumerate(whole.iteration)}
    history = effective(whole)
    assert len(whole.row) > len(history.row) == 160
    assert history.row.tolist() == [last[i] for i in range(160)]
    assert "rewind" in whole.event


def test_a_line_that_is_being_written_is_not_read(tmp_path):
    run = write_run(tmp_path / "run", network=SMALL, iterations=10)
    with (run / "history.csv").open("a") as file:
        file.write("10,10,0.5")
    assert read_run(run).history.iteration[-1] == 9


def test_a_run_folder_gives_back_its_network_and_parameters(tmp_path):
    run = read_run(write_run(tmp_path / "a", network=tcmt.paper(), sigma_kappa=0.2, iterations=20))
    assert run.sigma_kappa == 0.2
    assert run.task.network == tcmt.paper()
    assert run.task.modulation.sigma_kappa == 0.2
    assert run.course.kappa.shape == (4, 262)
    unfinished = read_run(write_run(tmp_path / "b", network=SMALL, iterations=20, finished=False))
    np.testing.assert_array_equal(unfinished.trained["omega"], unfinished.course.omega[-1])


def test_what_is_wrong_with_a_run_folder_is_said(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_run(tmp_path)
    run = write_run(tmp_path / "run", network=SMALL, iterations=10)
    whole = (run / "history.csv").read_text()
    (run / "history.csv").write_text("iteration,J\n0,0.2\n")
    with pytest.raises(ValueError, match="must open with the columns row,iteration"):
        read_run(run)
    (run / "history.csv").write_text(whole.replace("0,0,", "0,zero,", 1))
    with pytest.raises(ValueError, match="no number"):
        read_run(run)
    assert find_runs(run) == [run]
    assert find_runs(tmp_path) == [run]


# ------------------------------------------------------------------------------------------- exposure


def test_exposure_of_one_resonator_is_exact():
    """ψ = (D s/Γ)(1 − e^{−Γt}) with D = √2 and Γ = 2 + γ: two leads with γ_e = 1 on one site, s = 10."""
    network = tcmt.from_edges([], sites=1, leads=[0, 0], gamma=0.02)
    task = tcmt.transmission(network, horizon=5.0, dt=1e-3)
    got = exposure(0, task, {"omega": np.zeros(1)})
    t = np.linspace(0, 5, 200_001)
    psi = 10 * np.sqrt(2) / 2.02 * (1 - np.exp(-2.02 * t))
    np.testing.assert_allclose(got.omega, np.trapezoid(psi**2, t), rtol=4e-3)  # recorded every 10 steps
    np.testing.assert_allclose(got.chi, np.trapezoid(psi**4, t), rtol=8e-3)


def test_exposure_sees_the_modulation_and_not_the_noise(key):
    network = tcmt.rectangular(3, 3)
    task = tcmt.transmission(network, horizon=4.0, dt=1e-2, sigma_kappa=0.3)
    theta = {k: np.asarray(v) for k, v in trained(network).items()}
    seed = noise_seed(key)
    got = exposure(seed, task, theta, count=4)
    still = exposure(seed, tcmt.transmission(network, horizon=4.0, dt=1e-2), theta)
    assert np.abs(got.omega / still.omega - 1).max() > 1e-2
    loud = task._replace(simulated=network.replace(sigma_e=5.0, sigma_r=5.0))
    np.testing.assert_allclose(exposure(seed, loud, theta, count=4).kappa, got.kappa, rtol=1e-6)
    paths = np.asarray(task.simulator(silent)(key, theta, 4).x)[:, :-1]
    size = np.hypot(*np.split(paths, 2, axis=-1))
    first, second = network.bonds.T
    expected = (size[..., first] * size[..., second]).mean(axis=0).sum(axis=0) * 1e-2
    np.testing.assert_allclose(got.kappa, expected, rtol=1e-4)  # same modulation; float32


def test_opacity_is_the_logarithm_within_a_family():
    got = fig1.opacity(np.array([1.0, 10.0, 100.0, 0.0]))
    middle = (1 + fig1.FAINTEST) / 2
    np.testing.assert_allclose(got, [fig1.FAINTEST, middle, 1.0, fig1.FAINTEST])
    assert fig1.opacity(np.full(3, 2.0)).tolist() == [1, 1, 1]


# -------------------------------------------------------------------------------------------- network


def test_coupling_scales_are_square_roots_about_one_and_differ_above_and_below():
    scale = scales(SMALL, {"kappa": np.linspace(0.6, 4.0, len(SMALL.bonds))})
    np.testing.assert_allclose(
        scale.compressed(np.array([0.6, 0.9, 1.0, 1.75, 4.0])), [-1, -0.5, 0, 0.5, 1], atol=1e-12
    )
    kappa = np.linspace(0.6, 4, 50)
    np.testing.assert_allclose(scale.expanded(scale.compressed(kappa)), kappa)
    assert (np.diff(scale.width(kappa)) > 0).all()
    assert (np.diff(scale.radius(np.linspace(0, scale.detuning, 9))) > 0).all()


@pytest.mark.parametrize(
    "network",
    [SMALL, tcmt.ring(8), tcmt.chain(5), tcmt.honeycomb(4, 6), tcmt.from_edges([], sites=1, leads=[0]),
     tcmt.rectangular(4, 5, leads=[0, tcmt.Lead({18: 0.6, 19: 0.8}), 4, 7])],
    ids=["lattice", "ring", "chain", "honeycomb", "one site", "four leads"],
)  # fmt: skip
def test_any_network_can_be_drawn(network):
    assert_legible(diagram(network, {}))


def test_disks_show_detuning_and_kerr():
    theta = {"omega": np.linspace(-2, 1, SMALL.sites), "chi": np.linspace(-1, 3, SMALL.sites)}
    axes = diagram(SMALL, {}).axes[0]
    axes.clear()
    scale = draw_network(axes, SMALL, theta)
    (disks,) = (c for c in axes.collections if c.get_array() is not None)
    np.testing.assert_array_equal(disks.get_array(), theta["chi"])
    assert (disks.norm.vmin, disks.norm.vmax) == (-3, 3)
    assert scale.detuning == 2


# -------------------------------------------------------------------------------------------- figures


def test_rolling_mean_leaves_a_trend_in_place():
    np.testing.assert_allclose(rolling_mean(3 * np.arange(100.0)), 3 * np.arange(100.0))
    step = rolling_mean(np.repeat([0.0, 1.0], 50))
    assert step[37] == 0 < step[38]
    assert step[61] < 1 == step[62]


def test_the_breakpoint_is_where_budgets_part(folder, tmp_path):
    assert breakpoint_of([read_run(path) for path in find_runs(folder / "inset")]) == 60
    for name, late in (("a", 2000), ("b", 500)):
        budget = lambda i, late=late: 1000 if i < 7 else late
        write_run(tmp_path / name, network=SMALL, iterations=20, ensemble=budget)
    assert breakpoint_of([read_run(tmp_path / "a"), read_run(tmp_path / "b")]) == 7
    assert breakpoint_of([read_run(tmp_path / "a")] * 2) is None


def test_fig1_is_whole(folder, tmp_path):
    results = fig1.gather(folder, count=4)
    assert [run.sigma_kappa for run in results.runs] == [0, 0.05, 0.1, 0.2]
    assert results.notes == []
    figure = fig1.draw(results)
    assert_legible(figure)
    assert [t.get_text() for t in texts(figure) if t.get_fontweight() == "bold"] == ["a", "b", "c", "d", "e", "f"]
    a, b = figure.axes[:2]
    assert len(a.lines) == len(b.lines) == 4
    inset = b.child_axes[0]
    assert [t.get_text() for t in inset.get_legend().get_texts()] == ["25k", "20k", "1k"]
    pdf, png = save(fig1.draw(results), tmp_path / "one" / "fig1")
    again, _ = save(fig1.draw(results), tmp_path / "two" / "fig1")
    assert pdf.read_bytes() == again.read_bytes()
    assert png.stat().st_size > 50_000


def test_the_command_draws_what_there_is_and_says_what_is_missing(folder, tmp_path):
    done = CliRunner().invoke(
        app, ["reproduce", "fig1", "--runs", str(folder), "--out", str(tmp_path), "--trajectories", "2"]
    )
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "fig1.pdf") in done.output
    assert "note" not in done.output
    few = tmp_path / "few"
    write_run(few / "only", network=SMALL, iterations=30)
    (few / "broken").mkdir()
    (few / "broken" / "history.csv").write_text("")
    done = CliRunner().invoke(app, ["reproduce", "fig1", "--runs", str(few), "--out", str(tmp_path / "few-out")])
    assert done.exit_code == 0, done.output
    for said in ("panel b has no inset", "no run has σ_κ = 0.2; there are 0", "broken is left out"):
        assert said in done.output
    assert (tmp_path / "few-out" / "fig1.png").exists()
    done = CliRunner().invoke(app, ["reproduce", "fig1", "--runs", str(tmp_path / "nowhere")])
    assert done.exit_code == 2
    assert "fluctua train" in done.output


def test_before_and_after_share_their_scales(folder):
    run = read_run(folder / "sigma-0")
    figure = draw_run(run)
    assert_legible(figure)
    before, after = figure.axes[:2]
    norms = [next(c.norm for c in axes.collections if c.get_array() is not None) for axes in (before, after)]
    assert norms[0].vmax == norms[1].vmax == np.abs(run.trained["chi"]).max()
    assert_legible(draw_before_after(SMALL, {}, trained(SMALL), run.history))


def test_made_up_rows_have_the_columns_of_a_history():
    rows = history_rows(10, rewind=(5, 3))
    assert [row[1] for row in rows] == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9]
