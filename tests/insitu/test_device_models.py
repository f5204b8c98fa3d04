"""The models of examples/ that are no lattices, and the drivers from laboratory software."""

import ast
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from scipy.linalg import expm
from scipy.optimize import minimize
from typer.testing import CliRunner

import fluctua as fl
from fluctua import insitu
from fluctua.cli.app import app
from fluctua.insitu.instrument import CommandRejected, InstrumentError, ResidualGuard, Retry
from fluctua.store import history

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MAX_CHECKED = 10
"""Trajectories that may be measured before a training, to check the instrument."""


def load(name):
    """The functions of an example."""
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))


def train(name, folder, words):
    """Run `fluctua insitu train` with the driver and the model of an example."""
    file = EXAMPLES / f"{name}.py"
    command = f"insitu train {file}:connect --model {file}:model --out {folder} {words}"
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    with np.load(folder / "final.npz") as settings:
        return history.read(folder / "history.csv"), dict(settings)


def mean_reward(jacobian, force, noise, horizon):
    """−E[(x₀ − 1)² + x₁²] averaged over the horizon, of dx = (Ax + f)dt + noise dW from rest.

    The moments v = (1, x₀, x₁, x₀², x₀x₁, x₁²) follow v' = Lv; the integral of v is part of an
    exponential of a block matrix.
    """
    (a, b), (c, d) = jacobian
    f, g = force
    rate = np.array(
        [
            [0, 0, 0, 0, 0, 0],
            [f, a, b, 0, 0, 0],
            [g, c, d, 0, 0, 0],
            [noise**2, 2 * f, 0, 2 * a, 2 * b, 0],
            [0, g, f, c, a + d, b],
            [noise**2, 0, 2 * g, 0, 2 * c, 2 * d],
        ]
    )
    block = np.zeros((12, 12))
    block[:6, :6] = rate
    block[6:, :6] = np.eye(6)
    _, x0, _, x0x0, _, x1x1 = expm(block * horizon)[6:, 0] / horizon
    return -(x0x0 - 2 * x0 + 1 + x1x1)


def find_best(reward, bounds):
    """The settings with the largest reward, and the reward."""
    middle = np.mean(bounds, axis=1)
    found = minimize(lambda v: -reward(v), middle, bounds=bounds, tol=1e-12)
    return found.x, -found.fun


# --------------------------------------------------------------------------- the driven oscillator


OSCILLATOR = load("driven_oscillator")
BOUNDS = [OSCILLATOR.model.knobs[name].bounds for name in OSCILLATOR.KNOBS]


def exact_oscillator(values, offset=OSCILLATOR.Oscillator.offset, gain=OSCILLATOR.Oscillator.gain):
    """J of the hidden oscillator at settings (drive, detuning, pump)."""
    drive, detuning, pump = offset + gain * np.asarray(values)
    loss = OSCILLATOR.LOSS
    jacobian = [[pump - loss, detuning], [-detuning, -pump - loss]]
    return mean_reward(jacobian, (drive, 0.0), OSCILLATOR.NOISE, OSCILLATOR.T[-1])


def test_the_exact_reward_is_that_of_the_oscillator():
    """By 2,000 trajectories at settings where every term counts; steps of 0.002 bias J by 0.002."""
    box = OSCILLATOR.Oscillator()
    values = {"drive": 1.5, "detuning": 0.4, "pump": -0.3}
    box.settings.update(values)
    a = box.acquire(2000)
    returns = -np.trapezoid(np.abs(a - 1) ** 2, OSCILLATOR.T, axis=1) / OSCILLATOR.T[-1]
    error = returns.std(ddof=1) / np.sqrt(len(returns))
    assert abs(returns.mean() - exact_oscillator(list(values.values()))) < 4 * error + 0.003


def test_the_oscillator_is_calibrated_at_probes():
    driver = OSCILLATOR.connect()
    rng = np.random.default_rng(1)
    runs = []
    for _ in range(6):
        settings = OSCILLATOR.model.probe(rng)
        driver.set(settings)
        driver.arm(50)
        runs.append((settings, fl.Trajectories(OSCILLATOR.T, driver.acquire().x)))
    report = OSCILLATOR.model.calibrate(runs).report
    found = np.array(re.findall(r"(\S+) ± (\S+)", report), float)
    hidden = np.concatenate([OSCILLATOR.Oscillator.gain, OSCILLATOR.Oscillator.offset])
    assert np.abs((found[:, 0] - hidden) / found[:, 1]).max() < 4
    assert found[:, 1].max() < 0.1  # the spread of the data sheet is 0.3


