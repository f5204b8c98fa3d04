"""`fluctua virtual-bench`."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import sys
import threading
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from fluctua.cli.common import EXPECTED, fail, lattice_size, say


def virtual_bench(
    port: Annotated[int, typer.Option(help="0 lets the system choose one")] = 5025,
    host: Annotated[
        str, typer.Option(help="where to listen; other machines can reach it only if this says so")
    ] = ("127.0.0.1"),
    lattice: Annotated[str, typer.Option(help="rows x columns")] = "3x4",
    seed: Annotated[int, typer.Option(help="of the box: its hidden disorder, and its noise")] = 0,
    devices: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="boxes, each with its own disorder (seed, seed + 1, …), on ports in a row",
        ),
    ] = 1,
    interval: Annotated[float, typer.Option(help="between two samples")] = 0.01,
    oversample: Annotated[int, typer.Option(help="simulation steps in a sampling interval")] = 10,
    disorder: Annotated[
        float, typer.Option(help="of the resonance frequencies, standard deviation")
    ] = 0.4,
    kappa_disorder: Annotated[float, typer.Option(help="of the couplings")] = 0.2,
    gain_error: Annotated[float, typer.Option(help="of the actuators, relative")] = 0.2,
    ageing: Annotated[
        float, typer.Option(help="amplitude of the slow change of the frequencies")
    ] = 0.05,
    ageing_shots: Annotated[
        float, typer.Option(help="trajectories in a period of that change")
    ] = 20_000.0,
    readout: Annotated[float, typer.Option(help="readout noise of each quadrature")] = 1e-3,
    adc_range: Annotated[float, typer.Option(help="full scale of the converter")] = 16.0,
    bits: Annotated[int, typer.Option(help="of the converter, 4 to 16")] = 16,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="KIND@ACQUISITION, such as drop@3, or 2:drop@3 of the second box alone; may be "
            "repeated. drop, stall, "
            "short, nan, clip, reboot, brownout, dead, frozen, random"
        ),
    ] = None,
    fault_rate: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="probability of a random fault at an acquisition"),
    ] = 0.0,
    attached: Annotated[
        bool, typer.Option("--attached", help="stop when standard input closes")
    ] = False,
) -> None:
    """Serve an imperfect resonator network as a laboratory instrument: SCPI over TCP.

    Connect with PyVISA (TCPIP::127.0.0.1::5025::SOCKET) or netcat (nc 127.0.0.1 5025, then *IDN?).
    The box is not what its data sheet says; docs/virtual_bench.md lists its commands.
    """
    from fluctua.insitu.bench.box import Bench, FaultPlan, parse
    from fluctua.insitu.bench.device import Sheet
    from fluctua.insitu.bench.server import Server, serve

    try:
        rows, columns = lattice_size(lattice)
        sheet = Sheet(
            rows=rows,
            columns=columns,
            seed=seed,
            interval=interval,
            oversample=oversample,
            disorder=disorder,
            kappa_disorder=kappa_disorder,
            gain_error=gain_error,
            ageing=ageing,
            ageing_shots=ageing_shots,
            readout=readout,
            adc_range=adc_range,
            bits=bits,
        )
        faults = [(_device(text, devices), parse(text.rpartition(":")[2])) for text in fault or []]
        benches = [
            Bench(
                replace(sheet, seed=seed + k),
                FaultPlan(
                    tuple(f for which, f in faults if which in (None, k)),
                    rate=fault_rate,
                    seed=seed + k,
                ),
            )
            for k in range(devices)
        ]
        if not 0 <= port <= 2**16 - devices:
            raise ValueError(f"--port must be 0 to {2**16 - devices}; got {port}.")
    except EXPECTED as error:
        fail(str(error))
    numbers: dict[int, int] = {}

    def listening(k: int, number: int) -> None:
        numbers[k] = number
        if len(numbers) < devices:
            return
        for _, at in sorted(numbers.items()):
            say(f"listening on TCPIP::{host}::{at}::SOCKET   (tcp://{host}:{at})")
        of = "" if devices == 1 else f"{devices} boxes, each a "
        say(
            f"{of}{lattice} lattice, {sheet.nominal.sites} + {len(sheet.nominal.bonds)} knobs. "
            "Ctrl-C stops it."
        )
        if host not in ("127.0.0.1", "localhost", "::1"):
            say("It can be reached from other machines, and has no password.")
        sys.stdout.flush()

    async def main() -> None:
        each = (
            serve(Server(bench), host, port and port + k, partial(listening, k))
            for k, bench in enumerate(benches)
        )
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(asyncio.gather(*each))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        if attached:
            threading.Thread(target=_until_closed, args=(loop, task), daemon=True).start()
        try:
            await task
        except asyncio.CancelledError:
            return

    try:
        asyncio.run(main())
    except OSError as error:
        fail(_why_not(error, host, port))


def _device(text: str, devices: int) -> int | None:
    """Which box a fault is of; None for all."""
    which, colon, _ = text.rpartition(":")
    if not colon:
        return None
    if not which.isdigit() or not 1 <= int(which) <= devices:
        raise ValueError(
            f"a fault of one box is NUMBER:KIND@ACQUISITION, NUMBER 1 to {devices}; got {text!r}."
        )
    return int(which) - 1


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use, perhaps by another bench. Stop that one, or choose "
            "another --port; "
            "0 finds a free one."
        )
    what = (
        "--host must be an address of this machine"
        if isinstance(error, socket.gaierror)
        else ("try another --host or --port")
    )
    return f"cannot listen on {host}:{port}: {error.strerror or error}; {what}."


def _until_closed(loop: asyncio.AbstractEventLoop, task: asyncio.Future[Any]) -> None:
    """Whoever started the bench holds its standard input; when that closes, they are gone."""
    while sys.stdin.read(4096):
        pass
    loop.call_soon_threadsafe(task.cancel)
