"""The virtual bench: its box, its SCPI, its socket; and that nothing it is sent brings it down."""

import contextlib
import io
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluctua.insitu.bench import box, device, server
from fluctua.insitu.bench.box import Bench
from fluctua.insitu.bench.session import COMMANDS, MAX_ANSWER, Session
from fluctua.insitu.instrument import scpi
from fluctua.insitu.instrument.protocol import CommandRejected, Instrument, InstrumentError
from fluctua.insitu.instrument.virtual import VirtualBench
from processes import wait_until

deliver = server.Server._deliver
SMALL = device.Sheet(rows=2, columns=2, seed=1)


@pytest.fixture
def port():
    with server.background(Bench(SMALL)) as number:
        yield number


@contextlib.contextmanager
def client(port, timeout=30.0):
    with (
        socket.create_connection(("127.0.0.1", port), timeout=timeout) as s,
        s.makefile("rwb", buffering=0) as f,
    ):
        yield s, f


def ask(port, *lines):
    """The answers of a fresh connection to some queries."""
    with client(port) as (_, f):
        f.write(b"".join(line + b"\n" for line in lines))
        return [f.readline() for line in lines if b"?" in line]


def tell(session, text):
    return session.execute(text.encode()).data.decode().strip()


# ----------------------------------------------------------------------------------------- the wire


def test_blocks_read_back():
    for data in (b"", b"\n", bytes(range(256)) * 40):
        assert scpi.read_block(io.BytesIO(scpi.make_block(data)).read, max_bytes=20_000) == data
    assert scpi.make_block(b"x" * 256).startswith(b"#3256x")


@pytest.mark.parametrize("wire", [b"abc", b"#0", b"#x12", b"#3 12", b"#9999999999", b"#14abcd"])
def test_a_bad_block_is_refused(wire):
    with pytest.raises(ValueError, match="block|bytes"):
        scpi.read_block(io.BytesIO(wire).read, max_bytes=3)


@pytest.mark.parametrize("text", ["1", "-2.5", "+.5", "3.", "1e-3", "1E+10"])
def test_numbers(text):
    assert scpi.parse_number(text) == float(text)


@pytest.mark.parametrize(
    "text", ["", "nan", "inf", "1e999", "0x10", "1_000", "١", "1" * 101, "1e", "--1", "#B1"]
)
def test_not_numbers(text):
    assert scpi.parse_number(text) is None


def test_numbers_read_back_exactly():
    values = np.random.default_rng(0).normal(size=50) * 10.0 ** np.arange(-25, 25)
    assert [
        scpi.parse_number(text) for text in scpi.format_numbers(values).split(",")
    ] == values.tolist()


# ------------------------------------------------------------------------------------------ the box


def test_the_box_is_not_its_data_sheet_and_the_same_each_time():
    made, again = device.draw_hidden(SMALL), device.draw_hidden(SMALL)
    settings = device.reset_settings(SMALL)
    theta = device.compute_parameters(SMALL, made, settings)
    assert np.abs(theta["omega"]).max() > 0.1
    assert np.std(theta["kappa"]) > 0.05
    np.testing.assert_array_equal(
        theta["kappa"], device.compute_parameters(SMALL, again, settings)["kappa"]
    )
    aged = device.compute_parameters(SMALL, made, settings, shots=5000)["omega"] - theta["omega"]
    assert 0 < np.abs(aged).max() <= 2 * SMALL.ageing


def test_samples_follow_the_transition_density_of_the_true_parameters():
    """Residuals under the hidden parameters have mean zero and the variance a²Δt + 2ν²."""
    sheet = device.Sheet(rows=2, columns=2, seed=1, ageing=0.0)
    made, settings = device.draw_hidden(sheet), device.reset_settings(sheet)
    x = device.measure(sheet, made, settings, count=400, points=51).astype(float) * sheet.scale
    psi = x[..., :4] + 1j * x[..., 4:]
    p, (i, j) = device.compute_parameters(sheet, made, settings), sheet.nominal.bonds.T
    h = np.diag(p["omega"]).astype(complex)
    h[i, j] = h[j, i] = p["kappa"]
    lead = np.array([1.0, 0, 0, 1.0])
    drift = psi[:, :-1] @ (-1j * h - np.diag(lead + made.gamma)).T
    drift[..., 0] += 10 * np.sqrt(2)
    residual = np.diff(psi, axis=1) - drift * sheet.interval
    variance = (
        sheet.sigma_w**2 * (lead + made.gamma) * 2 * sheet.interval
        + 2 * sheet.readout**2
        + sheet.scale**2 / 6
    )
    count = residual.shape[0] * residual.shape[1]
    assert np.all(np.abs(residual.mean(axis=(0, 1))) < 5 * np.sqrt(2 * variance / count))
    measured = (np.abs(residual) ** 2).mean(axis=(0, 1)) / 2
    assert np.all(np.abs(measured / variance - 1) < 5 / np.sqrt(count))


