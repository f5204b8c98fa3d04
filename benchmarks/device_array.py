"""Devices that differ, trained alone and together: table and figure of what `fluctua insitu demo --devices 4` measured.

for seed in 3 13 23; do
  fluctua insitu demo --devices 4 --seed $seed --iterations 60 --trajectories 120 --out runs/array-$seed
  cp runs/array-$seed/array.csv results/array/seed-$seed.csv
done
python benchmarks/device_array.py
"""

from pathlib import Path

from fluctua.core.text import with_error
from fluctua.insitu.bench.population import read, together
from fluctua.plot.training import draw_population

FOLDER = Path(__file__).resolve().parents[1] / "results" / "array"
NAMES = {
    "before": "before training",
    "one device": "trained on one box, the others set as it is",
    "settings": "trained on four together, the same settings",
    "parameters": "trained on four together, settings corrected",
}


def main():
    """Write table.md and array.png."""
    paths = sorted(FOLDER.glob("seed-*.csv"), key=lambda path: int(path.stem.split("-")[1]))
    each = [read(path) for path in paths]
    lines = ["| design | boxes | " + " | ".join(f"seed {p.stem.split('-')[1]}" for p in paths) + " |"]
    lines += ["| --- | --- |" + " --- |" * len(paths)]
    for k, name in enumerate(design.name for design in each[0].designs):
        kinds = [("trained", lambda c: slice(0, c.devices)), ("took no part", lambda c: slice(c.devices, None))]
        if name == "one device":
            kinds.insert(0, ("the one", lambda c: slice(0, 1)))
        for kind, boxes in kinds:
            levels = [c.designs[k].over(boxes(c)) if kind != "the one" else c.designs[k].levels[0] for c in each]
            lines.append(f"| {NAMES[name]} | {kind} | " + " | ".join(with_error(*level) for level in levels) + " |")
    (FOLDER / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    draw_population(together(each)).savefig(FOLDER / "array.png", dpi=130)


if __name__ == "__main__":
    main()
