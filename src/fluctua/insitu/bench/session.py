"""One connection to the virtual bench: SCPI messages in, answers out; sockets are in `server`.

Each connection has its own error queue and event register, so that one client's mistakes do not
show up in another's. Every number is checked; nothing that is sent is executed.
docs/virtual_bench.md lists the commands, and the tests compare the two.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from typing import NamedTuple

import numpy as np

from fluctua.insitu.bench.box import KINDS, MAX_BYTES, Bench, Fault, Problem
from fluctua.insitu.bench.device import FAMILIES, LIMITS, MAX_MODULATION, MAX_NOISE, MODULATION
from fluctua.insitu.instrument import scpi
from fluctua.insitu.instrument.scpi import MessageUnit, ScpiError, make_error

MAX_ERRORS = 32
MAX_UNITS = 64
"""Commands in one message."""
MAX_NUMBERS = 10_000
"""Parameters of one command."""
MAX_ANSWER = MAX_BYTES + 2**16
"""Bytes of the answer to one message: one acquisition, and further queries."""
POWER_ON = 128
"""The bit of the event register that a start sets."""


class Reply(NamedTuple):
    """The answer to a message.

    data: bytes to send.
    then: what happens to the connection next: "", "drop", "stall" or "reboot".
    """

    data: bytes = b""
    then: str = ""


class Session:
    """One connection to a bench."""

    def __init__(self, bench: Bench):
        self.bench = bench
        self.errors: deque[ScpiError] = deque()
        self.events = self.mask = self.service = 0
        self.then = ""

    def execute(self, line: bytes, room: int = MAX_ANSWER) -> Reply:
        """Execute one message and return its reply. Errors are queued, never raised.

        Args:
            line: the message without its end.
            room: bytes that the answer may have. A query whose answer does not fit is not answered,
                and an error is queued.
        """
        self.then = ""
        try:
            text = line.decode("ascii")
            if not text.isprintable() and any(c not in "\t" and not c.isprintable() for c in text):
                raise UnicodeDecodeError("ascii", line, 0, 1, "control character")
        except UnicodeDecodeError:
            self.queue_error(make_error(-101, "messages are printable ASCII"))
            return Reply()
        answers: list[bytes] = []
        for i, unit in enumerate(scpi.split_message(text.replace("\t", " "))):
            if i >= MAX_UNITS:
                self.queue_error(make_error(-223, f"at most {MAX_UNITS} commands in a message"))
                break
            try:
                answer = self._run(unit)
            except Problem as problem:
                self.queue_error(problem.entry)
                continue
            except MemoryError:
                self.queue_error(make_error(-225))
                continue
            except Exception as bug:  # other clients keep the bench
                self.queue_error(make_error(-310, f"{type(bug).__name__}: {bug}"))
                continue
            if answer is not None:
                answers.append(answer if isinstance(answer, bytes) else answer.encode())
                room -= len(answers[-1]) + 1  # a semicolon, or the end of the line
                if room < 0:
                    answers.pop()
                    self.then = ""
                    self.queue_error(
                        make_error(
                            -430, f"answers of more than {MAX_ANSWER} bytes wait to be collected"
                        )
                    )
                    break
            if self.then in ("stall", "reboot"):
                return Reply(b"", self.then)
        if answers:
            answers[-1] += b"\n"
        return Reply(b";".join(answers), self.then)

    def queue_error(self, entry: ScpiError) -> None:
        """Queue an error; a full queue reports that in its last entry."""
        self.events |= scpi.event_bit(entry.code)
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(entry)
        else:
            self.errors[-1] = make_error(-350)

    def _run(self, unit: MessageUnit) -> str | bytes | None:
        name = unit.header + ("?" if unit.query else "")
        count = len(unit.arguments)
        for pattern, run, minimum, maximum in COMMANDS:
            if pattern.fullmatch(name):
                if not minimum <= count <= maximum:
                    code = -109 if count < minimum else -108 if maximum == 0 else -223
                    raise Problem(code, f"{name} takes {_describe_count(minimum, maximum)}")
                return run(self, *unit.arguments)
        raise Problem(-113, unit.header[:60])


def _describe_count(minimum: int, maximum: int) -> str:
    if maximum == 0:
        return "no parameter"
    return f"{minimum} parameters" if minimum == maximum else f"{minimum} to {maximum} parameters"


def _parse_number(text: str, low: float, high: float) -> float:
    value = scpi.parse_number(text)
    if value is None:
        raise Problem(-120, f"a decimal number was expected, not {text[:30]}")
    if not low <= value <= high:
        raise Problem(-222, f"{value:g} is outside {low:g} to {high:g}")
    return value


def _parse_whole(text: str, low: int, high: int) -> int:
    value = _parse_number(text, low, high)
    if value != int(value):
        raise Problem(-104, f"a whole number was expected, not {text[:30]}")
    return int(value)


# ----------------------------------------------------------------------------------------- commands


class Command(NamedTuple):
    """A command of the bench.

    pattern: of the header, with `?` for a query.
    run: (session, *parameters) -> an answer or None.
    minimum, maximum: number of parameters.
    """

    pattern: re.Pattern[str]
    run: Callable[..., str | bytes | None]
    minimum: int = 0
    maximum: int = 0


COMMANDS: list[Command] = []


def _command(
    header: str,
    run: Callable[..., str | bytes | None],
    minimum: int = 0,
    maximum: int | None = None,
) -> None:
    """Add a command; `maximum` parameters is `minimum` if not given."""
    query = r"\?" if header.endswith("?") else ""
    pattern = re.compile(scpi.compile_pattern(header.rstrip("?")).pattern + query)
    COMMANDS.append(Command(pattern, run, minimum, minimum if maximum is None else maximum))


def _clear(s: Session) -> None:
    s.errors.clear()
    s.events = 0


def _read_events(s: Session) -> int:
    return s.events | (POWER_ON if s.bench.power_on else 0)


def _take_events(s: Session) -> str:
    events = _read_events(s)
    s.events = 0
    s.bench.power_on = False
    return str(events)


def _read_status(s: Session) -> str:
    byte = (4 if s.errors else 0) | (32 if _read_events(s) & s.mask else 0)
    return str(byte | (64 if byte & s.service else 0))


def _operation_complete(s: Session) -> None:
    s.events |= 1


def _set_mask(s: Session, text: str) -> None:
    s.mask = _parse_whole(text, 0, 255)


def _set_service(s: Session, text: str) -> None:
    s.service = _parse_whole(text, 0, 255)


_command("*IDN?", lambda s: f"fluctua,virtual bench,{s.bench.sheet.seed},{version('fluctua')}")
_command("*RST", lambda s: s.bench.reset())
_command("*CLS", _clear)
_command("*ESR?", _take_events)
_command("*OPC?", lambda s: "1")  # commands are carried out one after the other
_command("*OPC", _operation_complete)
_command("*WAI", lambda s: None)
_command("*TST?", lambda s: "0")
_command("*ESE", _set_mask, 1)
_command("*ESE?", lambda s: str(s.mask))
_command("*SRE", _set_service, 1)
_command("*SRE?", lambda s: str(s.service))
_command("*STB?", _read_status)
_command("SYSTem:ERRor[:NEXT]?", lambda s: str(s.errors.popleft() if s.errors else scpi.NO_ERROR))
_command("SYSTem:ERRor:COUNt?", lambda s: str(len(s.errors)))
_command("SYSTem:VERSion?", lambda s: "1999.0")
_command("NETWork:SITes?", lambda s: str(s.bench.sheet.nominal.sites))
_command("NETWork:LATTice?", lambda s: f"{s.bench.sheet.rows},{s.bench.sheet.columns}")
_command("NETWork:BONDs?", lambda s: ",".join(map(str, s.bench.sheet.nominal.bonds.ravel())))
_command("NETWork:NOISe?", lambda s: repr(s.bench.sheet.sigma_w))


def _set_drive(s: Session, text: str) -> None:
    s.bench.amplitude = _parse_number(text, 0.0, 1000.0)


def _set_noise(s: Session, text: str) -> None:
    s.bench.noise = _parse_number(text, 0.0, MAX_NOISE)


def _set_modulation(s: Session, text: str) -> None:
    s.bench.sigma_kappa = _parse_number(text, 0.0, MAX_MODULATION)


def _set_count(s: Session, text: str) -> None:
    s.bench.count = _parse_whole(text, 1, 10_000)


def _set_points(s: Session, text: str) -> None:
    s.bench.points = _parse_whole(text, 2, 100_000)


def _add_knob_commands(name: str, header: str) -> None:
    """Add the commands of one family of knobs."""

    def put(s: Session, *texts: str) -> None:
        expected = s.bench.settings[name].size
        if len(texts) != expected:
            code = -109 if len(texts) < expected else -223
            raise Problem(code, f"{expected} numbers were expected, not {len(texts)}")
        s.bench.settings[name] = np.array([_parse_number(text, *LIMITS[name]) for text in texts])

    _command(header, put, 1, MAX_NUMBERS)
    _command(header + "?", lambda s: scpi.format_numbers(s.bench.settings[name]))
    _command(header + ":RANGe?", lambda s: scpi.format_numbers(np.array(LIMITS[name])))


for _name, _header in zip(FAMILIES, ("SOURce:OMEGa", "SOURce:KAPPa", "SOURce:CHI"), strict=True):
    _add_knob_commands(_name, _header)
_command("SOURce:NOISe", _set_noise, 1)
_command("SOURce:NOISe?", lambda s: repr(s.bench.noise))
_command("SOURce:NOISe:RANGe?", lambda s: scpi.format_numbers(np.array([0.0, MAX_NOISE])))
_command("SOURce:MODulation", _set_modulation, 1)
_command("SOURce:MODulation?", lambda s: repr(s.bench.sigma_kappa))
_command("SOURce:MODulation:RANGe?", lambda s: scpi.format_numbers(np.array([0.0, MAX_MODULATION])))
_command(
    "SOURce:MODulation:SPECtrum?", lambda s: f"{MODULATION.harmonics},{MODULATION.omega_max!r}"
)
_command("SOURce:DRIVe", _set_drive, 1)
_command("SOURce:DRIVe?", lambda s: repr(s.bench.amplitude))
_command("ACQuire:COUNt", _set_count, 1)
_command("ACQuire:COUNt?", lambda s: str(s.bench.count))
_command("ACQuire:POINts", _set_points, 1)
_command("ACQuire:POINts?", lambda s: str(s.bench.points))
_command("ACQuire:SITes?", lambda s: ",".join(map(str, s.bench.sheet.sites)))
_command("ACQuire:NOISe?", lambda s: repr(s.bench.sheet.readout))
_command("ACQuire:INTerval?", lambda s: repr(s.bench.sheet.interval))
_command("ACQuire:SCALe?", lambda s: repr(s.bench.sheet.scale))
_command("ACQuire:RANGe?", lambda s: repr(s.bench.sheet.adc_range))
_command("ACQuire:SHOTs?", lambda s: str(s.bench.shots))


def _initiate(s: Session) -> None:
    s.bench.initiate()
    if s.bench.fault == "reboot":
        s.then = "reboot"


def _abort(s: Session) -> None:
    s.bench.codes = None


def _fetch(s: Session) -> bytes:
    codes = s.bench.codes
    fault = s.bench.fault
    if codes is None:
        raise Problem(-230, "nothing was acquired; INIT first")
    s.bench.fault = ""
    if fault in ("drop", "stall"):
        s.then = fault
    data = codes.astype("<i2", copy=False).tobytes()
    return scpi.make_block(data[: len(data) // 3] if fault == "short" else data)


def _fetch_modulation(s: Session) -> bytes:
    if s.bench.played is None:
        raise Problem(
            -230, "nothing was modulated in the last acquisition; SOUR:MOD and INIT first"
        )
    both = np.stack([s.bench.played["sine"], s.bench.played["cosine"]], axis=2)
    return scpi.make_block(both.astype("<f4", copy=False).tobytes())


def _add_fault(s: Session, kind: str, after: str = "1", times: str = "1") -> None:
    if kind.lower() not in KINDS:
        raise Problem(-224, f"one of {' '.join(KINDS)} was expected")
    if len(s.bench.faults.pending) >= 100:
        raise Problem(-223, "a hundred faults are pending")
    s.bench.faults.pending.append(
        Fault(kind.lower(), _parse_whole(after, 1, 10**6), _parse_whole(times, 1, 10**6))
    )


_command("INITiate[:IMMediate]", _initiate)
_command("ABORt", _abort)
_command("FETCh[:WAVeform]?", _fetch)
_command("FETCh:MODulation?", _fetch_modulation)
_command("DIAGnostic:FAULt", _add_fault, 1, 3)
_command("DIAGnostic:FAULt?", lambda s: ",".join(map(str, s.bench.faults.pending)) or "none")
_command("DIAGnostic:FAULt:CLEar", lambda s: s.bench.faults.pending.clear())
