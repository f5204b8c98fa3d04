"""The stochastic cases of the SBML test suite (DSMTS), judged by the suite's own statistics.

    python benchmarks/dsmts.py CHECKOUT      all 39 cases with reactions, 10,000 trajectories each
    python benchmarks/dsmts.py CHECKOUT --cases 1 33 --trajectories 1000 --out FOLDER

CHECKOUT is a clone of sbmlteam/sbml-test-suite; `pip install python-libsbml` reads its models
(`sbml.py` translates them). With means μ and standard deviations σ of the suite at t = 0 … 50,
and n trajectories,

    Z = √n (X̄ − μ)/σ,        Y = √(n/2) (S²/σ² − 1),        S² = Σ(X − μ)²/n,

Z lies within ±3 and Y within ±5. Two or more values outside are looked at again with other noise,
as the suite asks. The derivative of the mean at t = 50 to every parameter, by the generated kernel
(`fl.ppgt`), is compared with the exact one where rates are linear. Writes README.md, cases.csv and
dsmts.png (Evans, Gillespie and Wilkinson, Bioinformatics 24, 285 (2008)).
"""

from __future__ import annotations

import argparse
import csv
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import scipy

import fluctua as fl
from fluctua.core.simulate import Counted, sample_states
from fluctua.plot import style
from machine import describe_machine
from sbml import Model, read_model

CASES = range(1, 40)
"""Cases with reactions; those above only draw from distributions."""

GRADIENT_SEED = 77
SECOND_SEED = 1_000


class Case(NamedTuple):
    """A case of the suite. mean, sd: per species (T+1,)."""

    number: int
    model: Model
    levels: int
    t: np.ndarray
    mean: dict[str, np.ndarray]
    sd: dict[str, np.ndarray]
    mean_range: tuple[float, float]
    sd_range: tuple[float, float]


class Judgement(NamedTuple):
    """Statistics of one species (T+1,); NaN where the suite's standard deviation is zero.

    z, y: of the suite. y_own: as y, in the error of S² that the fourth moment of the sample gives.
    exact: whether mean and spread are exact where there is no spread.
    """

    z: np.ndarray
    y: np.ndarray
    y_own: np.ndarray
    exact: bool


class Verdict(NamedTuple):
    """Judgement of one species of a case. z_out, y_out: times at which Z or Y is out of range."""

    case: Case
    species: str
    judgement: Judgement
    z_out: np.ndarray
    y_out: np.ndarray

    @property
    def outside(self) -> int:
        """Number of values that are out of range."""
        return len(self.z_out) + len(self.y_out)


class Slope(NamedTuple):
    """Derivative of the mean at the last time to a parameter, estimated and exact."""

    parameter: str
    estimate: float
    stderr: float
    exact: float


def read_settings(path: Path) -> dict[str, str]:
    """Entries of a settings file."""
    pairs = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _read_range(text: str) -> tuple[float, float]:
    low, high = text.strip("()").split(",")
    return float(low), float(high)


def read_case(folder: Path) -> Case:
    """Read a case: the model of the highest level, and the expected means and deviations.

    The files of all levels must translate to the same process.
    """
    number = folder.name
    settings = read_settings(folder / f"{number}-settings.txt")
    files = sorted(folder.glob(f"{number}-sbml-*.xml"))
    models = [read_model(file) for file in files]
    for file, other in zip(files, models, strict=True):
        if not _same_process(other, models[-1]):
            raise ValueError(f"{file.name} is another process than {files[-1].name}.")
    with open(folder / f"{number}-results.csv", newline="") as stream:
        rows = [{k: float(v) for k, v in row.items() if k} for row in csv.DictReader(stream)]
    species = [name.strip() for name in settings["variables"].split(",")]

    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows])

    return Case(
        int(number),
        models[-1],
        len(models),
        column("time"),
        {name: column(f"{name}-mean") for name in species},
        {name: column(f"{name}-sd") for name in species},
        _read_range(settings["meanRange"]),
        _read_range(settings["sdRange"]),
    )


def _same_process(one: Model, other: Model) -> bool:
    """Whether two models have one start, one set of resets, and equal rates at some states."""
    if one.state != other.state or not np.array_equal(one.start, other.start):
        return False
    states = np.random.default_rng(0).integers(0, 40, (5, len(one.state))).astype(float)
    rates = [
        [np.asarray(m.process.rates(m.theta, jnp.asarray(x), 0.0)) for x in states]
        for m in (one, other)
    ]
    times = [[reset.time for reset in m.resets] for m in (one, other)]
    return np.array_equal(*rates) and times[0] == times[1]


