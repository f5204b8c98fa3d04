"""Every key of a configuration and every option of `fluctua train` is heeded or refused."""

import pytest
from typer.testing import CliRunner

from fluctua.cli.app import app
from fluctua.runs import lattice as runs
from fluctua.runs.conditions import CONDITIONS, refuse_ignored
from fluctua.runs.config import PRESETS, apply_changes, find_config


def invoke(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


@pytest.mark.parametrize("kind", ["none", "time", "carried", "optimal", "binned", "mean"])
def test_an_unknown_device_has_no_other_baseline_than_its_twin(kind, tmp_path):
    done = invoke("unknown", "--baseline", kind, "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert f"`baseline.kind` = '{kind}' would be ignored" in done.output
    assert "--baseline twin" in done.output
    assert "`calibration.correction`" in done.output
    assert not (tmp_path / "run").exists()


def test_the_baseline_that_is_used_is_shown(tmp_path):
    assert 'kind = "twin"' in invoke("unknown", "--baseline", "twin", "--show").output
    done = invoke("demo", "--set", "device.gain_error=0.2", "--show")  # demo carries its baseline
    assert "`baseline.kind` = 'carried' would be ignored" in done.output
    assert (
        invoke("demo", "--set", "device.gain_error=0.2", "--baseline", "twin", "--show").exit_code
        == 0
    )


@pytest.mark.parametrize(
    ("preset", "name", "value"),
    [
        ("unknown", "baseline.forget_after", 5.0),
        ("unknown", "baseline.rank", 2),
        ("unknown", "baseline.bins", 5),
        ("fast", "calibration.readout", False),
        ("fast", "calibration.correction", "measured"),
        ("fast", "calibration.simulated", 5),
        ("fast", "calibration.samples", 5),
        ("fast", "calibration.measure_every", 5),
        ("fast", "calibration.forget_after", 5.0),
        ("fast", "calibration.kerr", True),
        ("fast", "calibration.second_neighbours", "fit"),
        ("fast", "baseline.bins", 5),
        ("fast", "baseline.every", 5),
        ("demo", "baseline.rank", 5),
        ("demo", "baseline.forget_after", 5.0),
        ("demo", "ensemble.steps", [[0, 8]]),
        ("demo", "ensemble.budgets", [10, 20]),
        ("demo", "ensemble.window", 20),
        ("demo", "ensemble.confidence", 0.5),
        ("paper", "ensemble.trajectories", 50),
    ],
)
def test_a_key_that_would_be_ignored_is_refused(preset, name, value, tmp_path):
    config = apply_changes(find_config(preset), {name: value})
    with pytest.raises(ValueError, match=rf"`{name}` = .* would be ignored: it counts"):
        runs.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_key_with_a_condition_exists_and_every_preset_passes():
    for config in PRESETS.values():
        refuse_ignored(config, config)
        for name in CONDITIONS:
            section, key = name.split(".")
            assert hasattr(getattr(config, section), key)
    refuse_ignored(
        apply_changes(find_config("paper"), {"baseline.every": 5, "ensemble.budgets": [10, 20]}),
        find_config("paper"),
    )
    on_jax = apply_changes(find_config("paper"), {"baseline.every": 5, "backend": "jax"})
    with pytest.raises(ValueError, match=r"`baseline.every` = 5.*JAX"):
        refuse_ignored(on_jax, find_config("paper"))


def test_steps_need_steps():
    with pytest.raises(ValueError, match=r"`ensemble.steps`.*got none"):
        refuse_ignored(
            apply_changes(find_config("demo"), {"ensemble.schedule": "steps"}), find_config("demo")
        )


def test_a_file_is_looked_at_with_the_options_beside_it(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('preset = "demo"\n[ensemble]\nbudgets = [10, 20]\n')
    assert "`ensemble.budgets` = (10, 20) would be ignored" in invoke(path, "--show").output
    assert invoke(path, "--set", "ensemble.schedule=escalation", "--show").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("--resume", "runs/none", "--show"), "--show"),
        (("--from", "runs/none", "--show"), "--show"),
        (("demo", "--replace"), "--out"),
        (("demo", "--seed", "1", "--set", "seed=2"), "`seed` was given twice, as 1 and as 2"),
        (("demo", "--set", "seed=3", "--set", "seed=2"), "`seed` was given twice, as 3 and as 2"),
        (
            ("paper", "--trajectories", "9", "--set", "ensemble.schedule=escalation"),
            "`ensemble.schedule`",
        ),
        (("--from", "runs/none", "--replace"), "--out"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments, name):
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert name in done.output
    assert "no run folder" not in done.output