def test_converter_rounds_and_clips():
    coarse = device.Sheet(rows=2, columns=2, seed=1, bits=8, adc_range=2.0)
    codes = device.measure(
        coarse, device.draw_hidden(coarse), device.reset_settings(coarse), count=5, points=300
    )
    assert codes.dtype == np.int16
    assert codes.max() == 127
    assert codes.min() >= -127


# ----------------------------------------------------------------------------------------- messages


def test_common_commands():
    session = Session(Bench(SMALL))
    assert tell(session, "*IDN?").startswith("fluctua,virtual bench,1,")
    assert tell(session, "*ESR?") == "128"  # power on
    assert tell(session, "*ESR?") == "0"
    assert tell(session, "*OPC?;*TST?;SYST:VERS?") == "1;0;1999.0"
    assert tell(session, "*OPC;*ESR?") == "1"
    assert (
        tell(session, "*ESE 32;*SRE 32;FOO;*STB?") == "100"
    )  # error queue, event summary, service
    assert tell(session, "*CLS;*STB?;*ESE?;*SRE?") == "0;32;32"


def test_long_short_and_compound_forms():
    session = Session(Bench(SMALL))
    for query in ("SOUR:OMEG?", "source:omega?", ":Source:OMEGa?"):
        assert tell(session, query) == "0.0,0.0,0.0,0.0"
    assert (
        tell(session, "SOUR:OMEG 1,2,-1,0.5;KAPP 1,1,1,2;:SOUR:OMEG?;KAPP?")
        == "1.0,2.0,-1.0,0.5;1.0,1.0,1.0,2.0"
    )
    assert tell(session, "SYST:ERR:COUNT?") == "0"
    session.execute(b"*RST")
    assert tell(session, "SOUR:OMEG?") == "0.0,0.0,0.0,0.0"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("FOO:BAR 1", -113),
        ("SOURC:OMEG?", -113),  # neither the short nor the long form
        ("SOUR:OMEG", -109),
        ("SOUR:OMEG 1,2,3", -109),
        ("SOUR:OMEG 1,2,3,4,5", -223),
        ("SOUR:OMEG 1,2,3,9", -222),
        ("SOUR:OMEG 1,2,3,nan", -120),
        ("SOUR:OMEG #14abcd", -109),
        ("*IDN? 3", -108),
        ("ACQ:COUN 2.5", -104),
        ("ACQ:COUN 0", -222),
        ("ACQ:COUN 10000;POIN 100000;:INIT", -225),
        ("FETC?", -230),
        ("DIAG:FAUL explode", -224),
        ("*CLS;" * 65, -223),
        ("\x07*IDN?", -101),
        ("é", -101),
    ],
)
def test_errors_are_queued_with_the_standard_numbers(message, code):
    session = Session(Bench(SMALL))
    before = tell(session, "SOUR:OMEG?")
    session.execute(message.encode())
    assert tell(session, "SYST:ERR?").startswith(f"{code},")
    assert tell(session, "SYST:ERR?") == '0,"No error"'
    assert tell(session, "SOUR:OMEG?") == before  # all or nothing


def test_error_queue_overflows_as_it_should():
    session = Session(Bench(SMALL))
    for _ in range(40):
        session.execute(b"FOO")
    answers = [tell(session, "SYST:ERR?") for _ in range(33)]
    assert answers[30].startswith("-113,")
    assert answers[31:] == ['-350,"Queue overflow"', '0,"No error"']


