"""Driver of the virtual bench: SCPI over any `Transport`, a pattern for other drivers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from fluctua.core.arrays import Params
from fluctua.insitu.instrument import scpi
from fluctua.insitu.instrument.protocol import (
    Batch,
    CommandRejected,
    Health,
    InstrumentError,
    InvalidReply,
)
from fluctua.insitu.instrument.scpi import ScpiError
from fluctua.insitu.instrument.transport import connect, query_integer, query_number, query_numbers

INVALID = -(2**15)
POINTS = 601
"""Samples per trajectory after switching on."""
UNIT = "κ"
"""Of all rates: the nominal coupling."""
TRANSIENT = (-101, -102, -113, -120, -310, -350, -363)
"""Errors of a message that was garbled, or of a passing failure: they are retried."""
FAMILIES = ("omega", "kappa", "chi")
"""Its knobs."""
MIN_POSITIVE = float(np.finfo(np.float32).tiny)
SWITCHED_ON = "Is the bench switched on? fluctua virtual-bench starts one."


class BenchDescription(NamedTuple):
    """Data sheet of the bench, as read from it.

    identity: maker, model and serial number.
    rows, columns: of its lattice.
    sigma_w: amplitude of its noise.
    interval: time between two samples.
    full_scale: of the converter.
    scale: units per code.
    sites: resonators that are read.
    readout: standard deviation of the readout noise on each quadrature.
    """

    identity: str
    rows: int
    columns: int
    sigma_w: float
    interval: float
    full_scale: float
    scale: float
    sites: tuple[int, ...]
    readout: float

    @property
    def reads_all(self) -> bool:
        """Whether every resonator is read."""
        return self.sites == tuple(range(self.rows * self.columns))


class VirtualBench:
    """An `Instrument` with the commands of docs/virtual_bench.md.

    Rates are in units of the nominal coupling, κ.

    Args:
        address: tcp://HOST:PORT or a VISA resource.
        points: samples per trajectory, or None to leave them as they are.
        timeout: seconds to wait for an answer.
        noise: amplitude that is injected into every channel, in units of σ_W: σ² = σ_W² + noise².
        sigma_kappa: strength of the modulation of the couplings, which is recorded with every
            trajectory (`Batch.context`).

    >>> from fluctua.insitu.bench.box import Bench
    >>> from fluctua.insitu.bench.server import background  # or: fluctua virtual-bench --port PORT
    >>> with background(Bench()) as port:
    ...     bench = insitu.instrument.VirtualBench(f"tcp://127.0.0.1:{port}", points=11)
    ...     bench.arm(20)
    ...     print(bench.acquire().x.shape)
    (20, 11, 24)
    """

    units: Mapping[str, str] = {"omega": UNIT, "kappa": UNIT, "chi": f"{UNIT} per photon"}

    def __init__(
        self,
        address: str,
        *,
        points: int | None = None,
        timeout: float = 30.0,
        noise: float = 0.0,
        sigma_kappa: float = 0.0,
    ):
        self.names: tuple[str, ...] = ("omega", "kappa")
        if not timeout > 0:
            raise ValueError(f"`timeout` must be a positive number of seconds; got {timeout!r}.")
        if points is not None and (not isinstance(points, int) or points < 2):
            raise ValueError(f"`points` must be a whole number, at least 2; got {points!r}.")
        for name, value in (("noise", noise), ("sigma_kappa", sigma_kappa)):
            if not 0 <= value < np.inf:
                raise ValueError(f"`{name}` must be finite and not negative; got {value!r}.")
        self.generators = {"NOIS": float(noise), "MOD": float(sigma_kappa)}
        try:
            self.line = connect(address, timeout=timeout)
        except InstrumentError as error:
            raise InstrumentError(f"{error}. {SWITCHED_ON}") from error
        try:
            self._clear_errors(address)
            rows, columns = map(int, query_numbers(self.line, "NETW:LATT?", 2))
            self.description = BenchDescription(
                identity=self._read_identity(address),
                rows=rows,
                columns=columns,
                sigma_w=query_number(self.line, "NETW:NOIS?", least=0.0),
                interval=query_number(self.line, "ACQ:INT?", least=MIN_POSITIVE),
                full_scale=query_number(self.line, "ACQ:RANG?", least=MIN_POSITIVE),
                scale=query_number(self.line, "ACQ:SCAL?", least=MIN_POSITIVE),
                sites=self._read_sites(rows * columns),
                readout=query_number(self.line, "ACQ:NOIS?", least=0.0),
            )
            self.limits = {
                name: tuple(query_numbers(self.line, f"SOUR:{name.upper()}:RANG?", 2).tolist())
                for name in FAMILIES
            }
            if points is not None:
                self.line.write(f"ACQ:POIN {points}")
            self.channels = tuple(
                f"{part} psi[{n}]" for part in ("Re", "Im") for n in self.description.sites
            )
            self.points = query_integer(self.line, "ACQ:POIN?")
            self.count = 1
            if points is not None and self.points != points:
                raise InvalidReply(
                    f"{points} samples per trajectory were requested; the bench "
                    f"reads back {self.points}"
                )
            if any(self.generators.values()) or self._read_generators() != self.generators:
                for name, value in self.generators.items():
                    self.line.write(f"SOUR:{name} {value!r}")
                self._check_accepted()
            query_integer(self.line, "*ESR?")  # clears a start before this connection
            self._check_accepted()
        except BaseException:
            self.line.close()
            raise

    def _clear_errors(self, address: str) -> None:
        """Send the first message: only it shows whether a line of VISA leads anywhere."""
        try:
            self.line.write("*CLS")
        except InstrumentError as error:
            raise InstrumentError(f"no connection to {address}: {error}. {SWITCHED_ON}") from error

    def _read_identity(self, address: str) -> str:
        """Maker, model and serial number from `*IDN?`, without the version of the firmware."""
        answer = self.line.query("*IDN?")
        again = self.line.query("*IDN?")
        parts = answer.split(",")
        # noise on the line must not pass for another instrument
        if answer != again or len(parts) != 4:
            text = f"*IDN? was answered by {answer[:80]!r} and {again[:80]!r}"
            raise InvalidReply(
                f"{text}, where maker,model,serial,version was expected, twice the same"
            )
        if parts[1] != "virtual bench":
            raise CommandRejected(
                f"{address} is not a virtual bench; *IDN? was answered by {answer[:80]!r}. Write "
                "a driver for it."
            )
        return ",".join(parts[:3])

    def _read_sites(self, resonators: int) -> tuple[int, ...]:
        """Read which resonators are recorded, in the order of the channels."""
        numbers = query_numbers(self.line, "ACQ:SIT?")
        sites = tuple(int(number) for number in numbers)
        known = len(set(sites)) == len(sites) and all(0 <= n < resonators for n in sites)
        if not sites or not known or any(numbers != sites):
            raise InvalidReply(
                f"ACQ:SIT? was answered by {numbers.tolist()}, where different resonators from 0 "
                f"to {resonators - 1} were expected"
            )
        return sites

    def set(self, settings: Params) -> None:
        """Turn the knobs: omega (N,), kappa (B,) and chi (N,), or some of them."""
        self.names = tuple(settings)
        for name, values in settings.items():
            self.line.write(f"SOUR:{name.upper()} {scpi.format_numbers(values)}")
        self._check_accepted()

    def arm(self, count: int) -> None:
        """Set the number of trajectories of the next acquisition."""
        self.line.write(f"ACQ:COUN {count}")
        self._check_accepted()
        self.count = count

    def acquire(self) -> Batch:
        """Run an acquisition and fetch it."""
        self.line.write("INIT")
        self._check_accepted()
        sheet = self.description
        shape = (self.count, self.points, 2 * len(sheet.sites))
        expected = 2 * int(np.prod(shape))
        data = self.line.query_block("FETC?", max_bytes=expected)
        if len(data) != expected:
            raise InstrumentError(
                f"a short block: {len(data):,} bytes where {expected:,} were expected"
            )
        t = np.arange(self.points) * sheet.interval
        codes = np.frombuffer(data, "<i2").reshape(shape)
        modulation = self._fetch_modulation() if self.generators["MOD"] else None
        return Batch(t, codes, sheet.scale, sheet.full_scale, INVALID, modulation)

    def _fetch_modulation(self) -> dict[str, np.ndarray]:
        """Fetch the modulation of the last acquisition: {"sine", "cosine"}, (E, B, K) each."""
        # a query for a modulation that was not played would not be answered
        if (now := self._read_generators()) != self.generators:
            raise InstrumentError(
                f"the generators were set to {self.generators} and are at {now}: settings were lost"
            )
        harmonics = int(query_numbers(self.line, "SOUR:MOD:SPEC?", 2)[0])
        bonds = query_numbers(self.line, "NETW:BOND?").size // 2
        shape = (self.count, bonds, 2, harmonics)
        expected = 4 * int(np.prod(shape))
        data = self.line.query_block("FETC:MOD?", max_bytes=expected)
        if len(data) != expected:
            raise InstrumentError(
                f"a short block: {len(data):,} bytes of modulation, {expected:,} expected"
            )
        both = np.frombuffer(data, "<f4").reshape(shape)
        return {"sine": both[:, :, 0], "cosine": both[:, :, 1]}

    def _read_generators(self) -> dict[str, float]:
        """Read the settings of the generators of noise and modulation."""
        return {
            name: query_number(self.line, f"SOUR:{name}?", least=0.0) for name in self.generators
        }

    def health(self) -> Health:
        """Read back settings, the power-on bit, and the error queue."""
        settings = {name: query_numbers(self.line, f"SOUR:{name.upper()}?") for name in self.names}
        powered_on = bool(query_integer(self.line, "*ESR?") & 128)
        rebooted = powered_on or self._read_generators() != self.generators
        return Health(
            settings, rebooted, tuple(map(str, self._read_errors())), self.description.identity
        )

    def close(self) -> None:
        """Close the line."""
        with suppress(Exception):
            self.line.close()

    def _read_errors(self) -> list[ScpiError]:
        """Read the error queue, which empties it."""
        errors: list[ScpiError] = []
        while len(errors) < 100:
            answer = self.line.query("SYST:ERR?")
            entry = scpi.parse_error(answer)
            if entry is None:
                raise InvalidReply(
                    f"SYST:ERR? was answered by {answer[:60]!r}, which is no entry of "
                    "an error queue"
                )
            if entry.code == 0:
                break
            errors.append(entry)
        return errors

    def _check_accepted(self) -> None:
        """Wait for the commands so far, and raise their errors."""
        answer = self.line.query("*OPC?")
        if answer not in ("1", "+1"):
            raise InvalidReply(f"*OPC? was answered by {answer[:60]!r}, where 1 was expected")
        if errors := self._read_errors():
            text = f"the bench refused: {'; '.join(map(str, errors))}"
            raise (
                InvalidReply(text)
                if all(entry.code in TRANSIENT for entry in errors)
                else CommandRejected(text)
            )
