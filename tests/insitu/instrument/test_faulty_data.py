"""Data that lie: each fault, half way through a training, is an incident and stops it; honest
data are not touched.
"""

import csv
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fluctua as fl
from fluctua.cli.app import app
from fluctua.core.likelihood.guard import DoubtError
from fluctua.insitu import Plan, files, network_model
from fluctua.insitu.bench import box, device, server
from fluctua.insitu.bench.box import Bench
from fluctua.insitu.device_training import run_and_resume as loop
from fluctua.insitu.instrument.guard import ResidualGuard, find_dead
from fluctua.insitu.instrument.protocol import Batch, CommandRejected, Health, InstrumentError
from fluctua.insitu.instrument.substrate import Doubt, instrument_substrate
from fluctua.store import history

SHEET = device.Sheet(rows=2, columns=2, seed=3, interval=0.02, ageing=0.0)
POINTS, SITES = 101, 4
PLAN = Plan(iterations=4, trajectories=60, batch=60, attempts=2, first_pause=1e-3)


@functools.cache
def model():
    return network_model(SHEET.nominal, interval=SHEET.interval, points=POINTS)


class Box:
    """A device of this process. fault: (samples, those before, samples over twice the time) ->
    samples.
    """

    def __init__(self, sheet=SHEET, fault=None, first=0):
        self.sheet, self.fault, self.first = sheet, fault, first
        self.hidden, self.shots, self.before = device.draw_hidden(sheet), 0, None

    def __call__(self):
        return self

    def set(self, settings):
        self.settings = {name: np.array(v, float) for name, v in settings.items()}

    def arm(self, count):
        self.count = count

    def acquire(self):
        codes = device.measure(
            self.sheet,
            self.hidden,
            self.settings,
            count=self.count,
            points=2 * POINTS,
            shots=self.shots,
        )
        longer = codes * self.sheet.scale
        x, earlier = longer[:, :POINTS], self.shots
        self.shots += self.count
        if self.fault is not None and earlier >= self.first:
            x = self.fault(x, self.before, longer)
        else:
            self.before = x
        return Batch(
            np.arange(POINTS) * self.sheet.interval,
            x.astype(np.float32),
            full_scale=self.sheet.adc_range,
        )

    def health(self):
        return Health(self.settings, identity=f"box {self.sheet.seed}")

    def close(self):
        pass


def hold_channel(x, before, longer):
    x, half = x.copy(), POINTS // 2
    x[:, half:, 1] = x[:, half, None, 1]
    return x


def repeat_with_noise(x, before, longer):
    return before[: len(x)] + 1e-6 * np.random.default_rng(0).normal(size=x.shape)


def delay(samples, channel=slice(None)):
    def late(x, before, longer):
        y = x.copy()
        y[:, samples:, channel] = x[:, :-samples, channel]
        y[:, :samples, channel] = x[:, :1, channel]
        return y

    return late


def clip(x, before, longer):
    most = 0.6 * np.abs(x).max()
    return np.clip(x, -most, most)


def rotate(x, before, longer):
    psi = (x[..., :SITES] + 1j * x[..., SITES:]) * np.exp(0.3j)
    return np.concatenate([psi.real, psi.imag], axis=-1)


def on_one(factor):
    return np.where(np.arange(2 * SITES) == 1, factor, 1.0)


