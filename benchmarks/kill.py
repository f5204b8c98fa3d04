"""Kills without warning: trainings, recordings and the in-situ loop, at random moments and at every
write.

    python benchmarks/kill.py --kills 1000 --minutes 60

Each round begins something in a new folder, kills it again and again (SIGKILL), goes on each time
as a user would, lets it end, and looks at what is there. A loss: it cannot be gone on with, or
something that was acknowledged is gone. A
difference: a training that ended is not, to the bit, the one that was left alone. Half of the kills
come at a random moment, half at one of the system calls that write (write, fsync, rename, truncate,
unlink, mkdir), before it or between two pages of its bytes. A library between the program and the
system counts them, so a C compiler is needed.

The table is written after every round; a run that was stopped goes on with it. `--fresh` begins a
new one."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MARK = "fluctua-kill-"
HANGS = 150.0
"""Seconds after which a process that does not end is counted as a loss."""
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>
static long left = -1, seen = 0, armed = 0; static int half = 0;
void arm(long at, int in_half) { left = at; half = in_half; seen = 0; armed = 1; }
long counted(void) { armed = 0; return seen; }
static int ours(int fd) {
  char link[64], path[4096]; struct stat s;
  if (!armed || fstat(fd, &s) || !S_ISREG(s.st_mode)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0; return strstr(path, "fluctua-kill-") != 0;
}
static int now(void) { seen++; return left >= 0 && left-- == 0; }
static void die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }
/* A kill cuts a write between pages of a file, never inside one. */
static size_t part(size_t n, off_t o) {
  size_t end = (o + n) / 4096 * 4096;
  return half && end > (size_t)o ? end - o : 0;
}
static off_t where(int fd) { return lseek(fd, 0, SEEK_CUR); }
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
ssize_t write(int fd, const void *b, size_t n) {
  if (ours(fd) && now()) { size_t k = part(n, where(fd)); if (k) NEXT(write)(fd, b, k); die(); }
  return NEXT(write)(fd, b, n);
}
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) {
  if (ours(fd) && now()) { size_t k = part(n, o); if (k) NEXT(pwrite)(fd, b, k, o); die(); }
  return NEXT(pwrite)(fd, b, n, o);
}
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) {
  if (ours(fd) && now()) { size_t k = part(n, o); if (k) NEXT(pwrite64)(fd, b, k, o); die(); }
  return NEXT(pwrite64)(fd, b, n, o);
}
int fsync(int fd) { if (ours(fd) && now()) die(); return NEXT(fsync)(fd); }
int ftruncate(int fd, off_t n) { if (ours(fd) && now()) die(); return NEXT(ftruncate)(fd, n); }
int ftruncate64(int fd, off64_t n) {
  if (ours(fd) && now()) die();
  return NEXT(ftruncate64)(fd, n);
}
static int find_config(const char *path) { return armed && strstr(path, "fluctua-kill-") && now(); }
int rename(const char *a, const char *b) { if (find_config(b)) die(); return NEXT(rename)(a, b); }
int unlink(const char *a) { if (find_config(a)) die(); return NEXT(unlink)(a); }
int mkdir(const char *a, mode_t m) { if (find_config(a)) die(); return NEXT(mkdir)(a, m); }
"""


class Lost(Exception):
    """Something that was acknowledged is gone, or is not what it was."""


class Ended(NamedTuple):
    """How a child ended: "killed", "done" or "failed". words: what it acknowledged. writes: how
    many it made.
    """

    how: str
    words: list[str]
    writes: int = 0
    message: str = ""


class Kill(NamedTuple):
    """at: the write at which to die, −1 for none. half: between two pages of it. after:
    seconds, None for none.
    """

    at: int = -1
    half: bool = False
    after: float | None = None

    @property
    def kind(self) -> str:
        """As in the table."""
        return "random moment" if self.after is not None else "a write"


class Scenario(NamedTuple):
    """go_on: (folder, acknowledged, tell, draw) begins or goes on. check: (folder, reference)
    raises if it differs.
    """

    name: str
    share: float
    go_on: Callable[[Path, list[str], Callable[[str], None], random.Random], None]
    check: Callable[[Path, Path], None]


