"""One-way street
==============

A noisy oscillator network learns to carry a signal from left to right and not back.

Sixteen saturable oscillators on a 4 × 4 grid are coupled with a strength for each *direction* of
each bond. Half of the runs are driven at the left corner, half at the right one; the reward is the
power that arrives at the other corner, counted positive left to right and negative right to left.
Neither the couplings nor the saturation are reciprocal, so no adjoint experiment exists: the
gradient of all 64 parameters is read off the fluctuations of the runs alone.

Run it with `python examples/oscillators.py`; the gallery ran
`python examples/oscillators.py --iterations 30 --count 200`.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from rich.progress import track

import fluctua as fl

SMALL_TEXT: Any = {"font.size": 8, "legend.frameon": False}
SIDE = 4
SITES = SIDE * SIDE
LEFT, RIGHT = 0, SITES - 1
BONDS = np.array(
    [
        (i, j)
        for i in range(SITES)
        for j in range(SITES)
        if abs(i // SIDE - j // SIDE) + abs(i % SIDE - j % SIDE) == 1
    ]
)  # (from, to), both directions
DRIVE, LOSS, SATURATION, SIGMA = 3.0, 0.2, 0.05, 0.3
HORIZON, STEPS = 12.0, 300


def split(x):
    return x[:SITES] + 1j * x[SITES:]


def drift(theta, x, t, forward):
    """dψ/dt = −(γ + iω + s|ψ|²)ψ − iKψ + drive; K[to, from] need not equal K[from, to]."""
    psi = split(x)
    into = jnp.zeros(SITES, psi.dtype).at[BONDS[:, 1]].add(theta["coupling"] * psi[BONDS[:, 0]])
    source = jnp.where(forward, jnp.arange(SITES) == LEFT, jnp.arange(SITES) == RIGHT)
    rate = (
        -(LOSS + 1j * theta["detuning"] + SATURATION * jnp.abs(psi) ** 2) * psi
        - 1j * into
        + DRIVE * source
    )
    return jnp.concatenate([rate.real, rate.imag])


def one_way(theta, x, t, forward):
    """Power at the far corner over the power of the drive, averaged over time; its sign is the
    direction's.
    """
    arrived = jnp.abs(split(x)[jnp.where(forward, RIGHT, LEFT)]) ** 2
    return (
        jnp.where(forward, 2.0, -2.0) * arrived / DRIVE**2 / HORIZON
    )  # 2: each direction is half of the runs


process = fl.Process(drift, noise=lambda theta, x: SIGMA * jnp.ones(2 * SITES))
objective = fl.Objective(running=one_way)
simulator = fl.simulator(
    process,
    start=jnp.zeros(2 * SITES),
    t=jnp.linspace(0, HORIZON, STEPS + 1),
    context=lambda key: jax.random.bernoulli(key),
)


def train(iterations: int, count: int) -> list:
    theta = {"coupling": 0.6 * jnp.ones(len(BONDS)), "detuning": jnp.zeros(SITES)}
    # two bins, one for each direction: forward runs are compared with forward runs
    estimator = fl.ppgt(
        simulator,
        objective,
        baseline=fl.baselines.binned(lambda theta, x, t, forward: forward * 1.0, bins=2),
    )
    training = fl.Training(
        estimator,
        theta,
        optax.adam(0.03),
        trajectories=count,
        bounds=({"coupling": 0.0, "detuning": -2.0}, {"coupling": 1.2, "detuning": 2.0}),
    )
    return list(track(fl.train(training, iterations), "Training", total=iterations, transient=True))


def power(theta, count: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(t, power at the far corner driven from the left, and from the right), mean over fresh
    runs.
    """
    t, x, forward = simulator(jax.random.key(99), theta, count)[:3]
    at = lambda site: np.asarray(x[..., site] ** 2 + x[..., SITES + site] ** 2) / DRIVE**2
    forward = np.asarray(forward)
    return np.asarray(t), at(RIGHT)[forward].mean(0), at(LEFT)[~forward].mean(0)


STRENGTH, DETUNING = Normalize(0, 1.2), Normalize(-2, 2)
ARROWS, NODES = colormaps["viridis_r"], colormaps["coolwarm"]