FAULTS = {
    "a channel stuck half way": hold_channel,
    "stale with a little noise": repeat_with_noise,
    "shifted by 3": lambda x, before, longer: longer[:, 3 : 3 + POINTS],
    "delayed by 3": delay(3),
    "a channel delayed by 3": delay(3, 1),
    "times 1.3": lambda x, before, longer: 1.3 * x,
    "a channel times 1.3": lambda x, before, longer: x * on_one(1.3),
    "sign": lambda x, before, longer: -x,
    "I and Q swapped": lambda x, before, longer: np.roll(x, SITES, axis=-1),
    "conjugated": lambda x, before, longer: x * np.repeat([1.0, -1.0], SITES),
    "rotated": rotate,
    "clipped below full scale": clip,
    "time reversed": lambda x, before, longer: x[:, ::-1].copy(),
    "time axis times 1.5": lambda x, before, longer: longer[:, np.arange(POINTS) * 3 // 2],
}


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run that was stopped after two of four iterations, and its box."""
    folder, honest = tmp_path_factory.mktemp("doubt") / "half", Box()
    rows = loop.run(honest, model(), PLAN, folder)
    for row, _ in rows:
        assert not row.event
        if row.row == 1:
            break
    rows.close()
    return folder, honest


@pytest.fixture
def run(half, tmp_path):
    """A copy of it, and its box with a fault from here on."""
    folder, honest = half
    shutil.copytree(folder, tmp_path / "run")

    def faulty(fault):
        box = Box(fault=fault)
        box.shots, box.before = honest.shots, honest.before
        return box

    return tmp_path / "run", faulty


def incidents(folder):
    path = folder / "incidents.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.filterwarnings("ignore:.*unlike the calibration:RuntimeWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_half_way_is_an_incident_and_stops_the_run(run, fault):
    folder, faulty = run
    theta = dict(np.load(folder / "final.npz"))
    with pytest.raises(
        InstrumentError, match=r"not those of the calibrated model|no usable trajectory"
    ):
        list(loop.resume(faulty(FAULTS[fault]), model(), folder))
    found = incidents(folder)
    assert found
    assert found[-1]["kind"] in ("doubt", "unlike the calibration", "repeated")
    assert int(found[-1]["trajectories"]) > 0
    assert len(history.read(folder / "history.csv")) == 2  # no step was taken
    for name, value in np.load(folder / "final.npz").items():
        np.testing.assert_array_equal(value, theta[name])
    left_out = sorted((folder / "recordings").glob("batch-*-left-out.nc"))
    with files.open(left_out[-1]) as recording:
        assert recording.description.provenance.startswith("left out: ")


def test_without_a_fault_the_run_goes_on(run):
    folder, faulty = run
    assert len(list(loop.resume(faulty(None), model(), folder))) == 2
    assert not incidents(folder)


def test_a_run_that_is_asked_to_goes_on_with_marked_batches(run):
    folder, faulty = run
    box = faulty(FAULTS["times 1.3"])
    with pytest.raises(Doubt, match=r"--resume.*--set on_doubt=continue"):
        list(loop.resume(box, model(), folder))
    rows = [row for row, _ in loop.resume(box, model(), folder, on_doubt="continue")]
    assert [row.event for row in rows] == ["60 cut off; 1 doubt", "1 doubt"]
    kept = [incident for incident in incidents(folder) if incident["kind"] == "doubt"]
    # the last one is of the final evaluation
    assert [int(incident["trajectories"]) for incident in kept] == [60, 0, 0, 0]
    with files.open(sorted((folder / "recordings").glob("batch-*.nc"))[-1]) as recording:
        assert recording.description.provenance.startswith(
            "in doubt: The trajectories are not those"
        )
    assert loop.read_plan(folder).on_doubt == "continue"


def test_on_doubt_is_one_of_two_words():
    with pytest.raises(ValueError, match="on_doubt.*'perhaps'"):
        Plan(on_doubt="perhaps")
    with pytest.raises(ValueError, match="on_doubt.*'perhaps'"):
        instrument_substrate(lambda: None, on_doubt="perhaps")


@pytest.mark.long
def test_the_command_says_how_to_go_on_and_does_not_end_with_0(tmp_path, monkeypatch):
    bench, plain = Bench(SHEET), box.measure
    spoilt = lambda *arguments, **options: (
        plain(*arguments, **options) * (1.3 if bench.shots >= 420 else 1)
    ).astype(int)
    monkeypatch.setattr(box, "measure", spoilt)
    with server.background(bench) as port:
        options = "--iterations 4 --trajectories 60"
        words = f"insitu train tcp://127.0.0.1:{port} --out {tmp_path / 'run'} {options}"
        done = CliRunner().invoke(app, [*words.split(), "--set", f"points={POINTS}"])
        text = " ".join(done.output.split())
        assert done.exit_code == 2
        assert "not those of the calibrated model" in text
        assert "--resume" in text
        assert "--set on_doubt=continue" in text
        again = CliRunner().invoke(
            app,
            ["insitu", "train", "--resume", str(tmp_path / "run"), "--set", "on_doubt=continue"],
        )
        assert again.exit_code == 0
    assert [row.iteration for row in history.read(tmp_path / "run" / "history.csv")] == [0, 1, 2, 3]


@pytest.mark.long
def test_one_liar_in_an_array_is_taken_down_for_the_rest_of_it(tmp_path):
    sheets = [device.Sheet(2, 2, seed=k, interval=SHEET.interval, ageing=0.0) for k in range(3)]
    boxes = [Box(sheet) for sheet in sheets]
    boxes[1].fault, boxes[1].first = FAULTS["sign"], 320  # after its calibration and one iteration
    plan = Plan(
        iterations=4,
        trajectories=60,
        batch=20,
        attempts=2,
        first_pause=1e-3,
        rates=(1.0, 1.0, 1.0),
    )
    rows = [row for row, _ in loop.run(boxes, model(), plan, tmp_path / "run")]
    assert len(rows) == 4
    found = incidents(tmp_path / "run")
    assert [incident["kind"] for incident in found] == ["doubt", "device down"]
    assert all("device 2" in incident["message"] for incident in found)
    names, table = history.read_numbers(tmp_path / "run" / "devices.csv")
    assert table[:, names.index("2 trajectories")].tolist() == [20, 0, 0, 0]
    assert table[:, names.index("1 trajectories")].tolist() == [20, 30, 30, 30]
    assert boxes[1].shots == 340  # not asked again


@pytest.mark.parametrize(
    "dead",
    [
        lambda x: 0 * x,
        lambda x: 0.7 + 0 * x,
        lambda x: 0.7 + 1e-6 * np.random.default_rng(1).normal(size=x.shape),
    ],
    ids=["zero", "constant", "noise"],
)
def test_a_component_that_is_dead_before_calibration_ends_the_run(tmp_path, dead):
    def kill(x, before, longer):
        x = x.copy()
        x[..., 5] = dead(x[..., 5])
        return x

    with pytest.raises(CommandRejected, match="component 5 of the samples measures nothing"):
        list(loop.run(Box(fault=kill), model(), PLAN, tmp_path / "run"))
    assert [incident["kind"] for incident in incidents(tmp_path / "run")] == ["dead"]


def test_what_moves_is_not_dead():
    """Diffusion, with and without drift, at rest and with a readout as large as its steps."""
    rng = np.random.default_rng(0)
    for rate in (0.0, 0.05):
        x = np.zeros((20, 101, 4))
        for n in range(100):
            x[:, n + 1] = (1 - rate) * x[:, n] + rng.normal(size=(20, 4))
        assert find_dead(x) == []
        assert find_dead(x + rng.normal(size=x.shape)) == []
        assert find_dead(x[:1]) == []
    x[..., 2] = rng.normal(size=x.shape[:2])
    x[..., 3] = 5.0
    assert find_dead(x) == [2, 3]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fault", ["times 1.3", "a channel stuck half way"])
def test_a_training_that_calibrates_as_it_goes_stops_too(tmp_path, fault):
    plan = Plan(iterations=8, trajectories=4, calibration="training", batch=4)
    folder = tmp_path / "run"
    with pytest.raises(DoubtError, match="in doubt"):
        list(loop.run(Box(fault=FAULTS[fault], first=16), model(), plan, folder))
    assert [incident["kind"] for incident in incidents(folder)][-1] == "doubt"
    assert len(history.read(folder / "history.csv")) == 4


# ----------------------------------------------------------------------------------- honest data

T = np.linspace(0, 2, 101)
PROCESS = fl.Process(
    lambda theta, x: 5.0 - theta["k"] * x, noise=lambda theta, x: 0.3 * jnp.ones(2)
)
OBJECTIVE = fl.Objective(terminal=lambda theta, x: x[0] ** 2)
SETTINGS = {"k": jnp.array(1.0)}


class Honest:
    """Euler steps of the process itself."""

    def __init__(self, rng):
        self.rng = rng

    set = lambda self, settings: None
    close = lambda self: None
    health = Health

    def arm(self, count):
        self.count = count

    def acquire(self):
        x = np.zeros((self.count, T.size, 2))
        for n, dt in enumerate(np.diff(T)):
            x[:, n + 1] = (
                x[:, n]
                + (5 - x[:, n]) * dt
                + 0.3 * np.sqrt(dt) * self.rng.normal(size=(self.count, 2))
            )
        return Batch(T, x)


def exact_gradient():
    """∂J/∂k of the Euler scheme: E[x²] = m² + variance."""

    mean = variance = mean_slope = variance_slope = 0.0
    for dt in np.diff(T):
        factor = 1 - dt  # at k = 1
        mean_slope = factor * mean_slope - dt * mean
        mean = mean + (5 - mean) * dt
        variance_slope = factor**2 * variance_slope - 2 * dt * factor * variance
        variance = factor**2 * variance + 0.09 * dt
    return 2 * mean * mean_slope + variance_slope


@pytest.mark.long
def test_the_gradient_of_a_right_model_stays_unbiased_with_the_guard():
    """None is left out, so that the mean is the same to the bit as without the guard, and right."""
    gradients = {}
    for on_doubt, batches in (("stop", 24), ("continue", 5), (None, 24)):
        guard = ResidualGuard(PROCESS, np.ones(2))
        guard.start = np.zeros(2)
        found = []
        substrate = instrument_substrate(
            functools.partial(Honest, np.random.default_rng(1)),
            batch=40,
            guard=guard,
            on_doubt=on_doubt,
            report=found.append,
        )
        estimator = fl.ppgt(substrate, OBJECTIVE, process=PROCESS)
        gradients[on_doubt] = [
            float(estimator(jax.random.key(0), SETTINGS, 40).gradient["k"]) for _ in range(batches)
        ]
        assert found == []
    assert gradients["stop"] == gradients[None]
    assert gradients["continue"] == gradients[None][:5]
    each = np.array(gradients["stop"])
    assert abs(each.mean() - exact_gradient()) < 4 * each.std() / np.sqrt(len(each))
