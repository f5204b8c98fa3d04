"""Every estimator on the paper's lattice: variance of each family, cost of a trajectory, and so the
gain at equal cost.

One block for each σ_κ and each place in training (the start, and θ of a run under results/fig1).
Variances are of one trajectory's gradient, averaged over a family, relative to the paper's binned
baseline; cost is processor time a trajectory and step, of trajectories beyond the first: `python
benchmarks/estimators.py --count 256`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # waiting threads would be counted as processor time

import jax
import jax.numpy as jnp
import numpy as np

import rivals
from fluctua import tcmt
from fluctua.tcmt.conversion import kernel_spec
from fluctua.tcmt.kernel import run as kernel
from fluctua.tcmt.kernel.options import Binned
from fluctua.tcmt.kernel.twin import run_twin

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ("omega", "kappa", "chi")


def wrong_by(error, seed):
    """A twin whose couplings are all wrong by a factor 1 + error·z, and whose detunings by error·z
    couplings.

    One draw for a whole training: a model is wrong in one way, not in another way every day.
    """

    def theta(true):
        rng = np.random.default_rng([seed, 0x7717])
        draw = {name: rng.normal(size=np.shape(true[name])) for name in FAMILIES}
        return {
            "omega": true["omega"] + error * draw["omega"],
            "kappa": true["kappa"] * (1 + error * draw["kappa"]),
            "chi": true["chi"] * (1 + error * draw["chi"]),
        }

    return theta


class Entry(NamedTuple):
    """run: how many -> samples, a dict of (E, ·). paired: samples 2j and 2j+1 belong together.

    like: the estimator whose cost stands in, where ours is written in JAX and would be as fast in a
    kernel."""

    name: str
    run: Callable[[int], dict[str, np.ndarray]]
    paired: bool = False
    like: str = ""


def families(result: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(getattr(result.samples, name), float) for name in FAMILIES}


def variance(samples: dict[str, np.ndarray], paired: bool) -> np.ndarray:
    """Of one trajectory's gradient; of a pair, twice the variance of its mean."""
    each = [samples[name] for name in FAMILIES]
    if paired:
        return np.array([2 * ((v[::2] + v[1::2]) / 2).var(axis=0, ddof=1).mean() for v in each])
    return np.array([v.var(axis=0, ddof=1).mean() for v in each])


def cost(run: Callable[[int], Any], count: int, steps: int) -> float:
    """Nanoseconds a trajectory and step, of `count` more; the best of three."""
    times = [np.inf, np.inf]
    for _ in range(3):
        for place, size in enumerate((count, 2 * count)):
            begin = time.process_time()
            run(size)
            times[place] = min(times[place], time.process_time() - begin)
    return 1e9 * (times[1] - times[0]) / (count * steps)


def entries(task: tcmt.Task, theta: dict[str, jax.Array]) -> Iterator[Entry]:
    spec, modulated = kernel_spec(task, theta), task.modulation is not None
    pilot = kernel.run(spec, 1, 128, scores=False).mean_return_to_go

    def plain(n, **o):
        return families(kernel.run(spec, 0, n, samples=True, **o))

    def twin(n, **o):
        return families(run_twin(spec, 0, n, samples=True, **o))

    yield Entry("binned (the paper's)", lambda n: plain(n, baseline=Binned(every=100)))
    yield Entry("no baseline", plain)
    yield Entry("time only", lambda n: plain(n, baseline=pilot))
    yield Entry(
        "time only, antithetic pairs",
        lambda n: plain(n, baseline=pilot, antithetic=True),
        paired=True,
    )
    if modulated:

        def group(n):
            return rivals.leave_out_groups(task, theta, jax.random.key(2), n)

        yield Entry("16 share a modulation, leave one out", group, like="time only")
    yield Entry(
        "learned linear critic",
        lambda n: rivals.critic(task, theta, jax.random.key(3), n),
        like="twin",
    )
    yield Entry("twin", twin)
    for error in (0.05, 0.2):
        wrong = kernel_spec(task, wrong_by(error, 0)(theta))
        table = run_twin(spec, 7, 128, twin=wrong).mean_lambda  # that of an iteration before
        yield Entry(
            f"twin {error:.0%} wrong",
            lambda n, w=wrong, t=table: twin(n, twin=w, table=t),
            like="twin",
        )
    if modulated:
        yield Entry(
            "twin, modulation unknown to it", lambda n: twin(n, knows_modulation=False), like="twin"
        )
    else:
        for rank in (4, 8, 16, 32):
            yield Entry(f"twin, rank {rank}", lambda n, r=rank: twin(n, rank=r))

    def direct(n):
        return _direct(run_twin(spec, 0, n, samples=True))

    yield Entry("its direct part alone (biased if wrong)", direct, like="twin")


def _direct(result: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(getattr(result.direct_samples, name), float) for name in FAMILIES}


def places(sigma: float) -> Iterator[tuple[str, dict[str, jax.Array]]]:
    yield "start", tcmt.initial_parameters(jax.random.key(0), tcmt.paper())
    with np.load(ROOT / "results" / "fig1" / f"final_{sigma:g}.npz") as file:
        yield "end of results/fig1", {name: jnp.asarray(file[name]) for name in FAMILIES}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--count", type=int, default=256, help="trajectories behind each variance")
    ask.add_argument(
        "--sigma", type=float, nargs="+", default=[0.0, 0.2], help="strengths of the modulation"
    )
    ask.add_argument(
        "--timed", type=int, default=64, help="trajectories of a timing; 0 leaves costs out"
    )
    options = ask.parse_args()
    for sigma in options.sigma:
        task = tcmt.transmission(tcmt.paper(), sigma_kappa=sigma)
        steps, costs = len(task.t) - 1, {}
        for place, theta in places(sigma):
            print(f"\nσ_κ = {sigma:g}, {place}: {options.count} trajectories of {steps:,} steps")
            print(f"{'':40}{'variance, times lower than binned':^30}   ns a trajectory  gain at")
            print(f"{'':40}{'omega':>10}{'kappa':>10}{'chi':>10}   and step    equal cost")
            reference = None
            for e in entries(task, theta):
                variances = variance(e.run(options.count), e.paired)
                reference = variances if reference is None else reference
                if options.timed and not e.like and e.name not in costs:
                    costs[e.name] = cost(e.run, options.timed, steps)
                spent = costs.get(e.like or e.name, np.nan)
                gain = (
                    np.exp(np.log(reference / variances).mean())
                    * costs.get("binned (the paper's)", np.nan)
                    / spent
                )
                ratio = "".join(f"{r:10.3g}" for r in reference / variances)
                print(f"{e.name:40}{ratio}{spent:14.0f}{gain:12.3g}", flush=True)


if __name__ == "__main__":
    main()
