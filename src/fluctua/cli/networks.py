"""Networks that are simulated: their configurations and where a training starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fluctua.runs.config import Config
    from fluctua.tcmt import Task


def is_simulated(source: str) -> bool:
    """Whether a source is a preset, a TOML file or the folder of a run."""
    from fluctua.runs.config import PRESETS

    return source in PRESETS or source.endswith(".toml") or Path(source).is_dir()


def configure(source: str, settings: dict[str, Any]) -> Config:
    """The configuration of a preset, a TOML file or a run's folder, with changed settings."""
    from fluctua.runs.config import apply_changes, find_config, load_unedited

    folder = Path(source)
    if folder.suffix == ".npz" and folder.is_file():
        raise ValueError(
            f"{source} holds parameters and no settings: give it with --params, and as the source "
            "a preset, a TOML file or the folder of a run."
        )
    if not folder.is_dir():
        return apply_changes(find_config(source), settings)
    _refuse_other_runs(folder)
    if not (folder / "final.npz").exists():
        raise ValueError(
            f"{folder} has no final.npz: it is not a run folder, or its training never stopped."
        )
    return apply_changes(load_unedited(folder / "config.toml"), settings)


def _refuse_other_runs(folder: Path) -> None:
    """Refuse the runs of instruments and of own processes, which have no network to simulate."""
    if (folder / "config.toml").exists():
        return
    if (folder / "plan.json").exists():
        raise ValueError(
            f"{folder} is the run of an instrument, whose J is measured there and not simulated. "
            f"Results are in {folder / 'summary.txt'}, and drawn by fluctua plot {folder}; for "
            f"more iterations: fluctua insitu train --resume {folder} --iterations N."
        )
    if (folder / "run.json").exists():
        raise ValueError(
            f"{folder} is the run of a process of your own, and no network. Results are in "
            f"{folder / 'summary.txt'}, and drawn by fluctua plot {folder}."
        )


def draw_initial_theta(task: Task, config: Config, seed: int) -> dict[str, Any]:
    """Draw the parameters at which the training of a configuration starts."""
    import jax

    from fluctua import tcmt

    start, _ = jax.random.split(jax.random.key(seed))
    return tcmt.initial_parameters(start, task.network, chi_std=config.start.chi_std)