def draw_network(axes, theta, title: str) -> None:
    where = np.array(
        [((i % SIDE + i // SIDE), (i % SIDE - i // SIDE)) for i in range(SITES)], float
    )  # corner left
    for (i, j), coupling in zip(BONDS, np.asarray(theta["coupling"]), strict=True):
        s = STRENGTH(coupling)
        if s > 0.02:
            axes.add_patch(
                FancyArrowPatch(
                    where[i],
                    where[j],
                    connectionstyle="arc3,rad=0.16",
                    arrowstyle="-|>",
                    mutation_scale=4 + 6 * s,
                    shrinkA=6,
                    shrinkB=6,
                    lw=0.4 + 1.8 * s,
                    color=ARROWS(s),
                )
            )
    colour = np.asarray(theta["detuning"])
    axes.scatter(
        *where.T,
        s=55,
        c=colour,
        cmap=NODES,
        norm=DETUNING,
        edgecolors="0.2",
        linewidths=0.6,
        zorder=3,
    )
    axes.annotate("left", where[LEFT], (-9, 0), textcoords="offset points", ha="right", va="center")
    axes.annotate("right", where[RIGHT], (9, 0), textcoords="offset points", ha="left", va="center")
    axes.set(xlim=(-1.4, 7.4), ylim=(-3.6, 3.6), aspect="equal", title=title)
    axes.axis("off")


def draw(records) -> Figure:
    with mpl.rc_context(SMALL_TEXT):
        figure, axes = plt.subplots(
            2, 2, figsize=(7.0, 4.8), layout="constrained", height_ratios=[1.35, 1]
        )
        first, last = records[0].theta, records[-1].next_theta
        draw_network(axes[0, 0], first, "before: the same both ways")
        draw_network(axes[0, 1], last, "after: a one-way street")
        keys = ((STRENGTH, ARROWS, "coupling (arrows)"), (DETUNING, NODES, "detuning (disks)"))
        for place, (norm, colours, label) in zip(axes[0], keys, strict=True):
            figure.colorbar(
                ScalarMappable(norm, colours),
                ax=place,
                label=label,
                location="bottom",
                shrink=0.5,
                aspect=25,
            )

        value = np.array([r.estimate.value for r in records])
        error = np.array([r.estimate.value_stderr for r in records])
        spent = np.array([r.trajectories for r in records])
        curve, light = axes[1]
        curve.fill_between(
            spent,
            value - 2 * error,
            value + 2 * error,
            alpha=0.3,
            lw=0,
            label="± 2 standard errors",
        )
        curve.plot(spent, value)
        curve.set(
            xlabel="trajectories spent", ylabel="$J$, forward − backward", xlim=(0, spent[-1])
        )
        curve.legend(loc="lower right")

        before, after = power(first), power(last)
        light.plot(
            before[0], before[1], color="0.6", lw=2.4, label="either way, before"
        )  # the two are alike
        light.plot(before[0], before[2], color="0.6", lw=2.4)
        light.plot(after[0], after[1], color="#117733", label="left → right, after")
        light.plot(after[0], after[2], color="#aa4422", label="right → left, after")
        light.set(
            xlabel="time (1 / coupling unit)", ylabel="power arriving / driving", xlim=(0, HORIZON)
        )
        light.legend(loc="center right")
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", metavar="FILE", help="save the picture instead of showing it")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--count", type=int, default=400, help="trajectories per iteration")
    options = parser.parse_args()
    print(
        f"Training {len(BONDS)} directed couplings and {SITES} detunings from their fluctuations."
    )
    history = train(options.iterations, options.count)
    _, forward, backward = power(history[-1].next_theta)
    print(
        f"J, forward − backward power, went from {history[0].estimate.value:+.3f} to "
        f"{history[-1].estimate.value:+.3f}."
    )
    print(
        f"At the end of a run {forward[-50:].mean():.3f} of the driving power arrives from left to "
        f"right, {backward[-50:].mean():.3f} from right to left; J is the average over time."
    )
    figure = draw(history)
    if options.plot:
        figure.savefig(options.plot, dpi=130)
    else:
        plt.show()
