"""False alarms and power of the residual guard: 200 right models, and every fault that a residual
can show.

    python benchmarks/residual_guard.py right   -> results/guard/right.csv
    python benchmarks/residual_guard.py faults  -> results/guard/faults.csv

Right models are drawn at random: linear, nonlinear, multiplicative, sampled from finer steps, read
out with noise that is known, and lattices. Each is calibrated call after call by a
`SelfCalibrating`, whose guard adds its sums up. Faults are of two states with four unknowns,
calibrated in the same way, and of a lattice of six resonators that is known."""

import argparse
import csv
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fluctua as fl
from fluctua import tcmt
from fluctua.core.likelihood.alternatives import FITTED
from fluctua.core.likelihood.guard import examine_batch

FOLDER = Path(__file__).parents[1] / "results" / "guard"
DT = 0.02
SPREAD = 0.2
REWARD = fl.Objective(running=lambda p, x: -jnp.sum((x - 1) ** 2))


class Model(NamedTuple):
    """One kind of right model. unknown: φ at the start. hidden: rng -> φ of a device. device:
    what is measured.
    """

    name: str
    estimator: Any
    device: Callable[..., fl.Trajectories]
    effective: Callable[[Any, Any], Any]
    theta: Any
    unknown: Any
    trajectories: int
    readout: float = 0.0


# ---------------------------------------------------------------------------------------- processes


def linear_drift(p: Any, x: Any) -> Any:
    """Rates, a force, and a coupling of neighbours."""
    return p["b"] - p["k"] * x + 0.5 * (jnp.roll(x, 1) - x)


def bent_drift(p: Any, x: Any) -> Any:
    """Wells."""
    return p["b"] + p["k"] * (x - x**3) + 0.3 * (jnp.roll(x, 1) - x)


def steady(p: Any, x: Any) -> Any:
    """Noise that is the same everywhere."""
    return 0.3 * jnp.ones_like(x)


def growing(p: Any, x: Any) -> Any:
    """Noise that grows with the state."""
    return 0.3 * jnp.sqrt(1 + x**2)


def set_up(theta: Any, phi: Any) -> Any:
    """An offset of every rate, a gain of every force."""
    return {"k": theta["k"] + phi["k"], "b": theta["b"] * phi["b"]}


def small(
    name: str, drift: Any, noise: Any, size: int, steps: int, trajectories: int, **options: Any
) -> Model:
    """A process of a few components. options: finer, steps in an interval; readout, over the
    noise of one step.
    """
    finer, readout = options.get("finer", 1), options.get("readout", 0.0) * 0.3 * np.sqrt(DT)
    process = fl.Process(drift, noise)
    start = jnp.full(size, 0.4)
    t = np.arange(steps + 1) * DT
    simulator = fl.simulator(process, start, t)
    truth = fl.simulator(process, start, np.arange(steps * finer + 1) * DT / finer)

    def measure(key: Any, p: Any, count: int) -> fl.Trajectories:
        x = np.asarray(truth(key, p, count).x)[:, ::finer]
        noise = np.asarray(jax.random.normal(jax.random.fold_in(key, 1), x.shape))
        return fl.Trajectories(t, x + readout * noise if readout else x)

    return Model(
        name,
        fl.ppgt(simulator, REWARD, baseline=fl.Twin()),
        measure,
        set_up,
        {"k": jnp.linspace(1.0, 1.5, size), "b": jnp.linspace(1.0, 0.6, size)},
        {"k": jnp.zeros(size), "b": jnp.ones(size)},
        trajectories,
        readout,
    )


def lattice(rows: int, columns: int, trajectories: int) -> Model:
    """Resonators with unknown detunings and couplings."""
    network = tcmt.rectangular(rows, columns)
    task = tcmt.transmission(network, horizon=1.0, dt=4e-3)
    sites, bonds = network.sites, len(network.bonds)

    def effective(theta, phi):
        return {"omega": theta["omega"] + phi["offset"], "kappa": theta["kappa"] * phi["gain"]}

    return Model(
        f"lattice {rows} × {columns}",
        task.estimator("cpu", baseline="twin", threads=1),
        task.simulator(),
        effective,
        {"omega": jnp.linspace(-0.3, 0.3, sites), "kappa": jnp.ones(bonds)},
        {"offset": jnp.zeros(sites), "gain": jnp.ones(bonds)},
        trajectories,
    )


