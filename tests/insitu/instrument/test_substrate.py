"""An instrument as a substrate, and one test for each way in which it can fail."""

import contextlib
import functools
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fluctua.core.trajectories import Trajectories
from fluctua.insitu import files, network_model
from fluctua.insitu.bench import device, server
from fluctua.insitu.bench.box import KINDS, Bench, Fault, FaultPlan, parse_fault
from fluctua.insitu.instrument import transport, virtual
from fluctua.insitu.instrument.archive import Archive
from fluctua.insitu.instrument.guard import ResidualGuard
from fluctua.insitu.instrument.protocol import Batch, CommandRejected, Health, InstrumentError
from fluctua.insitu.instrument.substrate import Retry, instrument_substrate
from fluctua.insitu.instrument.virtual import VirtualBench
from processes import wait_until

SHEET = device.Sheet(
    rows=2, columns=2, seed=2, interval=0.1, ageing=0.0
)  # long enough to tell settings apart
SETTINGS = {"omega": np.array([0.5, -0.5, 0.2, 0.0]), "kappa": np.array([0.8, 1.2, 1.0, 0.6])}
POINTS = 21


class Still:
    """A box that hands over the same batch again and again."""

    set = arm = lambda self, what: None
    close = lambda self: None
    health = lambda self: Health()

    def __init__(self, batch):
        self.batch = batch

    def acquire(self):
        return self.batch


