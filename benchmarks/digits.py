"""Handwritten digits, classified by a noisy network of resonators that the library trains.

    python benchmarks/digits.py train CHECKOUT      # three seeds, on a GPU
    python benchmarks/digits.py noise CHECKOUT      # the trained networks at other noise
    python benchmarks/digits.py device CHECKOUT     # a device with 20 % hidden errors
    python benchmarks/digits.py xor                 # two bits, on a CPU
    python benchmarks/digits.py report              # tables and picture, from the other files

CHECKOUT is a copy of github.com/ClaraWanjura/neuroscatter; its digitRecognition folder has the data
(optdigits). `sklearn` in its place takes the 1,797 images that scikit-learn has, split otherwise:
for a trial only.

The network has 128 input modes, two per pixel, 30 hidden modes and 10 outputs. Pixels are detunings
of the inputs. All inputs are driven with the paper's amplitude, and all channels have its noise.
The answer is the output port with most power at the end of one run.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from matplotlib.figure import Figure

import fluctua as fl
from fluctua import tcmt
from fluctua.plot.style import LOOK, WIDTH, letter, save

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "digits"
PIXELS, COPIES, HIDDEN, CLASSES = 64, 2, 30, 10
SPAN, SCALE, JITTER = 3.0, 200.0, 0.2
LOSS, HIDDEN_LOSS = 0.02, 1.0
"""γ of modes with a port (γ_e = 1), and of hidden modes: all decay alike, and noise drives all."""
SIGMA_W = 0.5
SIGMAS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
TIMES = tcmt.ReadoutTimes(horizon=4.5, dt=0.15, integrator="rk4")
SEEDS = (0, 1, 2)
ERROR = 0.2
"""Standard deviation of the hidden errors: of detunings, and of couplings relative to their own."""


class Split(NamedTuple):
    """Training and test data."""

    train: tcmt.Examples
    test: tcmt.Examples


class Layout(NamedTuple):
    """Sizes of a network.

    copies: input modes per feature.
    """

    features: int = PIXELS
    copies: int = COPIES
    hidden: int = HIDDEN
    classes: int = CLASSES

    @property
    def inputs(self) -> int:
        """Number of input modes."""
        return self.features * self.copies


DIGITS = Layout()


def load(source: str, jitter: float = JITTER) -> Split:
    """The data of a checkout, split as its notebook does: optdigits.tra trains, .tes tests."""
    if source == "sklearn":
        from sklearn.datasets import load_digits

        digits = load_digits()
        rows = np.column_stack([digits.data, digits.target])
        parts = [rows[:1000], rows[1000:]]
    else:
        folder = Path(source) / "digitRecognition"
        files = [folder / f"optdigits.{part}" for part in ("tra", "tes")]
        missing = [path for path in files if not path.is_file()]
        if missing:
            raise SystemExit(f"{missing[0]} is missing: CHECKOUT must be a copy of neuroscatter.")
        parts = [np.loadtxt(path, delimiter=",") for path in files]
    return Split(make_examples(parts[0], jitter), make_examples(parts[1], 0.0))


def make_examples(rows: np.ndarray, jitter: float) -> tcmt.Examples:
    """Examples from rows of 64 pixels, 0 to 16, and a label."""
    return tcmt.Examples(rows[:, :-1] / 16, rows[:, -1].astype(int), jitter=jitter)


def make_task(
    sigma_w: float = SIGMA_W,
    layout: Layout = DIGITS,
    times: tcmt.ReadoutTimes = TIMES,
    hidden_loss: float = HIDDEN_LOSS,
    scale: float = SCALE,
) -> tcmt.Classification:
    """Features as detunings of the first layer, classes as ports of the last."""
    sizes = (layout.inputs, layout.hidden, layout.classes)
    losses = np.repeat([LOSS, hidden_loss, LOSS], sizes)
    network = tcmt.layered(sizes, gamma=losses, sigma_w=sigma_w)
    sites = np.arange(layout.inputs).reshape(layout.features, layout.copies).tolist()
    outputs = range(layout.inputs, layout.inputs + layout.classes)
    return tcmt.classification(network, sites, outputs, span=SPAN, scale=scale, times=times)


def draw_start(seed: int, network: tcmt.Network, inputs: int) -> dict[str, jax.Array]:
    """Random detunings, 1.5 on the inputs and 0.5 on the others, and couplings, 0.3."""
    k_omega, k_kappa = jax.random.split(jax.random.key(seed))
    width = jnp.where(jnp.arange(network.sites) < inputs, 1.5, 0.5)
    return {
        "omega": width * jax.random.normal(k_omega, (network.sites,)),
        "kappa": 0.3 * jax.random.normal(k_kappa, (len(network.bonds),)),
    }


# ----------------------------------------------------------------------------------- known device


class Plan(NamedTuple):
    """Length of a training.

    forget_after: iterations over which the twin's correction must be resolved to be taken; 1 takes
        all of it.
    """

    iterations: int = 1500
    trajectories: int = 1024
    learning_rate: float = 0.02
    forget_after: float = 100
    check_every: int = 200


class Point(NamedTuple):
    """A training at one iteration. J: mean of the iterations before; accuracies of single runs."""

    seed: int
    iteration: int
    trajectories: int
    J: float
    train: float
    test: float
    seconds: float


class Trained(NamedTuple):
    """Parameters after the last iteration, and how they came about."""

    theta: dict[str, jax.Array]
    history: list[Point]
    estimator: fl.ShrunkCorrection


def train(task: tcmt.Classification, split: Split, seed: int, plan: Plan) -> Trained:
    """Train by the library's estimator; its twin is the exact model."""
    model = task.estimator(split.train, fl.Twin(batch=plan.trajectories))
    estimator = fl.ShrunkCorrection(model, plan.forget_after)
    rate = optax.cosine_decay_schedule(plan.learning_rate, plan.iterations)
    inputs = len(task.process.drift.sites)
    theta = draw_start(seed, task.network, inputs)
    training = fl.Training(estimator, theta, optax.adam(rate), plan.trajectories, seed=seed)
    history: list[Point] = []
    values: list[Any] = []
    begin = time.perf_counter()
    for record in fl.train(training, iterations=plan.iterations):
        values.append(record.estimate.value)
        theta = record.next_theta
        done = record.iteration + 1
        if done % plan.check_every and done != plan.iterations:
            continue
        seconds = time.perf_counter() - begin
        key = jax.random.key(1000 + seed)
        right = [task.answer(key, theta, part).single_shot for part in split]
        J = float(np.mean([float(v) for v in values]))
        history.append(Point(seed, done, record.trajectories, J, *right, seconds))
        values.clear()
        print(*(f"{v:.4g}" for v in history[-1]), flush=True)
    return Trained(theta, history, estimator)


