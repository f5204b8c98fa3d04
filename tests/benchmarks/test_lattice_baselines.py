"""The table of baselines on the GPU: its variants are those of the CPU, and its times are read."""

import csv

import numpy as np
import pytest

import fake_cupy
import lattice_baselines
from fluctua.tcmt.kernel import cuda

pytestmark = pytest.mark.long


class Clock:
    """An event of a device that takes a millisecond per launch."""

    now = 0.0

    def record(self):
        Clock.now += 0.5
        self.time = Clock.now

    def synchronize(self):
        pass


@pytest.mark.parametrize("variant", lattice_baselines.VARIANTS)
def test_a_variant_is_that_of_the_cpu(device, variant):
    gpu, cpu = (
        lattice_baselines.make_call(variant, 2, 3, 12, 45, backend=backend, dtype="float64")()
        for backend in ("cuda", "cpu")
    )
    for name in ("omega", "kappa", "chi"):
        actual, expected = (getattr(run.gradient, name) for run in (gpu, cpu))
        np.testing.assert_allclose(actual, expected, atol=1e-9 * np.abs(expected).max())


def test_the_table_counts_every_launch(device, monkeypatch, tmp_path):
    if device == "gpu":
        pytest.skip("times of the emulation are known, those of a GPU are not")
    monkeypatch.setattr(fake_cupy.cuda, "Event", Clock, raising=False)
    monkeypatch.setattr(
        fake_cupy.cuda, "get_elapsed_time", lambda a, b: 2 * (b.time - a.time), raising=False
    )
    compile_module = cuda.compile_module
    rows = lattice_baselines.measure_lattice(fake_cupy, (2, 3), 4, 5, 1)
    assert [row.variant for row in rows] == list(lattice_baselines.VARIANTS)
    one_pass = rows[0]
    assert one_pass.kernels == "one_pass 1.0, moments 1.0"
    assert one_pass.kernel_ps == pytest.approx(2e9 / (6 * 4 * 5), rel=1e-6)
    twin = rows[3]
    assert "tabulate 1.0" in twin.kernels
    assert twin.kernel_ratio == pytest.approx(1.5)
    assert cuda.compile_module is compile_module
    lattice_baselines.write_table(rows, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        assert [row["variant"] for row in csv.DictReader(file)] == list(lattice_baselines.VARIANTS)
