"""Ties of digitised samples, drifts of one long record, and how a trend is taken away."""

import numpy as np
import pytest
from scipy.signal import lfilter
from typer.testing import CliRunner

from fluctua import insitu
from fluctua.cli.app import app
from fluctua.insitu.recording.digitisation import find_steps
from fluctua.insitu.recording.trend import find_trend, remove_trend
from fluctua.insitu.splitting import split_record

MODEL = """
import jax.numpy as jnp
import fluctua as fl

theta = {"k": 1.0}
from fluctua.insitu.files import RecordingModel
process = fl.Process(drift=lambda th, x: -th["k"] * x, noise=lambda th, x: jnp.full((1,), 1.0))
objective = fl.Objective(running=lambda th, x: x[0] ** 2)
model = RecordingModel(process, objective)
"""


def draw_correlated(rng, n, tau, shape=()):
    """Stationary, of unit variance, with correlation time tau in samples. (n, …)"""
    a = np.exp(-1 / tau)
    start = rng.normal(size=(1, *shape))
    noise = rng.normal(size=(n - 1, *shape)) * np.sqrt(1 - a**2)
    return lfilter([1.0], [1.0, -a], np.concatenate([start, noise]), axis=0)


def save(path, x, **changes):
    """A recording (E, T, M) in units of 0.1 per sample."""
    t = 0.1 * np.arange(x.shape[1])
    names = tuple("abcdefgh"[: x.shape[2]])
    insitu.files.save(
        path, insitu.files.Description(t, names, x.dtype.name, parameters={"k": 1.0}, **changes), x
    )
    return path


def findings(path):
    with insitu.files.open(path) as recording:
        return insitu.files.inspect(recording).findings


# -------------------------------------------------------------------------------------------- ties


def digitise(x, bits=12):
    """Rounded to 2**bits steps over ±4.5 standard deviations."""
    step = 9 / 2**bits
    return np.rint(x / step) * step


def test_chance_ties_of_twelve_bits_are_no_dropped_samples(tmp_path):
    """P(tie) = step / (√(2π) σ_Δ) in one channel: 380 of 40 × 1,000 where σ_Δ is 42 steps."""
    rng = np.random.default_rng(0)
    tau = 235
    x = digitise(np.moveaxis(draw_correlated(rng, 1001, tau, (40, 1)), 0, 1))
    wanted = 40_000 * (9 / 4096) / np.sqrt(2 * np.pi * 2 * (1 - np.exp(-1 / tau)))
    ties = int((x[:, 1:] == x[:, :-1]).sum())
    assert abs(ties - wanted) < 4 * np.sqrt(wanted)
    (finding,) = findings(save(tmp_path / "r.nc", x))
    assert (finding.what, finding.serious) == ("ties", False)
    predicted, error = map(float, finding.text.rstrip(".").split("predict ")[1].split(" ± "))
    assert abs(predicted - wanted) < 4 * error
    assert error < 0.15 * wanted


@pytest.mark.parametrize(
    ("bits", "channels", "held"), [(12, 1, 150), (12, 2, 10), (10, 4, 10), (16, 1, 40)]
)
def test_held_samples_among_digitised_ones_are_found(tmp_path, bits, channels, held):
    rng = np.random.default_rng(1)
    x = digitise(np.moveaxis(draw_correlated(rng, 1001, 21.6, (40, channels)), 0, 1), bits)
    for j, n in zip(rng.integers(0, 40, held), rng.integers(1, 1001, held), strict=True):
        x[j, n] = x[j, n - 1]
    serious = [f for f in findings(save(tmp_path / "r.nc", x)) if f.serious]
    assert [f.what for f in serious] == ["dropped samples"]
    assert "predict" in serious[0].text