class Score(NamedTuple):
    """Test accuracy of a trained network at some noise.

    single: of single runs. averaged: by the mean power of all `runs` of an image.
    with_errors: of single runs, the same settings on a device with hidden errors.
    """

    seed: int
    sigma_w: float
    dt: float
    runs: int
    single: float
    averaged: float
    with_errors: float


def score(
    task: tcmt.Classification, seed: int, theta: dict, examples: tcmt.Examples, runs: int = 3
) -> Score:
    """Measure the accuracy with several runs per image."""
    key = jax.random.key(2000 + seed)
    right = task.answer(key, theta, examples, runs)
    carried = apply_errors(theta, draw_errors(seed, task.network))
    wrong = task.answer(key, carried, examples, runs)
    numbers = (right.single_shot, right.averaged, wrong.single_shot)
    return Score(seed, float(task.network.sigma_r[0]), float(task.t[1]), runs, *numbers)


class Share(NamedTuple):
    """What the twin misses of the gradient at the end of a training, by family."""

    seed: int
    family: str
    correction_over_gradient: float
    standard_error: float
    chi2: float


class Variant(NamedTuple):
    """Properties of the network that may differ from those of the page."""

    hidden_loss: float = HIDDEN_LOSS
    horizon: float = TIMES.horizon

    def make_task(self, sigma_w: float = SIGMA_W, dt: float = TIMES.dt) -> tcmt.Classification:
        """The task of this network."""
        times = TIMES._replace(horizon=self.horizon, dt=dt)
        return make_task(sigma_w, times=times, hidden_loss=self.hidden_loss)


def run_training(
    source: str, plan: Plan, seeds: Sequence[int], out: Path, variant: Variant
) -> None:
    """Train all seeds, and write parameters, histories and final accuracies."""
    split = load(source)
    for seed in seeds:
        trained = train(variant.make_task(), split, seed, plan)
        save_theta(trained.theta, out / f"theta_{seed}.npz")
        write(f"training_{seed}.csv", trained.history, out)
        shares = [Share(seed, *row) for row in trained.estimator.certificate.rows]
        write(f"correction_{seed}.csv", shares, out)
        scores = [
            score(variant.make_task(dt=dt), seed, trained.theta, split.test, runs=10)
            for dt in (TIMES.dt, TIMES.dt / 4)
        ]
        write(f"final_{seed}.csv", scores, out)
        print(*scores, sep="\n", flush=True)