def answers(port):
    """Whether the bench does: not while it restarts."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=5) as line,
    ):
        line.sendall(b"*IDN?\n")
        return bool(line.recv(1))
    return False


@functools.cache
def calibrate_guard():
    """A guard of the bench, and the context of its trajectories, from three probes."""
    model, rng = (
        network_model(SHEET.nominal, interval=SHEET.interval, points=POINTS),
        np.random.default_rng(0),
    )
    probes, t = [], np.arange(POINTS) * SHEET.interval
    for k in range(3):
        settings = model.probe(rng)
        codes = device.measure(
            SHEET,
            device.draw_hidden(SHEET),
            settings,
            count=50,
            points=POINTS,
            shots=10**6 + 50 * k,
        )
        probes.append((settings, Trajectories(t, codes * SHEET.scale)))
    values = model.calibrate(probes).values
    guard = ResidualGuard(model.process)
    guard.calibrate(probes, values)
    return guard, lambda count: {
        name: np.broadcast_to(v, (count, *np.shape(v))) for name, v in values.items()
    }


def run(tmp_path, *faults, count=30, timeout=20.0, visa=False, retry=None, guarded=False):
    """(trajectories, substrate, incidents, pauses, bench) of one call to a bench with these
    faults.
    """
    guard, context = calibrate_guard() if guarded else (None, None)
    bench = Bench(SHEET, FaultPlan(tuple(map(parse_fault, faults)), seed=1))
    incidents, pauses = [], []
    with server.background(bench) as port:
        address = f"TCPIP::127.0.0.1::{port}::SOCKET" if visa else f"tcp://127.0.0.1:{port}"

        def rest(seconds):  # until a restart is over; a test waits for nothing else
            pauses.append(seconds)
            if "reboot" in str(faults):
                wait_until(lambda: answers(port))

        substrate = instrument_substrate(
            lambda: VirtualBench(address, points=POINTS, timeout=timeout),
            batch=10,
            archive=Archive(tmp_path),
            report=incidents.append,
            sleep=rest,
            retry=retry,
            guard=guard,
            context=context,
        )
        try:
            return substrate(None, SETTINGS, count), substrate, incidents, pauses, bench
        finally:
            substrate.close()


def read_batches(tmp_path):
    """Of each batch: which were good, why not the others, and what was set."""
    batches = {}
    for path in sorted(tmp_path.glob("batch-*.nc")):
        with files.open(path) as file:
            d, left_out = file.description, path.stem.endswith("-left-out")
            good, why, settings = batches.get(path.stem[:12], (np.zeros(0), "", d.settings))
            good = np.concatenate([good, np.full(file.count, not left_out)])
            batches[path.stem[:12]] = good, why or d.provenance, settings
    return list(batches.values())


def at_the_settings(x):
    """Whether trajectories were run at SETTINGS and not at those after a reset: by their mean,
    in standard errors.
    """
    reference = {
        name: device.measure(
            SHEET, device.draw_hidden(SHEET), s, count=2000, points=POINTS, shots=10**6
        )
        * SHEET.scale
        for name, s in (("asked", SETTINGS), ("reset", device.reset_settings(SHEET)))
    }
    far = lambda r: (
        np.abs(x.mean(axis=0)[-1] - r.mean(axis=0)[-1]).max()
        / (r.std(axis=0)[-1].max() / np.sqrt(len(x)))
    )
    return far(reference["asked"]) < far(reference["reset"])


def test_without_faults(tmp_path):
    (t, x, context, *_), substrate, incidents, pauses, bench = run(tmp_path)
    assert x.shape == (30, POINTS, 8)
    assert context is None
    assert at_the_settings(x)
    assert not incidents
    assert not pauses
    assert substrate.describe() == "30 trajectories averaged; discarded: none"
    files = read_batches(tmp_path)
    assert [len(good) for good, *_ in files] == [10, 10, 10]
    np.testing.assert_array_equal(files[0][2]["omega"], SETTINGS["omega"])


@pytest.mark.parametrize("visa", [False, True])
def test_a_dropped_connection_is_opened_again(tmp_path, visa):
    if visa:
        pytest.importorskip("pyvisa_py")
    (_, x, *_), substrate, incidents, pauses, bench = run(
        tmp_path, "drop@2", visa=visa, timeout=1.0 if visa else 20.0
    )
    assert len(x) == 30
    assert at_the_settings(x)
    assert substrate.counts["good"] == 30
    assert pauses[0] == 0.1
    assert bench.shots >= 40  # the batch that was cut off was run again


def test_commands_do_not_wait_for_acknowledgements():
    with server.background(Bench(SHEET)) as port:
        line = transport.Socket(f"tcp://127.0.0.1:{port}")
        durations = []
        for _ in range(50):
            begin = time.monotonic()
            line.write("*CLS")
            line.write("*CLS")
            assert line.query("*OPC?") == "1"
            durations.append(time.monotonic() - begin)
        line.close()
    # 0.04 s with delayed acknowledgements, after the first few; some are slow on a busy machine
    assert np.quantile(durations, 0.25) < 0.02


def test_a_stalled_answer_is_given_up(tmp_path):
    (_, x, *_), substrate, incidents, pauses, _ = run(tmp_path, "stall@2", timeout=1.0)
    assert len(x) == 30
    assert (
        substrate.counts["failures"] >= 1
    )  # more on a machine so busy that an honest answer takes as long
    assert "timed out" in incidents[0].message


def test_a_short_block_is_not_used(tmp_path):
    (_, x, *_), substrate, incidents, *_ = run(tmp_path, "short@1")
    assert len(x) == 30
    assert at_the_settings(x)
    assert "short block" in incidents[0].message


def test_invalid_samples_are_discarded_counted_and_kept(tmp_path):
    (_, x, *_), substrate, incidents, *_ = run(tmp_path, "nan@2")
    assert len(x) == 30
    assert np.isfinite(x).all()
    assert substrate.counts == {"good": 30, "invalid": 3}
    assert incidents[0] == ("invalid", 3, "3 of 10 trajectories invalid")
    files = read_batches(tmp_path)
    assert [int(good.sum()) for good, *_ in files] == [10, 7, 10, 3]
    assert sum(len(good) for good, *_ in files) == 33
    assert files[1][1] == "left out: invalid"


def test_clipped_trajectories_are_discarded_and_counted(tmp_path):
    (_, x, *_), substrate, *_ = run(tmp_path, "clip@1")
    assert np.abs(x).max() < SHEET.adc_range
    assert substrate.counts == {"good": 30, "clipped": 3}


def test_after_a_reboot_the_settings_are_sent_again(tmp_path):
    (_, x, *_), substrate, incidents, pauses, bench = run(tmp_path, "reboot@2")
    assert bench.boots == 2
    assert len(x) == 30
    assert at_the_settings(x)
    assert substrate.counts["failures"] >= 1
    np.testing.assert_array_equal(bench.settings["omega"], SETTINGS["omega"])


def test_settings_lost_in_silence_are_noticed(tmp_path):
    """The batch was run at other settings: it is whole and finite, and must not be averaged."""
    (_, x, *_), substrate, incidents, *_ = run(tmp_path, "brownout@2")
    assert len(x) == 30
    assert at_the_settings(x)
    assert substrate.counts == {"good": 30, "at other settings": 10}


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ("dead@2", "unlike the calibration"),
        ("random@2", "unlike the calibration"),
        ("frozen@2", "repeated"),
    ],
)
def test_what_the_box_cannot_have_measured_is_set_aside(tmp_path, fault, verdict):
    (_, x, *_), substrate, incidents, *_ = run(tmp_path, fault, guarded=True)
    assert len(x) == 30
    assert at_the_settings(x)
    lost = substrate.counts[verdict] + (
        substrate.counts["repeated"] if fault == "dead@2" else 0
    )  # zeros are both
    assert lost == 10 == sum(incident.trajectories for incident in incidents)
    files = read_batches(tmp_path)
    assert [int(good.sum()) for good, *_ in files] == [10, 0, 10, 10]
    assert verdict in files[1][1]


@pytest.mark.parametrize("kind", ["dead", "random", "frozen"])
def test_a_box_that_stays_dead_ends_the_run(tmp_path, kind):
    with pytest.raises(InstrumentError, match="3 acquisitions in a row held no usable trajectory"):
        run(tmp_path, f"{kind}@2x99", guarded=True, retry=Retry(attempts=3))
    assert [int(good.sum()) for good, *_ in read_batches(tmp_path)] == [10, 0, 0, 0]


@pytest.mark.long
def test_honest_trajectories_pass_the_guard(tmp_path):
    _, substrate, incidents, *_ = run(tmp_path, guarded=True, count=300)
    assert substrate.counts == {"good": 300}
    assert not incidents


def test_another_box_is_refused(tmp_path):
    with (
        server.background(Bench(SHEET)) as one,
        server.background(Bench(device.Sheet(2, 2, seed=9))) as other,
    ):
        ports = iter([one, other])
        substrate = instrument_substrate(
            lambda: VirtualBench(f"tcp://127.0.0.1:{next(ports)}", points=POINTS), sleep=pytest.fail
        )
        substrate(None, SETTINGS, 3)
        assert substrate.identity == "fluctua,virtual bench,2"
        substrate.close()
        with pytest.raises(
            CommandRejected, match="'fluctua,virtual bench,9'.*'fluctua,virtual bench,2'"
        ):
            substrate(None, SETTINGS, 3)


class Noisy:
    """A line on which the text answers of some numbers, counted over all lines, come out wrong."""

    queries = 0

    def __init__(self, line, wrong):
        self.line, self.wrong = line, wrong
        self.write, self.query_block, self.close = line.write, line.query_block, line.close

    def query(self, message):
        Noisy.queries += 1
        return self.wrong.get(Noisy.queries, lambda answer: answer)(self.line.query(message))


RUBBISH = {
    "nothing": lambda answer: "",
    "a letter": lambda answer: "x" + answer,
    "twice": lambda answer: f"{answer};{answer}",
}


@pytest.mark.parametrize("kind", RUBBISH)
def test_a_garbled_text_answer_is_asked_for_again(kind, monkeypatch):
    """Every text answer of a connection and of an acquisition in turn."""
    incidents, bench = [], Bench(SHEET)
    with server.background(bench) as port:
        address, plain = f"tcp://127.0.0.1:{port}", virtual.connect
        Noisy.queries = 0
        monkeypatch.setattr(virtual, "connect", lambda *a, **k: Noisy(plain(*a, **k), {}))
        instrument_substrate(lambda: VirtualBench(address, points=POINTS))(None, SETTINGS, 4)
        answers = Noisy.queries
        assert answers >= 15
        for number in range(1, answers + 1):
            Noisy.queries, before = 0, len(incidents)
            wrong = {number: RUBBISH[kind]}
            monkeypatch.setattr(
                virtual, "connect", lambda *a, wrong=wrong, **k: Noisy(plain(*a, **k), wrong)
            )
            substrate = instrument_substrate(
                lambda: VirtualBench(address, points=POINTS),
                report=incidents.append,
                sleep=lambda seconds: None,
            )
            x = substrate(None, SETTINGS, 4).x
            substrate.close()
            assert x.shape == (4, POINTS, 8)
            assert substrate.counts == {"good": 4, "failures": 1}, number
            assert "was answered by" in incidents[before].message


@pytest.mark.parametrize("answer", ["nan", "inf", "9.91E37", "0.0", "-16"])
def test_a_range_that_is_none_is_refused(answer, monkeypatch):
    """With it no sample would count as clipped."""
    monkeypatch.setattr(virtual, "connect", lambda *a, **k: Told(**k))

    class Told(transport.Socket):
        def __init__(self, **options):
            super().__init__(f"tcp://127.0.0.1:{port}", **options)

        def query(self, message):
            return answer if message == "ACQ:RANG?" else super().query(message)

    with server.background(Bench(SHEET)) as port:
        substrate = instrument_substrate(lambda: VirtualBench("tcp://"), sleep=pytest.fail)
        with pytest.raises(CommandRejected, match="ACQ:RANG"):
            substrate(None, SETTINGS, 4)


@pytest.mark.parametrize("full_scale", [np.nan, 0.0, -1.0])
def test_a_batch_without_a_range_is_refused(full_scale):
    batch = Batch(np.arange(3.0), np.ones((2, 3, 1)), full_scale=full_scale)
    with pytest.raises(CommandRejected, match=f"full_scale.*{full_scale}"):
        instrument_substrate(lambda: Still(batch), batch=2, sleep=pytest.fail)(None, {}, 2)


class Faulty:
    """A driver of two channels. acquire: its `acquire` of the acquisitions from the second on."""

    acquisitions = 0

    def __init__(self, acquire, health=Health):
        self.wrong, self.health = acquire, health

    set = lambda self, settings: None
    close = lambda self: None

    def arm(self, count):
        self.count = count

    def acquire(self):
        Faulty.acquisitions += 1
        x = np.random.default_rng(Faulty.acquisitions).normal(size=(self.count, 3, 2))
        good = Batch(np.arange(3.0), x)
        return self.wrong(good) if Faulty.acquisitions > 1 else good


ANSWERS = {
    "nothing": (lambda good: None, "`acquire` of the driver returned None"),
    "an array": (lambda good: good.samples, "`acquire` of the driver returned a ndarray"),
    "one channel more": (
        lambda good: good._replace(samples=np.ones((2, 3, 3))),
        "2 channels; got 3",
    ),
    "a channel less": (
        lambda good: good._replace(samples=good.samples[..., :1]),
        "2 channels; got 1",
    ),
    "a trajectory less": (
        lambda good: good._replace(samples=good.samples[:1]),
        r"samples of shape \(1, 3, 2\)",
    ),
    "no times": (lambda good: good._replace(t=None), r"times of shape \(\)"),
    "complex": (
        lambda good: good._replace(samples=1j * good.samples),
        "real numbers; their type is complex128",
    ),
    "no samples": (lambda good: good._replace(samples=None), "real numbers; their type is object"),
    "context": (
        lambda good: good._replace(context={"drive": np.ones(5)}),
        r"'drive' must have 2 rows.*\(5,\)",
    ),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_an_answer_of_a_driver_that_is_none_is_an_incident(what, monkeypatch):
    acquire, message = ANSWERS[what]
    monkeypatch.setattr(Faulty, "acquisitions", 0)
    incidents = []
    substrate = instrument_substrate(
        lambda: Faulty(acquire),
        batch=2,
        retry=Retry(attempts=3),
        report=incidents.append,
        sleep=lambda seconds: None,
    )
    with pytest.raises(InstrumentError, match=f"failed 3 times in a row.*{message}"):
        substrate(None, {}, 4)
    assert [incident.kind for incident in incidents] == ["failure"] * 3
    assert substrate.counts == {"good": 2, "failures": 3}


def test_a_wrong_count_of_channels_is_an_incident_from_the_first_batch_on():
    batch = Batch(np.arange(3.0), np.ones((2, 3, 5)))
    incidents = []
    substrate = instrument_substrate(
        lambda: Still(batch), batch=2, channels=8, retry=Retry(attempts=1), report=incidents.append
    )
    with pytest.raises(InstrumentError, match="8 channels; got 5"):
        substrate(None, {}, 2)
    assert len(incidents) == 1


def test_a_health_that_is_none_is_an_incident():
    substrate = instrument_substrate(
        lambda: Faulty(lambda good: good, health=lambda: None), retry=Retry(attempts=1)
    )
    with pytest.raises(InstrumentError, match="`health` of the driver returned None"):
        substrate(None, {}, 2)


def test_settings_read_back_in_another_number_are_others():
    health = lambda: Health(settings={"kappa": np.ones(3)})
    substrate = instrument_substrate(
        lambda: Faulty(lambda good: good, health=health), retry=Retry(attempts=1)
    )
    with pytest.raises(InstrumentError, match="knobs kappa, omega, and .* reads back kappa"):
        substrate(None, {"omega": np.zeros(2), "kappa": np.ones(3)}, 2)


def test_a_driver_that_hangs_is_given_up(monkeypatch):
    """Within the time limit, twice; what came before is kept, and closing does not wait for it
    either.
    """
    monkeypatch.setattr(Faulty, "acquisitions", 0)
    never, incidents, closed = threading.Event(), [], []
    monkeypatch.setattr(Faulty, "close", lambda self: closed.append(1))
    substrate = instrument_substrate(
        lambda: Faulty(lambda good: never.wait()),
        batch=2,
        retry=Retry(limit=0.5),
        report=incidents.append,
        sleep=lambda seconds: None,
    )
    trajectories, failure = substrate.gather({}, 4)
    substrate.close()  # would never return
    assert len(trajectories.x) == 2
    assert "did not return within 0.5 s" in str(failure)
    assert "raise the time limit" in str(failure)
    assert [incident.kind for incident in incidents] == ["failure"] * 2
    wait_until(lambda: len(closed) == 2)
    never.set()


def test_an_instrument_that_opens_too_late_is_closed():
    late, closed = threading.Event(), threading.Event()

    class Late:
        close = lambda self: closed.set()

        def __init__(self):
            late.wait()

    with pytest.raises(InstrumentError, match=r"within 0\.1 s"):
        instrument_substrate(Late, retry=Retry(attempts=1, limit=0.1))(None, {}, 2)
    late.set()
    assert closed.wait(10)


HANGING = """
import threading
from fluctua.insitu import instrument_substrate
from fluctua.insitu.instrument import Health, Retry

