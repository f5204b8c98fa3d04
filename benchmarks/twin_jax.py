"""What a twin is worth on the paper's lattice: variance of each family against the time-only
baseline, in JAX.

Run it with `python benchmarks/twin_jax.py`; it writes results/twin/table.txt. The step is ten times
the paper's, which changes the variances little and the time tenfold.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import fluctua as fl
from fluctua.tcmt import initial_parameters, paper, transmission

ROOT = Path(__file__).resolve().parents[1]


def off(error):
    return lambda theta: {name: (1 + error) * v for name, v in theta.items()}


def main(count, dt):
    network = paper()
    theta = initial_parameters(jax.random.key(1), network)
    lines = [
        f"The paper's lattice at the start of a training, dt = {dt:g}, {count} trajectories, "
        "float32.",
        "Variance of the gradient of one trajectory, averaged over each family: times lower than "
        "with the time-only",
        "baseline.",
        "",
        f"{'sigma_kappa':<13}{'estimator':<30}"
        + "".join(f"{name:>10}" for name in theta)
        + f"{'seconds':>10}",
    ]
    for sigma in (0.0, 0.2):
        task = transmission(network, dt=dt, sigma_kappa=sigma)
        twins = {
            "twin": "twin",
            "twin 5 % off": fl.Twin(off(0.05)),
            "twin 20 % off": fl.Twin(off(0.2)),
        }
        # one noise-free path for all, and so one Hessian; with modulation there would be one for
        # each
        if not sigma:
            twins["twin of second order"] = fl.Twin(order=2)
        plain = None
        for name, baseline in {"time only": "time", **twins}.items():
            estimator = task.estimator(baseline=baseline)
            variance, seconds = measure(estimator, theta, count)
            plain = plain or variance
            lines.append(row(sigma, name, [plain[f] / variance[f] for f in theta], seconds))
            if name == "twin":
                direct = estimator.split(jax.random.key(0), theta, count).direct
                variance = {f: float(jnp.mean(v.var(axis=0, ddof=1))) for f, v in direct.items()}
                lines.append(
                    row(
                        sigma,
                        "its direct part alone",
                        [plain[f] / variance[f] for f in theta],
                        None,
                    )
                )
    return "\n".join(lines) + "\n"


def measure(estimator, theta, count):
    jax.block_until_ready(estimator(jax.random.key(0), theta, count).gradient)  # compile
    started = time.perf_counter()
    estimate = estimator(jax.random.key(0), theta, count)
    jax.block_until_ready(estimate.gradient)
    return {
        f: count * float(jnp.mean(v**2)) for f, v in estimate.stderr.items()
    }, time.perf_counter() - started


def row(sigma, name, gains, seconds):
    return (
        f"{sigma:<13}{name:<30}"
        + "".join(f"{g:>10.3g}" for g in gains)
        + (f"{seconds:>10.1f}" if seconds else "")
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=128)
    parser.add_argument("--dt", type=float, default=1e-2)
    options = parser.parse_args()
    table = main(options.count, options.dt)
    place = ROOT / "results" / "twin"
    place.mkdir(parents=True, exist_ok=True)
    (place / "table.txt").write_text(table)
    print(table, end="")
