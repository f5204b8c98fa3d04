"""Estimate and calibrate notice a file that is not of the model: its noise, its units."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fluctua as fl
from fluctua import insitu
from fluctua.cli.app import app

MODEL = """
import fluctua as fl, jax.numpy as jnp
from fluctua.insitu.files import RecordingModel
process = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: {noise} * jnp.ones(2))
objective = fl.Objective(terminal=lambda th, x: jnp.sum(x**2))
model = RecordingModel(process, objective)
"""
THETA = {"k": jnp.array(0.8)}
T = np.linspace(0, 1, 51)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """r.nc is of the process with noise 0.5; ms.nc has its times in units of a thousandth."""
    path = tmp_path_factory.mktemp("r")
    process = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: 0.5 * jnp.ones(2))
    x = np.asarray(
        fl.simulator(process, jnp.ones(2), jnp.asarray(T))(jax.random.key(0), THETA, 200).x
    )
    insitu.files.save(path / "r.nc", insitu.files.Description(T, ("a", "b"), parameters=THETA), x)
    insitu.files.save(
        path / "ms.nc", insitu.files.Description(1000 * T, ("a", "b"), parameters=THETA), x
    )
    (path / "right.py").write_text(MODEL.format(noise=0.5))
    (path / "loud.py").write_text(MODEL.format(noise=0.05))
    return path


def run(folder, command, file, model, *options):
    return CliRunner().invoke(
        app, [command, str(folder / file), "--model", f"{folder / model}:model", *options]
    )


@pytest.mark.parametrize("command", ["estimate", "calibrate"])
def test_a_sound_file_passes(folder, command):
    done = run(folder, command, "r.nc", "right.py", "--strict")
    assert done.exit_code == 0, done.output
    assert "not of this model" not in done.output


@pytest.mark.parametrize("command", ["estimate", "calibrate"])
@pytest.mark.parametrize(("file", "model"), [("r.nc", "loud.py"), ("ms.nc", "right.py")])
def test_a_file_of_another_model_is_noticed(folder, command, file, model):
    """Noise ten times the model's is E[r Q⁻¹r]/2Δt = 100; a thousandth of the time unit is a
    thousandth of it.
    """
    done = run(folder, command, file, model)
    assert done.exit_code == 0, done.output
    assert "not of this model" in done.output
    assert run(folder, command, file, model, "--strict").exit_code == 1


def test_the_numbers_are_in_the_json(folder):
    done = CliRunner().invoke(
        app,
        ["estimate", str(folder / "r.nc"), "--model", f"{folder / 'loud.py'}:model", "--json"],
        catch_exceptions=False,
    )
    residuals = json.loads(done.stdout)["residuals"]
    # v from 10,000 steps is known to √(2/10,000) of itself
    np.testing.assert_allclose(residuals["v"], 100, rtol=4 * np.sqrt(2e-4))
    assert residuals["cause"]


def test_the_library_warns(folder):
    process = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: 0.05 * jnp.ones(2))
    objective = fl.Objective(terminal=lambda th, x: jnp.sum(x**2))
    with (
        insitu.files.open(folder / "r.nc") as r,
        pytest.warns(RuntimeWarning, match="not of this process"),
    ):
        assert insitu.estimate(r, process, objective).residuals.cause