def test_one_repeat_of_continuous_numbers_is_serious(tmp_path):
    x = np.random.default_rng(2).normal(size=(4, 50, 2))
    x[1, 7] = x[1, 6]
    assert [(f.what, f.serious) for f in findings(save(tmp_path / "r.nc", x))] == [
        ("dropped samples", True)
    ]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_steps_are_found_where_there_are_some(dtype):
    rng = np.random.default_rng(3)
    smooth = draw_correlated(rng, 5000, 20, (2,)).astype(dtype)
    assert find_steps(smooth) is None
    step = np.array([0.0137, 0.251])
    np.testing.assert_allclose(
        find_steps((np.rint(smooth / step) * step + 0.5).astype(dtype)), step, rtol=1e-3
    )
    mixed = smooth.copy()
    mixed[:, 0] = np.rint(smooth[:, 0] / 0.01) * 0.01
    assert find_steps(mixed) is None  # one continuous channel: no tie is chance


@pytest.mark.long
def test_sound_digitised_data_raise_no_alarm(tmp_path):
    """One to four channels, alike or not, steps from a third of a difference to 100 of them:
    none of 120 files.
    """
    rng = np.random.default_rng(4)
    wrong = []
    for channels, alike in ((1, 0.0), (2, 0.0), (2, 0.99), (4, 0.5)):
        for steps in (0.3, 1.0, 2.0, 5.0, 20.0, 100.0):  # standard deviation of a difference
            mixing = np.linalg.cholesky((1 - alike) * np.eye(channels) + alike)
            for k in range(5):
                x = draw_correlated(rng, 10_000, 50, (channels,)) @ mixing.T
                counts = np.rint(x * steps / np.sqrt(2 * (1 - np.exp(-1 / 50))))
                path = save(
                    tmp_path / f"{channels}{alike}{steps}{k}.nc", counts.reshape(10, 1000, channels)
                )
                wrong += [f.text for f in findings(path) if f.what == "dropped samples"]
    assert wrong == []


# ------------------------------------------------------------------------------------------- drifts


def test_a_slow_drift_of_one_record_is_named(tmp_path):
    """By one standard deviation over 2,000 correlation times: the halves differ by half of that."""
    rng = np.random.default_rng(5)
    x = draw_correlated(rng, 20_000, 10, (2,))
    x[:, 1] += np.linspace(0, 1, 20_000)
    (finding,) = findings(save(tmp_path / "r.nc", x[None]))
    assert (finding.what, finding.serious) == ("drift", True)
    assert "the mean of b differs by 0." in finding.text
    assert "--detrend" in finding.text
    change = find_trend(x).trend.change
    assert abs(change - 0.5) < 4 * np.sqrt(4 * 20 / 20_000)  # error of the difference of two halves
    still = find_trend(x - [0, 1] * np.linspace(0, 1, 20_000)[:, None])
    assert still.trend is None
    assert still.resolved


def test_a_variance_that_changes_is_named():
    x = (
        draw_correlated(np.random.default_rng(6), 20_000, 10, (1,))
        * np.linspace(1.0, 1.6, 20_000)[:, None]
    )
    trend = find_trend(x).trend
    assert (trend.what, trend.component) == ("variance", 0)
    assert 0.5 < trend.change < 1.1  # ∫(1 + 0.6u)² du over the halves: 1.97 − 1.33 = 0.78


def test_a_record_shorter_than_its_fluctuations_cannot_tell(tmp_path):
    x = draw_correlated(np.random.default_rng(7), 2000, 200, (1,))
    (finding,) = findings(save(tmp_path / "r.nc", x[None]))
    assert (finding.what, finding.serious) == ("slow", False)


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 10, 100, 1000])
def test_steady_records_are_rarely_said_to_drift(times):
    """Records of so many correlation times: at most 1 in 100, and 1 in 10,000 is meant."""
    rng = np.random.default_rng(8)
    n, count = 2000, 600
    x = draw_correlated(rng, n, n / times, (count,))
    false = sum(find_trend(x[:, [k]]).trend is not None for k in range(count))
    assert false <= 6 + 3 * np.sqrt(6)