class Hanging:
    set = arm = lambda self, what: None
    close = lambda self: None
    health = Health
    acquire = lambda self: threading.Event().wait()

try:
    instrument_substrate(Hanging, retry=Retry(limit=0.1), sleep=lambda seconds: None)(None, {}, 2)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.long
def test_a_driver_that_hangs_does_not_keep_the_process():
    done = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=300, check=True
    )
    assert "did not return within 0.1 s" in done.stdout


@pytest.mark.parametrize("limit", [0.0, -1.0, np.nan])
def test_a_time_limit_that_is_none_is_refused(limit):
    with pytest.raises(ValueError, match=f"limit.*{limit}"):
        instrument_substrate(lambda: None, retry=Retry(limit=limit))


def test_every_kind_of_fault_has_a_test():
    source = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{kind}@' in source for kind in KINDS)


def test_pauses_double_and_patience_ends(tmp_path):
    with pytest.raises(
        InstrumentError, match="failed 5 times in a row, at last with: a short block"
    ):
        run(tmp_path, "short@1x99", retry=Retry(attempts=5, first=0.25, longest=1.0))
    assert [Retry(5, 0.25, 1.0).pause(k) for k in (1, 2, 3, 4)] == [0.25, 0.5, 1.0, 1.0]


def test_a_box_that_only_sends_rubbish_is_given_up():
    rubbish = Batch(np.arange(3.0), np.full((2, 3, 1), np.nan))
    with pytest.raises(InstrumentError, match="no usable trajectory .* 4 invalid"):
        instrument_substrate(lambda: Still(rubbish), batch=2, retry=Retry(attempts=2))(None, {}, 2)


