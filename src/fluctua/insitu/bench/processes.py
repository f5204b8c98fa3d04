"""Virtual benches as processes of their own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from fluctua.insitu.bench import device


@contextlib.contextmanager
def bench_processes(devices: int, *options: str) -> Iterator[list[tuple[str, int]]]:
    """Run `fluctua virtual-bench` as a process on free ports; yields (host, port) of each box."""
    words = ["--port", "0", "--attached", "--devices", str(devices), *options]
    command = [sys.executable, "-m", "fluctua", "virtual-bench", *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        places = []
        for _ in range(devices):
            line = process.stdout.readline()
            if "listening on" not in line:
                raise RuntimeError(f"the virtual bench did not start; its output is {line!r}.")
            _, host, port, _ = line.split()[2].split("::")
            places.append((host, int(port)))
        yield places
    finally:
        assert process.stdin is not None
        process.stdin.close()  # its sign to stop, also if this process is killed
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def bench_process(*options: str) -> Iterator[tuple[str, int]]:
    """Run a virtual bench with one box; yields its (host, port)."""
    with bench_processes(1, *options) as places:
        yield places[0]


def list_sheet_options(sheet: device.Sheet) -> list[str]:
    """List the command-line options of a bench with this data sheet."""
    words = ["--seed", str(sheet.seed), "--set", f"readout_noise={sheet.readout}"]
    for name in (
        "rows",
        "columns",
        "interval",
        "oversample",
        "disorder",
        "kappa_disorder",
        "gain_error",
        "ageing",
        "ageing_shots",
        "adc_range",
        "bits",
        "read",
    ):
        words += ["--set", f"{name}={getattr(sheet, name)}"]
    return words
