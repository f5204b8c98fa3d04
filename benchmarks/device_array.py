"""Devices that differ, trained alone and together: table and figure of what `fluctua insitu demo
--devices 4` measured.

for seed in 3 13 23; do
    fluctua insitu demo --set devices=4 --seed $seed --iterations 60 --trajectories 120 --out
    runs/array-$seed cp runs/array-$seed/array.csv results/array/seed-$seed.csv
done
python benchmarks/device_array.py

`--boxes` asks how many boxes a design for all needs: the same settings for K boxes, trained with
exact moments and gradients, and J on 100 others. No measurement is needed for it, and none could do
better."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fluctua as fl
from fluctua import tcmt
from fluctua.core.estimate import Estimate
from fluctua.core.text import with_error
from fluctua.insitu.bench import device
from fluctua.insitu.bench.population import concatenate, read
from fluctua.plot.insitu import draw_population
from fluctua.plot.style import save_png
from fluctua.tcmt import exact

FOLDER = Path(__file__).resolve().parents[1] / "results" / "array"
NAMES = {
    "before": "before training",
    "one device": "trained on one box, the others set as it is",
    "settings": "trained on four together, the same settings",
    "parameters": "trained on four together, settings corrected",
    "whole range": "the same, whole range of the knobs",
}


def boxes(iterations=80):
    """J of settings that K boxes share, on these and on 100 others, by exact moments; into
    boxes.md.
    """
    task = tcmt.transmission(device.Sheet().nominal, horizon=6.0, dt=device.Sheet().interval)

    def of(seed, settings):
        box = device.draw_hidden(device.Sheet(seed=seed))
        at = {
            name: box.offset[name] + box.gain[name] * np.asarray(u) for name, u in settings.items()
        }
        value, slope = exact.value_and_gradient(task, at | {"gamma": box.gamma})
        return value, {name: slope[name] * box.gain[name] for name in settings}

    lines = ["| boxes that share settings | J on these | J on 100 others |", "| --- | --- | --- |"]
    for count in (1, 4, 16, 64):

        def mean(key, theta, _, seeds=range(1000, 1000 + count)):
            values, slopes = zip(*(of(seed, theta) for seed in seeds), strict=True)
            gradient = jax.tree.map(lambda *leaves: jnp.asarray(np.mean(leaves, axis=0)), *slopes)
            zero = jax.tree.map(jnp.zeros_like, gradient)
            return Estimate(gradient, zero, zero, jnp.asarray(np.mean(values)), jnp.asarray(0.0), 1)

        start = {"omega": jnp.zeros(task.network.sites), "kappa": jnp.ones(len(task.network.bonds))}
        rule = optax.adam(optax.cosine_decay_schedule(0.1, iterations, alpha=0.05))
        bounds = ({"omega": -2.0, "kappa": 0.0}, {"omega": 2.0, "kappa": 1.5})
        *_, last = fl.train(
            fl.Training(mean, start, rule, trajectories=1, bounds=bounds), iterations=iterations
        )
        others = np.array([of(seed, last.next_theta)[0] for seed in range(2000, 2100)])
        level = with_error(float(others.mean()), float(others.std(ddof=1) / 10))
        lines.append(f"| {count} | {float(last.estimate.value):.3f} | {level} |")
        print(lines[-1], flush=True)
    (FOLDER / "boxes.md").write_text("\n".join(lines) + "\n")


def main():
    """Write table.md and array.png."""
    paths = sorted(FOLDER.glob("seed-*.csv"), key=lambda path: int(path.stem.split("-")[1]))
    each = [read(path) for path in paths]
    lines = [
        "| design | boxes | " + " | ".join(f"seed {p.stem.split('-')[1]}" for p in paths) + " |"
    ]
    lines += ["| --- | --- |" + " --- |" * len(paths)]
    for k, name in enumerate(design.name for design in each[0].designs):
        kinds = [
            ("trained", lambda c: slice(0, c.devices)),
            ("took no part", lambda c: slice(c.devices, None)),
        ]
        if name == "one device":
            kinds.insert(0, ("the one", lambda c: slice(0, 1)))
        for kind, boxes in kinds:
            levels = [
                c.designs[k].over(boxes(c)) if kind != "the one" else c.designs[k].levels[0]
                for c in each
            ]
            lines.append(
                f"| {NAMES[name]} | {kind} | "
                + " | ".join(with_error(*level) for level in levels)
                + " |"
            )
    (FOLDER / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    save_png(draw_population(concatenate(each)), FOLDER / "array.png")


if __name__ == "__main__":
    boxes() if "--boxes" in sys.argv[1:] else main()
