"""Diagrams of networks: what their scales mean, and that nothing is clipped, tiny or missing."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from figures import assert_legible, texts
from fluctua import tcmt
from fluctua.plot.network import RADIUS, draw_diagram, draw_network, fit_scales

SMALL = tcmt.rectangular(4, 5)


def test_coupling_scales_are_square_roots_about_one_and_differ_above_and_below():
    scale = fit_scales(SMALL, {"kappa": np.linspace(0.6, 4.0, len(SMALL.bonds))})
    np.testing.assert_allclose(
        scale.compress(np.array([0.6, 0.9, 1.0, 1.75, 4.0])), [-1, -0.5, 0, 0.5, 1], atol=1e-12
    )
    kappa = np.linspace(0.6, 4, 50)
    np.testing.assert_allclose(scale.expand(scale.compress(kappa)), kappa)
    assert (np.diff(scale.width(kappa)) > 0).all()
    assert (np.diff(scale.radius(np.linspace(0, scale.detuning, 9))) > 0).all()


@pytest.mark.parametrize(
    "network",
    [
        SMALL,
        tcmt.ring(8),
        tcmt.chain(5),
        tcmt.honeycomb(4, 6),
        tcmt.from_edges([], sites=1, leads=[0]),
        tcmt.rectangular(4, 5, leads=[0, tcmt.Lead({18: 0.6, 19: 0.8}), 4, 7]),
    ],
    ids=["lattice", "ring", "chain", "honeycomb", "one site", "four leads"],
)
def test_any_network_can_be_drawn(network):
    assert_legible(draw_diagram(network, {}))


def test_disks_show_detuning_and_kerr():
    theta = {"omega": np.linspace(-2, 1, SMALL.sites), "chi": np.linspace(-1, 3, SMALL.sites)}
    axes = draw_diagram(SMALL, {}).axes[0]
    axes.clear()
    scale = draw_network(axes, SMALL, theta)
    (disks,) = (c for c in axes.collections if c.get_array() is not None)
    np.testing.assert_array_equal(disks.get_array(), theta["chi"])
    assert (disks.norm.vmin, disks.norm.vmax) == (-3, 3)
    assert scale.detuning == 2


def test_no_label_lies_on_a_resonator():
    """The largest disks, on the corners where the leads are."""
    network = tcmt.rectangular(4, 5)
    figure = draw_diagram(network, {"omega": np.ones(network.sites)})
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes = figure.axes[0]
    centres = axes.transData.transform(network.positions)
    first, second = network.bonds[0]
    radius = RADIUS[1] * np.linalg.norm(centres[first] - centres[second])
    for label in (t for t in texts(figure) if t.get_text() in ("input", "output")):
        box = label.get_window_extent(canvas.get_renderer())
        nearest = np.clip(centres, (box.x0, box.y0), (box.x1, box.y1))
        assert np.linalg.norm(centres - nearest, axis=1).min() > radius, label.get_text()
