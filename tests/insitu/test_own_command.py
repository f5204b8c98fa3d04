"""`fluctua insitu train FILE.py:NAME --model FILE.py:NAME`: an instrument of one's own."""

import pytest
from typer.testing import CliRunner

from fluctua.cli.app import app
from fluctua.store import history

LAB = """
import jax.numpy as jnp
import numpy as np

import fluctua as fl
from fluctua import insitu
from fluctua.insitu.instrument import Batch, Health

T = np.linspace(0.0, 1.0, 21)
NOISE = 0.3
GAIN = 0.8  # of the device; the model expects 1


def drift(settings, x, t, unknowns):
    return jnp.array([unknowns["gain"] * settings["force"] - x[0]])


def model():
    return insitu.Model(
        fl.Process(drift, lambda settings, x: jnp.array([NOISE])),
        fl.Objective(terminal=lambda settings, x: -((x[0] - 1.0) ** 2)),
        knobs={"force": insitu.Knob(0.0, bounds=(-4.0, 4.0))},
        unknowns={"gain": insitu.Unknown(1.0, spread=0.3)},
        x0=jnp.zeros(1),
        t=T,
    )


class Trap:
    rng = np.random.default_rng(0)

    def set(self, settings):
        self.force = float(settings["force"])

    def arm(self, count):
        self.count = count

    def acquire(self):
        dt = T[1] - T[0]
        x = np.zeros((self.count, len(T), 1))
        for n in range(len(T) - 1):
            kick = NOISE * np.sqrt(dt) * self.rng.normal(size=(self.count, 1))
            x[:, n + 1] = x[:, n] + (GAIN * self.force - x[:, n]) * dt + kick
        return Batch(T, x)

    def health(self):
        return Health({"force": np.asarray(self.force)})

    def close(self):
        pass


wrong = 3
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs `fluctua insitu train` in a folder that holds lab.py."""
    (tmp_path / "lab.py").write_text(LAB)
    monkeypatch.chdir(tmp_path)
    return lambda words: CliRunner().invoke(app, ["insitu", "train", *words.split()])


@pytest.mark.long
def test_an_instrument_of_ones_own_is_trained_and_continued(run, tmp_path):
    plan = "--iterations 4 --trajectories 40 --set learning_rate=0.5 --set probes=2"
    done = run(f"lab.py:Trap --model lab.py:model --out run {plan}")
    assert done.exit_code == 0, done.output
    rows = history.read(tmp_path / "run" / "history.csv")
    assert len(rows) == 4
    assert rows[-1].J > rows[0].J
    assert "gain" in (tmp_path / "run" / "calibration.txt").read_text()
    done = run("--resume run --iterations 5")
    assert done.exit_code == 0, done.output
    assert len(history.read(tmp_path / "run" / "history.csv")) == 5


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("lab.py:Trap --out run", "needs its model"),
        ("lab.py:Trap tcp://127.0.0.1:1 --out run", "needs its model"),
        ("lab.py:Trap --model lab.py:wrong --out run", "must be a model (an insitu.Model"),
        ("lab.py:Trap --model lab.py:none --out run", "none"),
        ("lab.py:Trap --model lab.py:model --out run --set kerr=true", "--set kerr"),
    ],
)
def test_mistakes_are_explained(run, tmp_path, words, text):
    done = run(words)
    assert done.exit_code == 2
    assert text in done.output
    assert not (tmp_path / "run").exists()
