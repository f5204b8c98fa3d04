"""The virtual bench as an instrument: SCPI messages in, answers out, nothing of sockets (see `server`).

One `Bench` is the box; each connection has its own `Session` with its own error queue and event register, so that
one client's mistakes do not show up in another's. Every number is checked; nothing that is sent is executed.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from fluctua.insitu.bench.box import Bench, Problem
from fluctua.insitu.bench.commands import TABLE
from fluctua.insitu.instrument import scpi
from fluctua.insitu.instrument.scpi import ScpiError, Unit, error

__all__ = ["Bench", "Reply", "Session", "commands"]
MOST_ERRORS = 32
MOST_UNITS = 64
"""Commands in one message."""


class Reply(NamedTuple):
    """What goes back, and what the connection does then: "", "drop", "stall" or "reboot"."""

    data: bytes = b""
    then: str = ""


class Session:
    """One connection to a bench."""

    def __init__(self, bench: Bench):
        self.bench = bench
        self.errors: deque[ScpiError] = deque()
        self.events = self.mask = self.service = 0
        self.then = ""

    def execute(self, line: bytes) -> Reply:
        """One message, a line without its end. Never raises on account of what it says."""
        self.then = ""
        try:
            text = line.decode("ascii")
            if not text.isprintable() and any(c not in "\t" and not c.isprintable() for c in text):
                raise UnicodeDecodeError("ascii", line, 0, 1, "control character")
        except UnicodeDecodeError:
            self.complain(error(-101, "messages are printable ASCII"))
            return Reply()
        answers: list[bytes] = []
        for i, unit in enumerate(scpi.units(text.replace("\t", " "))):
            if i >= MOST_UNITS:
                self.complain(error(-223, f"at most {MOST_UNITS} commands in a message"))
                break
            try:
                answer = self._run(unit)
            except Problem as problem:
                self.complain(problem.entry)
                continue
            except MemoryError:
                self.complain(error(-225))
                continue
            except Exception as bug:  # a mistake of the bench is no reason to leave the others without it
                self.complain(error(-310, f"{type(bug).__name__}: {bug}"))
                continue
            if answer is not None:
                answers.append(answer if isinstance(answer, bytes) else answer.encode())
            if self.then in ("stall", "reboot"):
                return Reply(b"", self.then)
        data = b";".join(answers) + b"\n" if answers else b""
        return Reply(data, self.then)

    def complain(self, entry: ScpiError) -> None:
        """Queue an error; a full queue says so in its last entry."""
        self.events |= scpi.event_bit(entry.code)
        if len(self.errors) < MOST_ERRORS:
            self.errors.append(entry)
        else:
            self.errors[-1] = error(-350)

    def _run(self, unit: Unit) -> str | bytes | None:
        for form, run, takes in TABLE:
            name = unit.header + ("?" if unit.query else "")
            if form.fullmatch(name):
                if len(unit.arguments) > takes[1]:
                    raise Problem(-108 if takes[1] == 0 else -223, f"{name} takes {_many(takes)}")
                if len(unit.arguments) < takes[0]:
                    raise Problem(-109, f"{name} takes {_many(takes)}")
                return run(self, unit.arguments)
        raise Problem(-113, unit.header[:60])


def _many(takes: tuple[int, int]) -> str:
    least, most = takes
    return "no parameter" if most == 0 else f"{least} parameters" if least == most else f"{least} to {most} parameters"


def commands() -> list[str]:
    """Every command as a pattern, for tests of the documentation."""
    return [form.pattern for form, *_ in TABLE]
