"""`fluctua virtual-bench`: a simulated instrument on a socket."""

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

from fluctua.cli.common import EXPECTED, fail, say
from fluctua.cli.settings import Key, Keys, Settings, read_settings

VIRTUAL_BENCH_KEYS: Keys = {
    "rows": Key(int, "rows of the lattice (3)"),
    "columns": Key(int, "columns of the lattice (4)"),
    "interval": Key(float, "time between two samples (0.01)"),
    "oversample": Key(int, "simulation steps per sampling interval (10)"),
    "disorder": Key(float, "standard deviation of the hidden resonance frequencies (0.4)"),
    "kappa_disorder": Key(float, "standard deviation of the hidden couplings (0.2)"),
    "gain_error": Key(float, "relative standard deviation of the actuators' gains (0.2)"),
    "ageing": Key(float, "amplitude of the slow change of the frequencies (0.05)"),
    "ageing_shots": Key(float, "trajectories in a period of that change (20000)"),
    "readout_noise": Key(float, "standard deviation of each quadrature's readout (0.001)"),
    "adc_range": Key(float, "full scale of the converter (16)"),
    "bits": Key(int, "bits of the converter, 4 to 16 (16)"),
    "read": Key(str, "resonators that are recorded: all, or ports (input and output) (all)"),
    "fault_rate": Key(float, "probability of a random fault at an acquisition (0)"),
}


def virtual_bench(
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one")] = 5025,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; any but 127.0.0.1 can be reached from other machines"
        ),
    ] = "127.0.0.1",
    seed: Annotated[
        int, typer.Option(help="Seed of all random numbers: hidden disorder and noise")
    ] = 0,
    devices: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Number of devices, each with its own disorder (seed, seed + 1, …) and port",
        ),
    ] = 1,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND@ACQUISITION",
            help="A fault, such as drop@3, or 2:drop@3 of the second device; may be repeated. "
            "Kinds: drop, stall, short, nan, clip, reboot, brownout, dead, frozen, random",
        ),
    ] = None,
    attached: Annotated[
        bool, typer.Option("--attached", help="Stop when standard input closes")
    ] = False,
    settings: Settings = None,
) -> None:
    """Serve an imperfect resonator network as a laboratory instrument: SCPI over TCP.

    Connect with PyVISA (TCPIP::127.0.0.1::5025::SOCKET) or netcat (nc 127.0.0.1 5025, then *IDN?).
    The device differs from its data sheet. docs/virtual_bench.md lists its commands.
    """
    from fluctua.insitu.bench.box import Bench, FaultPlan, parse_fault
    from fluctua.insitu.bench.device import Sheet
    from fluctua.insitu.bench.server import Server, serve

    try:
        keys = read_settings(settings, VIRTUAL_BENCH_KEYS)
        fault_rate = keys.pop("fault_rate", 0.0)
        if not 0 <= fault_rate <= 1:
            raise ValueError(f"--set fault_rate takes 0 to 1; got {fault_rate:g}.")
        if "readout_noise" in keys:
            keys["readout"] = keys.pop("readout_noise")
        sheet = Sheet(seed=seed, **keys)
        faults = [
            (_find_device(text, devices), parse_fault(text.rpartition(":")[2]))
            for text in fault or []
        ]
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
        prefix = "" if devices == 1 else f"{devices} devices, each a "
        seen = "" if sheet.read == "all" else f", read at {' and '.join(map(str, sheet.sites))}"
        say(
            f"{prefix}{sheet.rows}x{sheet.columns} lattice, {sheet.nominal.sites} + "
            f"{len(sheet.nominal.bonds)} knobs{seen}. Ctrl-C stops it."
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
            threading.Thread(target=_stop_when_closed, args=(loop, task), daemon=True).start()
        try:
            await task
        except asyncio.CancelledError:
            return

    try:
        asyncio.run(main())
    except OSError as error:
        fail(_explain(error, host, port))


def _find_device(text: str, devices: int) -> int | None:
    """Index of the device that has a fault; None for all."""
    which, colon, _ = text.rpartition(":")
    if not colon:
        return None
    if not which.isdigit() or not 1 <= int(which) <= devices:
        raise ValueError(
            f"a fault of one is NUMBER:KIND@ACQUISITION, NUMBER 1 to {devices}; got {text!r}."
        )
    return int(which) - 1


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use, perhaps by another bench. Stop that one, or choose "
            "another --port; 0 finds a free one."
        )
    what = (
        "--host must be an address of this machine"
        if isinstance(error, socket.gaierror)
        else "try another --host or --port"
    )
    return f"cannot listen on {host}:{port}: {error.strerror or error}; {what}."


def _stop_when_closed(loop: asyncio.AbstractEventLoop, task: asyncio.Future[Any]) -> None:
    """Stop the bench when the process that started it, and holds its standard input, ends."""
    while sys.stdin.read(4096):
        pass
    loop.call_soon_threadsafe(task.cancel)