def test_the_optimum_of_the_data_sheet_is_none_of_the_device():
    nominal, predicted = find_best(lambda v: exact_oscillator(v, np.zeros(3), np.ones(3)), BOUNDS)
    best = find_best(exact_oscillator, BOUNDS)[1]
    assert abs(predicted - best) < 1e-6  # offsets and gains are in reach of the knobs
    assert exact_oscillator(nominal) < best - 0.5


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "spent"),
    [
        ("--calibration training --trajectories 5 --iterations 45", 45 * 5),
        ("--trajectories 20 --set probes=6 --iterations 60", 60 * 20 + 6 * 50),
    ],
    ids=["training", "probes"],
)
def test_the_oscillator_is_trained_to_its_optimum(words, spent, tmp_path):
    """Within 1 % of what there is to gain, 0.82: the learning rate ends at 0.015."""
    with jax.enable_x64(False):
        words = f"{words} --set learning_rate=0.3"
        rows, settings = train("driven_oscillator", tmp_path / "run", words)
    start = exact_oscillator(np.zeros(3))
    best = find_best(exact_oscillator, BOUNDS)[1]
    reached = exact_oscillator([settings[name] for name in OSCILLATOR.KNOBS])
    assert best - reached < 0.01 * (best - start)
    assert spent <= rows[-1].trajectories <= spent + MAX_CHECKED


# ------------------------------------------------------------------------------------ the RF chain


CHAIN = load("rf_chain")


def test_the_exact_reward_is_that_of_the_chain():
    box = CHAIN.Chain()
    tuning = np.array([-0.5, 0.4, -0.9])
    box.settings["tuning"] = tuning
    ends = box.acquire(1000)
    returns = np.trapezoid(2 * CHAIN.LEAD * np.abs(ends[..., 1]) ** 2, CHAIN.T, axis=1)
    returns = returns / CHAIN.T[-1]
    error = returns.std(ddof=1) / np.sqrt(len(returns))
    assert abs(returns.mean() - CHAIN.compute_return(tuning + box.offset)) < 4 * error


def measure_chain(settings, count):
    driver = CHAIN.connect()
    driver.set(settings)
    driver.arm(count)
    return settings, fl.Trajectories(CHAIN.T, driver.acquire().x)


@pytest.mark.long
def test_inner_resonators_are_calibrated_from_records_at_the_ends():
    """At two settings: the offsets within their errors, and a guard that takes such records."""
    runs = [
        measure_chain({"tuning": tuning}, 8)
        for tuning in (np.zeros(3), np.array([-0.5, 0.5, -0.5]))
    ]
    fit = CHAIN.model.calibrate(runs)
    found = np.array(re.findall(r"(\S+) ± (\S+)", fit.report), float)
    assert np.abs((found[:, 0] - CHAIN.Chain.offset) / found[:, 1]).max() < 4
    assert found[:, 1].max() < 0.1  # the spread of the data sheet is 1

    guard = ResidualGuard(CHAIN.model.process)
    guard.calibrate(runs, fit.values)
    # e(S⁻¹e) of 16 · 120 innovations has a standard error of √(2/1920) about 1
    assert np.abs(guard.noise - 1).max() < 4 * np.sqrt(2 / 1920) * 1.25  # of a median
    settings, fresh = measure_chain({"tuning": np.array([0.3, 0.0, 0.3])}, 8)
    known = {"offset": np.broadcast_to(fit.values["offset"], (8, 3))}
    fresh = fresh._replace(context=known)
    assert not guard(settings, fresh).bad.any()
    assert guard.examine(settings, fresh) == ""
    silent = fresh.x.copy()
    silent[..., 3] = silent[..., 3].mean(axis=0)  # the noise of one channel is gone
    verdict = guard(settings, fresh._replace(x=silent))
    assert verdict.bad.all()
    assert "component 3" in verdict.reason
    swapped = fresh._replace(x=fresh.x[..., [1, 0, 3, 2]])
    assert "innovations" in guard.examine(settings, swapped)


@pytest.mark.long
def test_the_chain_is_trained_from_the_command_line(tmp_path):
    """To half of what there is to gain; `python examples/rf_chain.py` takes it to the optimum."""
    with jax.enable_x64(False):
        words = "--calibration training --trajectories 4 --iterations 3 --set learning_rate=0.4"
        rows, settings = train("rf_chain", tmp_path / "run", words)
    offset = CHAIN.Chain.offset
    best = find_best(CHAIN.compute_return, [(-4.0, 4.0)] * 3)[1]
    start = CHAIN.compute_return(offset)
    reached = CHAIN.compute_return(settings["tuning"] + offset)
    assert reached - start > (best - start) / 2
    assert 12 <= rows[-1].trajectories <= 12 + MAX_CHECKED


# ----------------------------------------------------------------------------- laboratory software


def exact_resonator(values, coupling):
    """J of the hidden resonator of both recipes at settings (drive, detuning)."""
    drive, detuning = values
    jacobian = [[-1.0, 0.7 + detuning], [-0.7 - detuning, -1.0]]
    return mean_reward(jacobian, (coupling * drive, 0.0), 0.1, 4.0)


def check_training(name, coupling, folder):
    """The recipe is trained from the command line to its optimum."""
    with jax.enable_x64(False):
        words = "--calibration training --trajectories 5 --iterations 30 --set learning_rate=0.3"
        rows, settings = train(name, folder, words)
    assert 150 <= rows[-1].trajectories <= 150 + MAX_CHECKED
    reward = lambda values: exact_resonator(values, coupling)
    best = find_best(reward, [(0.0, 3.0), (-2.0, 2.0)])[1]
    reached = reward((settings["drive"], settings["detuning"]))
    assert best - reached < 0.02 * (best - reward((0.5, 0.0)))


