"""Time of whole calls: rows are complete, and the estimates behind them are right."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import small_calls

KERNELS = Path(__file__).parents[2] / "benchmarks"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


def test_a_table_of_short_calls():
    result = small_calls.measure("cpu", (32,), 8, 2, KERNELS)
    names = {(r["process"], r["who"], r["baseline"], r["noise"]) for r in result["rows"]}
    assert len(names) == len(result["rows"]) == 13
    assert all(0 < row["best"] <= row["median"] for row in result["rows"])
    text = small_calls.report(result)
    assert "driven pendulum, 5 parameters: fl.ppgt, optimal, philox7" in text
    assert "by hand" in text


@pytest.mark.parametrize("noise", small_calls.NOISES)
def test_calls_of_kernel_and_jax_agree(noise):
    own = small_calls.driven_pendulum()
    got, expected = (
        small_calls.make_call(own, "table", noise, 64, 20, backend)() for backend in ("cpu", "jax")
    )
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = max(1e-6, float(np.abs(other).max()))
        np.testing.assert_allclose(one, other, atol=1e-3 * scale)
