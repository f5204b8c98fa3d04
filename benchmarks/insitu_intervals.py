"""How far apart may samples be? Euler's score and local linearisation's against the truth, on a
small lattice.

python benchmarks/insitu_intervals.py [--trajectories 20000] [--minutes 8] [--out results/insitu]

The lattice is simulated in fine steps and looked at every Δ. What is estimated is the gradient of
the return as the samples see it, J_Δ = E[(Δ/T) Σ g(X_{nΔ})]. Without bias it is had from the same
trajectories if the score of an interval is the sum of the scores of its fine steps, which only a
simulation knows. The difference of the two, trajectory by trajectory, is the bias, with an error
far below that of either gradient."""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.stats import chi2

import fluctua as fl
from fluctua import tcmt
from fluctua.core.estimator import gradient_samples
from fluctua.core.simulate import advance_one, start_trajectory

DT, HORIZON, FINEST = 2e-4, 5.0, 10
EVERY = (
    10,
    20,
    50,
    100,
    250,
    500,
    1000,
    2500,
    5000,
)  # steps of DT between samples, multiples of FINEST
FAMILIES = ("omega", "kappa", "chi")
WORTH = 100  # below, local linearisation costs much and Euler is as good
SCORES = {"Euler": fl.scores.full_score, "local linearisation": fl.scores.local_linear_score}

CASES = [(name, every) for name in SCORES for every in EVERY if name == "Euler" or every >= WORTH]


def lattice():
    """2 × 3 in the paper's conditions, away from the symmetric start, with a Kerr effect that
    matters.
    """
    network = tcmt.rectangular(2, 3)
    rng = np.random.default_rng(0)
    theta = {
        "omega": jnp.asarray(0.3 * rng.normal(size=6)),
        "kappa": jnp.asarray(1 + 0.2 * rng.normal(size=len(network.bonds))),
        "chi": jnp.asarray(0.004 * rng.normal(size=6)),
    }
    return tcmt.transmission(network, horizon=HORIZON, dt=DT), theta


def nearly_continuous(process):
    """The process whose Euler step of DT is a midpoint step: hardware has no Δt, and Euler's
    own error would show.
    """
    f = process.drift

    def middle(th, x, t, c):
        return f(th, x + f(th, x, t, c) * DT / 2, t + DT / 2, c)

    return process._replace(drift=middle)


@partial(jax.jit, static_argnums=0)
def simulate(recipe, key, theta, trajectories, x0, t):
    """States (E, T/FINEST + 1, M) and the scores of the steps between them, summed (E,
    T/FINEST, P).
    """

    def one(j):
        started = start_trajectory(recipe, key, theta, x0, j)

        def step(carry, n):
            x, total = carry
            after = advance_one(recipe, theta, x, started.context, started.streams, n, t[n], DT)
            u = fl.scores.full_score(
                recipe.process, theta, fl.scores.Step(x, after, t[n], DT, started.context)
            )
            return (after, total + ravel_pytree(u)[0]), None

        def several(x, first):
            zero = jnp.zeros(ravel_pytree(theta)[0].size, x.dtype)
            (x, total), _ = jax.lax.scan(step, (x, zero), first + jnp.arange(FINEST))
            return x, (x, total)

        _, (path, scores) = jax.lax.scan(several, started.x, jnp.arange(0, len(t) - 1, FINEST))
        return jnp.concatenate([started.x[None], path]), scores

    return jax.vmap(one)(trajectories)


def correct_estimates(task, theta, data, scores, table):
    """Σ_n (λ̂ₙ₊₁ − λ̄ₙ₊₁) Σ_{fine steps of n} U, of every trajectory. (E, P)"""
    reward = jax.vmap(jax.vmap(lambda x, t: task.objective.running(theta, x, t)), in_axes=(0, None))
    g = reward(jnp.asarray(data.x[:, :-1]), jnp.asarray(data.t[:-1]))
    to_go = fl.returns_to_go(g, jnp.zeros(len(g)), jnp.diff(data.t))
    return np.asarray(jnp.einsum("en,enp->ep", to_go[:, 1:] - table[1:], scores))


