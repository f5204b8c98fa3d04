"""The measurements of Fig. 2: four panels, each a table on disk that is measured once.

`plan` says what there is to do and `measure` does it. A panel whose table exists is not measured again; a table that
was measured otherwise is refused. `fluctua.paper.properties` reads the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fluctua.paper import convergence
from fluctua.paper.lattices import Lattice, nearest
from fluctua.runs import noise
from fluctua.runs.noise import Done
from fluctua.store import tables
from fluctua.tcmt.kernel.run import Binned

SIGMA_W = tuple(float(f"{0.5 * 10 ** (k / 3):.4g}") for k in range(-8, 3))
"""Noise amplitudes of c and d: three a decade, the paper's 0.5 among them."""


class Settings(NamedTuple):
    """How much is measured. The defaults are the paper's ensembles; some 80 s of H200 kernels, by results/bench.

    running: trajectories of a and b. difference: of either leg of the finite difference. variance: of each point of
    c. bias: of each point of d. every: steps between two sortings into bins (1 is the paper's). site: of a and b, −1
    for `clearest_site`. fit_to: largest σ_W in the exponents of d; those of c, which are of the limit σ_W → 0, end a
    decade below.
    """

    running: int = 200_000
    group: int = 2000
    block: int = 100
    difference: int = 10_000
    variance: int = 1000
    bias: int = 10_000
    every: int = 100
    pilot: int = 1000
    site: int = -1
    sigma_w: tuple[float, ...] = SIGMA_W
    sigma_kappa: tuple[float, ...] = (0.0, 0.05, 0.2)
    fit_to: float = 0.5
    budget: int = 30_000
    seed: int = 0


QUICK = Settings(
    running=8000, difference=1000, variance=300, bias=1000, every=100, pilot=300, sigma_w=SIGMA_W[::2], budget=4000
)
"""A look in some seconds, on a small lattice."""


class Panel(NamedTuple):
    """One table to measure. work: trajectories. make: told of those done, returns columns and what goes above them."""

    name: str
    path: Path
    work: int
    settings: dict[str, Any]
    make: Callable[[Done], tuple[dict[str, Any], dict[str, Any]]]


def plan(folder: Path, lattices: list[Lattice], settings: Settings, backend: str) -> list[Panel]:
    """The panels a–d on lattices in the middle of their training; each σ_κ on the one trained closest to it."""
    s = settings
    key = jax.random.key(s.seed)
    calm, rough = s.sigma_kappa[0], s.sigma_kappa[-1]
    panels = []
    for name, sigma in (("a", calm), ("b", rough)):
        lattice = nearest(lattices, sigma)
        told = _told([lattice], s, "running", "group", "difference", "pilot", "site", "every", "seed", "budget")
        work = s.running + s.pilot + 2 * s.difference
        k = jax.random.fold_in(key, ord(name))
        panels.append(Panel(name, folder / f"panel_{name}.csv", work, {**told, "sigma_kappa": sigma},
                            _convergence(k, lattice, s, backend)))  # fmt: skip
    each = [nearest(lattices, sigma) for sigma in s.sigma_kappa]
    points = len(s.sigma_w) * len(each)
    told = _told(each, s, "variance", "every", "sigma_w", "sigma_kappa", "fit_to", "seed")
    k = jax.random.fold_in(key, ord("c"))
    panels.append(Panel("c", folder / "panel_c.csv", 2 * s.variance * points, told, _variances(k, each, s, backend)))
    told = _told(each, s, "bias", "sigma_w", "sigma_kappa", "fit_to", "seed")
    work = s.bias * (points + len(each))
    k = jax.random.fold_in(key, ord("d"))
    panels.append(Panel("d", folder / "panel_d.csv", work, told, _returns(k, each, s, backend)))
    return panels


def measure(panels: list[Panel], *, replace: bool = False) -> Iterator[tuple[Panel, Callable[[Done], None]]]:
    """The panels that are not there yet, each with what measures it; tables of other settings are refused first."""
    missing = []
    for panel in panels:
        if panel.path.exists() and not replace:
            _same(panel)
        else:
            missing.append(panel)
    for panel in missing:
        yield panel, partial(_write, panel)