def simulate(case: Case, count: int, seed: int) -> dict[str, np.ndarray]:
    """Amounts of every species at the times of the case, (E, T+1) each.

    A simulation is cut at each reset, and goes on from the states that the reset leaves.
    """
    model = case.model
    times = [reset.time for reset in model.resets if case.t[0] < reset.time < case.t[-1]]
    cuts = [case.t[0], *times, case.t[-1]]
    states = np.tile(model.start, (count, 1))
    key = jax.random.fold_in(jax.random.key(seed), case.number)  # equal models, unequal noise
    path = np.empty((count, len(case.t), len(model.start)))
    for k, (begin, end) in enumerate(itertools.pairwise(cuts)):
        inside = case.t[(case.t > begin) & (case.t < end)]
        grid = np.concatenate([[begin], inside, [end]])
        x = _continue(model, states, grid, jax.random.fold_in(key, k))
        shared = np.isin(grid, case.t)
        path[:, np.searchsorted(case.t, grid[shared])] = x[:, shared]
        states = x[:, -1]
        if k < len(model.resets):
            assign = jax.vmap(lambda x, k=k: model.resets[k].assign(model.theta, x, 0.0))
            states = np.asarray(assign(jnp.asarray(states)))
    amounts = jax.vmap(jax.vmap(lambda x: model.amounts(model.theta, x)))(jnp.asarray(path))
    shape = path.shape[:2]
    return {name: np.broadcast_to(np.asarray(v, np.float64), shape) for name, v in amounts.items()}


def _continue(model: Model, states: np.ndarray, grid: np.ndarray, key: Any) -> np.ndarray:
    """States (E, T+1, M) on a grid, from those at its beginning (E, M)."""
    table = jnp.asarray(states)
    begin = Counted(lambda key, j: table[j])
    start = fl.Reparameterised(lambda theta, context: context)
    run = fl.simulator(model.process, start, jnp.asarray(grid), context=begin, backend="jax")
    x, _ = sample_states(run, key, model.theta, jnp.arange(len(states)), 1)
    return np.asarray(x)


def judge(x: np.ndarray, mean: np.ndarray, sd: np.ndarray) -> Judgement:
    """Z and Y of samples x (E, T+1) against the suite's means and standard deviations (T+1,)."""
    count = len(x)
    away = x - mean
    spread = np.mean(away**2, axis=0)
    fourth = np.mean(away**4, axis=0)
    known = sd > 0
    divisor = np.where(known, sd, np.nan)
    ratio = spread / divisor**2 - 1
    own = np.sqrt(np.maximum(fourth / divisor**4 - 1, 0) / count)
    none = ~known
    exact = np.allclose(x[:, none], mean[none], rtol=1e-5, atol=1e-5)
    return Judgement(
        np.sqrt(count) * away.mean(axis=0) / divisor,
        np.sqrt(count / 2) * ratio,
        ratio / np.where(own > 0, own, np.nan),
        exact,
    )


def judge_case(case: Case, count: int, seed: int) -> list[Verdict]:
    """Simulate a case and judge every species that the suite names."""
    amounts = simulate(case, count, seed)
    verdicts = []
    for name, mean in case.mean.items():
        found = judge(amounts[name], mean, case.sd[name])
        verdicts.append(
            Verdict(
                case,
                name,
                found,
                case.t[_is_outside(found.z, case.mean_range)],
                case.t[_is_outside(found.y, case.sd_range)],
            )
        )
    return verdicts


