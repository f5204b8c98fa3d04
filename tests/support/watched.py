"""Run folders that grow, are killed and go on, for the page that follows them."""

import csv

import numpy as np

from fluctua import tcmt
from fluctua.learn.predictions import MeasurementComparison, RecordComparison
from fluctua.runs.reading import make_description
from fluctua.store import course, expectations, history
from fluctua.store.folder import RunFolder, acquire
from fluctua.store.history import Row


def make_record():
    """A record of two components at 50 times; one sample of the first is far off."""
    t = 0.1 * np.arange(50)
    expected = np.stack([np.sin(t), np.cos(t)], axis=1)
    measured = expected + 0.01
    measured[10, 0] += 1
    names = ("Re psi[0]", "Im psi[0]")
    return RecordComparison(t, names, expected, np.full((50, 2), 0.1), measured)


class Growing:
    """A run of a lattice, written as training writes it, without the training."""

    def __init__(self, path, *, every=5):
        self.place, self.every, self.lock = RunFolder(path), every, None
        path.mkdir(parents=True)
        self.network = tcmt.rectangular(3, 4)
        self.place.settings.write_text('preset = "demo"\n')
        self.place.history.write_text(history.HEADER)
        self.place.signal.write_text(history.signal_header(self.theta(0)))
        course.create(
            self.place.parameters,
            self.theta(0),
            "aa",
            make_description(self.network, {"sigma_kappa": 0.0}),
        )
        self.count = 0

    def theta(self, iteration):
        sites, bonds = self.network.sites, len(self.network.bonds)
        return {
            "omega": np.full(sites, 0.01 * iteration),
            "kappa": np.full(bonds, 1 + 0.01 * iteration),
            "chi": np.full(sites, -1e-4 * iteration),
        }

    def begin(self):
        self.lock = acquire(self.place)

    def kill(self):
        self.lock.close()

    def grow(self, rows, event=""):
        with open(self.place.history, "a") as file, open(self.place.signal, "a") as beside:
            for k in range(self.count, self.count + rows):
                last = k == self.count + rows - 1
                row = Row(
                    k,
                    k,
                    0.5 - 0.4 / (1 + k),
                    0.01,
                    100,
                    100 * (k + 1),
                    1.0,
                    0.1,
                    event if last else "",
                )
                history.append(file, row, "aa")
                history.append_signal(beside, k, self.theta(k + 1), self.theta(1))
                if k % self.every == 0:
                    course.append(self.place.parameters, [course.Point(k, k, self.theta(k))])
        self.count += rows

    def cut(self, rows):
        """What resuming does: everything after a checkpoint goes."""
        history.truncate(self.place.history, rows - 1, "aa")
        history.truncate_signal(self.place.signal, self.theta(0), rows - 1)
        course.truncate(self.place.parameters, list(self.theta(0)), rows - 1, self.every)
        self.count = rows

    def incident(self, kind, text):
        path = self.place.path / "incidents.csv"
        fresh = not path.exists()
        with open(path, "a", newline="") as file:
            writer = csv.writer(file)
            if fresh:
                writer.writerow(("time", "iteration", "kind", "trajectories", "reason"))
            writer.writerow(("2026-01-01T00:00:00", self.count, kind, 3, text))

    def measure(self, *, silent=(), devices=3):
        """`devices.csv` as in-situ training writes it, a row for each of the history.
        silent: who does not answer.
        """
        each = (
            "J",
            "error",
            "trajectories",
            "lost",
            "failures",
            "up",
            "rate",
            "guard",
            "drift omega_offset",
            "drift gain",
        )
        names = [f"{k + 1} {name}" for k in range(devices) for name in each]
        with open(self.place.path / "devices.csv", "w") as file:
            file.write(history.csv_line(["row", *names]))
            for row in range(self.count):
                cells = [str(row)]
                for k in range(devices):
                    up = k + 1 not in silent
                    J = 0.1 * k + 0.01 * row if up else np.nan
                    cells += [
                        f"{v:.5g}"
                        for v in (J, 0.002, 40 * up, k, 2 * k, up, 1.0, 1.05, 0.001 * row, 0.0)
                    ]
                file.write(history.csv_line(cells))

    def expect(self, every=2):
        """What a run whose model is calibrated as it goes writes: it measures in one of `every`
        iterations, and expects J to 0.02; of the last one it keeps a record.
        """
        rows = history.read(self.place.history)
        rows = [row if row.row % every == 0 else row._replace(ensemble=0) for row in rows]
        lines = [history.format_row(row, "aa") for row in rows]
        self.place.history.write_text(history.HEADER + "".join(lines))
        files = expectations.ExpectationFiles(self.place)
        for row in rows:
            if row.ensemble:
                comparison = MeasurementComparison(row.J + 0.01, 0.02, 1.1, 0.9, make_record())
            else:
                comparison = MeasurementComparison()
            files.add(row, comparison)
        files.save()
        files.close()

    def use(self, theta, low=None, high=None, t=None):
        """Another θ: {name: function of the iteration}, as a process of a user's own has it."""
        self.theta = lambda k: {name: np.asarray(value(k)) for name, value in theta.items()}
        describe = course.describe_arrays(low or {}, high or {}, t)
        self.place.signal.write_text(history.signal_header(self.theta(0)))
        course.create(self.place.parameters, self.theta(0), "aa", describe)

    def end(self):
        np.savez(self.place.final, **self.theta(self.count))
        self.lock.close()
