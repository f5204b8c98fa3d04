"""The sim-to-real gap, measured and closed: a virtual bench, three trainings, one figure.

    nominal   trained by simulation of the data sheet, then carried over to the bench
    true      trained by simulation with the hidden parameters, which a laboratory does not know
    in situ   calibrated from recordings and trained on the bench over its socket

All three start from the same settings and have the same bounds. J is always measured on the bench.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.bench import device, levels
from fluctua.insitu.bench.processes import bench_process, list_sheet_options
from fluctua.insitu.bench.simulated import train_by_simulation
from fluctua.insitu.calibrate.knobs import compute_parameters
from fluctua.insitu.device_training import run_and_resume
from fluctua.insitu.device_training.plan import Plan
from fluctua.insitu.instrument import virtual
from fluctua.insitu.instrument.substrate import Incident, instrument_substrate
from fluctua.insitu.model import Model
from fluctua.insitu.networks import network_model
from fluctua.insitu.unknowns import DeviceFit, Runs
from fluctua.store.history import Row


class DemoResult(NamedTuple):
    """Levels of J in the demonstration.

    before: at the start.
    nominal, nominal_predicted: trained with the data sheet, on the bench and by its own simulation.
    true: trained with the hidden parameters.
    in_situ: trained on the bench.
    rows: of the in-situ training.
    discarded: trajectories, by kind of incident.
    calibration_error: root mean square over the sites or bonds, at the last settings.
    """

    before: levels.Level
    nominal: levels.Level
    nominal_predicted: float
    true: levels.Level
    in_situ: levels.Level
    rows: list[Row]
    discarded: dict[str, int]
    calibration_error: dict[str, float]

    @property
    def share(self) -> float:
        """J in situ over J with the true parameters."""
        return self.in_situ.J / self.true.J


def run(
    folder: Path,
    *,
    sheet: device.Sheet | None = None,
    plan: Plan | None = None,
    address: Callable[[str, int], str] | None = None,
    bench_options: tuple[str, ...] = (),
    reference: int = 250,
    measure: int = 400,
    say: Callable[[str], None] = print,
    show: Callable[[run_and_resume.Rows], run_and_resume.Rows] = lambda rows: rows,
    report: Callable[[Incident], None] = lambda incident: None,
) -> DemoResult:
    """Run the whole demonstration into a new folder.

    address: (host, port) -> address to connect to.
    bench_options: further options of `fluctua virtual-bench`.
    reference: iterations of the simulated trainings.
    measure: trajectories per level.
    say: called with a line of text about each stage.
    show: wraps the rows of the training, for a display.
    report: called with every incident.
    """
    plan = plan or Plan()
    sheet = sheet or device.Sheet(seed=3)
    points = plan.options.get("points", virtual.POINTS)
    hidden = device.draw_hidden(sheet)
    discarded: Counter[str] = Counter()
    calibration: dict[str, Array] = {}

    def note(incident: Incident) -> None:
        discarded[incident.kind] += incident.trajectories
        report(incident)

    with bench_process(*list_sheet_options(sheet), *bench_options) as (host, port):
        where = f"tcp://{host}:{port}" if address is None else address(host, port)
        say(f"bench      {where}, a process of its own")

        def connect():
            return virtual.VirtualBench(where, points=points, timeout=10.0)

        model = network_model(sheet.nominal, interval=sheet.interval, points=points)
        bench = instrument_substrate(connect)
        before = levels.measure_level(model, bench, model.start, measure)
        steps = list(
            show(
                run_and_resume.run(
                    connect, _share_calibration(model, calibration), plan, folder, report=note
                )
            )
        )
        rows = [row for row, _ in steps]
        settings = steps[-1][1].next_theta
        shots = rows[-1].trajectories
        in_situ = levels.measure_level(model, bench, settings, measure)
        say(
            "reference  two trainings by simulation with exact gradients, "
            f"{reference} iterations each"
        )
        at_nominal, predicted = train_by_simulation(
            sheet, model, points, hidden=None, shots=shots, iterations=reference
        )
        at_true, _ = train_by_simulation(
            sheet, model, points, hidden=hidden, shots=shots, iterations=reference
        )
        nominal = levels.measure_level(model, bench, at_nominal, measure)
        true = levels.measure_level(model, bench, at_true, measure)
        bench.close()
    calibrated = compute_parameters(calibration, settings)
    truth = device.compute_parameters(sheet, hidden, settings, shots)
    error = {
        name: float(np.sqrt(np.mean((np.asarray(v) - truth[name]) ** 2)))
        for name, v in calibrated.items()
    }
    return DemoResult(before, nominal, predicted, true, in_situ, rows, dict(discarded), error)


def _share_calibration(model: Model, calibration: dict[str, Array]) -> Model:
    """Return the same model, which also writes its latest calibration into a dictionary."""

    def calibrate(runs: Runs) -> DeviceFit:
        first = model.calibrate(runs)
        calibration.update(first.values)
        return first

    def follow(
        values: dict[str, Array], settings: Params, trajectories: Trajectories
    ) -> dict[str, Array]:
        assert model.methods.follow is not None
        calibration.update(model.methods.follow(values, settings, trajectories))
        return dict(calibration)

    methods = model.methods._replace(
        calibrate=calibrate, follow=follow if model.methods.follow else None
    )
    return model._replace(methods=methods)