def run_noise(source: str, seeds: Sequence[int], out: Path, variant: Variant) -> None:
    """Measure trained networks at other noise than they were trained with."""
    split = load(source)
    thetas = {seed: load_theta(out / f"theta_{seed}.npz") for seed in seeds}
    rows = []
    for sigma in SIGMAS:
        task = variant.make_task(sigma)
        rows += [score(task, seed, theta, split.test) for seed, theta in thetas.items()]
        print(rows[-1], flush=True)
    write("noise.csv", rows, out)


def save_theta(theta: dict[str, jax.Array], path: Path) -> None:
    """Write parameters in half of a float64."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **{name: np.asarray(v, np.float32) for name, v in theta.items()})


def load_theta(path: Path) -> dict[str, jax.Array]:
    """Read what `save_theta` wrote."""
    with np.load(path) as file:
        return {name: jnp.asarray(file[name]) for name in file.files}


# --------------------------------------------------------------------------------- unknown device


def apply_errors(theta: dict[str, Any], phi: dict[str, Any]) -> dict[str, Any]:
    """What the device does at settings θ: detunings have offsets, couplings gains."""
    return {"omega": theta["omega"] + phi["offset"], "kappa": phi["gain"] * theta["kappa"]}


def draw_errors(seed: int, network: tcmt.Network) -> dict[str, jax.Array]:
    """Hidden offsets and gains."""
    k_offset, k_gain = jax.random.split(jax.random.key(5000 + seed))
    return {
        "offset": ERROR * jax.random.normal(k_offset, (network.sites,)),
        "gain": 1 + ERROR * jax.random.normal(k_gain, (len(network.bonds),)),
    }


class Calibration(NamedTuple):
    """Length of a training on a device.

    calls: of the estimator that measure. between: iterations per measurement.
    """

    calls: int = 8
    trajectories: int = 16
    between: int = 15
    simulated: int = 256
    learning_rate: float = 0.005


class DevicePoint(NamedTuple):
    """A device after some measured runs; rms errors of the calibration."""

    seed: int
    runs: int
    nominal: float
    device: float
    offset_error: float
    gain_error: float


class Look(NamedTuple):
    """A device at some settings, after some measured runs. hidden: its errors."""

    seed: int
    runs: int
    settings: dict[str, Any]
    hidden: dict[str, Any]


def look(
    task: tcmt.Classification, split: Split, estimator: fl.SelfCalibrating, now: Look
) -> DevicePoint:
    """Measure accuracies on nominal model and device, and how far the calibration is off."""
    key = jax.random.key(3000 + now.seed)
    nominal = task.answer(key, now.settings, split.test).single_shot
    real = task.answer(key, apply_errors(now.settings, now.hidden), split.test).single_shot
    errors = {name: estimator.phi[name] - now.hidden[name] for name in now.hidden}
    rms = [float(np.sqrt(np.mean(np.square(errors[name])))) for name in ("offset", "gain")]
    return DevicePoint(now.seed, now.runs, nominal, real, *rms)


def make_calibration(
    task: tcmt.Classification, split: Split, device: Any, plan: Calibration
) -> fl.SelfCalibrating:
    """The estimator that fits offsets and gains to the runs of a device."""
    unknown = {
        "offset": jnp.zeros(task.network.sites),
        "gain": jnp.ones(len(task.network.bonds)),
    }
    return fl.SelfCalibrating(
        task.estimator(split.train, fl.Twin(batch=plan.simulated)),
        device,
        apply_errors,
        unknown,
        ERROR,
        correction="none",
        simulated=plan.simulated,
        samples=0,
        measure_every=plan.between,
        every=4,
        on_doubt="continue",
    )


def calibrate_and_train(
    task: tcmt.Classification, split: Split, seed: int, theta: dict, plan: Calibration
) -> list[DevicePoint]:
    """Train a device from the parameters of its nominal model; only its runs are measured."""
    hidden = draw_errors(seed, task.network)
    simulator = task.simulator(split.train)

    def device(key, settings, count):
        return simulator(key, apply_errors(settings, hidden), count)

    estimator = make_calibration(task, split, device, plan)
    iterations = plan.calls * plan.between
    rate = optax.cosine_decay_schedule(plan.learning_rate, iterations)
    training = fl.Training(estimator, theta, optax.adam(rate), plan.trajectories, seed=seed)
    points = [look(task, split, estimator, Look(seed, 0, theta, hidden))]
    for record in fl.train(training, iterations=iterations):
        if (record.iteration + 1) % plan.between == 0:
            now = Look(seed, record.trajectories, record.next_theta, hidden)
            points.append(look(task, split, estimator, now))
            print(points[-1], flush=True)
    return points


def correct_settings(theta: dict, phi: dict) -> dict[str, jax.Array]:
    """The settings at which a device with errors φ does what its nominal model does at θ."""
    gain = jnp.maximum(phi["gain"], MIN_GAIN)
    return {"omega": theta["omega"] - phi["offset"], "kappa": theta["kappa"] / gain}


MIN_GAIN = 0.2
"""Smallest gain that a setting is corrected for: a quarter of a standard deviation above zero."""


def calibrate_and_correct(
    task: tcmt.Classification, split: Split, seed: int, theta: dict, calls: int
) -> list[DevicePoint]:
    """Correct the settings of a device by its own runs: four, and then as many again per call."""
    hidden = draw_errors(seed, task.network)
    simulator = task.simulator(split.train)

    def device(key, settings, count):
        return simulator(key, apply_errors(settings, hidden), count)

    estimator = make_calibration(task, split, device, Calibration(simulated=16, between=1))
    key = jax.random.key(7000 + seed)
    settings = theta
    points = [look(task, split, estimator, Look(seed, 0, settings, hidden))]
    for call in range(calls):
        runs = points[-1].runs
        count = max(4, runs)
        estimator(jax.random.fold_in(key, call), settings, count)
        settings = correct_settings(theta, estimator.phi)
        points.append(look(task, split, estimator, Look(seed, runs + count, settings, hidden)))
        print(points[-1], flush=True)
    return points


def run_device(source: str, calls: int, seeds: Sequence[int], out: Path) -> None:
    """Calibrate one device per seed, and correct its settings."""
    split = load(source)
    for seed in seeds:
        theta = load_theta(out / f"theta_{seed}.npz")
        points = calibrate_and_correct(make_task(), split, seed, theta, calls)
        write(f"device_{seed}.csv", points, out)


# -------------------------------------------------------------------------------------------- XOR


XOR = Layout(features=2, copies=2, hidden=4, classes=2)
XOR_SCALE = 50.0


class XorRow(NamedTuple):
    """XOR after a training: mean log-likelihood, and accuracy of 1,000 single runs per input."""

    seed: int
    sigma_w: float
    trajectories: int
    J: float
    single: float


class XorTraining(NamedTuple):
    """A trained network, and how well it does."""

    row: XorRow
    theta: dict[str, jax.Array]


def make_bits() -> tcmt.Examples:
    """The four inputs of XOR."""
    bits = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    return tcmt.Examples(bits, np.array([0, 1, 1, 0]))


def train_xor(seed: int, sigma_w: float = SIGMA_W, iterations: int = 300) -> XorTraining:
    """Train ten modes to tell equal bits from unequal ones."""
    examples = make_bits()
    task = make_task(sigma_w, XOR, scale=XOR_SCALE)
    estimator = fl.ShrunkCorrection(task.estimator(examples))
    theta = draw_start(seed, task.network, XOR.inputs)
    rate = optax.cosine_decay_schedule(0.05, iterations)
    training = fl.Training(estimator, theta, optax.adam(rate), 64, seed=seed)
    for record in fl.train(training, iterations=iterations):
        theta = record.next_theta
    right = task.answer(jax.random.key(seed), theta, examples, repetitions=1000).single_shot
    J = float(record.estimate.value)
    return XorTraining(XorRow(seed, sigma_w, record.trajectories, J, right), theta)


def train_xor_device(seed: int, theta: dict, plan: Calibration) -> list[DevicePoint]:
    """Train a device with hidden errors from the parameters of its nominal model."""
    examples = make_bits()
    many = tcmt.Examples(np.tile(examples.features, (500, 1)), np.tile(examples.labels, 500))
    task = make_task(SIGMA_W, XOR, scale=XOR_SCALE)
    return calibrate_and_train(task, Split(examples, many), seed, theta, plan)


def run_xor(out: Path) -> None:
    """Train XOR at three noise amplitudes, and devices with hidden errors at the paper's."""
    rows: list[XorRow] = []
    points: list[DevicePoint] = []
    plan = Calibration(calls=8, trajectories=4, between=10, simulated=64, learning_rate=0.02)
    for sigma_w in (SIGMA_W, 2 * SIGMA_W, 4 * SIGMA_W):
        for seed in SEEDS:
            trained = train_xor(seed, sigma_w)
            rows.append(trained.row)
            print(trained.row, flush=True)
            if sigma_w == SIGMA_W:
                points += train_xor_device(seed, trained.theta, plan)
    write("xor.csv", rows, out)
    write("xor_device.csv", points, out)


