"""Boxes that differ, trained alone and together; J on each of them, and on boxes that took no part.

one device   the first box is trained, and the others are set as it is
settings     K boxes are trained together at the same settings: a design for the population
parameters   K boxes are trained together to do the same, the settings of each corrected by its
calibration whole range  the same, where settings may go beyond the bounds of the design, to where
the knobs end

All spend the same number of trajectories an iteration. For the last two every box, trained or not,
is calibrated once more before it is set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fluctua.core.arrays import Params
from fluctua.core.estimate import sample_error
from fluctua.insitu.bench import device
from fluctua.insitu.bench.levels import Level, power
from fluctua.insitu.bench.processes import bench_processes, sheet_options
from fluctua.insitu.device_training.plan import Plan
from fluctua.insitu.device_training.run_and_resume import Rows, run
from fluctua.insitu.instrument.substrate import Incident, InstrumentSubstrate, instrument_substrate
from fluctua.insitu.instrument.virtual import VirtualBench
from fluctua.insitu.model import Model
from fluctua.insitu.networks import network_model
from fluctua.store import tables

LEVEL_TRAJECTORIES = 200
"""Behind every level."""

WAYS = {
    "one device": "settings",
    "settings": "settings",
    "parameters": "parameters",
    "whole range": "parameters",
}
"""Ways of training, and what the boxes share in each."""


class Design(NamedTuple):
    """What one way of training comes to. levels: of every box, those that took no part last.
    spent: trajectories.
    """

    name: str
    levels: list[Level]
    spent: int

    def over(self, boxes: slice) -> Level:
        """The mean over some boxes, with the error between them."""
        each = np.array([level.J for level in self.levels[boxes]])
        return Level(
            float(each.mean()),
            float(sample_error(each)) if len(each) > 1 else np.nan,
        )


class PopulationComparison(NamedTuple):
    """devices: that were trained together. designs: before training, and after each way of it."""

    devices: int
    designs: list[Design]

    def save(self, path: Path, header: dict) -> None:
        """One line a design and box."""
        lines = [
            (d.name, k, level, d.spent) for d in self.designs for k, level in enumerate(d.levels)
        ]
        columns = {
            "design": [name for name, *_ in lines],
            "box": [k + 1 for _, k, *_ in lines],
            "trained": [int(k < self.devices) for _, k, *_ in lines],
            "J": [level.J for _, _, level, _ in lines],
            "error": [level.stderr for _, _, level, _ in lines],
            "trajectories": [spent for *_, spent in lines],
        }
        tables.write(path, columns, header)


def read(path: Path) -> PopulationComparison:
    """A comparison that was saved."""
    table = tables.read(path)
    designs = []
    for name in dict.fromkeys(table.columns["design"].tolist()):
        of = table.where(design=name)
        levels = [Level(float(j), float(e)) for j, e in zip(of["J"], of["error"], strict=True)]
        designs.append(Design(name, levels, int(of["trajectories"][0])))
    return PopulationComparison(int(table.header["devices"]), designs)


def together(each: Sequence[PopulationComparison]) -> PopulationComparison:
    """Several comparisons as one: all boxes that were trained, then all that took no part."""
    designs = []
    for same in zip(*(one.designs for one in each), strict=True):
        trained = [
            level for one, d in zip(each, same, strict=True) for level in d.levels[: one.devices]
        ]
        others = [
            level for one, d in zip(each, same, strict=True) for level in d.levels[one.devices :]
        ]
        designs.append(Design(same[0].name, trained + others, sum(d.spent for d in same)))
    return PopulationComparison(sum(one.devices for one in each), designs)


def compare(
    folder: Path,
    *,
    devices: int = 4,
    held_out: int = 4,
    ways: Sequence[str] = tuple(WAYS),
    sheet: device.Sheet | None = None,
    plan: Plan | None = None,
    bench_options: tuple[str, ...] = (),
    say: Callable[[str], None] = print,
    show: Callable[[Rows], Rows] = lambda rows: rows,
    report: Callable[[Incident], None] = lambda incident: None,
) -> PopulationComparison:
    """Everything, into folders below a new one.

    Args:
        folder: of the runs, each named like its way.
        devices: boxes that are trained together.
        held_out: boxes that take no part.
        ways: of training, from `WAYS`.
        sheet: of the first box; the others have the seeds after its own.
        plan: of every training.
        bench_options: further words for `fluctua virtual-bench`.
        say: called with a line of text about each stage.
        show: wraps the rows of a training, for a display.
        report: called with every incident.

    """
    plan = plan or Plan()
    sheet = sheet or device.Sheet(seed=3)
    model = network_model(sheet.nominal, interval=sheet.interval, points=plan.points)
    wide = network_model(
        sheet.nominal, interval=sheet.interval, points=plan.points, reach=device.LIMITS
    )
    with bench_processes(devices + held_out, *sheet_options(sheet), *bench_options) as places:
        connects = [
            partial(VirtualBench, f"tcp://{h}:{p}", points=plan.points, timeout=30.0)
            for h, p in places
        ]
        boxes = [instrument_substrate(connect) for connect in connects]
        say(
            f"bench      {devices} boxes to train and {held_out} that take no part, each with its "
            "own disorder"
        )
        designs = [
            Design(
                "before", _levels(model, boxes, [model.start] * len(boxes), LEVEL_TRAJECTORIES), 0
            )
        ]
        for name in ways:
            say(f"training   {name}")
            own = wide if name == "whole range" else model
            share = WAYS[name]
            which = connects[0] if name == "one device" else connects[:devices]
            asked = dataclasses.replace(plan, share=share)
            row, record = list(
                show(run(which, own, asked, folder / name.replace(" ", "-"), report=report))
            )[-1]
            theta = record.next_theta
            settings = [
                theta if share == "settings" else _corrected(own, box, plan, theta) for box in boxes
            ]
            designs.append(
                Design(name, _levels(model, boxes, settings, LEVEL_TRAJECTORIES), row.trajectories)
            )
        for box in boxes:
            box.close()
    result = PopulationComparison(devices, designs)
    result.save(
        folder / "array.csv", {"devices": devices, "held_out": held_out, "seed": sheet.seed}
    )
    return result


def _corrected(model: Model, box: InstrumentSubstrate, plan: Plan, theta: Params) -> Params:
    """Settings of one box, from a calibration of its own."""
    assert model.methods.correct is not None
    rng = np.random.default_rng(plan.seed)
    probes = [model.probe(rng) for _ in range(plan.probes)]
    fit = model.calibrate(
        [(settings, box(None, settings, plan.probe_trajectories)) for settings in probes]
    )
    return {name: np.asarray(v) for name, v in model.methods.correct(theta, fit.values).items()}


def _levels(
    model: Model, boxes: Sequence[InstrumentSubstrate], settings: Sequence[Params], count: int
) -> list[Level]:
    return [power(model, box, at, count) for box, at in zip(boxes, settings, strict=True)]