def run(task, theta, batches, batch, key, until):
    """{(score, every): (bias, its error)}, {every: gradient}, and how many trajectories they
    are from.
    """
    differences = {which: [] for which in CASES}
    truth = {every: [] for every in EVERY}
    tables, substrate = {}, task._replace(process=nearly_continuous(task.process)).simulator()
    for k in range(
        batches + 1
    ):  # the first is a pilot: the mean return-to-go of trajectories used for nothing else
        j = jnp.arange(batch) + k * batch
        x, u = map(
            np.asarray, simulate(substrate.recipe, key, theta, j, substrate.x0, jnp.asarray(task.t))
        )
        for every in EVERY:
            c = every // FINEST
            data = fl.Trajectories(task.t[::every], x[:, ::c])
            if k == 0:
                tables[every] = fl.mean_return_to_go(task.objective, theta, data)
                continue
            right = correct_estimates(
                task, theta, data, u.reshape(batch, -1, c, u.shape[-1]).sum(axis=2), tables[every]
            )
            truth[every].append(right)
            for name, score in SCORES.items():
                if (name, every) not in differences:
                    continue
                plan = fl.baselines.time_only(tables[every])
                each = gradient_samples(
                    task.process, task.objective, theta, data, score=score, baseline=plan
                ).gradient
                rows = np.concatenate(
                    [np.asarray(each[family]) for family in sorted(theta)], axis=1
                )
                differences[name, every].append(rows - right)
        print(f"batch {k} of {batches}", flush=True)
        if k and time.time() > until:
            break

    def of(parts):
        return (lambda v: (v.mean(axis=0), v.std(axis=0, ddof=1) / np.sqrt(len(v))))(
            np.concatenate(parts)
        )

    count = sum(map(len, truth[EVERY[0]]))
    return (
        {w: of(parts) for w, parts in differences.items()},
        {e: of(parts)[0] for e, parts in truth.items()},
        count,
    )


def compare(theta, pair, gradient):
    """Relative bias of each family beyond noise, what noise alone gives, and χ² of all
    parameters.
    """
    bias, error = pair
    statistic = float(np.sum((bias / error) ** 2))
    row = {"chi2_per_parameter": statistic / bias.size, "p": float(chi2.sf(statistic, bias.size))}
    families = sorted(theta)
    ends = np.cumsum([0, *(np.size(theta[name]) for name in families)])
    for name, first, last in zip(families, ends, ends[1:], strict=False):
        size = np.linalg.norm(gradient[first:last])
        floor = np.sqrt(np.sum(error[first:last] ** 2))
        beyond = np.sqrt(max(np.sum(bias[first:last] ** 2) - floor**2, 0))
        row[name] = {"bias": float(beyond / size), "floor": float(floor / size)}
    return row


def report(table, count):
    lines = [
        "Bias of the gradient against the interval between samples "
        "(benchmarks/insitu_intervals.py):",
        f"2 x 3 lattice, T = {HORIZON:g}, midpoint steps of {DT:g}, sigma_W = 0.5, chi on, "
        f"{count:,} trajectories.",
        "Bias: |G - truth| / |truth| of a family, the noise taken off; (floor): what noise alone "
        "gives.",
        "chi2/P: over all 19 parameters.",
        "",
        f"{'score':<20} {'interval':>8} {'omega':>16} {'kappa':>16} {'chi':>16} {'chi2/P':>8} "
        f"{'p':>8}",
    ]
    for row in table:
        cells = " ".join(f"{row[k]['bias']:>7.1%} ({row[k]['floor']:>5.1%})" for k in FAMILIES)
        lines.append(
            f"{row['score']:<20} {row['interval']:>8g} {cells} {row['chi2_per_parameter']:>8.2f} "
            f"{row['p']:>8.2g}"
        )
    lines.append("")
    for name in SCORES:
        mine = [row for row in table if row["score"] == name]
        good = [row["interval"] for row in mine if row["p"] > 1e-3]
        small = [
            row["interval"] for row in mine if max(max(row[k].values()) for k in FAMILIES) < 0.05
        ]

        def largest(v):
            return f"up to an interval of {max(v):g}" if v else "at none of these intervals"

        lines.append(
            f"{name}: no bias seen (p > 0.001) {largest(good)}; bias and floor below 5 % "
            f"{largest(small)}"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=1_000)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin no other batch after this"
    )
    parser.add_argument("--out", type=Path, default=Path("results/insitu"))
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    task, theta = lattice()
    batches = max(1, options.trajectories // options.batch)
    until = time.time() + 60 * options.minutes
    found, gradients, count = run(task, theta, batches, options.batch, jax.random.key(1), until)
    table = [
        {"score": name, "interval": every * DT, "trajectories": count}
        | compare(theta, found[name, every], gradients[every])
        for name, every in CASES
    ]
    text = report(table, count)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "intervals.txt").write_text(text)
    (options.out / "intervals.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
