"""Draw a network and its parameters as a diagram (Fig. 1f).

Disk radius is |ω_n|, the detuning; disk colour is χ_n. Width and colour of a bond are |κ_nm| on
square-root scales about κ = 1, one above and another below, so that a few strong bonds do not hide
changes of the weak ones. A triangle marks the input, a star the output. Sizes are in bond lengths,
so a diagram looks the same at any size, and its keys are drawn to the same scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import EllipseCollection, LineCollection, PolyCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.gridspec import SubplotSpec
from matplotlib.patches import Circle, Polygon
from matplotlib.transforms import AffineDeltaTransform, ScaledTranslation, blended_transform_factory

from fluctua.core.arrays import Params
from fluctua.plot.style import LOOK
from fluctua.tcmt import Network, parameters

COUPLING = LinearSegmentedColormap.from_list(
    "coupling", ["#ccb2dd", "#ada1b5", "#8c8c8c", "#2f8f4e", "#00441b"]
)
KERR = mpl.colormaps["RdBu_r"]
INPUT = "#009e73"
OUTPUT = "#0072b2"
OTHER = "0.55"

RADIUS = (0.12, 0.38)
"""Radius of a disk at no detuning and at the largest, in bond lengths."""

WIDTH = (0.025, 0.09, 0.30)
"""Width of a bond at the weakest coupling, at κ = 1 and at the strongest, in bond lengths."""

MARGIN = 1.25
"""Margin around the outermost resonators, in bond lengths, for the marks of the leads."""

NARROWEST = 0.01
"""Minimum extent of a scale: an untrained network has no spread of its own."""


class Scales(NamedTuple):
    """Values at full size and full colour. Diagrams that are compared share one.

    detuning: the largest |ω|.
    weakest, strongest: of |κ|, with 1 between them.
    kerr: the largest |χ|.
    length: of a typical bond, in the units of `positions`.
    """

    detuning: float
    weakest: float
    strongest: float
    kerr: float
    length: float

    def compress(self, kappa: np.ndarray) -> np.ndarray:
        """κ| on the asymmetric square-root scale: −1 at the weakest, 0 at 1, 1 at the strongest."""
        excess = np.abs(kappa) - 1
        return np.where(
            excess < 0,
            -np.sqrt(np.abs(excess) / (1 - self.weakest)),
            np.sqrt(np.abs(excess) / (self.strongest - 1)),
        )

    def expand(self, u: np.ndarray) -> np.ndarray:
        """κ| at a point of that scale, the inverse of `compress`."""
        u = np.asarray(u, float)
        return 1 + np.where(u < 0, -(u**2) * (1 - self.weakest), u**2 * (self.strongest - 1))

    def radius(self, omega: np.ndarray) -> np.ndarray:
        """Radius of a disk, in bond lengths."""
        return RADIUS[0] + (RADIUS[1] - RADIUS[0]) * np.abs(omega) / self.detuning

    def width(self, kappa: np.ndarray) -> np.ndarray:
        """Width of a bond, in bond lengths."""
        return np.interp(self.compress(kappa), (-1, 0, 1), WIDTH)


def fit_scales(network: Network, *thetas: Params) -> Scales:
    """The smallest scales that fit all θ."""
    of = [
        {name: np.abs(np.asarray(v)) for name, v in parameters(network, theta).items()}
        for theta in thetas
    ]

    def gather(name):
        return np.concatenate([one[name] for one in of])

    ends = network.positions[network.bonds]
    lengths = np.linalg.norm(ends[:, 1] - ends[:, 0], axis=1)
    return Scales(
        detuning=float(gather("omega").max(initial=NARROWEST)),
        weakest=float(gather("kappa").min(initial=1 - NARROWEST)),
        strongest=float(gather("kappa").max(initial=1 + NARROWEST)),
        kerr=float(gather("chi").max(initial=1e-4)),
        length=float(np.median(lengths)) if lengths.size else 1.0,
    )


def draw_network(
    axes: Axes, network: Network, theta: Params, *, scale: Scales | None = None
) -> Scales:
    """Draw the diagram on given axes, and return its scales for `draw_keys`.

    theta: some of omega, kappa, chi; the others are the network's. Lead 0 is the input, lead 1 the
        output.

    >>> draw_network(mpl.figure.Figure().subplots(), network, theta)
    """
    scale = scale or fit_scales(network, theta)
    p = {name: np.asarray(value, float) for name, value in parameters(network, theta).items()}
    _draw_bonds(axes, network, p["kappa"], scale)
    size = 2 * scale.length * scale.radius(p["omega"])
    disks = EllipseCollection(
        size,
        size,
        np.zeros_like(size),
        units="xy",
        offsets=network.positions,
        offset_transform=axes.transData,
    )
    disks.set(array=p["chi"], cmap=KERR, norm=Normalize(-scale.kerr, scale.kerr))
    disks.set(edgecolor="0.25", linewidth=0.4, zorder=3)
    axes.add_collection(disks)
    for lead in range(network.leads):
        _draw_port(
            axes, network, lead, "input" if lead == 0 else "output" if lead == 1 else "", scale
        )
    low = network.positions.min(axis=0)
    high = network.positions.max(axis=0)
    margin = MARGIN * scale.length
    axes.set(
        xlim=(low[0] - margin, high[0] + margin),
        ylim=(low[1] - margin, high[1] + margin),
        aspect="equal",
    )
    axes.set_axis_off()
    return scale


def _draw_bonds(axes: Axes, network: Network, kappa: np.ndarray, scale: Scales) -> None:
    ends = network.positions[network.bonds]  # (B, 2, 2)
    along = ends[:, 1] - ends[:, 0]
    across = np.stack([-along[:, 1], along[:, 0]], axis=1) / np.linalg.norm(
        along, axis=1, keepdims=True
    )
    half = across * (scale.length * scale.width(kappa) / 2)[:, None]
    corners = np.stack(
        [ends[:, 0] + half, ends[:, 1] + half, ends[:, 1] - half, ends[:, 0] - half], axis=1
    )
    order = np.argsort(np.abs(kappa))  # strong ones on top
    colours = COUPLING(Normalize(-1, 1)(scale.compress(kappa[order])))
    axes.add_collection(
        PolyCollection(list(corners[order]), facecolors=colours, edgecolors="none", zorder=1)
    )
    negative = ends[kappa < 0]
    if len(negative):  # the diagram shows magnitudes: a sign is a light line along the bond
        axes.add_collection(
            LineCollection(list(negative), colors="white", linewidths=0.5, zorder=2)
        )


def _draw_port(axes: Axes, network: Network, lead: int, role: str, scale: Scales) -> None:
    """Draw the mark of a lead outside the network, or on its resonators where there is no room."""
    sites = np.flatnonzero(network.lead_weights[:, lead])
    here = network.positions[sites].mean(axis=0)
    outward = here - network.positions.mean(axis=0)
    distance = np.linalg.norm(outward)
    outward = outward / distance if distance > 1e-9 else np.array([0.0, 1.0])
    place = here + 0.85 * scale.length * outward
    if np.linalg.norm(network.positions - place, axis=1).min() < 0.7 * scale.length:
        place = here
    for site in sites:
        axes.plot(
            *zip(network.positions[site], place, strict=True), color="0.35", lw=0.8, zorder=0.5
        )
    facing = np.arctan2(-outward[1], -outward[0])  # the triangle points inwards
    radii = {"input": [0.36] * 3, "output": [0.40, 0.17] * 5}.get(role, [0.22] * 4)
    angle = (np.pi / 2 if role == "output" else facing) + 2 * np.pi * np.arange(len(radii)) / len(
        radii
    )
    corners = place + scale.length * np.array(radii)[:, None] * np.stack(
        [np.cos(angle), np.sin(angle)], axis=1
    )
    colour = {"input": INPUT, "output": OUTPUT}.get(role, OTHER)
    axes.add_patch(Polygon(corners, facecolor=colour, edgecolor="white", linewidth=0.5, zorder=4))
    inward = -np.sign(outward[0])
    # above, where beside it the stem or the network would be in the way
    beside = abs(outward[1]) > 0.3 and inward
    shift = (0.0, 0.45)
    align = "center"
    if beside:
        shift = (0.5 * inward, 0.0)
        align = "left" if inward > 0 else "right"
    x, y = place + scale.length * np.array(shift)
    away = "top" if beside and outward[1] < 0 else "bottom"  # from the disks of the row beside it
    axes.text(x, y, role, ha=align, va=away, fontsize=7, color=colour)


# --------------------------------------------------------------------------------------------- keys


def draw_keys(axes: Axes, diagram: Axes, scale: Scales) -> None:
    """Draw the keys of radius, width and colour, to the scale of the diagram."""
    here: Any = axes.transData
    there: Any = diagram.transData
    size = AffineDeltaTransform(there)  # lengths of the diagram, wherever it is
    spread = np.array([-1.0, 0.0, 1.0])
    centres = (0.0, 3.4, 6.8)

    detuning = np.array([0.0, 0.5, 1.0]) * scale.detuning
    for x, r in zip(centres[0] + spread, scale.length * scale.radius(detuning), strict=True):
        place = size + ScaledTranslation(x, 0, here)
        disk = Circle(
            (0, 0), r, transform=place, facecolor="white", edgecolor="0.25", lw=0.6, clip_on=False
        )
        disk.set_in_layout(False)  # its size follows from the layout
        axes.add_patch(disk)

    u = np.linspace(-1, 1, 129)
    across = blended_transform_factory(here, size + ScaledTranslation(0, 0, here))
    for centre, cmap, width in (
        (centres[1], COUPLING, scale.width(scale.expand(u))),
        (centres[2], KERR, 0 * u + 0.3),
    ):
        x = centre + u
        half = scale.length * width / 2
        slices = [
            [(a, -p), (b, -q), (b, q), (a, p)]
            for a, b, p, q in zip(x, x[1:], half, half[1:], strict=False)
        ]
        colours = cmap(Normalize(-1, 1)(u[:-1]))
        bar = PolyCollection(
            slices, transform=across, facecolors=colours, edgecolors=colours, lw=0.3, clip_on=False
        )
        bar.set_in_layout(False)
        axes.add_collection(bar, autolim=False)
    axes.set(xlim=(centres[0] - 1.6, centres[2] + 1.6), ylim=(-0.5, 0.5), yticks=[])

    def number(value):
        return f"{value:.2g}".replace("-", "−")

    scale_labels: list[tuple[Sequence[float], str]] = [
        (detuning.tolist(), r"detuning $|\omega_n-\omega|$"),
        ((scale.weakest, 1.0, scale.strongest), r"coupling $|\kappa_{nm}|$"),
        ((-scale.kerr, 0.0, scale.kerr), r"Kerr $\chi_n$"),
    ]
    labels = [
        label
        for (low, middle, high), name in scale_labels
        for label in (number(low), f"{number(middle)}\n{name}", number(high))
    ]
    axes.set_xticks(np.add.outer(centres, spread).ravel(), labels, linespacing=1.4)
    axes.tick_params(length=0, pad=1)
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw_panel(
    figure: Figure | SubFigure, where: SubplotSpec, network: Network, *thetas: Params
) -> list[Axes]:
    """Draw diagrams of one network at several θ on one scale, with keys; return their axes."""
    scale = fit_scales(network, *thetas)
    height = np.ptp(network.positions[:, 1]) / scale.length + 2 * MARGIN
    # the largest disk fits its key
    grid = where.subgridspec(2, 1, height_ratios=[height, 1.0], hspace=0.02)
    row = grid[0].subgridspec(1, len(thetas), wspace=0.02)
    axes = [figure.add_subplot(row[i]) for i in range(len(thetas))]
    for one, theta in zip(axes, thetas, strict=True):
        draw_network(one, network, theta, scale=scale)
    draw_keys(figure.add_subplot(grid[1]), axes[0], scale)
    return axes


def draw_diagram(network: Network, theta: Params) -> Figure:
    """A figure of one network, for any use.

    >>> draw_diagram(network, theta).savefig("network.pdf")
    """
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(3.5, 3.5), layout="constrained")
        draw_panel(figure, figure.add_gridspec(1, 1)[0], network, theta)
        return figure
