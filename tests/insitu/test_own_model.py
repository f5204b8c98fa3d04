"""A model that is no lattice: an oscillator with two knobs, trained on a box of its own."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua import insitu
from fluctua.insitu.instrument import Batch, Health
from fluctua.store import history

T = np.linspace(0.0, 2.0, 101)
HIDDEN = {"gain": np.array(0.7), "damping": np.array(0.5)}
NOISE = 0.2


def drift(settings, x, t, unknowns):
    """A driven, damped oscillator: x (position, velocity)."""
    force = unknowns["gain"] * settings["force"]
    spring = -settings["stiffness"] * x[0]
    return jnp.array([x[1], spring - unknowns["damping"] * x[1] + force])


PROCESS = fl.Process(drift, lambda settings, x: jnp.array([NOISE, NOISE]))
OBJECTIVE = fl.Objective(terminal=lambda settings, x: -((x[0] - 1.0) ** 2))
MODEL = insitu.Model(
    PROCESS,
    OBJECTIVE,
    knobs={
        "force": insitu.Knob(0.0, bounds=(-4.0, 4.0)),
        "stiffness": insitu.Knob(2.0, bounds=(1.0, 3.0), learning_rate_scale=0.5),
    },
    unknowns={"gain": insitu.Unknown(1.0, spread=0.3), "damping": insitu.Unknown(0.3, spread=0.3)},
    x0=jnp.zeros(2),
    t=T,
)


@jax.jit
def integrate(settings, z):
    """Trajectories (E, T+1, 2) of the hidden device, from normal variates (E, T, 2)."""
    dt = T[1] - T[0]

    def step(x, z):
        rate = drift(settings, x, 0.0, HIDDEN)
        x = x + rate * dt + NOISE * jnp.sqrt(dt) * z
        return x, x

    def one(z):
        return jnp.concatenate([jnp.zeros((1, 2)), jax.lax.scan(step, jnp.zeros(2), z)[1]])

    return jax.vmap(one)(z)


class Box:
    """A driver of the oscillator."""

    rng = np.random.default_rng(0)

    def set(self, settings):
        self.settings = {name: np.asarray(value) for name, value in settings.items()}

    def arm(self, count):
        self.count = count

    def acquire(self):
        z = self.rng.normal(size=(self.count, len(T) - 1, 2))
        return Batch(T, np.asarray(integrate(self.settings, z)))

    def health(self):
        return Health(self.settings)

    def close(self):
        pass


PLAN = insitu.Plan(
    iterations=12, trajectories=100, learning_rate=0.3, probes=4, probe_trajectories=60
)


def measure_errors(values, text):
    """Departures of the calibration from the hidden values, in its standard errors."""
    errors = {
        name: float(error) for name, error in re.findall(r"(\w+) +[\d.e-]+ ± ([\d.e-]+)", text)
    }
    return [float((values[name] - HIDDEN[name]) / float(errors[name])) for name in HIDDEN]


def test_unknowns_are_found_at_probes():
    rng, box, runs = np.random.default_rng(1), Box(), []
    for _ in range(4):
        settings = MODEL.probe(rng)
        assert -2 <= settings["force"] <= 2  # half of the bounds
        box.set(settings)
        box.arm(100)
        runs.append((settings, fl.Trajectories(T, box.acquire().x)))
    fit = MODEL.calibrate(runs)
    z = measure_errors(fit.values, fit.report)
    assert np.abs(z).max() < 4
    assert "4 settings, 400 trajectories" in fit.report


def fit_speeds(runs, dt, moves):
    """The most probable gain and damping of `moves`, and their errors, by Gauss–Newton in NumPy.

    moves: (settings, x (…, 2), unknowns (2,)) -> expected change of the speed.
    """
    start, precision = np.array([1.0, 0.3]), np.eye(2) / 0.3**2  # those of MODEL
    point = start
    for _ in range(8):
        normal, pull = precision, -precision @ (point - start)
        for settings, x in runs:
            now = x[:, :-1]
            r = x[:, 1:, 1] - now[..., 1] - moves(settings, now, point)
            sides = [
                [moves(settings, now, point + sign * unit) for sign in (1, -1)]
                for unit in 1e-4 * np.eye(2)
            ]
            slope = np.stack([(up - down).ravel() / 2e-4 for up, down in sides], axis=1)
            normal = normal + slope.T @ slope / (NOISE**2 * dt)
            pull = pull + slope.T @ r.ravel() / (NOISE**2 * dt)
        point = point + np.linalg.solve(normal, pull)
    return point, np.sqrt(np.diag(np.linalg.inv(normal)))


def test_a_fit_beside_a_position_without_noise_is_that_of_its_step():
    """Heun's step moves the position first; least squares of that step, in NumPy, agree."""
    dt = 0.1
    rng = np.random.default_rng(2)

    def accelerate(settings, position, speed, unknowns):
        spring = -settings["stiffness"] * position
        return spring - unknowns[1] * speed + unknowns[0] * settings["force"]

    def move_after_position(settings, x, unknowns, ahead=1.0):
        position, speed = x[..., 0] + ahead * dt * x[..., 1], x[..., 1]
        here = accelerate(settings, position, speed, unknowns)
        there = accelerate(settings, x[..., 0] + dt * speed, speed + dt * here, unknowns)
        return dt / 2 * (here + there)

    def move_together(settings, x, unknowns):
        return move_after_position(settings, x, unknowns, ahead=0.0)

    truth = np.array([HIDDEN["gain"], HIDDEN["damping"]])
    runs = []
    for force, stiffness in ((2.0, 1.5), (-1.0, 3.0)):
        settings = {"force": force, "stiffness": stiffness}
        x = np.zeros((400, 2))
        path = [x]
        for _ in range(40):
            change = move_after_position(settings, x, truth)
            kick = NOISE * np.sqrt(dt) * rng.standard_normal(len(x))
            x = np.stack([x[:, 0] + dt * x[:, 1], x[:, 1] + change + kick], axis=1)
            path.append(x)
        runs.append((settings, np.stack(path, axis=1)))
    process = fl.Process(
        drift, lambda settings, x: jnp.array([0.0, NOISE]), noiseless=(0,), integrator="heun"
    )
    t = dt * np.arange(41)
    model = MODEL._replace(process=process, t=t)
    fit = model.calibrate([(settings, fl.Trajectories(t, x)) for settings, x in runs])
    found = np.array([fit.values["gain"], fit.values["damping"]])
    expected, error = fit_speeds(runs, dt, move_after_position)
    assert np.abs((found - expected) / error).max() < 0.02  # a fit ends at a step of 0.01
    assert np.abs((found - truth) / error).max() < 4
    other, _ = fit_speeds(runs, dt, move_together)
    assert np.abs((found - other) / error).max() > 4  # a step of all components is another law


