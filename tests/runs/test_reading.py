"""Run folders, read back: what is left out, what is put together, what is refused."""

import numpy as np
import pytest

from fluctua import tcmt
from fluctua.runs.reading import effective, find_runs, read_history, read_run, rolling_mean
from fluctua.store.history import find_kept
from run_folders import history_rows, write_figure_runs, write_run

SMALL = tcmt.rectangular(4, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_figure_runs(
        tmp_path_factory.mktemp("runs"), network=SMALL, iterations=160, dt=1e-2
    )


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
    assert find_kept(np.array(iteration, int)).tolist() == rows


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


def test_rolling_mean_leaves_a_trend_in_place():
    np.testing.assert_allclose(rolling_mean(3 * np.arange(100.0)), 3 * np.arange(100.0))
    step = rolling_mean(np.repeat([0.0, 1.0], 50))
    assert step[37] == 0 < step[38]
    assert step[61] < 1 == step[62]


def test_made_up_rows_have_the_columns_of_a_history():
    rows = history_rows(10, rewind=(5, 3))
    assert [row[1] for row in rows] == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9]
