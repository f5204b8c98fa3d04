"""The driver of the virtual bench, and a pattern for the driver of a real one: SCPI over any `Transport`."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import numpy as np

from fluctua.core.types import Params
from fluctua.insitu.instrument import scpi
from fluctua.insitu.instrument.protocol import Batch, Health, InstrumentError, Refused
from fluctua.insitu.instrument.transport import connect

INVALID = -(2**15)
SWITCHED_ON = "Is the bench switched on? fluctua virtual-bench starts one."


class Description(NamedTuple):
    """What the bench says of itself. rows, columns: of its lattice. sigma_w: its noise, by the data sheet."""

    identity: str
    rows: int
    columns: int
    sigma_w: float
    interval: float
    full_scale: float
    scale: float


class VirtualBench:
    """An `Instrument` that speaks the commands of docs/virtual_bench.md.

    address: tcp://HOST:PORT or a VISA resource. points: samples a trajectory, or None to leave them as they are.

    >>> bench = VirtualBench("TCPIP::127.0.0.1::5025::SOCKET", points=601)
    >>> bench.set({"omega": omega, "kappa": kappa}); bench.arm(100); bench.acquire().x.shape
    (100, 601, 24)
    """

    def __init__(self, address: str, *, points: int | None = None, timeout: float = 30.0):
        if not timeout > 0:
            raise ValueError(f"`timeout` must be a positive number of seconds; got {timeout!r}.")
        try:
            self.line = connect(address, timeout=timeout)
        except InstrumentError as error:
            raise InstrumentError(f"{error}. {SWITCHED_ON}") from error
        try:
            self._greet(address)
            identity = self.line.query("*IDN?")
            if "virtual bench" not in identity:
                raise Refused(f"{address} is not a virtual bench; it says {identity[:80]!r}. Write a driver for it.")
            rows, columns = map(int, self.line.query("NETW:LATT?").split(","))
            self.description = Description(
                identity, rows, columns,
                *(float(self.line.query(q)) for q in ("NETW:NOIS?", "ACQ:INT?", "ACQ:RANG?", "ACQ:SCAL?")),
            )  # fmt: skip
            if points is not None:
                self.line.write(f"ACQ:POIN {points}")
            self.points, self.count = int(self.line.query("ACQ:POIN?")), 1
            self.line.query("*ESR?")  # a start before this connection is not news
            self._accepted()
        except BaseException:
            self.line.close()
            raise

    def _greet(self, address: str) -> None:
        """VISA may open a line that leads nowhere, and only the first message tells."""
        try:
            self.line.write("*CLS")
        except InstrumentError as error:
            raise InstrumentError(f"no connection to {address}: {error}. {SWITCHED_ON}") from error

    def set(self, settings: Params) -> None:
        """Turn the knobs: omega (N,) and kappa (B,)."""
        for name, values in settings.items():
            self.line.write(f"SOUR:{name.upper()} {scpi.numbers(values)}")
        self._accepted()

    def arm(self, count: int) -> None:
        """Trajectories of the next acquisition."""
        self.line.write(f"ACQ:COUN {count}")
        self._accepted()
        self.count = count

    def acquire(self) -> Batch:
        """Run and fetch."""
        self.line.write("INIT")
        self._accepted()
        d, sites = self.description, self.description.rows * self.description.columns
        shape = (self.count, self.points, 2 * sites)
        expected = 2 * int(np.prod(shape))
        data = self.line.query_block("FETC?", most=expected)
        if len(data) != expected:
            raise InstrumentError(f"a short block: {len(data):,} bytes where {expected:,} were expected")
        t = np.arange(self.points) * d.interval
        return Batch(t, np.frombuffer(data, "<i2").reshape(shape), d.scale, d.full_scale, INVALID)

    def health(self) -> Health:
        """Settings read back, the power-on bit, and the error queue."""
        settings = {
            name: np.array(self.line.query(f"SOUR:{name.upper()}?").split(","), float) for name in ("omega", "kappa")
        }
        rebooted = bool(int(self.line.query("*ESR?")) & 128)
        return Health(settings, rebooted, self._errors())

    def close(self) -> None:
        """Close the line."""
        with suppress(Exception):
            self.line.close()

    def _errors(self) -> tuple[str, ...]:
        answers: list[str] = []
        while not answers or (len(answers) < 100 and not answers[-1].lstrip("+").startswith("0,")):
            answers.append(self.line.query("SYST:ERR?"))
        return scpi.parsed_errors(answers)

    def _accepted(self) -> None:
        """Wait for the commands so far, and raise what was wrong with them."""
        self.line.query("*OPC?")
        if errors := self._errors():
            raise Refused(f"the bench refused: {'; '.join(errors)}")