def right_models() -> Iterator[Model]:
    """Few and many trajectories, short and long."""
    for steps, trajectories in ((60, 4), (100, 40), (600, 2)):
        yield small("linear", linear_drift, steady, 1, steps, trajectories)
        yield small("linear", linear_drift, steady, 4, steps, trajectories)
        yield small("nonlinear", bent_drift, steady, 2, steps, trajectories)
        yield small("multiplicative", linear_drift, growing, 2, steps, trajectories)
        yield small("finer steps", linear_drift, steady, 2, steps, trajectories, finer=10)
        yield small("readout", linear_drift, steady, 2, steps, trajectories, readout=0.5)
    yield lattice(2, 2, 2)
    yield lattice(2, 3, 8)


# ------------------------------------------------------------------------------------------ studies


def draw(model: Model, rng: np.random.Generator) -> Any:
    """φ of a device."""
    return jax.tree.map(
        lambda v: v + jnp.asarray(SPREAD * rng.normal(size=v.shape), v.dtype), model.unknown
    )


def watch(model: Model, device: Any, seed: int, calls: int) -> Iterator[str]:
    """Each call's doubt about one device as it comes; a guard that has doubted begins anew."""
    hidden = draw(model, np.random.default_rng(seed))

    def make():
        return fl.SelfCalibrating(
            model.estimator,
            device,
            model.effective,
            model.unknown,
            SPREAD,
            samples=0,
            readout=model.readout,
            on_doubt="continue",
        )

    estimator = make()
    for call in range(calls):
        theta = {**model.theta}
        name = next(iter(theta))
        theta[name] = theta[name] * (1 + 0.3 * np.cos(call))
        key = jax.random.fold_in(jax.random.key(seed), call)
        measured = device(key, model.effective(theta, hidden), model.trajectories)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            estimator.learn(theta, measured)
        yield estimator.doubt
        if estimator.doubt:
            estimator = make()


def study_right(models: int, calls: int) -> list[dict[str, Any]]:
    """False alarms of right models."""
    kinds, table = list(right_models()), []
    each = -(-models // len(kinds))
    for model in kinds:
        doubts = [
            doubt for seed in range(each) for doubt in watch(model, model.device, seed, calls)
        ]
        size = len(jax.tree.leaves(model.theta)[0])
        alarms = [doubt for doubt in doubts if doubt]
        table.append(
            {
                "kind": model.name,
                "size": size,
                "trajectories": model.trajectories,
                "models": each,
                "batches": len(doubts),
                "alarms": len(alarms),
                "first": alarms[0] if alarms else "",
            }
        )
        print(table[-1], flush=True)
    return table


# ------------------------------------------------------------------------------------------ faults


def change(device: Any, mend: Callable[[np.ndarray], np.ndarray]) -> Any:
    """A device whose states pass through a fault."""

    def measure(key: Any, p: Any, count: int) -> fl.Trajectories:
        measured = device(key, p, count)
        return measured._replace(x=mend(np.array(measured.x)))

    return measure


def delay(x: np.ndarray, samples: int, channels: Any = slice(None)) -> np.ndarray:
    """Channels that show what was so many samples ago, and the first state until then."""
    late = np.concatenate([np.repeat(x[:, :1], samples, axis=1), x[:, :-samples]], axis=1)
    return put(x, channels, late[..., channels])


def shift(x: np.ndarray, samples: int, channels: Any = slice(None)) -> np.ndarray:
    """Channels that begin so many samples late; the last ones come from the beginning."""
    return put(x, channels, np.roll(x, -samples, axis=1)[..., channels])


def put(x: np.ndarray, channels: Any, values: np.ndarray) -> np.ndarray:
    """The states with some channels replaced."""
    changed = x.copy()
    changed[..., channels] = values
    return changed


def two_states() -> Model:
    """Two states, four unknowns."""
    return small("two states", linear_drift, steady, 2, 100, 40)


def faults_of_two_states() -> Iterator[tuple[str, Model, Any]]:
    """Faults of the structure, of the detector and of the time axis."""
    model = two_states()
    many = model._replace(trajectories=2000)

    def made(drift, noise):
        return small("two states", drift, noise, 2, 100, 40).device

    yield "cubic", many, made(lambda p, x: linear_drift(p, x) - 0.5 * x**3, steady)
    yield "multiplicative noise", model, made(linear_drift, lambda p, x: 0.3 * (1 + 0.3 * x))
    for gain in (1.05, 1.2):
        yield f"gain {gain} of both", model, change(model.device, lambda x, g=gain: g * x)
        yield (
            f"gain {gain} of one",
            model,
            change(model.device, lambda x, g=gain: x * np.array([g, 1.0], x.dtype)),
        )
    for samples in (3, 20):
        yield (
            f"delay of {samples} samples",
            model,
            change(model.device, lambda x, n=samples: delay(x, n)),
        )


def faults_of_a_lattice() -> Iterator[tuple[str, Any]]:
    """Changes of states [Re ψ, Im ψ] of six resonators, one of them or all."""
    yield "stuck half way", stick
    yield (
        "stale, 1e-6 of noise",
        lambda x: x[:1] + 1e-6 * np.random.default_rng(0).normal(size=x.shape),
    )
    for samples in (3, 20):
        yield f"one delayed by {samples}", lambda x, n=samples: delay(x, n, [1, 7])
        yield f"one shifted by {samples}", lambda x, n=samples: shift(x, n, [1, 7])
        yield f"all delayed by {samples}", lambda x, n=samples: delay(x, n)
        yield f"all shifted by {samples}", lambda x, n=samples: shift(x, n)
    for factor in (1.3, 0.8, -1.0):
        yield f"one × {factor:g}", lambda x, f=factor: put(x, [1, 7], f * x[..., [1, 7]])
    yield "I and Q swapped", lambda x: put(x, [1, 7], x[..., [7, 1]])
    yield "conjugated", lambda x: put(x, 7, -x[..., 7])
    yield "rotated by 0.3", lambda x: put(x, [1, 7], x[..., [1, 7]] @ turn(0.3).astype(x.dtype))
    yield "clipped at 0.7", lambda x: np.clip(x, -0.7 * np.abs(x).max(), 0.7 * np.abs(x).max())
    yield "time reversed", lambda x: x[:, ::-1]


def stick(x: np.ndarray) -> np.ndarray:
    """One quadrature that stays where it is in the middle of the record."""
    half = x.shape[1] // 2
    return put(x, 1, np.where(np.arange(x.shape[1]) < half, x[..., 1], x[:, half : half + 1, 1]))


def turn(angle: float) -> np.ndarray:
    """A rotation of two quadratures."""
    return np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])


