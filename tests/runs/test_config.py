"""Configurations: what is written reads back, and what is wrong is named."""

import dataclasses
import tomllib

import pytest

from fluctua.runs.config import PRESETS, Config, apply_changes, dump, find_config, load


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_read_back_as_they_were_written(name, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(dump(PRESETS[name]))
    assert load(path) == PRESETS[name]


def test_paper_preset_is_the_papers():
    paper = PRESETS["paper"]
    assert (paper.lattice.rows, paper.lattice.columns) == (11, 13)
    assert (paper.lattice.gamma_e, paper.lattice.gamma) == (1.0, 0.02)
    assert (paper.task.horizon, paper.task.dt, paper.task.sigma_w, paper.task.amplitude) == (
        20,
        1e-3,
        0.5,
        10,
    )
    assert paper.optimiser.rule == "paper"
    assert paper.optimiser.learning_rate == 0.05
    assert paper.optimiser.options == {"rho": 10.0, "beta": 0.9, "epsilon": 1e-8}
    assert (paper.ensemble.schedule, paper.ensemble.budgets[0], paper.ensemble.window) == (
        "escalation",
        1000,
        100,
    )
    assert (paper.baseline.kind, paper.baseline.bins, paper.baseline.every) == ("binned", 20, 1)
    assert paper.start.chi_std == 1e-4
    quick = PRESETS["paper-quick"]
    assert (quick.iterations, quick.ensemble.schedule, quick.ensemble.trajectories) == (
        75,
        "fixed",
        1000,
    )
    assert dataclasses.replace(quick.optimiser) == paper.optimiser


def test_a_file_changes_what_it_names_and_takes_the_rest_from_its_preset(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'preset = "demo"\niterations = 7\n[task]\nsigma_kappa = 1\n[ensemble]\nschedule = "steps"\n'
        "steps = [[0, 10], [5, 20]]\n"
    )
    expected = apply_changes(
        PRESETS["demo"],
        {
            "iterations": 7,
            "task.sigma_kappa": 1.0,
            "ensemble.schedule": "steps",
            "ensemble.steps": ((0, 10), (5, 20)),
        },
    )
    assert find_config(str(path)) == expected
    assert isinstance(expected.task.sigma_kappa, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[task]\nsigma_kapa = 0.1",
            '`task.sigma_kapa` is no key of .task., .*Did you mean "sigma_kappa"',
        ),
        (
            "sigma_kappa = 0.1",
            '`sigma_kappa` is no key of the top level.*Did you mean "task.sigma_kappa"',
        ),
        ("[tsak]\ndt = 0.1", '`tsak` is no key.*Did you mean "task"'),
        (
            "[ensemble]\nschedule = 'escalate'",
            '"fixed", "steps", "escalation"; got .escalate.*mean "escalation"',
        ),
        ("[task]\nstep = 'hoin'", '"euler", "heun"; got .hoin'),
        ("preset = 'dmeo'", 'preset.*"demo", "fast", .*"paper".*mean "demo"'),
        ("iterations = 0", "`iterations` must be a whole number, at least 1; got 0"),
        ("iterations = 2.5", "whole number.*got 2.5"),
        ("seed = true", "whole number.*got True"),
        ("[task]\ndt = -1", "`task.dt` must be a number above 0; got -1"),
        ("[task]\ndt = nan", "`task.dt` must be a number above 0; got nan"),
        ("[ensemble]\nconfidence = 1.0", "above 0 and below 1"),
        ("[bounds]\nkappa = [2, 0]", r"`bounds.kappa` must be \[lower, upper\] with lower ≤ upper"),
        ("[ensemble]\nbudgets = [1000, 1000]", "larger than the one before"),
        ("[ensemble]\nsteps = [[3, 100]]", "rising from 0"),
        ("[optimiser]\noptions = 3", "a table such as"),
        ("task = 3", r"`task` is a section.*\[task\].*got 3"),
        ("iterations = = 3", "is not TOML.*line 1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"wrong\.toml") as caught:
        load(path)
    assert caught.match(message)


def test_names_that_are_no_preset_and_no_file():
    with pytest.raises(
        ValueError, match=r"neither a preset \(demo, fast, .*paper, .*\).*mean \"paper\""
    ):
        find_config("papre")
    with pytest.raises(ValueError, match="there is no file nowhere.toml"):
        find_config("nowhere.toml")
    with pytest.raises(ValueError, match="too deep"):
        apply_changes(Config(), {"task.a.b": 1})


def test_every_key_of_the_file_is_explained_or_plain():
    text = dump(PRESETS["paper"])
    tree = tomllib.loads(text)
    assert set(tree) == {field.name for field in dataclasses.fields(Config)}
    assert "# escalation: W, iterations" in text


def test_steps_of_the_presets():
    steps = {name: (c.task.integrator, c.task.dt) for name, c in PRESETS.items()}
    assert steps["fast"] == ("heun", 0.02)
    assert steps["unknown"] == ("heun", 0.02)
    assert steps["ports"] == ("heun", 0.0125)
    assert steps["isolation"] == ("euler", 5e-4)
    hard = PRESETS["unknown"]
    # the device's own steps and samples, whatever those of the model are
    assert hard.task.dt / hard.device.finer == pytest.approx(5e-4)
    assert hard.task.dt * hard.device.sample_every == pytest.approx(0.02)
