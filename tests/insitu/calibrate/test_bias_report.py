"""What a calibration says of each component of the gradient, in its own units."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fluctua as fl
from fluctua import insitu
from fluctua.cli.app import app
from fluctua.insitu.calibrate.report import describe, gradient_errors

MODEL = """
import fluctua as fl, jax.numpy as jnp
from fluctua.insitu.files import RecordingModel
drift = lambda th, x: th["force"] / {unit} - th["k"] * x
process = fl.Process(drift, lambda th, x: th["s"] * jnp.ones(1))
objective = fl.Objective(terminal=lambda th, x: th["w"] * x[0] ** 2)
model = RecordingModel(process, objective)
"""
T = np.linspace(0, 1, 41)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """400 trajectories of a particle with a force, a stiffness, a noise amplitude, and the
    weight of the reward.
    """
    place = tmp_path_factory.mktemp("bias")
    theta = {"force": jnp.array(2.0), "k": jnp.array(0.8), "s": jnp.array(0.5), "w": jnp.array(1.0)}
    process = fl.Process(
        lambda th, x: th["force"] - th["k"] * x, lambda th, x: th["s"] * jnp.ones(1)
    )
    x = np.asarray(
        fl.simulator(process, jnp.ones(1), jnp.asarray(T))(jax.random.key(2), theta, 400).x
    )
    for unit in (1, 1000):
        parameters = {**theta, "force": theta["force"] * unit}
        insitu.files.save(
            place / f"{unit}.nc", insitu.files.Description(T, ("x",), parameters=parameters), x
        )
        (place / f"right_{unit}.py").write_text(MODEL.format(unit=unit))
    return place


@pytest.fixture(scope="module")
def calibrations(folder):
    """{model: its calibration} with the force in either unit."""
    found = {}
    for unit in (1, 1000):
        model = f"right_{unit}"
        with insitu.files.open(folder / f"{unit}.nc") as recording:
            found[model] = insitu.calibrate.calibrate_recording(
                recording, insitu.files.load_model(recording, f"{folder / model}.py:model")
            )
    return found


def say(calibration):
    return describe(calibration, ("x",))


@pytest.mark.long
def test_the_bias_is_judged_component_by_component(calibrations):
    """In whatever unit the force is, the line about what would have gone unseen is the same."""
    one, other = (calibrations[f"right_{unit}"] for unit in (1, 1000))
    last = say(one).splitlines()[-1]
    assert "no bias is seen; one of about" in last
    assert last == say(other).splitlines()[-1]
    np.testing.assert_allclose(gradient_errors(other), gradient_errors(one), rtol=1e-3)
    unseen = {
        n: float(one.residuals.bias_stderr[n] / one.estimate.stderr[n]) for n in ("force", "k")
    }
    worst = max(unseen, key=unseen.get)
    assert (
        f"about {unseen[worst]:.2g} times the gradient's own error would not have been in {worst}, "
        "the worst" in last
    )


def test_what_was_not_examined_is_said(folder, calibrations):
    """The residuals of the drift say nothing of s.

    Of w, which is in the reward alone, there is nothing to say.
    """
    words = say(calibrations["right_1"])
    assert "not examined, parameters of the noise alone: s\n" in words
    assert "no bias, because they have no score: w\n" in words
    assert " 0 ± 0 " not in words
    done = CliRunner().invoke(
        app,
        ["calibrate", str(folder / "1.nc"), "--model", f"{folder / 'right_1.py'}:model", "--json"],
        env={"FORCE_COLOR": "1", "JPY_PARENT_PID": "1"},  # as in a cell of a notebook
    )
    assert "\x1b" not in done.output  # no spinner, whose every turn the cell would keep
    numbers = json.loads(done.stdout)["files"][0]
    assert (
        numbers["bias"]["s"]
        is numbers["bias_stderr"]["s"]
        is numbers["bias_in_gradient_errors"]["s"]
        is None
    )
    assert numbers["bias"]["w"] == 0
    unexamined = say(calibrations["right_1"]._replace(residuals=None))
    assert "BIAS OF THE GRADIENT   not examined" in unexamined
    assert "--set bias=false" in unexamined


def test_the_worst_component_is_named(calibrations):
    """Biases of −4 and 3 that are known to 0.1, beside gradients that are known to 0.5 and 10."""
    c = calibrations["right_1"]
    pair = lambda force, k: {**c.residuals.bias, "force": jnp.array(force), "k": jnp.array(k)}
    residuals = c.residuals._replace(bias=pair(3.0, -4.0), bias_stderr=pair(0.1, 0.1))
    words = say(
        c._replace(residuals=residuals, estimate=c.estimate._replace(stderr=pair(0.5, 10.0)))
    )
    assert (
        "2 components of the gradient cannot be trusted with these parameters: k, force;" in words
    )
    assert "the worst is force, biased by 6 times its own error" in words
