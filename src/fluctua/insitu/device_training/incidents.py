"""incidents.csv: what went wrong in a run, when, and what it cost."""

from __future__ import annotations

import csv
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fluctua.insitu.instrument.substrate import Incident

Report = Callable[[Incident], None]
"""Called with every incident."""


class IncidentLog:
    """Incidents of a run, written to a file and reported as they happen.

    Args:
        path: of the file.
        report: called with every incident.

    """

    def __init__(self, path: Path, report: Report):
        self.path = path
        self.report = report
        self.iteration = "calibration"
        self._recent: list[Incident] = []
        self._lock = threading.Lock()  # devices of an array report from threads of their own

    def add(self, incident: Incident) -> None:
        """Write an incident and report it."""
        with self._lock:
            self._recent.append(incident)
            self._write(incident)
            self.report(incident)

    def note(self, kind: str, text: str) -> None:
        """Write and report something that cost no trajectories."""
        self.add(Incident(kind, 0, text))

    def _write(self, incident: Incident) -> None:
        is_new = not self.path.exists()
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if is_new:
                writer.writerow(("time", "iteration", *Incident._fields))
            writer.writerow((time.strftime("%Y-%m-%dT%H:%M:%S"), self.iteration, *incident))

    def summarise(self) -> str:
        """The incidents since the last call, in a few words without commas."""
        count: Counter[str] = Counter()
        for incident in self._recent:
            count[incident.kind] += incident.trajectories or 1
        self._recent = []
        return "; ".join(f"{n} {kind}" for kind, n in count.items())
