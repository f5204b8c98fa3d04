"""Reaction networks: seconds of an estimate with the generated kernel and on JAX, and of
GillesPy2's simulation.

Everyone is called in turn, several times over, so that a busy machine is as busy for all; the best
call counts. Events are exact in all three. GillesPy2 (`pip install gillespy2`), where it is there,
simulates alone: no scores, no rewards. Writes a table: `taskset -c 0,1 python
benchmarks/reaction_kernels.py --out results/reactions/kernels.txt`."""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fluctua as fl
from fluctua.core.protocols import Estimator
from machine import describe_machine
from reactions import association, repressilator


class Network(NamedTuple):
    """A jump process, what it is paid for, and the same for GillesPy2: species, and
    (propensity, consumed, made).
    """

    process: fl.Jumps
    objective: fl.Objective
    start: jax.Array
    t: jax.Array
    theta: dict[str, jax.Array]
    species: tuple[str, ...]
    reactions: tuple[tuple[str, str, str], ...]


def birth_death() -> Network:
    """Born at a rate of 40, each dies at a rate of 1."""
    process = fl.Jumps(
        lambda th, x: jnp.array([40 * th["birth"], th["death"] * x[0]]), [[1.0], [-1.0]]
    )
    theta = {"birth": jnp.array(1.0), "death": jnp.array(1.0)}
    objective = fl.Objective(running=lambda th, x: x[0], terminal=lambda th, x: x[0] ** 2)
    reactions = (("40", "", "A"), ("A", "A", ""))
    return Network(
        process, objective, jnp.array([10.0]), jnp.linspace(0, 4, 81), theta, ("A",), reactions
    )


def schloegl() -> Network:
    """2X <-> 3X and B <-> X with two stable states, near 80 and 560; some 2,000 events a unit
    of time.
    """
    k = (0.03 / 2, 1e-4 / 6, 200.0, 3.5)

    def rates(th, x):
        n = x[0]
        return jnp.array(
            [
                th["a"] * k[0] * n * (n - 1),
                th["b"] * k[1] * n * (n - 1) * (n - 2),
                th["c"] * k[2],
                th["d"] * k[3] * n,
            ]
        )

    process = fl.Jumps(rates, [[1.0], [-1.0], [1.0], [-1.0]])
    theta = {name: jnp.array(1.0) for name in "abcd"}
    objective = fl.Objective(terminal=lambda th, x: x[0])
    reactions = (
        (f"{k[0]}*X*(X-1)", "", "X"),
        (f"{k[1]}*X*(X-1)*(X-2)", "X", ""),
        ("200", "", "X"),
        ("3.5*X", "X", ""),
    )
    return Network(
        process, objective, jnp.array([250.0]), jnp.linspace(0, 1, 41), theta, ("X",), reactions
    )


def bound() -> Network:
    """The weak association of reactions.py."""
    reactions = (("0.05*(20-C)*(20-C)", "", "C"), ("C", "C", ""))
    return Network(*association(0.05, 1.0, 2.0)[:5], ("C",), reactions)


def ring() -> Network:
    """The repressilator of reactions.py."""
    made = tuple(
        (f"60/(1+pow({before}/8,3))", "", gene) for before, gene in zip("CAB", "ABC", strict=True)
    )
    return Network(
        *repressilator()[:5], tuple("ABC"), made + tuple((gene, gene, "") for gene in "ABC")
    )


NETWORKS = {
    "association": bound,
    "birth and death": birth_death,
    "Schlögl": schloegl,
    "repressilator": ring,
}


def count_events(network: Network, count: int = 64) -> float:
    """Events of a trajectory, on average."""
    record = fl.simulator(network.process, network.start, network.t)(
        jax.random.key(9), network.theta, count
    )
    return float((np.asarray(record.events.channel) >= 0).sum() / count)


def peer(network: Network, count: int) -> Callable[[], Any] | None:
    """A simulation by GillesPy2, compiled C++; None without it."""
    try:
        import gillespy2
    except ImportError:
        return None
    model = gillespy2.Model(name="network")
    first = np.asarray(network.start, int).tolist()
    model.add_species(
        [
            gillespy2.Species(name=n, initial_value=v)
            for n, v in zip(network.species, first, strict=True)
        ]
    )
    for k, (rate, used, made) in enumerate(network.reactions):

        def one(name):
            return {name: 1} if name else {}

        model.add_reaction(
            gillespy2.Reaction(
                name=f"r{k}", reactants=one(used), products=one(made), propensity_function=rate
            )
        )
    model.timespan(gillespy2.TimeSpan(np.asarray(network.t, float)))
    solver = gillespy2.SSACSolver(model=model)
    return lambda: solver.run(number_of_trajectories=count, seed=1)


def estimate(estimator: Estimator, network: Network, count: int) -> Any:
    return jax.block_until_ready(estimator(jax.random.key(0), network.theta, count).gradient)


def callers(network: Network, backend: str, count: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    for baseline in ("none", "optimal"):
        for who in ("jax", backend):
            run = fl.simulator(network.process, network.start, network.t, backend=who)
            estimator = fl.ppgt(run, network.objective, baseline=baseline)
            yield f"{who}, {baseline}", partial(estimate, estimator, network, count)
    simulate = peer(network, count) if backend == "cpu" else None
    if simulate is not None:
        yield "GillesPy2, no scores", simulate


def rows(name: str, backend: str, counts: list[int], rounds: int) -> list[str]:
    network = NETWORKS[name]()
    events = count_events(network)
    lines = []
    for count in counts:
        calls = dict(callers(network, backend, count))
        best = {}
        for who, call in calls.items():
            started = time.perf_counter()
            call()
            best[who] = (time.perf_counter() - started, np.inf)
        for _ in range(rounds):
            for who, call in calls.items():
                started = time.perf_counter()
                call()
                best[who] = (best[who][0], min(best[who][1], time.perf_counter() - started))
        for who, (first, seconds) in best.items():
            kernel = best[f"{backend}, {'optimal' if 'optimal' in who else 'none'}"][1]
            lines.append(
                f"{name:<16} {count:>7,} {events:>7.0f} {who:<22} {seconds:>9.4f} "
                f"{1e9 * seconds / (count * events):>9.2f} {seconds / kernel:>8.1f} {first:>8.1f}"
            )
            print(lines[-1], flush=True)
    return lines


HEAD = (
    f"{'network':<16} {'count':>7} {'events':>7} {'who, baseline':<22} {'s':>9} {'ns/event':>9} "
    f"{'÷kernel':>8} "
    f"{'first/s':>8}"
)
NOTES = """events: of a trajectory, on average. s: of one whole call, the best. ÷kernel: over the
kernel with the same baseline (GillesPy2: with none). first: the first call, compiling."""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--backend", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--trajectories", type=int, nargs="*", default=[2_000, 20_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(HEAD)
    lines = [
        line
        for name in options.networks
        for line in rows(name, options.backend, options.trajectories, options.rounds)
    ]
    if options.out:
        machine_text = describe_machine(options.backend)
        options.out.write_text("\n".join([HEAD, *lines, "", NOTES, machine_text, ""]))