def require(name):
    package = name.split(".")[0]
    return pytest.importorskip(name, reason=f"needs {package}: pip install {package}")


@pytest.mark.long
def test_a_qcodes_station_is_trained(tmp_path):
    require("qcodes")
    check_training("qcodes_station", 0.8, tmp_path / "run")


@pytest.mark.long
def test_an_ophyd_device_is_trained_under_bluesky(tmp_path):
    require("bluesky")
    require("ophyd")
    check_training("ophyd_device", 1.0, tmp_path / "run")


def test_a_qcodes_station_is_a_driver():
    require("qcodes")
    driver = load("qcodes_station").connect()
    try:
        assert driver.limits == {"drive": (-800.0, 400.0), "detuning": (-800.0, 400.0)}
        assert driver.units == {"drive": "V", "detuning": "V"}
        driver.set({"drive": np.float32(0.5), "detuning": np.array(-0.25)})
        assert driver.health().settings == {"drive": 0.5, "detuning": -0.25}
        driver.arm(3)
        batch = driver.acquire()
        assert batch.x.shape == (3, 201, 2)
        assert not batch.x[:, 0].any()
        with pytest.raises(CommandRejected, match="'drive' must be from -800 to 400; .* 1000"):
            driver.set({"drive": 1000.0, "detuning": 0.0})
    finally:
        driver.close()


def test_an_ophyd_device_is_a_driver():
    require("bluesky")
    require("ophyd")
    driver = load("ophyd_device").connect()
    assert driver.limits == {"drive": (0.0, 3.0), "detuning": (-2.0, 2.0)}
    assert driver.units == {"drive": "V", "detuning": "MHz"}
    driver.set({"drive": 0.5, "detuning": -0.25})
    assert driver.health().settings == {"drive": 0.5, "detuning": -0.25}
    driver.arm(3)
    assert driver.acquire().x.shape == (3, 401, 2)
    driver.close()


def test_an_acquisition_that_bluesky_reports_as_failed_is_repeated(monkeypatch):
    require("bluesky")
    sim = require("ophyd.sim")
    status = require("ophyd.status")
    trigger = sim.SynSignal.trigger
    triggers = []

    def fail_once(signal):
        triggers.append(signal)
        if len(triggers) > 1:
            return trigger(signal)
        failed = status.Status()
        failed.set_exception(RuntimeError("no trigger"))
        return failed

    monkeypatch.setattr(sim.SynSignal, "trigger", fail_once)
    notes = []
    substrate = insitu.instrument_substrate(
        load("ophyd_device").connect,
        retry=Retry(attempts=3, first=0.0),
        report=lambda incident: notes.append(incident.message),
    )
    settings = {"drive": np.array(0.5), "detuning": np.array(0.0)}
    try:
        assert substrate(None, settings, 2).x.shape == (2, 401, 2)
    finally:
        substrate.close()
    assert substrate.counts["failures"] == 1
    assert "FailedStatus" in notes[0]
    assert len(triggers) == 3


def test_an_instrument_that_is_switched_off_ends_the_run_with_its_message(monkeypatch):
    require("qcodes")
    station = load("qcodes_station")

    def time_out(digitiser, drive, detuning):
        raise TimeoutError("the digitiser did not answer")

    monkeypatch.setattr(station.Digitiser, "simulate", time_out)
    substrate = insitu.instrument_substrate(
        station.connect, retry=Retry(attempts=2, first=0.0), sleep=lambda seconds: None
    )
    with pytest.raises(InstrumentError, match="2 times in a row.*did not answer"):
        substrate(None, {"drive": np.array(0.5), "detuning": np.array(0.0)}, 2)


# ------------------------------------------------------------------------------ the documentation


def find_source(name, function):
    """The text of a function of an example."""
    source = (EXAMPLES / f"{name}.py").read_text()
    nodes = {node.name: node for node in ast.parse(source).body if hasattr(node, "name")}
    return ast.get_source_segment(source, nodes[function])


def test_code_in_the_documentation_is_that_of_the_examples():
    software = (ROOT / "docs" / "laboratory_software.md").read_text()
    for name in ("qcodes_station", "ophyd_device", "driven_oscillator"):
        assert f"```python\n{find_source(name, 'connect')}\n```" in software
    assert len(find_source("qcodes_station", "connect").splitlines()) <= 15
    source = (EXAMPLES / "driven_oscillator.py").read_text()
    assert (
        source.split("# --8<-- the model\n")[1].strip()
        in (ROOT / "docs" / "device_models.md").read_text()
    )


@pytest.mark.long
def test_blocks_of_the_page_about_models_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "device_models.md").read_text(), re.DOTALL
    )
    code = [block for block in blocks if "import" in block]
    assert len(code) == 2
    space = {}
    with jax.enable_x64(False):
        exec("\n".join(code).replace("iterations=60", "iterations=2"), space)
    assert space["row"].iteration == 1
    assert space["trajectories"].x.shape == (100, 201, 2)
