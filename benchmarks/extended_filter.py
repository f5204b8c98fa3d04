"""The bias of the extended filter: a Kerr oscillator of which one quadrature is read, against
finite differences.

Run it with `python benchmarks/extended_filter.py`: gradients by the filter and by common-noise
finite differences of 40,000 trajectories each, the error of their difference, and the ratio.
"""

import jax
import jax.numpy as jnp
import numpy as np

import fluctua as fl

COUNT = 40_000


def drift(theta, x):
    frequency = theta["omega"] + theta["chi"] * (x[0] ** 2 + x[1] ** 2)
    return jnp.array([frequency * x[1] - 0.3 * x[0] + 1.0, -frequency * x[0] - 0.3 * x[1]])


def main() -> None:
    """One row for each χ and parameter."""
    jax.config.update("jax_enable_x64", True)
    oscillator = fl.Process(drift, lambda theta, x: theta["sigma"] * jnp.ones(2))
    process = fl.Observed(oscillator, observe=[[1.0, 0.0]], noise=0.04, start=jnp.array([0.5, 0.0]))
    objective = fl.Objective(running=lambda theta, y: y[0], terminal=lambda theta, y: y[0] ** 2)
    substrate = fl.simulator(process, t=jnp.linspace(0, 2, 21))
    filtered, differences = (
        fl.ppgt(substrate, objective),
        fl.reference.finite_differences(objective, substrate),
    )
    for chi in (0.02, 0.05, 0.1, 0.3):
        theta = {"omega": jnp.array(0.5), "chi": jnp.array(chi), "sigma": jnp.array(0.4)}
        ours, exact = (
            filtered(jax.random.key(0), theta, COUNT),
            differences(jax.random.key(1), theta, COUNT),
        )
        for name in theta:
            g, truth = float(ours.gradient[name]), float(exact.gradient[name])
            error = np.hypot(float(ours.stderr[name]), float(exact.stderr[name]))
            print(
                f"χ = {chi:<5} ∂J/∂{name:6} {g:8.3f}   exact {truth:8.3f}   ± {error:.3f}   "
                f"{g / truth - 1:+.1%}"
            )


if __name__ == "__main__":
    main()