def tabulate(system: str, fault: str, each: list[list[str]]) -> dict[str, Any]:
    """How often a fault was found, and what it was called most often. each: doubts of the
    batches of one device.
    """
    words = [doubt.split(" (")[0] for doubts in each for doubt in doubts if doubt]
    row = {
        "system": system,
        "fault": fault,
        "first batch": float(np.mean([bool(doubts[0]) for doubts in each])),
        "all batches": float(np.mean([any(doubts) for doubts in each])),
        "words": max(set(words), key=words.count) if words else "",
    }
    print(row, flush=True)
    return row


def study_two_states(repetitions: int) -> list[dict[str, Any]]:
    """Faults of two states with four unknowns, in four calls."""
    table = []
    for fault, model, device in faults_of_two_states():
        each = [list(watch(model, device, seed, 4)) for seed in range(repetitions)]
        table.append(tabulate("two states", fault, each))
    return table


def study_lattice(repetitions: int) -> list[dict[str, Any]]:
    """Faults of a lattice whose parameters are known, in one batch of ten trajectories."""
    task = tcmt.transmission(tcmt.rectangular(2, 3), horizon=4.0, dt=0.01)
    theta = {"omega": jnp.linspace(-0.3, 0.3, 6), "kappa": jnp.ones(7)}
    simulate = task.simulator()
    table = []
    for fault, mend in (("none", lambda x: x), *faults_of_a_lattice(), ("time axis × 1.5", None)):
        causes = []
        for seed in range(repetitions):
            measured = simulate(jax.random.key(seed), theta, 10)
            if mend is None:
                measured = measured._replace(t=1.5 * np.asarray(measured.t))
            else:
                measured = measured._replace(x=np.asarray(mend(np.array(measured.x)), np.float32))
            batch = examine_batch(task.process, theta, measured, limits=FITTED, start=task.start)
            causes.append([batch.residuals.cause])
        table.append(tabulate("lattice", fault, causes))
    return table


def write(name: str, table: list[dict[str, Any]]) -> None:
    """A csv in the results."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / name, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, table[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


def main() -> None:
    """Run one study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=("right", "faults"))
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--calls", type=int, default=25)
    parser.add_argument("--repetitions", type=int, default=40)
    options = parser.parse_args()
    if options.study == "right":
        write("right.csv", study_right(options.models, options.calls))
    else:
        write(
            "faults.csv", study_two_states(options.repetitions) + study_lattice(options.repetitions)
        )


if __name__ == "__main__":
    main()