def child(work: Callable[[Callable[[str], None]], None], kill: Kill, shim: Any) -> Ended:
    """Run `work` in a process of its own and kill it, or let it end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)

        def tell(text):
            return os.write(write, (text.replace("\n", " ") + "\n").encode())

        status = 1
        try:
            faulthandler.dump_traceback_later(HANGS, exit=True, file=write)
            shim.arm(kill.at, int(kill.half))
            work(tell)
            tell(f"writes {shim.counted()}")
            status = 0
        except BaseException as error:
            shim.counted()
            place = traceback.extract_tb(error.__traceback__)[-1]
            tell(
                f"failed {type(error).__name__}: {error} "
                f"({Path(place.filename).name}:{place.lineno})"
            )
        finally:
            os._exit(status)
    os.close(write)
    started = time.monotonic()
    if kill.after is not None:
        while (
            time.monotonic() - started < kill.after
            and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        ):
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)  # of our own child, which is not yet waited for
    with os.fdopen(read) as pipe:
        words = pipe.read().splitlines()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return Ended("killed", words)
    failed = [word for word in words if word.startswith("failed ")]
    if failed:
        return Ended("failed", words, message=failed[0].removeprefix("failed "))
    if status:
        return Ended(
            "failed",
            words,
            message="it hung: " + " < ".join(_short(w) for w in words if "File " in w)[:500],
        )
    return Ended("done", words, int(words[-1].split()[1]))


def _short(line: str) -> str:
    """A line of a traceback without its folders."""
    return re.sub(r'File ".*/([^/"]+)", line (\d+) in (\w+)', r"\1:\2 \3", line.strip())


# ----------------------------------------------------------------------------------------- lattices


def lattice(
    folder: Path, acknowledged: list[str], tell: Callable[[str], None], draw: random.Random
) -> None:
    """A small lattice with an escalating schedule, rewinds included."""
    from fluctua.runs import lattice as runs
    from fluctua.runs.config import PRESETS, apply_changes

    config = apply_changes(
        PRESETS["demo"],
        {
            "lattice.rows": 2,
            "lattice.columns": 3,
            "task.horizon": 0.5,
            "task.dt": 5e-3,
            "iterations": 60,
            "backend": "cpu",
            "keep.checkpoint_seconds": 0.02,
            "ensemble.schedule": "escalation",
            "ensemble.window": 10,
            "ensemble.budgets": [8, 12, 16, 20, 24, 28],
            "optimiser.rule": "paper",
            "keep.parameters_every": 3,
        },
    )

    def quiet(text):
        return None

    if not (folder / "config.toml").exists():
        rows = runs.run(config, folder)
    elif (folder / "summary.json").exists():
        return
    else:
        rows = runs.resume(folder, report=quiet)
    for _ in rows:
        pass


def own(
    folder: Path, acknowledged: list[str], tell: Callable[[str], None], draw: random.Random
) -> None:
    """A process of one's own, through fluctua.run."""
    import jax.numpy as jnp
    import optax

    import fluctua as fl

    process = fl.Process(lambda th, x: th["f"] - x, lambda th, x: 0.3 * jnp.ones_like(x))
    objective = fl.Objective(terminal=lambda th, x: -((x[0] - 1) ** 2))
    estimator = fl.ppgt(fl.simulator(process, jnp.zeros(1), jnp.linspace(0, 2, 21)), objective)
    training = fl.Training(estimator, {"f": jnp.zeros(1)}, optax.adam(0.1), trajectories=20)
    fl.run(training, iterations=40, folder=folder, checkpoint_seconds=0.02)


def same_training(folder: Path, reference: Path) -> None:
    """History, parameters and result, to the bit; times are the clock's."""
    import h5py
    import numpy as np

    from fluctua.store import history

    rows = [
        [row._replace(seconds=0.0) for row in history.read(path / "history.csv")]
        for path in (folder, reference)
    ]
    if rows[0] != rows[1]:
        raise Lost("another history")
    with h5py.File(folder / "parameters.h5") as a, h5py.File(reference / "parameters.h5") as b:
        names: list[str] = []
        b.visititems(
            lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None
        )
        for name in names:
            if not np.array_equal(a[name][...], b[name][...]):
                raise Lost(f"other parameters {name}")
    with np.load(folder / "final.npz") as a, np.load(reference / "final.npz") as b:
        if any(not np.array_equal(a[name], b[name]) for name in b.files):
            raise Lost("another final.npz")


# --------------------------------------------------------------------------------------- recordings

TRAJECTORIES, TIMES = 12, 40


def states(number: int) -> Any:
    """What trajectory `number` of a recording is."""
    import numpy as np

    return np.random.default_rng(number).normal(size=(TIMES, 2))


