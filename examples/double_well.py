"""Bistable switch
===============

Find the weakest pulse that carries a noisy particle over a barrier.

The particle sits in the left well of V(x) = x⁴/4 − x²/2 and feels a force u(t) = Σ uₖ bump(t − tₖ)
whose twelve amplitudes are trained. The reward is to end in the right well, less the energy of the
pulse.

Run it with `python examples/double_well.py`; the gallery ran
`python examples/double_well.py --iterations 50 --count 100`.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.progress import track

import fluctua as fl

HORIZON, SIGMA = 8.0, 0.25
CENTRES = jnp.linspace(0.0, HORIZON, 12)
COST = 0.15


def pulse(u, t):
    return jnp.sum(u * jnp.exp(-(((t - CENTRES) / 0.5) ** 2)))


process = fl.Process(
    drift=lambda u, x, t: x - x**3 + pulse(u, t),
    noise=lambda u, x: SIGMA * jnp.ones(1),
)
switch = fl.Objective(
    running=lambda u, x, t: -COST * pulse(u, t) ** 2,
    terminal=lambda u, x: jnp.tanh(4 * x[0]),  # +1 in the right well, −1 in the left
)
simulator = fl.simulator(process, start=jnp.array([-1.0]), t=jnp.linspace(0, HORIZON, 401))


def train(iterations: int, count: int):
    # the bins compare particles that are at the same place before the kick
    estimator = fl.ppgt(simulator, switch, baseline=fl.baselines.binned(lambda u, x: x[0]))
    # without a nudge no run ever switches, and there is nothing to learn from
    start = 0.3 * jnp.ones(12)
    records = fl.train(
        fl.Training(estimator, start, optax.adam(0.05), trajectories=count, bounds=(-2, 2)),
        iterations=iterations,
    )
    return list(track(records, "Training", total=iterations, transient=True))


def draw(records) -> Figure:
    figure, axes = plt.subplots(2, 2, figsize=(9.6, 5.4), layout="constrained")
    t = np.asarray(simulator.t)
    for column, (title, u) in enumerate(
        [("before", records[0].theta), ("after", records[-1].next_theta)]
    ):
        x = np.asarray(simulator(jax.random.key(1), u, 200).x)[..., 0]
        share = (x[:, -1] > 0).mean()
        axes[0, column].plot(t, x[:60].T, lw=0.5, color="C0", alpha=0.4)
        axes[0, column].set(
            title=f"{title}: {share:.0%} of runs switch",
            xlabel="time",
            ylabel="position",
            ylim=(-1.9, 1.9),
        )
        axes[0, column].axhline(0, color="0.6", lw=0.8, ls=":")
        axes[1, 0].plot(t, jax.vmap(lambda s, u=u: pulse(u, s))(t), label=title, color=f"C{column}")
    axes[1, 0].set(xlabel="time", ylabel="force u(t)")
    axes[1, 0].legend(frameon=False)
    value = np.array([r.estimate.value for r in records])
    error = np.array([r.estimate.value_stderr for r in records])
    axes[1, 1].fill_between(range(len(value)), value - error, value + error, alpha=0.3, lw=0)
    axes[1, 1].plot(value)
    axes[1, 1].set(xlabel="iteration", ylabel="expected return J")
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", metavar="FILE", help="save the picture instead of showing it")
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--count", type=int, default=300, help="trajectories per iteration")
    options = parser.parse_args()
    history = train(options.iterations, options.count)
    print(f"J went from {history[0].estimate.value:+.3f} to {history[-1].estimate.value:+.3f}")
    figure = draw(history)
    if options.plot:
        figure.savefig(options.plot, dpi=150)
    else:
        plt.show()
