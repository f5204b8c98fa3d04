"""The compiled core refuses what does not fit before it touches memory, and names it."""

import dataclasses

import numpy as np
import pytest

from fluctua.tcmt.kernel.cpu import EnsembleSums, Pass, TwinSums, TwinTables
from fluctua.tcmt.kernel.layout import KernelPlan, make_plan, read_blocks
from fluctua.tcmt.kernel.options import KernelJob, KernelOptions
from fluctua.tcmt.native import _native
from kernel_reference import rectangle

COUNT = 5
ENSEMBLE = KernelJob(
    rectangle(2, 3, steps=8),
    1,
    COUNT,
    KernelOptions(samples=True, record_every=2),
    table=np.zeros(9),
)
PLAN = make_plan(ENSEMBLE)
ONCE = Pass(COUNT, 0, 1, scores=True, record_every=2)
ARRAYS = [
    f.name for f in dataclasses.fields(KernelPlan) if isinstance(getattr(PLAN, f.name), np.ndarray)
]
LINEAR = TwinTables(4, False, 0, None, None)
OUTPUTS = ["returns", "reward_sum", "moments", "samples", "record", "overflow"]


def sweep(plan=PLAN, once=ONCE, **outputs):
    out = dataclasses.replace(EnsembleSums.empty(ENSEMBLE), **outputs)
    _native.sweep(plan, once, out, False)
    return out


def list_changed(**values):
    return dataclasses.replace(PLAN, **values)


def test_what_fits_runs():
    assert np.isfinite(sweep().samples).all()


def test_every_array_of_a_plan_is_measured():
    for name in ARRAYS:
        refuse_other_arrays(name)


def refuse_other_arrays(name):
    value = getattr(PLAN, name)
    other = np.int64 if value.dtype == np.int32 else np.float16
    longer = np.concatenate(
        [value.ravel(), value.ravel()[:1] if value.size else np.zeros(1, value.dtype)]
    )
    wrong = [longer, value.astype(other) if value.size else np.zeros(3, other)]
    if value.size:
        wrong.append(value.ravel()[:-1])
    if value.size > 1:
        wrong.append(np.repeat(value.ravel(), 2)[::2])  # not contiguous
    for array in wrong:
        with pytest.raises(ValueError, match=f"`{name}`"):
            sweep(list_changed(**{name: array}))
    if name != "bar":
        with pytest.raises(ValueError, match=f"`{name}`"):
            sweep(list_changed(**{name: None}))


def test_every_output_is_measured():
    for name in OUTPUTS:
        refuse_other_outputs(name)


def refuse_other_outputs(name):
    value = getattr(EnsembleSums.empty(ENSEMBLE), name)
    read_only = value.copy()
    read_only.setflags(write=False)
    for array in (value.ravel()[:-1], np.zeros(value.shape, np.int16), read_only):
        with pytest.raises(ValueError, match=f"`{name}`"):
            sweep(**{name: array})


def test_numbers_out_of_range_are_refused():
    for values, message in [
        ({"sites": 7}, "`omega`|`lower_start`"),
        ({"sites": 0}, "`sites` must be 1"),
        ({"steps": 2**31}, "`steps`"),
        ({"steps": 2**40}, "`steps`"),
        ({"bonds": -3}, "`bonds` must be 0"),
        ({"seed": 2**64}, "`seed`"),
        ({"modulation_steps": 0}, "`modulation_steps`"),
        ({"drive_rows": 3}, "`drive_rows`"),
        (
            {"harmonics": 2**31 - 1, "steps": 2**31 - 1, "drive_rows": 1},
            "`lower_start`|`bar`|`modulation`|memory",
        ),
        ({"dt": "fast"}, "`dt`"),
    ]:
        with pytest.raises(ValueError, match=message):
            sweep(list_changed(**values))