def recording(
    folder: Path, acknowledged: list[str], tell: Callable[[str], None], draw: random.Random
) -> None:
    """create, append, append_to and repair; every append that returned is told."""
    import numpy as np

    from fluctua.insitu.files import Description, append_to, create, repair

    folder.mkdir(exist_ok=True)
    path = folder / "run.nc"
    known = 1 + max(
        (int(word.split()[1]) for word in acknowledged if word.startswith("have ")), default=-1
    )
    if not path.exists():
        if known:
            raise Lost(f"the recording is gone, {known} trajectories were acknowledged")
        writer = create(path, Description(np.arange(float(TIMES)), ("a", "b")))
    else:
        if draw.random() < 0.5:
            repair(path)
        writer = append_to(path)
    if writer.count < known:
        raise Lost(f"{writer.count} trajectories of {known} that were acknowledged")
    while writer.count < TRAJECTORIES:
        tell(f"have {writer.append(states(writer.count))}")
        if draw.random() < 0.1:
            break
    whole = writer.count == TRAJECTORIES
    writer.close()
    if not whole:
        recording(folder, [*acknowledged], tell, draw)


def whole_recording(folder: Path, reference: Path) -> None:
    """Every trajectory, as it was measured."""
    import numpy as np

    from fluctua.insitu.recording.reader import open_recording

    with open_recording(folder / "run.nc") as file:
        if file.count != TRAJECTORIES:
            raise Lost(f"{file.count} trajectories of {TRAJECTORIES}")
        x = np.asarray(file.trajectories(load=True).x)
    if not np.array_equal(x, np.stack([states(n) for n in range(TRAJECTORIES)])):
        raise Lost("other states")


# ------------------------------------------------------------------------------------------ in situ


class Box:
    """An instrument that answers at once with noise."""

    def __init__(self) -> None:
        import numpy as np

        self.rng = np.random.default_rng()

    def set(self, settings: Any) -> None:
        self.settings = settings

    def arm(self, count: int) -> None:
        self.count = count

    def acquire(self) -> Any:
        import numpy as np

        from fluctua.insitu.instrument import Batch

        return Batch(np.arange(11.0), self.rng.normal(size=(self.count, 11, 1)), full_scale=100.0)

    def health(self) -> Any:
        from fluctua.insitu.instrument import Health

        return Health(settings=self.settings)

    def close(self) -> None:
        pass


ITERATIONS = 8


