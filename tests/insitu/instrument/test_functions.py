"""Drivers from two functions: every clear form of a record is read, every other one refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fluctua as fl
from fluctua.insitu import instrument_substrate
from fluctua.insitu.instrument import (
    Batch,
    CommandRejected,
    Health,
    Instrument,
    InstrumentError,
    InvalidReply,
    Retry,
    make_driver,
)

T = np.linspace(0.0, 1.0, 11)
X = np.random.default_rng(0).normal(size=(3, 11, 2))
PSI = X[..., :1] + 1j * X[..., 1:]


def read(record, count, **options):
    """What a driver makes of a record."""
    options = options or {"t": T}
    driver = make_driver(lambda settings: None, lambda count: record, **options)
    driver.arm(count)
    return driver.acquire()


CLEAR = {
    "array": (X, 3),
    "float32": (X.astype(np.float32), 3),
    "JAX": (jnp.asarray(X), 3),
    "list of arrays": (list(X), 3),
    "nested lists": (X.tolist(), 3),
    "list of pairs": ([(T, x) for x in X], 3),
    "pair": ((T, X), 3),
    "pair of lists": ((T.tolist(), X.tolist()), 3),
    "complex": (PSI, 3),
    "complex, one channel": (PSI[..., 0], 3),
    "complex list": ([psi[:, 0] for psi in PSI], 3),
    "complex trajectory": (PSI[0, :, 0], 1),
    "complex numbers": (PSI[0, :, 0].tolist(), 1),
    "one trajectory": (X[0], 1),
    "one trajectory in a list": ([X[0]], 1),
    "one trajectory with its axis": (X[:1], 1),
    "one pair": ((T, X[0]), 1),
    "Batch": (Batch(T, X), 3),
    "Trajectories": (fl.Trajectories(T, X), 3),
    "masked array": (np.ma.masked_array(X), 3),
}


@pytest.mark.parametrize("form", CLEAR)
@pytest.mark.parametrize("options", [{"t": T}, {"interval": 0.1}], ids=["t", "interval"])
def test_clear_forms_are_read(form, options):
    record, count = CLEAR[form]
    batch = read(record, count, **options)
    np.testing.assert_allclose(batch.x, X[:count], rtol=1e-6)
    np.testing.assert_allclose(batch.t, T, atol=1e-12)


@pytest.mark.parametrize(
    ("record", "count"),
    [
        (X[0, :, 0], 1),
        (X[0, :, 0].tolist(), 1),
        (X[:, :, 0], 3),
        (X[:1, :, 0], 1),
        (X[0, :, :1], 1),
    ],
)
def test_one_channel_needs_no_axis(record, count):
    assert np.array_equal(read(record, count).x, X[:count, :, :1])


def test_a_file_is_read(tmp_path):
    np.save(tmp_path / "a.npy", PSI)
    assert np.array_equal(read(tmp_path / "a.npy", 3).x, X)
    assert np.array_equal(read(str(tmp_path / "a.npy"), 3).x, X)
    np.save(tmp_path / "one.npy", X[0])
    assert np.array_equal(read([tmp_path / "one.npy"], 1).x, X[:1])
    with pytest.raises(InvalidReply, match="b.npy' does not exist"):
        read(tmp_path / "b.npy", 3)
    (tmp_path / "short.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-100])
    with pytest.raises(InvalidReply, match="short.npy' cannot be read"):
        read(tmp_path / "short.npy", 3)
    np.save(tmp_path / "objects.npy", np.array([None]), allow_pickle=True)
    with pytest.raises(InvalidReply, match="objects.npy' cannot be read"):
        read(tmp_path / "objects.npy", 3)
    with pytest.raises(CommandRejected, match=r"end in .npy; `acquire` returned 'a.csv'"):
        read("a.csv", 3)


def test_complex_channels_are_real_parts_then_imaginary_parts():
    """As a recording has them: x = [Re ψ, Im ψ]."""
    psi = np.random.default_rng(1).normal(size=(3, 11, 2, 2)).view(complex)[..., 0]
    x = read(psi, 3).x
    assert np.array_equal(x[..., :2], psi.real)
    assert np.array_equal(x[..., 2:], psi.imag)
    with pytest.raises(CommandRejected, match="3 components"):
        read(psi, 3, t=T, channels=3)


def test_context_and_codes_are_kept():
    context = {"modulation": np.arange(3.0)}
    assert read(fl.Trajectories(T, X, context), 3).context is context
    codes = Batch(T, np.full((3, 11, 1), 7, np.int16), scale=0.5, full_scale=16.0)
    assert read(codes, 3).x[0, 0, 0] == 3.5
    assert read(codes, 3).full_scale == 16.0


REFUSED = {
    "integers": (X.astype(int), CommandRejected, "int64.*scale"),
    "objects": (np.array([[None] * 11] * 3), CommandRejected, "object"),
    "booleans": (X > 0, CommandRejected, "bool"),
    "text": ([["1.0"] * 11] * 3, CommandRejected, "<U3"),
    "a dictionary": ({"x": X}, CommandRejected, "dict"),
    "nothing": (None, InvalidReply, "None"),
    "one number": (0.5, CommandRejected, "one number"),
    "another count": (X[:2], InvalidReply, r"\(3 trajectories, 11 times, channels\).*\(2, 11, 2\)"),
    "a list of another count": (list(X[:2]), InvalidReply, r"\(2, 11, 2\)"),
    "short": (X[:, :9], InvalidReply, r"\(3 trajectories, 11 times.*\(3, 9, 2\)"),
    "one short": ([X[0], X[1, :9], X[2]], InvalidReply, r"11 times.*\(1, 9, 2\)"),
    "unlike entries": ([[1.0, 2.0], [1.0]], InvalidReply, "several shapes"),
    "times first": (X.swapaxes(0, 1), CommandRejected, r"x.swapaxes\(0, 1\)"),
    "channels first": (X.swapaxes(1, 2), CommandRejected, r"x.swapaxes\(-1, -2\)"),
    "flat": (X.ravel(), CommandRejected, r"shape \(66,\)"),
    "four axes": (X[None], CommandRejected, r"shape \(1, 3, 11, 2\)"),
    "three parts": ((T, X, X), CommandRejected, "tuple of 3"),
    "a tuple of trajectories": ((X[0], X[1]), CommandRejected, r"shape \(11, 2\)"),
    "times of another length": ((T[:-1], X), InvalidReply, "11 samples has 10 times"),
    "another rate": ((2 * T, X), CommandRejected, "from 0 to 1; .* from 0 to 2"),
    "times that fall": ((T[::-1], X), InvalidReply, "increase strictly"),
    "events": (fl.Trajectories(T, X, None, X), CommandRejected, "events"),
    "context without names": (fl.Trajectories(T, X, X[:, 0]), CommandRejected, "dictionary"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_other_forms_are_refused(form):
    record, kind, message = REFUSED[form]
    with pytest.raises(kind, match=message) as caught:
        read(record, 3, t=T, channels=2 if "first" in form else None)
    assert type(caught.value) is kind


@pytest.mark.parametrize("shape", [(2, 11), (11, 11)])
def test_a_shape_with_two_meanings_is_refused(shape):
    """Without times or channels, two traces and two times are the same array."""
    with pytest.raises(CommandRejected, match="`channels` or `t`"):
        read(np.zeros(shape), 1, interval=0.1)
    with pytest.raises(CommandRejected, match="fewer times than channels"):
        read(np.zeros((3, *shape)), 3, interval=0.1)
    if shape[0] != shape[1]:
        with pytest.raises(CommandRejected, match=r"x.swapaxes\(-1, -2\)"):
            read(np.zeros(shape), 1, t=T, channels=2)
    assert read(np.zeros(shape), 1, interval=0.1, channels=11).x.shape == (1, *shape)


def test_a_record_of_another_number_of_channels_is_refused():
    with pytest.raises(CommandRejected, match=r"4 channels\).*\(3, 11, 2\)"):
        read(X, 3, t=T, channels=4)
    with pytest.raises(CommandRejected, match="2 complex channels"):
        read(PSI, 3, t=T, channels=4)
    with pytest.raises(CommandRejected, match=r"3 channels\).*\(3, 11, 2\)"):
        read(X, 3, t=T, channels=("a", "b", "c"))
    assert np.array_equal(read(PSI, 3, t=T, channels=("re", "im")).x, X)
    assert make_driver(print, print, channels=("re", "im")).channels == ("re", "im")


def test_trajectories_must_share_their_times():
    with pytest.raises(InvalidReply, match=r"trajectory 2 has 11 times from 5 to 6"):
        read([(T, X[0]), (T, X[1]), (T + 5, X[2])], 3, interval=None)
    with pytest.raises(CommandRejected, match="times of this record are unknown"):
        read(X, 3, interval=None)


@given(
    count=st.integers(1, 4),
    points=st.integers(2, 6),
    channels=st.integers(1, 6),
    order=st.permutations(range(3)),
)
@settings(max_examples=60)
def test_axes_in_another_order_are_never_read(count, points, channels, order):
    """An array that is read is the array that was meant, whatever the lengths of its axes."""
    meant = np.arange(float(count * points * channels)).reshape(count, points, channels)
    turned = meant.transpose(order)
    t = np.arange(float(points))
    if turned.shape != meant.shape:
        with pytest.raises(InstrumentError):
            read(turned, count, t=t, channels=channels)
    else:
        assert np.array_equal(read(turned, count, t=t, channels=channels).x, turned)


def test_later_records_are_as_the_first():
    records = iter([X, X[:, :9], X[..., :1]])
    driver = make_driver(lambda settings: None, lambda count: next(records), interval=0.1)
    driver.arm(3)
    assert driver.acquire().x.shape == X.shape
    with pytest.raises(InvalidReply, match=r"11 times"):
        driver.acquire()
    with pytest.raises(CommandRejected, match=r"2 channels"):
        driver.acquire()


def test_a_function_without_arguments_is_called_for_each_trajectory():
    def open_driver(traces):
        rest = iter(traces)
        return make_driver(lambda settings: None, lambda: next(rest), t=T)

    for traces in (list(X), [(T, x) for x in X], [Batch(T, x[None]) for x in X]):
        driver = open_driver(traces)
        driver.arm(3)
        assert np.array_equal(driver.acquire().x, X)


class Knobs:
    """Remembers its settings, and the calls."""

    def __init__(self):
        self.settings = {}
        self.is_open = True

    def close(self):
        self.is_open = False
        raise OSError("already closed")


def test_knobs_are_floats_and_arrays_within_their_limits():
    knobs = Knobs()
    driver = make_driver(
        knobs.settings.update,
        lambda count: X[:count],
        t=T,
        limits={"drive": (0.0, 1.0), "bias": (-1.0, [0.5, 2.0])},
        units={"drive": "V"},
        health=lambda: knobs.settings,
        close=knobs.close,
    )
    assert isinstance(driver, Instrument)
    driver.set({"drive": jnp.float32(0.5), "bias": np.array([0.5, 1.5]), "free": 9})
    assert type(knobs.settings["drive"]) is float
    assert knobs.settings["free"] == 9.0
    assert np.array_equal(knobs.settings["bias"], [0.5, 1.5])
    assert driver.health() == Health(knobs.settings)
    assert driver.limits["drive"] == (0.0, 1.0)
    assert driver.units == {"drive": "V"}
    before = dict(knobs.settings)
    for bad, message in (
        ({"drive": 1.5, "bias": np.zeros(2)}, "'drive' must be from 0 to 1; .* 1.5"),
        ({"drive": np.nan, "bias": np.zeros(2)}, "'drive' .* nan"),
        ({"drive": 0.5, "bias": np.array([0.0, 2.5])}, r"'bias' .* 2.5"),
        ({"drive": 0.5}, "limits of a knob 'bias'; the settings are 'drive'"),
    ):
        with pytest.raises(CommandRejected, match=message):
            driver.set(bad)
    assert knobs.settings == before
    driver.close()
    assert not knobs.is_open


def test_bad_arguments_are_refused():
    def acquire(count):
        return X

    for arguments, options, kind, message in (
        ((None, acquire), {}, TypeError, "`set` must be a function; got None"),
        ((print, X), {}, TypeError, "`acquire` must be a function"),
        ((print, acquire), {"close": 1}, TypeError, "`close` must be a function; got 1"),
        ((print, acquire), {"t": T, "interval": 0.1}, ValueError, "exclude each other"),
        ((print, acquire), {"interval": 0.0}, ValueError, "`interval` must be .* got 0.0"),
        ((print, acquire), {"t": [0.0]}, ValueError, "at least two times"),
        ((print, acquire), {"channels": 0}, ValueError, "`channels` .* got 0"),
        ((print, acquire), {"channels": ()}, ValueError, r"`channels` .* got \(\)"),
        ((print, acquire), {"channels": "re"}, ValueError, "`channels` .* got 're'"),
        ((print, acquire), {"limits": {"a": (1, 0)}}, ValueError, r"`limits\['a'\]`"),
        ((print, acquire), {"limits": {"a": 1.0}}, ValueError, r"`limits\['a'\]`"),
    ):
        with pytest.raises(kind, match=message):
            make_driver(*arguments, **options)


class LineBroke(Exception):
    """What a vendor's library raises."""