def _is_outside(values: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    return (values <= limits[0]) | (values >= limits[1])


def exact_mean(model: Model, theta: dict[str, Any], end: float) -> Any:
    """Mean state at the time `end` of a model with linear rates, by a matrix exponential. (M,)"""
    start = jnp.asarray(model.start)
    changes = jnp.asarray(model.process.changes).T

    def drift(x: Any) -> Any:
        return changes @ model.process.rates(theta, x, 0.0)

    slope = jax.jacfwd(drift)(start)
    constant = drift(jnp.zeros_like(start))
    width = len(start)
    generator = jnp.zeros((width + 1, width + 1))
    generator = generator.at[:width, :width].set(slope).at[:width, width].set(constant)
    return (jax.scipy.linalg.expm(generator * end) @ jnp.append(start, 1.0))[:width]


def is_linear(model: Model) -> bool:
    """Whether the mean obeys a linear equation: linear rates, and no events of SBML."""
    if model.resets or isinstance(model.process.changes, fl.RandomJump):
        return False
    slope = jax.jacfwd(lambda x: model.process.rates(model.theta, x, 0.0))
    start = jnp.asarray(model.start)
    return bool(jnp.allclose(slope(start), slope(2 * start + 3.0)))


def error_factors(model: Model, t: np.ndarray) -> np.ndarray:
    """Error of S² over what a normal distribution gives, √((μ₄/σ⁴ − 1)/2), exactly. (T+1,)

    For linear rates of one species: moments up to the fourth obey a closed linear equation. In
    double precision, so for some hundreds of molecules.
    """
    if not is_linear(model) or len(model.state) != 1:
        raise ValueError("the fourth moment is closed for linear rates of one species only.")
    one = np.ones(1)
    base, raised = (
        np.asarray(model.process.rates(model.theta, jnp.asarray(x), 0.0), np.float64)
        for x in (0 * one, one)
    )
    generator = np.zeros((5, 5))
    for (change,), constant, slope in zip(model.process.changes, base, raised - base, strict=True):
        for power in range(1, 5):
            moved = np.polynomial.Polynomial([change, 1.0]) ** power
            gained = (moved - np.polynomial.Polynomial.basis(power)).coef[:power]
            generator[power, :power] += constant * gained
            generator[power, 1 : power + 1] += slope * gained
    first = model.start[0] ** np.arange(5.0)
    factors = []
    for time_since in t:
        m = scipy.linalg.expm(generator * time_since) @ first
        variance = m[2] - m[1] ** 2
        fourth = m[4] - 4 * m[1] * m[3] + 6 * m[1] ** 2 * m[2] - 3 * m[1] ** 4
        factors.append(np.sqrt((fourth / variance**2 - 1) / 2) if variance > 0 else np.nan)
    return np.array(factors)


def explain(outcome: Outcome) -> str:
    """Why a case did not pass, as far as it is known."""
    case = outcome.verdicts[0].case
    if outcome.passed or len(case.model.state) != 1 or not is_linear(case.model):
        return ""
    factors = error_factors(case.model, case.t)
    pair = (outcome.verdicts[0], outcome.again[0])
    largest = [_largest(verdict.judgement.y / factors) for verdict in pair]
    return (
        f"the exact error of S² is up to {np.nanmax(factors):.1f} times that of a normal "
        f"distribution; |Y| over it is at most {largest[0]:.2f} and {largest[1]:.2f}"
    )


def check_gradient(case: Case, count: int, backend: str) -> list[Slope]:
    """∂E[X]/∂θ of the first species at the last time, by `fl.ppgt`, beside the exact one."""
    model = case.model
    run = fl.simulator(
        model.process, jnp.asarray(model.start), jnp.asarray(case.t), backend=backend
    )
    estimator = fl.ppgt(run, fl.Objective(terminal=lambda th, x: x[0]), baseline="mean")
    key = jax.random.fold_in(jax.random.key(GRADIENT_SEED), case.number)
    found = estimator(key, model.theta, count)
    exact = jax.jacfwd(lambda theta: exact_mean(model, theta, case.t[-1])[0])(model.theta)
    return [
        Slope(name, float(found.gradient[name]), float(found.stderr[name]), float(exact[name]))
        for name in model.theta
        if float(exact[name]) != 0
    ]


class Outcome(NamedTuple):
    """All that is known of a case. again: judged with other noise; empty if not needed."""

    verdicts: list[Verdict]
    again: list[Verdict]
    slopes: list[Slope]

    @property
    def passed(self) -> bool:
        """At most one value out of range, or none of those again at the same time."""
        exact = all(v.judgement.exact for v in self.verdicts)
        if not self.again:
            return exact
        repeated = sum(
            len(np.intersect1d(a.z_out, b.z_out)) + len(np.intersect1d(a.y_out, b.y_out))
            for a, b in zip(self.verdicts, self.again, strict=True)
        )
        return exact and repeated == 0


def run_case(case: Case, count: int, seed: int, backend: str) -> Outcome:
    """Judge a case, once more if two values or more are out of range, and its gradient."""
    verdicts = judge_case(case, count, seed)
    again = []
    if sum(verdict.outside for verdict in verdicts) > 1:
        again = judge_case(case, count, seed + SECOND_SEED)
    slopes = check_gradient(case, count, backend) if is_linear(case.model) else []
    return Outcome(verdicts, again, slopes)


def _largest(values: np.ndarray) -> float:
    return float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 0.0


HEAD = (
    "case,model,species,max_abs_z,max_abs_y,max_abs_y_own_error,z_outside,y_outside,"
    "z_outside_again,y_outside_again,passed,parameters,max_abs_z_of_gradient,reason"
)


def list_rows(outcome: Outcome) -> Iterator[list[Any]]:
    """Rows of the table of one case, in the columns of HEAD."""
    z = [abs(s.estimate - s.exact) / s.stderr for s in outcome.slopes]
    for k, verdict in enumerate(outcome.verdicts):
        found = verdict.judgement
        again = outcome.again[k] if outcome.again else None
        yield [
            verdict.case.number,
            verdict.case.model.name,
            verdict.species,
            f"{_largest(found.z):.2f}",
            f"{_largest(found.y):.2f}",
            f"{_largest(found.y_own):.2f}",
            len(verdict.z_out),
            len(verdict.y_out),
            "" if again is None else len(again.z_out),
            "" if again is None else len(again.y_out),
            "yes" if outcome.passed else "no",
            " ".join(s.parameter for s in outcome.slopes),
            f"{max(z):.2f}" if z else "",
            explain(outcome),
        ]


def draw(outcomes: list[Outcome], path: Path) -> None:
    """Z and Y of all times against the number of the case, and the gradients in their errors."""
    with plt.rc_context(style.LOOK):
        figure, axes = plt.subplots(3, 1, figsize=(style.WIDTH, 5.2), sharex=True)
        for outcome in outcomes:
            for verdict in outcome.verdicts:
                found = verdict.judgement
                place = np.full(len(found.z), verdict.case.number)
                axes[0].plot(place, found.z, ".", ms=3.5, color="#332288", alpha=0.4, mew=0)
                axes[1].plot(place, found.y, ".", ms=3.5, color="#117733", alpha=0.4, mew=0)
            for slope in outcome.slopes:
                z = (slope.estimate - slope.exact) / slope.stderr
                axes[2].plot(outcome.verdicts[0].case.number, z, ".", ms=5, color="#882255", mew=0)
        for panel, limit, label in zip(
            axes, (3, 5, 3), ("$Z$ of means", "$Y$ of variances", "gradient, errors"), strict=True
        ):
            panel.axhspan(-limit, limit, color="0.93", lw=0, zorder=0)
            panel.set(ylabel=label)
        axes[0].set_ylim(-4.5, 4.5)
        axes[2].set_ylim(-4.5, 4.5)
        axes[2].set(xlabel="case", xlim=(0, 40), xticks=[1, 10, 20, 30, 39])
        figure.tight_layout()
        figure.savefig(path, dpi=150)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a clone of sbmlteam/sbml-test-suite")
    parser.add_argument("--cases", type=int, nargs="*", default=list(CASES))
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="cpu", help="of the gradients: cpu, cuda or jax")
    parser.add_argument("--out", type=Path, default=Path("results/dsmts"))
    options = parser.parse_args()
    root = options.checkout / "cases" / "stochastic"
    if not root.is_dir():
        parser.error(f"{root} is missing: give a clone of sbmlteam/sbml-test-suite.")
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    rows = []
    begin = time.process_time()
    for number in options.cases:
        case = read_case(root / f"{number:05d}")
        outcome = run_case(case, options.trajectories, options.seed, options.backend)
        outcomes.append(outcome)
        for row in list_rows(outcome):
            rows.append(row)
            print(*row, f"{time.process_time() - begin:.0f} s", flush=True)
    with open(options.out / "cases.csv", "w", newline="") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(HEAD.split(","))
        table.writerows(rows)
    draw(outcomes, options.out / "dsmts.png")
    passed = sum(outcome.passed for outcome in outcomes)
    slopes = [slope for outcome in outcomes for slope in outcome.slopes]
    off = np.array([(slope.estimate - slope.exact) / slope.stderr for slope in slopes])
    if len(off):
        print(
            f"{len(off)} derivatives: {np.sqrt(np.mean(off**2)):.2f} standard errors off (rms), "
            f"{np.abs(off).max():.2f} at most"
        )
    verdicts = [verdict for outcome in outcomes for verdict in outcome.verdicts]
    print(
        f"{passed} of {len(outcomes)} pass; outside: {sum(len(v.z_out) for v in verdicts)} Z, "
        f"{sum(len(v.y_out) for v in verdicts)} Y; models read: "
        f"{sum(o.verdicts[0].case.levels for o in outcomes)} files; {describe_machine('cpu')}"
    )


if __name__ == "__main__":
    main()