def _write(panel: Panel, done: Done) -> None:
    columns, told = panel.make(done)
    tables.write(panel.path, columns, {**panel.settings, **told})


def _same(panel: Panel) -> None:
    told = tables.read(panel.path).told
    for name, value in panel.settings.items():
        if told.get(name) != _plain(value):
            raise ValueError(
                f"{panel.path} was measured with {name} = {told.get(name)}, not {_plain(value)}. Pass --replace to "
                "measure it again, or --from-tables to draw it as it is."
            )


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value


def _told(lattices: list[Lattice], settings: Settings, *names: str) -> dict[str, Any]:
    """What a table says of itself."""
    first = lattices[0].task
    return {
        "lattices": [f"{lattice.source}, iteration {lattice.iteration}" for lattice in lattices],
        "sites": first.network.sites,
        "horizon": float(first.t[-1]),
        "dt": float(first.t[-1]) / (len(first.t) - 1),
        "trained_sigma_w": float(first.network.sigma_r[0]),
        **{name: getattr(settings, name) for name in names},
    }


# ------------------------------------------------------------------------------------------ measuring


def _convergence(key: Any, lattice: Lattice, s: Settings, backend: str) -> Any:
    def make(done: Done) -> tuple[dict[str, Any], dict[str, Any]]:
        k_pilot, k_run, k_difference = jax.random.split(key, 3)
        task, theta = lattice.task, lattice.theta
        site = s.site
        if site < 0:
            site = convergence.clearest_site(k_pilot, task, theta, count=s.pilot, backend=backend)
        done(s.pilot)
        value, error = convergence.finite_difference(
            k_difference, task, theta, site, count=s.difference, backend=backend
        )
        done(2 * s.difference)
        run = convergence.running(
            k_run, task, theta, site, s.running, group=s.group, block=s.block, every=s.every, backend=backend, done=done
        )
        columns = {"trajectories": run.trajectories, "block_mean": run.mean, "block_mean_square": run.square}
        told = {"block": s.block, "chosen_site": site, "finite_difference": value, "finite_difference_stderr": error}
        return columns, told

    return make


def _variances(key: Any, lattices: list[Lattice], s: Settings, backend: str) -> Any:
    def make(done: Done) -> tuple[dict[str, Any], dict[str, Any]]:
        rows = []
        for lattice, sigma in zip(lattices, s.sigma_kappa, strict=True):
            for name, baseline in (("none", "none"), ("binned", Binned(every=s.every, group=max(s.variance, 2)))):
                found = noise.variances(
                    key, lattice.task, lattice.theta, s.sigma_w, baseline=baseline, count=s.variance, backend=backend,
                    done=done,
                )  # fmt: skip
                rows += [
                    (sigma, name, w, b, found[i, b])
                    for i, w in enumerate(s.sigma_w)
                    for b in range(found.shape[1])
                ]  # fmt: skip
        return dict(zip(("sigma_kappa", "baseline", "sigma_w", "batch", "variance"), zip(*rows, strict=True),
                        strict=True)), {}  # fmt: skip

    return make


def _returns(key: Any, lattices: list[Lattice], s: Settings, backend: str) -> Any:
    def make(done: Done) -> tuple[dict[str, Any], dict[str, Any]]:
        rows, silent = [], []
        for lattice, sigma in zip(lattices, s.sigma_kappa, strict=True):
            found = noise.returns(
                key, lattice.task, lattice.theta, s.sigma_w, count=s.bias, backend=backend, done=done
            )  # fmt: skip
            silent.append(found.silent)
            for b, square in enumerate(found.silent_square):
                rows.append((sigma, 0.0, b, 0.0, square))
            rows += [
                (sigma, w, b, found.bias[i, b], found.square[i, b])
                for i, w in enumerate(s.sigma_w)
                for b in range(found.bias.shape[1])
            ]
        names = ("sigma_kappa", "sigma_w", "batch", "bias", "square")
        return dict(zip(names, zip(*rows, strict=True), strict=True)), {"J_silent": silent}

    return make