WORDS = [
    "*IDN?",
    "*RST",
    "*ESR?",
    "SYST:ERR?",
    "SOUR:OMEG",
    "SOUR:OMEG?",
    "SOUR:KAPP",
    "ACQ:COUN",
    "ACQ:POIN",
    "INIT",
]
WORDS += [
    "FETC?",
    "DIAG:FAUL",
    "nan",
    "drop",
    "1",
    "-2.5e3",
    "1e400",
    "2,3",
    "#15",
    ";",
    ":",
    ",",
    "?",
    " ",
    '"',
    "\t",
]


@pytest.mark.long
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.one_of(
            st.lists(st.sampled_from(WORDS), max_size=12).map(lambda w: " ".join(w).encode()),
            st.lists(st.sampled_from(WORDS), max_size=12).map(lambda w: "".join(w).encode()),
            st.binary(max_size=200).map(lambda b: b.replace(b"\n", b"")),
            st.text(max_size=100).map(
                lambda s: s.replace("\n", "").encode("utf-8", "surrogatepass")
            ),
        ),
        max_size=6,
    )
)
def test_no_message_breaks_a_session(monkeypatch_bytes, lines):
    session = Session(Bench(SMALL))
    for line in lines:
        reply = session.execute(line)
        assert reply.data == b"" or reply.data.endswith(b"\n")
    assert tell(session, "*CLS;*IDN?").startswith("fluctua,virtual bench")
    assert tell(session, "SYST:ERR:COUN?") == "0"


@pytest.fixture
def monkeypatch_bytes(monkeypatch):
    """Acquisitions of a fuzzer stay small."""
    monkeypatch.setattr(box, "MAX_BYTES", 2**18)


# --------------------------------------------------------------------------------------- the socket


def test_driver_over_a_bare_socket(port):
    bench = VirtualBench(f"tcp://127.0.0.1:{port}", points=40)
    assert isinstance(bench, Instrument)
    _acquires(bench)


def test_driver_over_visa(port):
    pytest.importorskip("pyvisa_py")
    _acquires(VirtualBench(f"TCPIP::127.0.0.1::{port}::SOCKET", points=40))


def _acquires(bench):
    asked = {"omega": np.array([0.1, -0.2, 0.3, 1 / 3]), "kappa": np.full(4, 0.7)}
    bench.set(asked)
    bench.arm(6)
    batch = bench.acquire()
    assert batch.x.shape == (6, 40, 8)
    assert batch.t[1] == SMALL.interval
    assert np.all(batch.x[:, 0].std(axis=0) < 0.01)  # empty at first
    assert np.abs(batch.x).max() > 0.5
    health = bench.health()
    assert health.ok
    np.testing.assert_array_equal(health.settings["omega"], asked["omega"])
    with pytest.raises(CommandRejected, match="out of range"):
        bench.set({"omega": np.full(4, 50.0)})
    bench.close()


def test_pyvisa_reads_a_block_by_itself(port):
    """As somebody would at a prompt, without this library."""
    pyvisa = pytest.importorskip("pyvisa")
    pytest.importorskip("pyvisa_py")
    bench = pyvisa.ResourceManager("@py").open_resource(
        f"TCPIP::127.0.0.1::{port}::SOCKET",
        read_termination="\n",
        write_termination="\n",
        timeout=30_000,
    )
    assert "virtual bench" in bench.query("*IDN?")
    bench.write("ACQ:COUN 3;POIN 11;:INIT")
    assert len(bench.query_binary_values("FETC?", datatype="h", container=np.array)) == 3 * 11 * 8
    bench.close()


def test_plain_lines_as_from_netcat(port):
    assert ask(port, b"*IDN?\r", b"NETW:SIT?", b"SYST:ERR?") == [
        ask(port, b"*IDN?")[0],
        b"4\n",
        b'0,"No error"\n',
    ]