def measure(acquire, count=3, **options):
    """Trajectories and counts of a substrate with a driver that `acquire` makes."""
    substrate = instrument_substrate(
        lambda: make_driver(lambda settings: None, acquire, t=T, **options),
        batch=3,
        retry=Retry(attempts=3, first=0.0),
        sleep=lambda seconds: None,
    )
    try:
        return substrate(None, {"drive": np.array(0.5)}, count), substrate.counts
    finally:
        substrate.close()


def test_passing_faults_are_retried_and_others_are_not():
    rng = np.random.default_rng(2)
    faults = iter([LineBroke("no trigger"), TimeoutError("late"), None])

    def acquire(count):
        fault = next(faults)
        if fault is not None:
            raise fault
        return rng.normal(size=(count, 11, 2))

    trajectories, counts = measure(acquire, transient=(LineBroke,))
    assert trajectories.x.shape == (3, 11, 2)
    assert counts["failures"] == 2
    faults = iter([LineBroke("no trigger")])
    with pytest.raises(CommandRejected, match="raised LineBroke"):
        measure(acquire)


def test_samples_that_are_missing_cost_their_trajectory_only():
    rng = np.random.default_rng(3)
    calls = iter(range(100))

    def acquire(count):
        x = rng.normal(size=(count, 11, 2))
        if next(calls) == 0:
            x[1, 4, 0] = np.nan
        return x

    trajectories, counts = measure(acquire)
    assert np.isfinite(trajectories.x).all()
    assert counts == {"good": 3, "invalid": 1}

    def acquire_masked(count):
        x = np.ma.masked_array(rng.normal(size=(count, 11, 2)))
        x[0, 3] = np.ma.masked
        return x

    with pytest.raises(InstrumentError, match="invalid"):
        measure(acquire_masked, count=9)
