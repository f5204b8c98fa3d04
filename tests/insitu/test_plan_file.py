"""plan.json: a plan that was edited by hand is refused, and the field is named."""

import dataclasses
import json
import math

import pytest

from fluctua.insitu import Plan, read_plan
from fluctua.insitu.device_training.plan_file import hold_plan, write_plan
from fluctua.store import checkpoint

EDITS = {
    "iterations": 50,
    "trajectories": 30,
    "learning_rate": math.inf,
    "probes": 7,
    "probe_trajectories": 51,
    "batch": 99,
    "seed": 1,
    "baseline": "optimal",
    "attempts": 9,
    "first_pause": 0.2,
    "longest_pause": 31.0,
    "record": False,
    "instruments": ["tcp://elsewhere:1"],
    "model": "lab.py:model",
    "options": {"points": 602},
    "share": "parameters",
    "rates": [1.0],
    "calibration": "training",
    "forget_after": 2.0,
    "renew": True,
    "measure_every": 2,
    "readout": "measured",
}


@pytest.fixture
def folder(tmp_path):
    fields = dataclasses.asdict(Plan())
    (tmp_path / "plan.json").write_bytes(write_plan(fields, "0123456789abcdef", {}))
    checkpoint.write(tmp_path / "checkpoints", 0, hold_plan(fields), keep=3)
    return tmp_path


def edit(folder, **values):
    entries = json.loads((folder / "plan.json").read_text()) | values
    (folder / "plan.json").write_text(
        json.dumps({k: v for k, v in entries.items() if v is not None})
    )


def test_a_plan_is_read_as_it_was_written(folder):
    assert read_plan(folder) == Plan()


def test_a_plan_of_an_earlier_version_is_read(folder):
    fields = dataclasses.asdict(Plan(forget_after=5.0))
    fields["memory"] = fields.pop("forget_after")
    for name in ("instruments", "model", "options"):
        del fields[name]
    fields |= {"address": "tcp://127.0.0.1:1 tcp://127.0.0.1:2", "points": 301, "kerr": False}
    fields |= {"most_omega": 2.5, "most_kappa": 1.5, "noise": 0.0, "sigma_kappa": 0.1}
    (folder / "plan.json").write_bytes(write_plan(fields, "0123456789abcdef", {}))
    checkpoint.write(folder / "checkpoints", 0, hold_plan(fields), keep=3)
    options = {"points": 301, "noise": 0.0, "sigma_kappa": 0.1, "kerr": False}
    assert read_plan(folder) == Plan(
        forget_after=5.0,
        instruments=("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"),
        options={**options, "omega_max": 2.5, "kappa_max": 1.5},
    )
    edit(folder, memory=6.0)
    with pytest.raises(ValueError, match="`memory` was 5.0 and is 6.0"):
        read_plan(folder)


@pytest.mark.parametrize("name", EDITS)
def test_every_edit_is_named(folder, name):
    edit(folder, **{name: EDITS[name]})
    with pytest.raises(
        ValueError, match=rf"`{name}` was .* and is .*only `iterations`.* can change"
    ):
        read_plan(folder)


def test_an_edit_is_noticed_without_its_checksum_and_without_a_checkpoint(folder):
    edit(folder, seed=1, checksum=None)
    with pytest.raises(ValueError, match="`seed` was 0 and is 1"):
        read_plan(folder)
    edit(folder, seed=0)
    assert read_plan(folder) == Plan()  # as a folder of an earlier version, which has no checksum
    edit(folder, seed=1, checksum="0123456789abcdef")
    for path in checkpoint.list_checkpoints(folder / "checkpoints"):
        path.unlink()
    with pytest.raises(ValueError, match="its checksum does not fit"):
        read_plan(folder)


def test_a_number_of_iterations_that_was_changed_officially_is_taken(folder):
    fields = dataclasses.asdict(Plan(iterations=150))
    (folder / "plan.json").write_bytes(write_plan(fields, "0123456789abcdef", {}))
    assert read_plan(folder).iterations == 150


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", math.inf),
        ("learning_rate", math.nan),
        ("learning_rate", "0.1"),
        ("seed", -1),
        ("seed", 0.5),
        ("seed", 2**63),
        ("first_pause", -1.0),
        ("longest_pause", math.inf),
        ("forget_after", math.inf),
        ("readout", "often"),
        ("readout", -1.0),
        ("rates", (1.0, math.inf)),
        ("rates", (0.0,)),
        ("record", 1),
        ("instruments", (None,)),
        ("model", None),
    ],
)
def test_numbers_of_a_plan_are_finite_and_in_range(name, value):
    with pytest.raises(ValueError, match=f"`{name}`"):
        Plan(**{name: value})


def test_a_plan_with_earlier_names_opens(tmp_path):
    fields = dataclasses.asdict(Plan(forget_after=20.0))
    fields["memory"] = fields.pop("forget_after")
    (tmp_path / "plan.json").write_bytes(write_plan(fields, "0123456789abcdef", {}))
    assert read_plan(tmp_path) == Plan(forget_after=20.0)
