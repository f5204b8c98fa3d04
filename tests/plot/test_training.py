"""The pictures of a training: shared scales, bands that can be seen, iterations counted as on
the console.
"""

import numpy as np
import pytest
from matplotlib.figure import Figure

from figures import assert_legible, texts
from fluctua import tcmt
from fluctua.plot.training import (
    draw_before_after,
    draw_folder,
    draw_learning,
    draw_learning_curve,
    draw_run,
)
from fluctua.runs.reading import effective, read_history, read_run
from fluctua.store.folder import RunFolder
from run_folders import make_trained, write_figure_runs

SMALL = tcmt.rectangular(4, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_figure_runs(
        tmp_path_factory.mktemp("runs"), network=SMALL, iterations=160, dt=1e-2
    )


def test_before_and_after_share_their_scales(folder):
    run = read_run(folder / "sigma-0")
    figure = draw_run(run)
    assert_legible(figure)
    before, after = figure.axes[:2]
    norms = [
        next(c.norm for c in axes.collections if c.get_array() is not None)
        for axes in (before, after)
    ]
    assert norms[0].vmax == norms[1].vmax == np.abs(run.trained["chi"]).max()
    assert_legible(draw_before_after(SMALL, {}, make_trained(SMALL), run.history))


def test_iterations_count_from_one_as_on_the_console(folder):
    run = read_run(folder / "sigma-0")
    figure = draw_run(run)
    assert "after 160 iterations" in figure.axes[1].get_title()
    (curve,) = figure.axes[-1].lines
    assert (curve.get_xdata()[0], curve.get_xdata()[-1]) == (1, 160)


@pytest.mark.parametrize(("factor", "legend"), [(1e-3, False), (30.0, True)])
def test_a_band_that_nobody_sees_has_no_key(folder, factor, legend):
    history = effective(read_history(folder / "sigma-0"))
    axes = Figure().subplots()
    draw_learning_curve(axes, history._replace(J_stderr=factor * history.J_stderr))
    assert bool(axes.collections) is legend
    assert (axes.get_legend() is not None) is legend


def test_the_learning_curve_shows_what_was_rewound(folder):
    history = read_history(folder / "sigma-0")
    figure = draw_learning(history)
    assert_legible(figure)
    undone, curve = figure.axes[0].lines
    assert len(undone.get_xdata()) == len(history.row) - 160
    assert len(curve.get_xdata()) == 160
    assert any("trajectories" in text.get_text() for text in texts(figure))


def test_a_folder_is_drawn_into_itself(folder):
    names = sorted(path.name for path in draw_folder(RunFolder(folder / "sigma-0.2")))
    assert names == ["before_after.pdf", "before_after.png", "learning.pdf", "learning.png"]
    assert all((folder / "sigma-0.2" / "figures" / name).stat().st_size > 5000 for name in names)