@pytest.mark.long
def test_drifts_of_some_size_are_found():
    """A mean that moves by 1.5 standard deviations in 1,000 correlation times, and a variance
    that grows fivefold.
    """
    rng = np.random.default_rng(9)
    x = draw_correlated(rng, 4000, 4, (50,))
    rise = np.linspace(0, 1, 4000)
    assert (
        sum(find_trend(x[:, [k]] + 1.5 * rise[:, None]).trend is not None for k in range(50)) >= 45
    )
    assert (
        sum(
            find_trend(x[:, [k]] * np.sqrt(1 + 4 * rise)[:, None]).trend is not None
            for k in range(50)
        )
        >= 45
    )


# ------------------------------------------------------------------------------------- `--detrend`


def test_a_trend_is_taken_away_and_that_is_noted(tmp_path):
    rng = np.random.default_rng(10)
    steady = draw_correlated(rng, 20_000, 10, (2,)) + 3.0
    offset = np.stack([np.cos(np.linspace(0, np.pi, 20_000)), np.linspace(-1, 1, 20_000)], axis=1)
    psi = (steady + offset)[:, 0] + 1j * (steady + offset)[:, 1]
    path = tmp_path / "r.nc"
    t = 0.1 * np.arange(20_000)
    insitu.files.save(
        path,
        insitu.files.Description(t, ("psi",), "complex128", parameters={"k": 1.0}),
        psi[None, :, None],
    )
    copy = tmp_path / "copy.nc"
    done = CliRunner().invoke(app, ["convert", str(path), str(copy), "--detrend", "400"])
    assert done.exit_code == 0, done.output
    assert "detrended: what varies more slowly than 400 was subtracted" in done.output
    with insitu.files.open(copy) as recording:
        x = recording.x[0]
        assert "detrended: what varies more slowly than 400" in recording.description.provenance
        assert insitu.files.inspect(recording).findings == []
    np.testing.assert_allclose(x.mean(axis=0), (steady + offset).mean(axis=0), atol=1e-9)
    # ten cosines of variance 2τ each are lost of 20,000: a hundredth; and what a straight line has
    # beyond them
    assert np.abs(x - steady).std() < 0.15
    assert findings(path)[0].what == "drift"


def test_a_trend_as_fast_as_the_system_is_not_taken_away():
    x = draw_correlated(np.random.default_rng(11), 20_000, 50, (1,))
    with pytest.raises(ValueError, match="of the fluctuations of run away with its trend"):
        remove_trend(x, 1000, "run")
    with pytest.raises(ValueError, match="20000 samples long, less than half a period"):
        remove_trend(x, 50_000, "run")


@pytest.mark.parametrize("time", [0.0, float("nan"), -1.0])
def test_the_time_of_a_trend_is_checked(tmp_path, time):
    path = save(tmp_path / "r.nc", np.random.default_rng(0).normal(size=(1, 50, 1)))
    with (
        insitu.files.open(path) as recording,
        pytest.raises(ValueError, match="is a time, above 0"),
    ):
        insitu.files.convert(recording, tmp_path / "copy.nc", detrend=time)


def test_a_calibration_names_the_drift_and_advises_no_longer_record(tmp_path):
    """A drift of ten standard deviations looks like a memory of the whole record."""
    rng = np.random.default_rng(12)
    x = draw_correlated(rng, 20_000, 10, (1,)) * np.sqrt(0.5)
    (tmp_path / "model.py").write_text(MODEL)
    for size in (0.4, 10.0):
        path = tmp_path / f"{size}.nc"
        save(path, x[None] + size * np.linspace(0, 1, 20_000)[None, :, None])
        with insitu.files.open(path) as recording:
            model = insitu.files.load_model(recording, f"{tmp_path / 'model.py'}:model")
            if size == 0.4:
                pieces = split_record(recording, model)
                assert "the mean of a differs by" in pieces.trend
                assert "→ not steady: the mean of a" in repr(pieces)
            else:
                with pytest.raises(
                    ValueError, match="is too short.*because of a drift: the mean of a"
                ) as raised:
                    split_record(recording, model)
                assert "Record for longer" not in str(raised.value)