# ----------------------------------------------------------------------------------------- report


def write(name: str, rows: Sequence[Any], out: Path) -> None:
    """Write a table of records as CSV."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / name).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0]._fields)
        for row in rows:
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in row])


def read(pattern: str, out: Path) -> dict[str, np.ndarray]:
    """Read the columns of tables of numbers, one after the other; empty if there is no table."""
    rows: list[dict[str, str]] = []
    for path in sorted(out.glob(pattern)):
        with path.open() as file:
            rows += csv.DictReader(file)
    return {name: np.array([float(row[name]) for row in rows]) for name in (rows or [{}])[0]}


PUBLISHED = {"scattering, 30 hidden (final 96.7 %)": 0.96661, "digital (final 97.1 %)": 0.97051}
"""Last entries of the published test_accuracies_* files; the best of each is 0.2 to 0.3 % above."""


class Panel(NamedTuple):
    """Curves of one panel, one per seed. files: tables. x, y: columns."""

    files: str
    x: str
    y: str
    label: str


PANELS = (
    Panel("training_*.csv", "trajectories", "test", "trajectories, known device"),
    Panel("noise.csv", "sigma_w", "single", "noise σ_W"),
    Panel("device_*.csv", "runs", "device", "measured runs, unknown device"),
)


def draw(out: Path, panels: Sequence[Panel] = PANELS) -> None:
    """Draw test accuracies, with a panel for each table that exists."""
    tables = [(panel, read(panel.files, out)) for panel in panels]
    found = [(panel, table) for panel, table in tables if table]
    if not found:
        raise SystemExit(f"{out} has no tables to draw; run `train`, `noise` or `device` first.")
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 0.4 * WIDTH), layout="constrained")
        for number, (panel, table) in enumerate(found):
            axes = figure.add_subplot(1, len(found), number + 1)
            for seed in np.unique(table["seed"]):
                mine = table["seed"] == seed
                axes.plot(
                    table[panel.x][mine],
                    100 * table[panel.y][mine],
                    "o-",
                    ms=2,
                    label=f"{seed:.0f}",
                )
            if panel is PANELS[0]:
                for level, style in zip(PUBLISHED.values(), ("--", ":"), strict=True):
                    axes.axhline(100 * level, color="#444444", ls=style, lw=0.8)
            axes.set(xlabel=panel.label, ylabel="test accuracy (%)")
            axes.legend(title="seed")
            letter(axes, "abc"[number])
        save(figure, out / "digits")


def print_tables(out: Path) -> None:
    """Print the numbers of the page."""
    for pattern in ("final_*.csv", "noise.csv", "correction_*.csv", "device_*.csv", "xor*.csv"):
        for path in sorted(out.glob(pattern)):
            print(path.name, path.read_text(), sep="\n")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("train", "noise", "device", "xor", "report"))
    parser.add_argument("checkout", nargs="?", default="sklearn")
    parser.add_argument("--iterations", type=int, default=Plan().iterations)
    parser.add_argument("--trajectories", type=int, default=Plan().trajectories)
    parser.add_argument("--forget-after", type=float, default=Plan().forget_after)
    parser.add_argument("--hidden-loss", type=float, default=HIDDEN_LOSS)
    parser.add_argument("--horizon", type=float, default=TIMES.horizon)
    parser.add_argument("--calls", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    variant = Variant(args.hidden_loss, args.horizon)
    if args.what == "train":
        plan = Plan(args.iterations, args.trajectories, forget_after=args.forget_after)
        run_training(args.checkout, plan, args.seeds, args.out, variant)
    elif args.what == "noise":
        run_noise(args.checkout, args.seeds, args.out, variant)
    elif args.what == "device":
        run_device(args.checkout, args.calls, args.seeds, args.out)
    elif args.what == "xor":
        run_xor(args.out)
    else:
        print_tables(args.out)
        draw(args.out)


if __name__ == "__main__":
    main()
