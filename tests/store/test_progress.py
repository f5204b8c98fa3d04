"""Progress of `fluctua.run`: a line in terminals, one output in notebooks, silence elsewhere."""

import io
import re
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

import trap
from fluctua.store import history, progress
from fluctua.store.progress import RunLimits, TrainingProgress, estimate_time_left, show_progress

ROWS = [history.Row(i, i, 0.1 * i, 0.01, 10, 10 * (i + 1), 0.0, 2.0) for i in range(5)]


# ---------------------------------------------------------------------------------------- time left


def test_the_time_left_is_that_to_the_first_limit():
    assert estimate_time_left(ROWS, RunLimits(15)) == 20
    assert estimate_time_left(ROWS, RunLimits(15, max_trajectories=80)) == 6
    assert estimate_time_left(ROWS, RunLimits(15, max_minutes=0.2)) == 2
    assert estimate_time_left(ROWS, RunLimits(15, max_minutes=0.1)) == 0  # over: not negative
    assert estimate_time_left(ROWS, RunLimits(5)) == 0
    assert [progress.format_duration(s) for s in (42, 600, 9000)] == ["42 s", "10 min", "2.5 h"]


def test_the_first_iteration_of_a_session_compiles_and_does_not_count():
    slow = [ROWS[0]._replace(seconds=100.0), *ROWS[1:]]
    assert estimate_time_left(slow[:1], RunLimits(15)) is None
    assert estimate_time_left(slow, RunLimits(15)) == 20
    # one of two measures nothing
    seldom = [*slow[:4], ROWS[4]._replace(ensemble=0)]
    expected = 30 / 7.5 * 2
    assert estimate_time_left(seldom, RunLimits(15, max_trajectories=80)) == pytest.approx(expected)


def test_after_a_resume_the_pace_is_that_of_this_session():
    """Earlier rows are of another machine; minutes count from the beginning all the same."""
    earlier = [row._replace(seconds=60.0) for row in ROWS[:3]]
    rows = [*earlier, ROWS[3]._replace(seconds=30.0), ROWS[4]]
    assert estimate_time_left(rows[:4], RunLimits(15), earlier=3) is None
    assert estimate_time_left(rows, RunLimits(15), earlier=3) == 20
    spent = 3 * 60 + 30 + 2
    left = estimate_time_left(rows, RunLimits(1000, max_minutes=5), earlier=3)
    assert left == pytest.approx(5 * 60 - spent)


# ----------------------------------------------------------------------------------------- the line


def test_the_line_has_iteration_value_trajectories_and_time():
    shown = TrainingProgress(RunLimits(15))
    assert shown.line == ""
    shown.add(ROWS[0])
    assert shown.line == "iteration  1 of 15   J = 0.000 ± 0.010   10 trajectories"
    shown.add(ROWS[1])
    assert shown.line.endswith("J = 0.100 ± 0.010   20 trajectories   26 s left")
    shown.add(ROWS[2]._replace(iteration=14, ensemble=0))
    assert shown.line.endswith(
        "J = 0.200 ± 0.010 by the model   30 trajectories   final evaluation"
    )
    shown.is_over = True
    assert shown.line.endswith("30 trajectories")


def show(rows, console, **options):
    with show_progress(RunLimits(len(rows)), console=console, **options) as shown:
        for row in rows:
            shown.add(row)


@pytest.mark.parametrize("in_notebook", [False, True])
def test_a_terminal_draws_one_line_and_a_cell_gets_plain_ones(monkeypatch, in_notebook):
    """Kernels of Jupyter announce a terminal to commands, and keep every line that was redrawn."""
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    if in_notebook:
        monkeypatch.setenv("JPY_PARENT_PID", "1")
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    show(ROWS, console, show=True)
    text = console.file.getvalue()
    lines = text.splitlines()
    assert ("\x1b[?25l" in text) is not in_notebook  # hides the cursor, to draw anew
    assert (len(lines) == len(ROWS)) is in_notebook
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", text).rstrip("\n").splitlines()[-1]
    assert "iteration 5 of 5   J = 0.400 ± 0.010   50 trajectories" in last


@pytest.mark.parametrize("width", [20, 55, 60])
def test_a_narrow_terminal_has_one_line_too(monkeypatch, width):
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    show(ROWS, console)
    text = console.file.getvalue()
    assert "\x1b[1A" not in text  # goes up by a line, to draw two of them anew
    assert ("50 trajectories" in text) is (width > 20)


def test_long_logs_have_about_ten_lines():
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    rows = [ROWS[0]._replace(row=i, iteration=i) for i in range(1000)]
    show(rows, console, show=True)
    assert 10 <= len(console.file.getvalue().splitlines()) <= 11


def test_a_run_is_silent_in_a_pipe_unless_asked(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # announces a terminal that is none
    trap.run(tmp_path / "quiet", 3)
    assert capsys.readouterr().out == ""
    trap.run(tmp_path / "asked", 3, progress=True)
    assert "iteration 3 of 3   J = " in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    trap.run(tmp_path / "off", 3, progress=False)
    assert capsys.readouterr().out == ""


def test_a_terminal_shows_a_run_and_what_it_prints_stands_above(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    trap.run(tmp_path / "run", 2)
    trap.run(tmp_path / "run", 3, on_row=lambda row, record: print("a row", row.iteration))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert "a row 2\n" in text
    assert re.search(r"iteration 3 of 3   J = \S+ ± \S+   [\d,]+ trajectories\n", text)


# --------------------------------------------------------------------------------------- a notebook


class Notebook:
    """The part of IPython that a kernel has: outputs with an id, which are replaced."""

    def __init__(self):
        self.outputs = []
        self.updates = 0

    def display(self, shown, display_id):
        assert display_id is True
        number = len(self.outputs)
        self.outputs.append((repr(shown), shown._repr_html_()))

        def update(again):
            self.updates += 1
            self.outputs[number] = (repr(again), again._repr_html_())

        return SimpleNamespace(update=update)


@pytest.fixture
def notebook(monkeypatch):
    made = Notebook()
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", made)
    return made


def test_a_notebook_has_one_output_with_the_last_state(notebook, tmp_path, capsys):
    trap.run(tmp_path / "run", 30)
    ((text, html),) = notebook.outputs
    assert re.fullmatch(r"iteration 30 of 30   J = \S+ ± \S+   [\d,]+ trajectories", text)
    assert text in html
    assert html.count("<polyline") == 1
    points = re.search(r'<polyline points="([^"]*)"', html)[1].split()
    assert len(points) == 30
    assert notebook.updates <= 30
    assert capsys.readouterr().out == ""
    trap.run(tmp_path / "run", 30)  # complete: nothing happens, and nothing is shown
    assert len(notebook.outputs) == 1
    trap.run(tmp_path / "run", 32)  # the curve has the earlier rows too
    assert len(re.search(r'<polyline points="([^"]*)"', notebook.outputs[1][1])[1].split()) == 32
    trap.run(tmp_path / "off", 3, progress=False)
    assert len(notebook.outputs) == 2


def test_updates_are_seldom_and_the_last_state_stays_after_an_error(notebook, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def train():
        with show_progress(RunLimits(1000)) as shown:
            for k in range(100):
                now[0] += 0.01
                shown.add(ROWS[0]._replace(row=k, iteration=k))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert notebook.updates == 1 + 1  # after half a second, and at the end
    assert notebook.outputs[0][0].startswith("iteration   100 of 1,000")


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch):
    shell = SimpleNamespace()  # without a kernel
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert progress.find_notebook() is None
    monkeypatch.delitem(sys.modules, "IPython")
    assert progress.find_notebook() is None