def in_situ(
    folder: Path, acknowledged: list[str], tell: Callable[[str], None], draw: random.Random
) -> None:
    """The loop with every batch on disk; rows that were yielded are told, and have to stay as
    they were.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import fluctua as fl
    from fluctua import insitu
    from fluctua.insitu.device_training import run_and_resume as training
    from fluctua.store import history

    process = fl.Process(lambda th, x: th["f"] - x, lambda th, x: jnp.ones_like(x))
    fit = insitu.DeviceFit({"gain": np.ones(1)}, "a report")
    model = insitu.Model(
        process,
        fl.Objective(running=lambda th, x: x[0]),
        knobs={"f": insitu.Knob(np.zeros(1), bounds=(-1.0, 1.0))},
        unknowns={},
        methods=insitu.Methods(calibrate=lambda runs: fit),
    )

    class Slope:
        def __init__(self, substrate: Any, objective: Any, process: Any):
            self.substrate = substrate

        def __call__(self, key: Any, theta: Any, count: int) -> Any:
            x = self.substrate(key, theta, count).x
            zero = jax.tree.map(jnp.zeros_like, theta)
            return fl.Estimate(
                jax.tree.map(jnp.ones_like, theta),
                zero,
                zero,
                jnp.asarray(x.mean()),
                jnp.asarray(0.1),
                count,
            )

    plan = insitu.Plan(
        iterations=ITERATIONS,
        trajectories=6,
        probes=2,
        probe_trajectories=4,
        batch=3,
        first_pause=0.0,
        on_doubt="continue",  # the box is no process
    )
    if (folder / "plan.json").exists():
        rows = training.resume(Box, model, folder, estimator=Slope)
    else:
        rows = training.run(Box, model, plan, folder, estimator=Slope)
    values = dict(word.split()[1:3] for word in acknowledged if word.startswith("row "))
    before = {str(row.row): repr(row.J) for row in history.read(folder / "history.csv")}
    for number, value in values.items():
        if before.get(number) != value:
            raise Lost(f"row {number} was {value} and is {before.get(number)}")
    for row, _ in rows:
        tell(f"row {row.row} {row.J!r}")


def whole_loop(folder: Path, reference: Path) -> None:
    """A row an iteration, and every trajectory that was spent in the recordings."""
    from fluctua.insitu.recording.reader import open_recording
    from fluctua.store import history

    rows = history.read(folder / "history.csv")
    if [row.iteration for row in rows] != list(range(ITERATIONS)):
        raise Lost(f"{len(rows)} rows of {ITERATIONS}")
    kept = 0
    for path in (folder / "recordings").glob("*.nc"):
        with open_recording(path) as file:
            kept += file.count
    counted = json.loads((folder / "summary.json").read_text())["trajectories"]
    if kept != counted:
        raise Lost(f"{kept} trajectories in the recordings, {counted} counted")
    if not (folder / "final.npz").exists():
        raise Lost("no final.npz")


SCENARIOS = (
    Scenario("lattice training", 0.3, lattice, same_training),
    Scenario("fluctua.run", 0.2, own, same_training),
    Scenario("recording", 0.35, recording, whole_recording),
    Scenario("in-situ loop", 0.15, in_situ, whole_loop),
)
KINDS = ("random moment", "a write")


# ------------------------------------------------------------------------------------------- rounds


class Tally:
    """Kills, losses and differences of each scenario and kind, in a table that is written after
    every round.
    """

    def __init__(self, path: Path, fresh: bool):
        from fluctua.store import tables

        self.path = path
        self.numbers = {(s.name, kind): [0, 0, 0] for s in SCENARIOS for kind in KINDS}
        self.notes: list[str] = []
        self.rounds = 0
        self.seconds = 0.0
        if path.exists() and not fresh:
            table = tables.read(path)
            self.rounds, self.seconds, self.notes = (
                table.header[n] for n in ("rounds", "seconds", "notes")
            )
            columns = table.columns
            for k, key in enumerate(zip(columns["what"], columns["killed_at"], strict=True)):
                self.numbers[key] = [int(columns[n][k]) for n in ("kills", "losses", "differences")]

    def kills(self, name: str) -> int:
        return sum(self.numbers[name, kind][0] for kind in KINDS)

    def total(self, column: int) -> int:
        return sum(numbers[column] for numbers in self.numbers.values())

    def write(self) -> None:
        from fluctua.store import tables

        keys = list(self.numbers)
        columns = {"what": [k[0] for k in keys], "killed_at": [k[1] for k in keys]}
        columns |= {
            n: [self.numbers[k][i] for k in keys]
            for i, n in enumerate(("kills", "losses", "differences"))
        }
        head = {
            "command": "python benchmarks/kill.py",
            "rounds": self.rounds,
            "seconds": round(self.seconds, 1),
            "notes": self.notes,
        }
        tables.write(self.path, columns, head)


def one_round(
    scenario: Scenario,
    tally: Tally,
    shim: Any,
    folder: Path,
    reference: Path,
    span: tuple[int, float],
    draw: random.Random,
) -> None:
    """Begin, kill and go on up to eight times, let it end, and look."""
    acknowledged: list[str] = []
    writes, seconds = span
    last, dying = KINDS[0], Kill()
    for _ in range(8):
        by_write = draw.random() < 0.5
        kill = (
            Kill(draw.randrange(max(writes, 1)), draw.random() < 0.5)
            if by_write
            else Kill(after=draw.uniform(0, seconds))
        )
        seed = draw.random()
        go = partial(scenario.go_on, folder, list(acknowledged))
        ended = child(lambda tell, go=go, seed=seed: go(tell, random.Random(seed)), kill, shim)
        acknowledged += ended.words
        if ended.how == "failed":
            tally.numbers[scenario.name, last][1] += 1
            tally.notes.append(f"{scenario.name}, after {dying}: {ended.message}")
            return
        if ended.how == "done":
            break
        last, dying = kill.kind, kill
        tally.numbers[scenario.name, last][0] += 1
    ended = child(
        lambda tell: scenario.go_on(folder, acknowledged, tell, random.Random(1)), Kill(), shim
    )
    if ended.how == "done":
        ended = child(lambda tell: scenario.check(folder, reference), Kill(), shim)
        column = 2
    else:
        column = 1
    if ended.how != "done":
        tally.numbers[scenario.name, last][column] += 1
        tally.notes.append(f"{scenario.name}, after kills, the last {dying}: {ended.message}")


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills", type=int, default=1000, help="in all, those in the table included"
    )
    parser.add_argument("--minutes", type=float, default=120.0, help="stop after this long")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "kill" / "kills.csv")
    parser.add_argument("--only", choices=[s.name for s in SCENARIOS], help="one of the scenarios")
    parser.add_argument("--fresh", action="store_true", help="begin a new table")
    options = parser.parse_args()
    work = Path(os.environ.get("FLUCTUA_KILL", ""))
    if not os.environ.get("FLUCTUA_KILL"):
        work = Path(tempfile.mkdtemp(prefix=MARK))
        try:
            (work / "shim.c").write_text(SHIM)
            made = ["-o", work / "shim.so", work / "shim.c", "-ldl"]
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", *made], check=True)
            extra = {
                "LD_PRELOAD": str(work / "shim.so"),
                "FLUCTUA_KILL": str(work),
                "OPENBLAS_NUM_THREADS": "1",
                "JAX_COMPILATION_CACHE_DIR": str(work.with_name(work.name.replace(MARK, "cache-"))),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
                "XLA_FLAGS": "--xla_backend_optimization_level=0",
                "HDF5_USE_FILE_LOCKING": "FALSE",
            }
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=os.environ | extra).returncode)
        finally:
            shutil.rmtree(work, ignore_errors=True)
            shutil.rmtree(work.with_name(work.name.replace(MARK, "cache-")), ignore_errors=True)
    run(options, work)


def run(options: argparse.Namespace, work: Path) -> None:
    """Round after round until there are enough kills, or no more time."""
    import h5py  # noqa: F401, here, so that children do not each import it
    import optax  # noqa: F401
    import scipy.stats  # noqa: F401

    import fluctua.insitu.device_training.run_and_resume
    import fluctua.runs.lattice  # noqa: F401

    shim = ctypes.CDLL(str(work / "shim.so"))
    tally = Tally(options.out, options.fresh)
    started, before = time.monotonic(), tally.seconds
    chosen = [s for s in SCENARIOS if options.only in (None, s.name)]
    spans, references = {}, {}
    for scenario in chosen:
        references[scenario.name] = work / f"reference-{scenario.name.replace(' ', '-')}"
        for _ in range(2):  # the first fills the cache of compilations
            shutil.rmtree(references[scenario.name], ignore_errors=True)
            start = time.monotonic()
            go = partial(scenario.go_on, references[scenario.name], [])
            ended = child(lambda tell, go=go: go(tell, random.Random(0)), Kill(), shim)
            if ended.how != "done":
                raise SystemExit(f"{scenario.name} does not run when left alone: {ended.message}")
            spans[scenario.name] = (ended.writes, time.monotonic() - start)
        print(
            f"{scenario.name}: {ended.writes} writes, {spans[scenario.name][1]:.1f} s when left "
            "alone",
            flush=True,
        )
    while time.monotonic() - started < 60 * options.minutes:
        open_ = [
            s
            for s in chosen
            if tally.kills(s.name) < options.kills * s.share / sum(c.share for c in chosen)
        ]
        if not open_:
            break
        scenario = min(open_, key=lambda s: tally.kills(s.name) / s.share)
        folder = work / f"round-{tally.rounds}"
        draw = random.Random(f"{scenario.name} {tally.rounds}")
        one_round(
            scenario, tally, shim, folder, references[scenario.name], spans[scenario.name], draw
        )
        shutil.rmtree(folder, ignore_errors=True)
        tally.rounds += 1
        tally.seconds = before + time.monotonic() - started
        tally.write()
        if tally.rounds % 10 == 0:
            print(
                f"{tally.total(0)} kills, {tally.total(1)} losses, {tally.total(2)} differences",
                flush=True,
            )
    for (name, kind), (kills, losses, differences) in tally.numbers.items():
        print(
            f"{name:<18} killed at {kind:<14} {kills:>5} kills {losses:>3} losses {differences:>3} "
            "differences"
        )
    print(
        f"{tally.total(0)} kills, {tally.total(1)} losses, {tally.total(2)} differences in "
        f"{tally.seconds / 60:.1f} min"
    )
    for note in tally.notes:
        print("  " + note)
    sys.exit(bool(tally.total(1) + tally.total(2)))


if __name__ == "__main__":
    main()