def test_indices_that_lead_out_of_an_array_are_refused():
    for name, value, message in [
        ("port_site", np.array([6, 0], np.int32), "`port_site` must hold indices below 6; got 6"),
        ("drive_site", np.array([-1], np.int32), "`drive_site`.*got -1"),
        ("upper_site", np.full(7, 99, np.int32), "`upper_site`.*got 99"),
        (
            "lower_start",
            np.array([0, 9, 0, 0, 0, 0, 7], np.int32),
            "`lower_start` must ascend from 0 to 7",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            sweep(list_changed(**{name: value}))


def test_passes_out_of_range_are_refused():
    for values, message in [
        ({"count": 0}, "`count`"),
        ({"count": 6}, "`returns` must have 6 elements; got 5"),
        ({"count": 2**62}, "`count`"),
        ({"first": 2**32}, "`first`"),
        ({"threads": 0}, "`threads`"),
        ({"record_every": -1}, "`record_every`"),
        ({"record_every": 1}, "`record`"),
    ]:
        with pytest.raises(ValueError, match=message):
            sweep(once=dataclasses.replace(ONCE, **values))


def test_the_second_pass_is_measured_too():
    good = Pass(COUNT, 0, 1, bins=2, rebin_every=3, first_returns=np.zeros(16), centre=np.zeros(9))
    for name, value in (
        ("bins", 0),
        ("bins", 257),
        ("rebin_every", 0),
        ("first_returns", np.zeros(5)),
        ("centre", np.zeros(8)),
        ("first_returns", None),
    ):
        with pytest.raises(ValueError, match=f"`{name}`"):
            _native.binned(
                PLAN,
                dataclasses.replace(good, **{name: value}),
                EnsembleSums.empty(ENSEMBLE),
                False,
            )


def test_a_twin_is_measured_too():
    for tables, message in [
        (TwinTables(0, True, 0, None, None), "`segment`"),
        (TwinTables(4, False, 7, None, None), "`rank`"),
        (
            TwinTables(
                4, False, 2, np.zeros((6, 1, 2), np.float32), np.zeros((2, 2, 2, 2), np.float32)
            ),
            "`basis`",
        ),
        (
            TwinTables(
                4, False, 2, np.zeros((6, 2, 2), np.float32), np.zeros((1, 2, 2, 2), np.float32)
            ),
            "`curvature`",
        ),
        (TwinTables(4, True, 2, None, None), "every step"),
    ]:

        def twin(model=PLAN, tables=LINEAR, **outputs):
            out = dataclasses.replace(TwinSums.empty(ENSEMBLE), **outputs)
            _native.twin(PLAN, ONCE, model, tables, out, False)

        with pytest.raises(ValueError, match=message):
            twin(tables=tables)
        with pytest.raises(ValueError, match="graph, drives, ports and steps"):
            twin(model=make_plan(ENSEMBLE.replace(spec=rectangle(2, 4, steps=8))))
        for name in ("gained", "prefix_sum", "direct", "correction", "moments"):
            with pytest.raises(ValueError, match=f"`{name}`"):
                twin(**{name: np.zeros(1, np.float32)})


def test_normals_of_absurd_sizes_are_refused():
    for sizes in [(2**33, 1, 1), (1, 2**34, 1), (2**31, 2**31, 2**31), (0, 1, 1)]:
        with pytest.raises(ValueError, match=r"32 bits|memory|at least 1"):
            _native.normals(0, *sizes)


def test_blocks_of_the_device_are_filled_by_name():
    block = read_blocks()["Outputs"]
    assert block.size == 8 * len(block.fields) == 48
    values = {name: i for i, name in enumerate(block.fields)}
    np.testing.assert_array_equal(block.pack(**dict(reversed(values.items()))), range(6))
    with pytest.raises(TypeError, match="waves"):
        block.pack(**{name: 0 for name in block.fields if name != "waves"})
    with pytest.raises(TypeError, match="wave"):
        block.pack(**{**values, "wave": 1})