def test_garbage_on_the_socket_is_survived(port):
    rng = np.random.default_rng(5)
    for size in (1, 10, 1000, 3 * server.LINE_LIMIT):
        with client(port) as (s, f):
            s.sendall(rng.bytes(size))
    with client(port) as (_, f):
        f.write(b"A" * (2 * server.LINE_LIMIT) + b"\nSYST:ERR?\n\xff\xfe*IDN?\nSYST:ERR?\n*IDN?\n")
        assert f.readline().startswith(b"-363,")
        assert f.readline().startswith(b"-101,")
        assert b"virtual bench" in f.readline()
    with client(port) as (s, f):  # half a message, and the line goes dead: it is not carried out
        f.write(b"SOUR:OMEG 1,1,1,1")
        s.shutdown(socket.SHUT_WR)
        assert f.read() == b""
    assert ask(port, b"SOUR:OMEG?") == [b"0.0,0.0,0.0,0.0\n"]


def test_several_clients_have_their_own_errors(port):
    with client(port) as (_, one), client(port) as (_, two):
        one.write(b"FOO\nSYST:ERR:COUN?\n")
        two.write(b"SYST:ERR:COUN?\n")
        assert (one.readline(), two.readline()) == (b"1\n", b"0\n")


def test_clients_at_once_get_whole_answers(port):
    bad = []

    def work():
        bench = VirtualBench(f"tcp://127.0.0.1:{port}", points=40)
        for _ in range(5):
            if not bench.line.query("*IDN?").startswith("fluctua"):
                bad.append(1)
        bench.close()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not bad


def test_connections_are_limited_and_come_free_again(port):
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(client(port)) for _ in range(server.CLIENT_LIMIT)]
        for _, f in held:
            f.write(b"*OPC?\n")
            assert f.readline() == b"1\n"
        with pytest.raises(InstrumentError):
            VirtualBench(f"tcp://127.0.0.1:{port}")
        assert held[0][1].write(b"*OPC?\n")
        assert held[0][1].readline() == b"1\n"
    for _ in range(100):
        with contextlib.suppress(ConnectionError):
            if ask(port, b"*OPC?") == [b"1\n"]:
                break
    else:
        pytest.fail("closed connections still count")


@pytest.mark.long
@pytest.mark.parametrize("message", [b"\n", b"*CLS\n"])
def test_a_flood_does_not_keep_others_out(port, message, monkeypatch):
    """A megabyte on each of all connections: commands would take minutes to carry out."""
    monkeypatch.setattr(server, "GREETING", 0.3)
    flood = message * (2**20 // len(message))
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(client(port))[0] for _ in range(server.CLIENT_LIMIT)]
        for line in held:
            threading.Thread(target=_send_all, args=(line, flood), daemon=True).start()
        wait_until(lambda: _answers(port), seconds=20)


def _send_all(line, data):
    with contextlib.suppress(OSError):
        line.sendall(data)


def _answers(port):
    with contextlib.suppress(OSError):
        return ask(port, b"*OPC?") == [b"1\n"]


def test_a_client_that_does_not_read_is_left():
    """An answer that nobody collects costs a time-out, not the bench."""
    bench = Bench(device.Sheet(rows=2, columns=2, seed=1))
    with server.background(bench, patience=0.2) as port, client(port) as (_, lazy):
        lazy.write(
            b"ACQ:COUN 200;POIN 2000;:INIT\n" + 5 * b"FETC?\n"
        )  # 32 MB: more than any socket buffers
        with client(port) as (_, other):
            other.write(b"*IDN?\n")
            assert b"virtual bench" in other.readline()


def test_a_silent_connection_is_closed():
    with server.background(Bench(SMALL), idle=0.3) as port, client(port) as (_, f):
        f.write(b"*OPC?\n")  # and then nothing, as from a cable that was pulled
        assert f.read() == b"1\n"


@pytest.mark.parametrize(
    "rest", [b"SOUR:OM", b"A" * 200_000], ids=["half a line", "a line too long"]
)
def test_a_line_that_was_begun_is_not_waited_for_like_a_silent_client(rest):
    with server.background(Bench(SMALL), patience=0.3) as port, client(port, timeout=10) as (_, f):
        f.write(b"*OPC?\n" + rest)
        assert f.readline() == b"1\n"
        with contextlib.suppress(ConnectionResetError):
            assert f.read() == b""


