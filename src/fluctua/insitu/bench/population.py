"""Boxes that differ, trained alone and together; J on each, and on boxes that took no part.

    one device   the first box is trained, and the others get its settings
    settings     K boxes are trained together at the same settings: a design for the population
    parameters   K boxes are trained together to the same θ, settings corrected by calibration
    whole range  the same, with settings beyond the bounds of the design, up to the knobs' limits

All spend the same number of trajectories per iteration. For the last two every box, trained or not,
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
from fluctua.insitu.bench.levels import Level, measure_level
from fluctua.insitu.bench.processes import bench_processes, list_sheet_options
from fluctua.insitu.device_training.plan import Plan
from fluctua.insitu.device_training.run_and_resume import Rows, run
from fluctua.insitu.instrument import virtual
from fluctua.insitu.instrument.substrate import Incident, InstrumentSubstrate, instrument_substrate
from fluctua.insitu.model import Model
from fluctua.insitu.networks import network_model
from fluctua.store import tables

LEVEL_TRAJECTORIES = 200
"""Trajectories per level."""

WAYS = {
    "one device": "settings",
    "settings": "settings",
    "parameters": "parameters",
    "whole range": "parameters",
}
"""Ways of training, and what the boxes share in each."""


class Design(NamedTuple):
    """Result of one way of training.

    name: of the way.
    levels: J of every box, those that took no part last.
    spent: trajectories.
    """

    name: str
    levels: list[Level]
    spent: int

    def over(self, boxes: slice) -> Level:
        """Mean over some boxes, with the error between them."""
        each = np.array([level.J for level in self.levels[boxes]])
        return Level(
            float(each.mean()),
            float(sample_error(each)) if len(each) > 1 else np.nan,
        )


class PopulationComparison(NamedTuple):
    """Ways of training, compared on the same boxes.

    devices: number of boxes that were trained together.
    designs: before training, and after each way of it.
    """

    devices: int
    designs: list[Design]

    def save(self, path: Path, header: dict) -> None:
        """Write a table with one line per design and box."""
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
    """Read a comparison from its table."""
    table = tables.read(path)
    designs = []
    for name in dict.fromkeys(table.columns["design"].tolist()):
        rows = table.where(design=name)
        pairs = zip(rows["J"], rows["error"], strict=True)
        levels = [Level(float(value), float(error)) for value, error in pairs]
        designs.append(Design(name, levels, int(rows["trajectories"][0])))
    return PopulationComparison(int(table.header["devices"]), designs)


def concatenate(each: Sequence[PopulationComparison]) -> PopulationComparison:
    """Join several comparisons: all boxes that were trained, then all that took no part."""
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
    """Train boxes in several ways and compare J on all of them; each run has a folder.

    Args:
        folder: of the runs, each named after its way.
        devices: boxes that are trained together.
        held_out: devices that take no part.
        ways: of training, from `WAYS`.
        sheet: of the first box; the others have the seeds after its own.
        plan: of every training.
        bench_options: further options of `fluctua virtual-bench`.
        say: called with a line of text about each stage.
        show: wraps the rows of a training, for a display.
        report: called with every incident.
    """
    plan = plan or Plan()
    sheet = sheet or device.Sheet(seed=3)
    points = plan.options.get("points", virtual.POINTS)
    model = network_model(sheet.nominal, interval=sheet.interval, points=points)
    wide = network_model(sheet.nominal, interval=sheet.interval, points=points, reach=device.LIMITS)
    with bench_processes(devices + held_out, *list_sheet_options(sheet), *bench_options) as places:
        connects = [
            partial(virtual.VirtualBench, f"tcp://{h}:{p}", points=points, timeout=30.0)
            for h, p in places
        ]
        boxes = [instrument_substrate(connect) for connect in connects]
        say(
            f"bench      {devices} devices to train and {held_out} held out, each with its "
            "own disorder"
        )
        designs = [
            Design(
                "before",
                _measure_levels(model, boxes, [model.start] * len(boxes), LEVEL_TRAJECTORIES),
                0,
            )
        ]
        for name in ways:
            say(f"training   {name}")
            own = wide if name == "whole range" else model
            share = WAYS[name]
            which = connects[0] if name == "one device" else connects[:devices]
            shared_plan = dataclasses.replace(plan, share=share)
            row, record = list(
                show(run(which, own, shared_plan, folder / name.replace(" ", "-"), report=report))
            )[-1]
            theta = record.next_theta
            settings = [
                theta if share == "settings" else _correct_settings(own, box, plan, theta)
                for box in boxes
            ]
            designs.append(
                Design(
                    name,
                    _measure_levels(model, boxes, settings, LEVEL_TRAJECTORIES),
                    row.trajectories,
                )
            )
        for box in boxes:
            box.close()
    result = PopulationComparison(devices, designs)
    result.save(
        folder / "array.csv", {"devices": devices, "held_out": held_out, "seed": sheet.seed}
    )
    return result


def _correct_settings(model: Model, box: InstrumentSubstrate, plan: Plan, theta: Params) -> Params:
    """Settings at which one box does θ, from a calibration of its own."""
    assert model.methods.correct is not None
    rng = np.random.default_rng(plan.seed)
    probes = [model.probe(rng) for _ in range(plan.probes)]
    fit = model.calibrate(
        [(settings, box(None, settings, plan.probe_trajectories)) for settings in probes]
    )
    return {name: np.asarray(v) for name, v in model.methods.correct(theta, fit.values).items()}


def _measure_levels(
    model: Model, boxes: Sequence[InstrumentSubstrate], settings: Sequence[Params], count: int
) -> list[Level]:
    return [measure_level(model, box, at, count) for box, at in zip(boxes, settings, strict=True)]
