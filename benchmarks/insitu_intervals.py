"""How far apart may samples be? Euler's score and local linearisation's against the truth, on a small lattice.

python benchmarks/insitu_intervals.py [--trajectories 400000] [--minutes 6] [--out results/insitu]

The lattice is simulated at the paper's Δt = 10⁻³ and looked at every Δ. What is estimated is the gradient of the return
as the samples see it, J_Δ = E[(Δ/T) Σ g(X_{nΔ})]; the truth is the pathwise derivative of the same sum through the
simulation. A score that is right at Δ agrees with it within errors, whatever Δ is.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.stats import chi2

import fluctua as fl
from fluctua import tcmt
from fluctua.simulate import sampled

DT, HORIZON, FINEST = 1e-3, 5.0, 10
EVERY = (10, 20, 50, 100, 200, 500, 1000)  # steps of DT between samples


def lattice():
    """2 × 3 in the paper's conditions, away from the symmetric start, with a Kerr effect that matters."""
    network = tcmt.rectangular(2, 3)
    rng = np.random.default_rng(0)
    theta = {
        "omega": jnp.asarray(0.3 * rng.normal(size=6)),
        "kappa": jnp.asarray(1 + 0.2 * rng.normal(size=len(network.bonds))),
        "chi": jnp.asarray(0.004 * rng.normal(size=6)),
    }
    return tcmt.transmission(network, horizon=HORIZON, dt=DT), theta


def truth(task, theta, every, count, key):
    """Pathwise gradient of J_Δ."""

    def running(th, x, t):
        n = jnp.round(t / DT).astype(int)
        return jnp.where(n % every == 0, every, 0) * task.objective.running(th, x, t)

    return fl.pathwise(fl.Objective(running=running), task.simulator())(key, theta, count)


def estimates(task, theta, batches, batch, key, until):
    """{(score, every): (gradient, stderr)} from the same trajectories."""
    scores = {"Euler": fl.full_score, "local linearisation": fl.local_linear_score}
    rows = {(name, every): [] for name in scores for every in EVERY}
    tables = {}
    for k in range(batches + 1):  # the first is a pilot: the mean return-to-go of trajectories used for nothing else
        j = jnp.arange(batch) + k * batch
        x = np.asarray(sampled(task.simulator(), key, theta, j, FINEST)[0])
        for every in EVERY:
            data = fl.Trajectories(task.t[::every], x[:, :: every // FINEST])
            if k == 0:
                tables[every] = fl.mean_return_to_go(task.objective, theta, data)
                continue
            for name, score in scores.items():
                estimator = fl.ppgt(
                    task.process, task.objective, task.simulator(), score=score, baseline=fl.time_only(tables[every])
                )
                each = estimator.samples_of(theta, data).gradient
                rows[name, every].append(np.asarray(jax.vmap(lambda g: ravel_pytree(g)[0])(each)))
        print(f"batch {k} of {batches}", flush=True)
        if k and time.time() > until:
            break
    found = {}
    for which, parts in rows.items():
        g = np.concatenate(parts)
        found[which] = g.mean(axis=0), g.std(axis=0, ddof=1) / np.sqrt(len(g))
    return found, len(g)


def compared(theta, found, exact):
    """Relative bias of each family, its error, and χ² of all parameters."""
    flat = lambda tree: np.asarray(ravel_pytree(tree)[0])
    g, error = found
    d = g - flat(exact.gradient)
    variance = error**2 + flat(exact.stderr) ** 2
    statistic = float(np.sum(d**2 / variance))
    told = {"chi2_per_parameter": statistic / d.size, "p": float(chi2.sf(statistic, d.size))}
    labels = flat({name: np.full(np.shape(v), i) for i, (name, v) in enumerate(theta.items())})
    for i, name in enumerate(theta):
        mine = labels == i
        size = np.linalg.norm(flat(exact.gradient)[mine])
        floor = np.sqrt(variance[mine].sum())
        told[name] = {
            "bias": float(np.sqrt(max(np.sum(d[mine] ** 2) - floor**2, 0)) / size),
            "floor": float(floor / size),
        }
    return told


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=400_000)
    parser.add_argument("--batch", type=int, default=20_000)
    parser.add_argument("--reference", type=int, default=16_384)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no other batch after this")
    parser.add_argument("--out", type=Path, default=Path("results/insitu"))
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    begun = time.time()
    task, theta = lattice()
    batches = max(1, options.trajectories // options.batch)
    until = begun + 60 * options.minutes
    found, count = estimates(task, theta, batches, options.batch, jax.random.key(1), until)
    table = []
    for every in EVERY:
        exact = truth(task, theta, every, options.reference, jax.random.key(2))
        for name in ("Euler", "local linearisation"):
            table.append({"score": name, "interval": every * DT, **compared(theta, found[name, every], exact)})
        print(f"interval {every * DT:g}, {time.time() - begun:.0f} s", flush=True)
    text = report(table, count, options.reference)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "intervals.txt").write_text(text)
    (options.out / "intervals.json").write_text(json.dumps(table, indent=1) + "\n")


def report(table, count, reference):
    lines = [
        "Bias of the gradient against the interval between samples: 2 x 3 lattice, T = 5, dt = 1e-3, sigma_W = 0.5,",
        f"{count:,} trajectories; truth: pathwise, {reference:,} trajectories. Bias: |G - truth| / |truth| of a family, the noise",
        "taken off; (floor): what noise alone gives. chi2/P: over all 19 parameters; unbiased if p > 0.001.",
        "",
        f"{'score':<20} {'interval':>8} {'omega':>15} {'kappa':>15} {'chi':>15} {'chi2/P':>8} {'p':>8}",
    ]
    for row in table:
        cells = " ".join(f"{row[k]['bias']:>6.1%} ({row[k]['floor']:>5.1%})" for k in ("omega", "kappa", "chi"))
        lines.append(
            f"{row['score']:<20} {row['interval']:>8g} {cells} {row['chi2_per_parameter']:>8.2f} {row['p']:>8.2g}"
        )
    lines.append("")
    for name in ("Euler", "local linearisation"):
        good = [row["interval"] for row in table if row["score"] == name and row["p"] > 1e-3]
        small = [
            row["interval"]
            for row in table
            if row["score"] == name and max(row[k]["bias"] for k in ("omega", "kappa", "chi")) < 0.05
        ]
        largest = lambda v: f"{max(v):g}" if v else "none of these"
        lines.append(f"{name}: no bias seen up to an interval of {largest(good)}; below 5 % up to {largest(small)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
