"""`fluctua record`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fluctua.cli.common import EXPECTED, bar, fail, lattice_size, parameters

STOPPED = 130
"""Exit status after Ctrl-C, as shells have it."""


def record(
    out: Annotated[Path, typer.Argument(metavar="FILE.nc", help="the recording to write")],
    preset: Annotated[
        str | None, typer.Option(help="demo, paper, paper-quick or a .toml, in place of the lattice options")
    ] = None,
    lattice: Annotated[str, typer.Option(help="rows x columns, leads on opposite corners")] = "3x4",
    horizon: Annotated[float, typer.Option(help="T, in units of 1 / coupling")] = 10.0,
    dt: Annotated[float, typer.Option(help="Euler-Maruyama step")] = 1e-2,
    sigma_w: Annotated[float, typer.Option(help="noise amplitude of every open channel")] = 0.5,
    sigma_kappa: Annotated[float, typer.Option(help="amplitude of the antagonistic modulation")] = 0.0,
    chi_std: Annotated[float, typer.Option(help="spread of the initial Kerr coefficients")] = 1e-4,
    params: Annotated[Path | None, typer.Option(help=".npz with some of omega, kappa, chi")] = None,
    trajectories: Annotated[int, typer.Option(min=1, help="how many the file is to have in the end")] = 200,
    settle: Annotated[
        float, typer.Option(help="time before the first sample, for a record that begins in the steady state")
    ] = 0.0,
    every: Annotated[
        int | None, typer.Option(help="keep one step of so many", show_default="1; with --preset 10")
    ] = None,
    observe: Annotated[
        str | None, typer.Option(help="resonators with a detector, such as 0,1,4-7; default all")
    ] = None,
    observation_noise: Annotated[
        float, typer.Option(help="standard deviation of the detectors, each quadrature")
    ] = 0.0,
    setting: Annotated[
        list[str] | None, typer.Option(help="NAME=NUMBER of an actuator, kept with the file; may be repeated")
    ] = None,
    note: Annotated[str, typer.Option(help="free text, kept with the file")] = "",
    append: Annotated[bool, typer.Option("--append", help="go on with FILE.nc until it has --trajectories")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="overwrite FILE.nc")] = False,
    seed: Annotated[int, typer.Option(help="of the noise, the modulation and the initial Kerr coefficients")] = 0,
) -> None:
    """Write a recording from the simulator, to try everything without hardware.

    Ctrl-C leaves a usable file; the same command with --append goes on exactly where it stopped.
    """
    from fluctua.insitu.recording.description import counted
    from fluctua.insitu.recording.simulate import describe
    from fluctua.insitu.recording.simulate import record as run

    done = 0
    try:
        task, theta = _task(preset, lattice, horizon, dt, sigma_w, sigma_kappa, chi_std, seed)
        theta = _with(theta, parameters(params))
        head = describe(
            task,
            theta,
            every=every or (1 if preset is None else 10),
            observe=_sites(observe),
            observation_noise=observation_noise,
            seed=seed,
            provenance=note,
            settings=_settings(setting),
            settle=settle,
        )
        with bar("recording") as progress:
            for done in run(out, task, head, trajectories, append=append, replace=replace):
                progress(done, trajectories)
    except KeyboardInterrupt:
        again = " ".join(["fluctua", *sys.argv[1:], *([] if append else ["--append"])])
        typer.echo(f"\nstopped with {done:,} of {trajectories:,} trajectories in {out}. Go on with: {again}")
        raise typer.Exit(STOPPED) from None
    except EXPECTED as error:
        fail(str(error))
    size = out.stat().st_size / 1e6
    typer.echo(
        f"{out}: {counted(trajectories, 'trajectory')} × {len(head.t):,} times × "
        f"{counted(len(head.channels), 'channel')}, {size:.1f} MB"
    )
    steady = " --continuing" if settle else ""
    typer.echo(f"next: fluctua inspect {out}; fluctua estimate {out}{steady}; fluctua calibrate {out}{steady}")


def _task(
    preset: str | None, lattice: str, horizon: float, dt: float, sigma_w: float, sigma_kappa: float, chi_std: float,
seed: int ) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    import jax

    from fluctua import tcmt

    if preset is not None:
        from fluctua.runs.build import make_task
        from fluctua.runs.config import named

        config = named(preset)
        task, chi_std = make_task(config), config.start.chi_std
    else:
        network = tcmt.rectangular(*lattice_size(lattice), sigma_w=sigma_w)
        task = tcmt.transmission(network, horizon=horizon, dt=dt, sigma_kappa=sigma_kappa)
    start = jax.random.split(jax.random.key(seed))[0]  # as in `fluctua gradient`
    return task, tcmt.initial_parameters(start, task.network, chi_std=chi_std)


def _with(theta: dict[str, Any], changes: dict[str, np.ndarray] | None) -> dict[str, Any]:
    for name, value in (changes or {}).items():
        if name not in theta or value.shape != theta[name].shape:
            shapes = ", ".join(f"{k} {v.shape}" for k, v in theta.items())
            raise ValueError(f"--params holds some of {shapes}; got {name} {value.shape}.")
    return {**theta, **(changes or {})}


def _sites(text: str | None) -> list[int] | None:
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


def _settings(texts: list[str] | None) -> dict[str, float]:
    settings = {}
    for text in texts or []:
        name, _, number = text.partition("=")
        try:
            settings[name] = float(number)
        except ValueError:
            raise ValueError(f"--setting is NAME=NUMBER, such as heater=1.5; got {text!r}.") from None
    return settings
