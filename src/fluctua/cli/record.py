"""`fluctua record`: a recording from the simulator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fluctua.cli import files, networks, options
from fluctua.cli.common import EXPECTED, STOPPED, fail, say, show_progress
from fluctua.cli.settings import parse_settings
from fluctua.core.words import format_count

if TYPE_CHECKING:
    from fluctua.runs.config import Config

SMALL = {"lattice.rows": 3, "lattice.columns": 4, "task.horizon": 10.0, "task.dt": 0.01}
"""Settings of `fluctua record` without a source: a lattice that a laptop records in a second."""


def record(
    out: Annotated[Path, typer.Argument(metavar="FILE.nc", help="Recording to write")],
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET|FILE.toml|RUN",
            help=f"Network to simulate: a preset ({options.PRESET}), a file of settings or a "
            "run's folder",
            show_default="a 3x4 lattice",
        ),
    ] = None,
    params: options.ParamsFile = None,
    trajectories: Annotated[
        int, typer.Option(min=1, help="Number of trajectories of the file in the end")
    ] = 200,
    settle: Annotated[
        float,
        typer.Option(help="Time before the first sample, to start in the steady state"),
    ] = 0.0,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between two samples", show_default="1; with a source 10"),
    ] = None,
    observe: Annotated[
        str | None,
        typer.Option(help="Resonators with a detector, such as 0,1,4-7", show_default="all"),
    ] = None,
    readout_noise: Annotated[
        float, typer.Option(help="Standard deviation of the readout of each quadrature")
    ] = 0.0,
    append: Annotated[
        bool, typer.Option("--append", help="Continue FILE.nc until it has --trajectories")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite FILE.nc")] = False,
    seed: options.Seed = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any key of the configuration, such as task.dt=0.001; note=TEXT and "
            "settings.NAME=NUMBER (of an actuator) are kept with the file; may be repeated",
        ),
    ] = None,
) -> None:
    """Write a recording from the simulator, to try everything without hardware.

    Ctrl-C leaves a usable file; the same command with --append continues exactly where it stopped.
    """
    from fluctua.insitu.recording.simulate import describe
    from fluctua.insitu.recording.simulate import record as run
    from fluctua.runs.build import make_task

    done = 0
    try:
        keys = parse_settings(settings)
        text = str(keys.pop("note", ""))
        actuators = _take_actuators(keys)
        config = _configure(source, keys)
        task = make_task(config)
        theta = networks.draw_initial_theta(task, config, seed)
        if source is not None and Path(source).is_dir():
            from fluctua.runs.reading import read_run

            theta = read_run(Path(source)).trained
        theta = _change_theta(theta, files.read_params(params))
        head = describe(
            task,
            theta,
            every=every or (1 if source is None else 10),
            observe=_parse_sites(observe),
            observation_noise=readout_noise,
            seed=seed,
            provenance=text,
            settings=actuators,
            settle=settle,
        )
        with show_progress("recording") as progress:
            for done in run(out, task, head, trajectories, append=append, replace=replace):
                progress(done, trajectories)
    except KeyboardInterrupt:
        again = " ".join(["fluctua", *sys.argv[1:], *([] if append else ["--append"])])
        say(
            "\n"
            f"stopped with {done:,} of {format_count(trajectories, 'trajectory')} in {out}. "
            f"Continue with: {again}"
        )
        raise typer.Exit(STOPPED) from None
    except EXPECTED as error:
        fail(str(error))
    size = out.stat().st_size / 1e6
    say(
        f"{out}: {format_count(trajectories, 'trajectory')} × {len(head.t):,} times × "
        f"{format_count(len(head.channels), 'channel')}, {size:.1f} MB"
    )
    steady = " --continuing" if settle else ""
    say(
        f"next: fluctua inspect {out}; fluctua estimate {out}{steady}; "
        f"fluctua calibrate {out}{steady}"
    )


def _configure(source: str | None, settings: dict[str, Any]) -> Config:
    """The configuration of a source, or of the small lattice."""
    if source is not None:
        return networks.configure(source, settings)
    return networks.configure("paper", {**SMALL, **settings})


def _change_theta(theta: dict[str, Any], changes: dict[str, Any] | None) -> dict[str, Any]:
    """Parameters of which some come from --params."""
    for name, value in (changes or {}).items():
        if name not in theta or value.shape != theta[name].shape:
            shapes = ", ".join(f"{k} {v.shape}" for k, v in theta.items())
            raise ValueError(f"--params holds some of {shapes}; got {name} {value.shape}.")
    return {**theta, **(changes or {})}


def _parse_sites(text: str | None) -> list[int] | None:
    """`0,1,4-7` as [0, 1, 4, 5, 6, 7]."""
    if text is None:
        return None
    sites: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"--observe is a list of resonators such as 0,1,4-7; got {text!r}.")
        sites += range(int(first), int(last if dash else first) + 1)
    return sites


def _take_actuators(settings: dict[str, Any]) -> dict[str, float]:
    """Remove `settings.NAME` from the keys of --set. Returns the numbers by NAME."""
    actuators = {}
    for key in [key for key in settings if key.startswith("settings.")]:
        value = settings.pop(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f"--set {key} takes a number, such as settings.heater=1.5; got {value!r}."
            )
        actuators[key.removeprefix("settings.")] = float(value)
    return actuators