def test_a_refusal_is_not_repeated(tmp_path):
    bench = Bench(SHEET)
    with server.background(bench) as port:
        substrate = instrument_substrate(
            lambda: VirtualBench(f"tcp://127.0.0.1:{port}", points=POINTS), sleep=pytest.fail
        )
        with pytest.raises(CommandRejected, match="out of range"):
            substrate(None, {**SETTINGS, "omega": np.full(4, 9.0)}, 5)


def test_clipping_that_would_bias_is_told():
    class Low:
        set = lambda self, settings: None
        close = lambda self: None
        health = lambda self: Health()

        def arm(self, count):
            self.count = count

        def acquire(self):
            x = np.zeros((self.count, 3, 1))
            x[1::10] = 1.0
            return Batch(np.arange(3.0), x, full_scale=1.0)

    with pytest.warns(RuntimeWarning, match="raise the range"):
        instrument_substrate(Low, batch=50)(None, {}, 250)


def test_faults_as_text():
    assert parse_fault("nan@5x2") == Fault("nan", 5, 2)
    assert str(Fault("drop", 3)) == "drop@3"
    plan = FaultPlan((Fault("drop", 2, 2), Fault("nan", 3)))
    assert [plan.next() for _ in range(5)] == [
        "",
        "drop",
        "drop",
        "",
        "",
    ]  # one at a time; the first named wins
    for bad in ("drop", "drop@0", "explode@1", "nan@1x"):
        with pytest.raises(ValueError, match="KIND@ACQUISITION"):
            parse_fault(bad)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*clipped:RuntimeWarning")
def test_random_faults_for_hours_in_a_second(tmp_path):
    bench = Bench(SHEET, FaultPlan(rate=0.4, seed=4))
    bench.faults.rng = np.random.default_rng(1)
    with server.background(bench, stall=0.1) as port:
        substrate = instrument_substrate(
            lambda: VirtualBench(f"tcp://127.0.0.1:{port}", points=POINTS, timeout=2.0),
            batch=10,
            archive=Archive(tmp_path),
            retry=Retry(attempts=20, first=0.05, longest=0.2),
        )
        x = substrate(None, SETTINGS, 300).x
        substrate.close()
    assert x.shape == (300, POINTS, 8)
    assert at_the_settings(x)
    assert len(substrate.counts) > 3
    assert (
        sum(int(good.sum()) for good, *_ in read_batches(tmp_path))
        == 300
        == substrate.counts["good"]
    )