@pytest.mark.long
def test_an_oscillator_is_trained_and_goes_on(tmp_path):
    rows = [row for row, _ in insitu.run(Box, MODEL, PLAN, tmp_path / "run")]
    assert rows[0].J < -0.9
    assert rows[-1].J > -0.3
    assert rows[-1].trajectories == 4 * 60 + 12 * 100
    assert "gain" in (tmp_path / "run" / "calibration.txt").read_text()
    more = list(insitu.resume(Box, MODEL, tmp_path / "run", iterations=13))
    assert [row.iteration for row, _ in more] == [12]
    other = MODEL._replace(unknowns=MODEL.unknowns | {"gain": insitu.Unknown(1.0, spread=0.1)})
    with pytest.raises(ValueError, match="`unknowns.gain.spread` was 0.3 and is 0.1"):
        insitu.resume(Box, other, tmp_path / "run", iterations=14)


def test_an_oscillator_is_calibrated_by_its_training(tmp_path):
    plan = dataclasses.replace(PLAN, calibration="training", trajectories=10)
    list(insitu.run(Box, MODEL, plan, tmp_path / "run"))
    rows = history.read(tmp_path / "run" / "history.csv")
    assert rows[-1].trajectories == 12 * 10
    assert rows[-1].J > -0.4
    with pytest.raises(ValueError, match="`unknowns`, `x0` and `t`"):
        insitu.run(Box, MODEL._replace(x0=None), plan, tmp_path / "other")


def test_a_record_has_the_channels_of_what_is_observed():
    whole = MODEL._replace(t=None).expected
    assert (whole.channels, whole.t) == (2, None)
    observed = fl.Observed(PROCESS, observe=[[1.0, 0.0]], noise=0.01, start=jnp.zeros(2))
    assert MODEL._replace(process=observed).expected.channels == 1
    assert MODEL._replace(process=observed, channels=3).expected.channels == 3