def test_a_line_in_drops_does_not_keep_its_connection():
    """A byte now and then is no sign of life: the whole line has to come within the patience."""
    with server.background(Bench(SMALL), patience=0.5) as port, client(port, timeout=0.1) as (s, f):
        for _ in range(100):
            try:
                s.sendall(b"A")
                if s.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("a hundred bytes in ten seconds kept the connection")


def test_silent_connections_make_room_for_new_ones():
    with server.background(Bench(SMALL), patience=1.0) as port, contextlib.ExitStack() as stack:
        for _ in range(server.CLIENT_LIMIT):
            _, f = stack.enter_context(client(port))
            f.write(b"*OPC?\n")
            assert f.readline() == b"1\n"
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with contextlib.suppress(ConnectionError):
                if ask(port, b"*OPC?") == [b"1\n"]:
                    return
        pytest.fail("sixteen silent connections keep everybody out")


# ---------------------------------------------------------------------------------- size of answers


def test_the_answer_to_one_message_is_bounded():
    session = Session(Bench(SMALL))
    session.execute(b"ACQ:COUN 10;POIN 50;:INIT")  # blocks of 8,006 bytes
    reply = session.execute(b";".join([b"FETC?"] * 64), room=2**15)
    assert 3 * 8006 < len(reply.data) <= 2**15
    assert reply.data.count(b"#48000") == 4
    assert reply.data.endswith(b"\n")
    assert tell(session, "SYST:ERR?").startswith("-430,")
    assert tell(session, "*OPC?") == "1"


def test_a_whole_acquisition_fits_in_one_answer():
    sheet = device.Sheet(rows=2, columns=2)
    largest = box.MAX_BYTES // (4 * sheet.nominal.sites)  # samples of all trajectories together
    assert len(scpi.make_block(bytes(4 * sheet.nominal.sites * largest))) + 1 <= MAX_ANSWER


def test_answers_that_nobody_collects_are_bounded_together(monkeypatch):
    """Eight clients ask for 16 MB each and read nothing: the bench keeps two answers and
    refuses the rest.
    """
    monkeypatch.setattr(server, "MAX_ANSWER", 17_000_000)
    monkeypatch.setattr(server, "MAX_WAITING", 40_000_000)
    bench, kept = Bench(SMALL), []
    monkeypatch.setattr(
        server.Server, "_deliver", lambda self, *a: kept.append(self.waiting) or deliver(self, *a)
    )
    with server.background(bench) as port, contextlib.ExitStack() as stack:
        lazy = [stack.enter_context(client(port))[1] for _ in range(8)]
        lazy[0].write(b"ACQ:COUN 100;POIN 10000;:INIT;*OPC?\n")
        assert lazy[0].readline() == b"1\n"
        for f in lazy:
            f.write(b"FETC?\n")
        wait_until(lambda: len(kept) >= 9)
        assert ask(port, b"*OPC?") == [b"1\n"]  # a word has room
    assert 32_000_000 < max(kept) < 40_000_000


def test_a_mistake_of_the_bench_is_an_entry_in_the_queue(monkeypatch):
    session = Session(Bench(SMALL))
    monkeypatch.setattr(box, "measure", lambda *a, **k: 1 / 0)
    session.execute(b"INIT")
    assert tell(session, "SYST:ERR?").startswith('-310,"System error; ZeroDivisionError')
    assert tell(session, "*OPC?") == "1"


@pytest.mark.long
def test_command_line_listens_on_loopback_and_stops_with_its_starter():
    words = ["virtual-bench", "--port", "0", "--attached", "--set", "rows=2", "--set", "columns=2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fluctua", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    assert line.startswith("listening on TCPIP::127.0.0.1::")
    assert ask(int(line.split("::")[2]), b"NETW:LATT?") == [b"2,2\n"]
    process.stdin.close()
    assert process.wait(60) == 0
    process.stdout.close()


def test_every_command_is_documented_and_nothing_else():
    text = (Path(__file__).parents[3] / "docs" / "virtual_bench.md").read_text()
    tables = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    written = set(re.findall(r"`([*A-Z][A-Za-z:\[\]]*\??)`", tables))
    compiled = {
        scpi.compile_pattern(f.rstrip("?")).pattern + (r"\?" if f.endswith("?") else "")
        for f in written
    }
    assert compiled == {command.pattern.pattern for command in COMMANDS}
