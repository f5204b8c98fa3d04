"""`fluctua train FILE.py:NAME`: a training of one's own."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from fluctua.cli.common import STOPPED, find_free_folder, say
from fluctua.cli.trainings.display import Target, serve_page, warn
from fluctua.learn.training import Training
from fluctua.store import runner
from fluctua.store.code import load_value

ITERATIONS = 100
"""Iterations of a training of one's own, if their number is not given."""


def train_code(source: str, resume: Path | None, iterations: int | None, place: Target) -> int:
    """Train what `FILE.py:NAME` is, into a folder. Returns the exit status."""
    if resume is not None and (place.out is not None or place.replace):
        raise ValueError("--resume continues the run in its folder: leave out --out and --replace.")
    training = load_value(source, Training, "a fluctua.Training")
    folder = resume or place.out or find_free_folder(Path(source.rpartition(":")[0]).stem)
    known = folder / "run.json"
    if resume is not None and not known.exists():
        raise ValueError(f"--resume: {folder} holds no training of your own (no run.json).")
    if resume is None and known.exists() and not place.replace:
        raise ValueError(
            f"{folder} holds a run already: continue it with --resume {folder}, or --replace it."
        )
    if iterations is None:
        iterations = json.loads(known.read_text())["iterations"] if resume else ITERATIONS
    console = Console()
    again = f"fluctua train {source} --resume {folder}"
    try:
        with serve_page(folder, place.watch, console):
            result = runner.run(
                training, iterations, folder, replace=place.replace, report=warn, progress=True
            )
    except KeyboardInterrupt:
        say(f"\nStopped. Continue with: {again}")
        return STOPPED
    say((result.folder / "summary.txt").read_text(), nl=False)
    say(f"run        {folder}   continue: {again} --iterations {2 * iterations}")
    return 0
