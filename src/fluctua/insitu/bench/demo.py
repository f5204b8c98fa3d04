"""The sim-to-real gap and how it closes, from start to end: a bench, three trainings, one figure.

nominal   trained on the data sheet's network by simulation, then carried over to the bench
true      trained by simulation with the bench's hidden parameters, which a laboratory cannot know
in situ   calibrated from recordings and trained on the bench over its socket

All three start from the same settings and have the same bounds. J is always measured on the bench.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fluctua import tcmt
from fluctua.core.arrays import Array, Params
from fluctua.core.estimate import Estimate
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.bench import device
from fluctua.insitu.calibrate.knobs import parameters
from fluctua.insitu.device_training.plan import Plan
from fluctua.insitu.device_training.run_and_resume import Rows
from fluctua.insitu.device_training.run_and_resume import run as train_in_situ
from fluctua.insitu.instrument.substrate import Incident, InstrumentSubstrate, instrument_substrate
from fluctua.insitu.instrument.virtual import VirtualBench
from fluctua.insitu.model import Model
from fluctua.insitu.networks import network_model
from fluctua.insitu.unknowns import DeviceFit, Runs
from fluctua.learn.training import Training, train
from fluctua.store.history import Row
from fluctua.tcmt import exact


class Level(NamedTuple):
    """J of some settings, measured on the bench."""

    J: float
    stderr: float


class DemoResult(NamedTuple):
    """Levels of the demonstration. rows: of the in-situ training. discarded: trajectories, by kind
    of incident.

    calibration_error: root mean square over the sites or bonds, at the last settings.
    """

    before: Level
    nominal: Level
    nominal_promised: float
    true: Level
    in_situ: Level
    rows: list[Row]
    discarded: dict[str, int]
    calibration_error: dict[str, float]

    @property
    def share(self) -> float:
        """J in situ over J with the true parameters."""
        return self.in_situ.J / self.true.J


@contextlib.contextmanager
def bench_processes(devices: int, *options: str) -> Iterator[list[tuple[str, int]]]:
    """`fluctua virtual-bench` as a process of its own, on ports that the system chose; (host,
    port) of each box.
    """
    words = ["--port", "0", "--attached", "--devices", str(devices), *options]
    command = [sys.executable, "-m", "fluctua", "virtual-bench", *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        places = []
        for _ in range(devices):
            line = process.stdout.readline()
            if "listening on" not in line:
                raise RuntimeError(f"the virtual bench did not start; it said {line!r}.")
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
    """One box; (host, port)."""
    with bench_processes(1, *options) as places:
        yield places[0]


class Exact(NamedTuple):
    """J and ∂J/∂u of a known linear network with θ = offset + gain · u, without noise: a
    yardstick, as an estimator.
    """

    task: tcmt.Task
    offset: Params
    gain: Params

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """Of the settings; `key` and `count` are not used."""
        at = {
            name: self.offset[name] + self.gain[name] * np.asarray(u) for name, u in theta.items()
        }
        value, by_theta = exact.value_and_gradient(self.task, at)
        gradient = {
            n: jnp.asarray(g * self.gain[n], jnp.asarray(theta[n]).dtype)
            for n, g in by_theta.items()
        }
        zero = jax.tree.map(jnp.zeros_like, gradient)
        return Estimate(
            gradient,
            zero,
            jax.tree.map(jnp.square, gradient),
            jnp.asarray(value),
            jnp.asarray(0.0),
            count,
        )


def simulated(
    sheet: device.Sheet,
    model: Model,
    points: int,
    *,
    hidden: device.Hidden | None,
    shots: float,
    iterations: int,
) -> tuple[Params, float]:
    """Settings trained by simulation, with the data sheet's parameters or the hidden ones; and the
    J it promises.

    With exact gradients: the best that a simulation could do.
    """
    network = sheet.nominal if hidden is None else sheet.nominal.replace(gamma=hidden.gamma)
    dt = sheet.interval / sheet.oversample
    task = tcmt.transmission(network, horizon=(points - 1) * sheet.interval, dt=dt)
    if hidden is None:
        offset = {name: np.zeros(np.shape(v)) for name, v in model.start.items()}
        gain = {name: np.ones(np.shape(v)) for name, v in model.start.items()}
    else:
        offset = device.offsets(sheet, hidden, shots)
        gain = hidden.gain
    estimator = Exact(task, offset, gain)
    rule = optax.adam(optax.cosine_decay_schedule(0.05, iterations, alpha=0.05))
    bounds = (model.lower, model.upper)
    training = Training(estimator, model.start, rule, trajectories=1, bounds=bounds)
    *_, last = train(training, iterations)
    return last.next_theta, float(estimator(jax.random.key(0), last.next_theta, 1).value)


def power(model: Model, substrate: InstrumentSubstrate, settings: Params, count: int) -> Level:
    """J on the bench, afresh."""
    t, x = substrate(None, settings, count)[:2]
    running = model.objective.running
    assert running is not None
    rate = jax.vmap(jax.vmap(lambda x: running(settings, x, 0.0)))(jnp.asarray(x[:, :-1]))
    returns = np.asarray(rate.sum(axis=1) * (t[1] - t[0]))
    return Level(float(returns.mean()), float(returns.std(ddof=1) / np.sqrt(count)))


def run(
    folder: Path,
    *,
    sheet: device.Sheet | None = None,
    plan: Plan | None = None,
    address: Callable[[str, int], str] | None = None,
    bench_options: tuple[str, ...] = (),
    yardstick: int = 250,
    measure: int = 400,
    say: Callable[[str], None] = print,
    show: Callable[[Rows], Rows] = lambda rows: rows,
    report: Callable[[Incident], None] = lambda incident: None,
) -> DemoResult:
    """Everything, into a new folder.

    address: (host, port) -> what to connect to. bench_options: further words for `fluctua
    virtual-bench`. yardstick: iterations of the simulated trainings. measure: trajectories behind
    every level. show: wraps the rows of the training, for a display.
    """
    plan = plan or Plan()
    sheet = sheet or device.Sheet(seed=3)
    points = plan.points
    hidden = device.hidden(sheet)
    discarded: Counter[str] = Counter()
    calibration: dict[str, Array] = {}

    def note(incident: Incident) -> None:
        discarded[incident.kind] += incident.trajectories
        report(incident)

    with bench_process(*sheet_options(sheet), *bench_options) as (host, port):
        where = f"tcp://{host}:{port}" if address is None else address(host, port)
        say(f"bench      {where}, a process of its own")

        def connect():
            return VirtualBench(where, points=points, timeout=10.0)

        model = network_model(sheet.nominal, interval=sheet.interval, points=points)
        levels = instrument_substrate(connect)
        before = power(model, levels, model.start, measure)
        steps = list(
            show(train_in_situ(connect, _noting(model, calibration), plan, folder, report=note))
        )
        rows = [row for row, _ in steps]
        settings = steps[-1][1].next_theta
        shots = rows[-1].trajectories
        in_situ = power(model, levels, settings, measure)
        say(
            f"yardstick  two trainings by simulation with exact gradients, {yardstick} iterations "
            "each"
        )
        at_nominal, promised = simulated(
            sheet, model, points, hidden=None, shots=shots, iterations=yardstick
        )
        at_true, _ = simulated(
            sheet, model, points, hidden=hidden, shots=shots, iterations=yardstick
        )
        nominal = power(model, levels, at_nominal, measure)
        true = power(model, levels, at_true, measure)
        levels.close()
    believed = parameters(calibration, settings)
    truth = device.parameters(sheet, hidden, settings, shots)
    error = {
        name: float(np.sqrt(np.mean((np.asarray(v) - truth[name]) ** 2)))
        for name, v in believed.items()
    }
    return DemoResult(before, nominal, promised, true, in_situ, rows, dict(discarded), error)


def _noting(model: Model, calibration: dict[str, Array]) -> Model:
    """The same model, which leaves its latest calibration in a dictionary of the caller's."""

    def calibrate(runs: Runs) -> DeviceFit:
        first = model.calibrate(runs)
        calibration.update(first.values)
        return first

    def follow(
        values: dict[str, Array], settings: Params, trajectories: Trajectories
    ) -> dict[str, Array]:
        assert model.methods.follow is not None
        calibration.update(model.methods.follow(values, settings, trajectories))
        return dict(calibration)

    methods = model.methods._replace(
        calibrate=calibrate, follow=follow if model.methods.follow else None
    )
    return model._replace(methods=methods)


def sheet_options(sheet: device.Sheet) -> list[str]:
    """The command line of a bench with this sheet."""
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
    ):
        words += ["--set", f"{name}={getattr(sheet, name)}"]
    return words
