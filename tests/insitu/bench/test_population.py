"""Comparisons of designs: means over boxes, and tables that are read back."""

import numpy as np

from fluctua.insitu.bench.levels import Level
from fluctua.insitu.bench.population import Design, PopulationComparison, concatenate, read
from fluctua.plot.insitu import draw_population


def comparison(shift):
    levels = lambda start: [Level(start + 0.1 * k + shift, 0.01) for k in range(5)]
    return PopulationComparison(
        3, [Design("before", levels(0.0), 0), Design("settings", levels(0.2), 700)]
    )


def test_tables_are_read_back_and_put_together(tmp_path):
    one, other = comparison(0.0), comparison(0.3)
    one.save(tmp_path / "array.csv", {"devices": 3})
    assert read(tmp_path / "array.csv") == one
    both = concatenate([one, other])
    assert both.devices == 6
    np.testing.assert_allclose(
        [level.J for level in both.designs[0].levels[6:]], [0.3, 0.4, 0.6, 0.7]
    )
    mean, error = one.designs[1].over(slice(0, 3))
    np.testing.assert_allclose([mean, error], [0.3, 0.1 / np.sqrt(3)])
    assert np.isnan(one.designs[1].over(slice(0, 1)).stderr)
    draw_population(both).savefig(tmp_path / "array.png")
