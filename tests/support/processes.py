"""Python processes that tests start, and waiting for what they do."""

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

# XLA optimises code that tests run once; without that their time is halved.
QUICK_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
QUICK = "FLUCTUA_TESTS_COMPILE_QUICKLY"
"""Marks, in the environment, that XLA_FLAGS is set by the tests."""


def compile_quickly():
    """Set XLA_FLAGS, unless it is set, to those of `QUICK_FLAGS` that the installed JAX accepts."""
    if "XLA_FLAGS" not in os.environ:
        os.environ["XLA_FLAGS"] = " ".join(accepted_flags(QUICK_FLAGS))
        os.environ[QUICK] = "1"


def accepted_flags(flags):
    """Return the flags that XLA accepts.

    JAX ends its process at an unknown one, so another process tries.
    """
    if not flags or _is_accepted(flags):
        return flags
    return tuple(flag for flag in flags if len(flags) > 1 and _is_accepted((flag,)))


def _is_accepted(flags):
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(command, env=environment, capture_output=True).returncode == 0


def environment_of_a_user(**variables):
    """The environment with the compiler as users have it, for numbers to all digits and for
    memory.
    """
    hidden = {"XLA_FLAGS", QUICK} if QUICK in os.environ else set()
    return {name: v for name, v in os.environ.items() if name not in hidden} | variables


def numbers_printed_by(script):
    """Run a script in a process of its own, with the compiler as users have it; return the
    numbers that it prints.
    """
    environment = environment_of_a_user(PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, "-c", script]
    out = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    return [float(word) for word in out.split()]


def peak_memory():
    """Most memory that this process has held, in bytes.

    `getrusage` would report the peak of its parent.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def reset_peak_memory():
    """Let `peak_memory` begin anew at what this process holds now: without what a compiler took."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc's own
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def environment_to_die_in(folder, **variables):
    """The environment for processes that are killed: half of a compiled function that they
    leave is theirs alone.
    """
    return {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), **variables}


def wait_until(condition, process=None, seconds=300.0, interval=0.005):
    """Wait for `condition()` to become true; fail at a deadline, or once `process` has ended
    without it.
    """
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds:g} s"
        assert process is None or process.poll() is None or condition(), (
            f"the process ended with {process.returncode}"
        )
        time.sleep(interval)


def cpu_seconds(process):
    """Processor time that a running process has used, of all its threads."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("reads the time of a process from /proc, which is Linux's")
    assert process.poll() is None, f"the process ended with {process.returncode}"
    status = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(status[11]) + int(status[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_busy(process, seconds=0.5):
    """Wait until a process has computed for so long: it is then inside what it said that it
    would begin.
    """
    begin = cpu_seconds(process)
    wait_until(lambda: cpu_seconds(process) > begin + seconds, process)


def read_until(process, words, seconds=300.0):
    """What a process prints up to `words`, line breaks apart; it is ended at a deadline."""
    deadline, text = threading.Timer(seconds, process.kill), ""
    deadline.start()
    try:
        while words not in " ".join(text.split()):
            line = process.stdout.readline()
            assert line, f"{words!r} is not in {text!r}"
            text += line
    finally:
        deadline.cancel()
    return text
