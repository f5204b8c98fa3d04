"""Every acquisition on disk, the bad ones too: one recording a batch, numbered, never overwritten.

They are recordings like any other (docs/recordings.md): `fluctua inspect`, xarray and h5py read them, and those of a
network `fluctua calibrate` and `estimate` too. Trajectories that must not be averaged are in files of their own,
batch-000007-left-out.nc, with the reason in their provenance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from fluctua.core.types import Params
from fluctua.insitu.instrument.protocol import Batch
from fluctua.insitu.recording.description import Description
from fluctua.insitu.recording.reader import open_recording
from fluctua.insitu.recording.writer import save

Head = Callable[[Batch, Params], Description]
"""(batch, settings) -> the head of its recording."""


class Archive:
    """A folder of batches. head: what their files say of the system; without one, states and settings only."""

    def __init__(self, folder: str | Path, head: Head | None = None):
        self.folder, self.head = Path(folder), head or _plain
        self.folder.mkdir(parents=True, exist_ok=True)
        self.number = 1 + max((_number(path) for path in self.folder.glob("batch-*.nc")), default=-1)

    def add(self, batch: Batch, settings: Params, good: np.ndarray, verdict: str) -> None:
        """Write one batch. good: (E,), which of its trajectories may be averaged. verdict: why not the others."""
        head = self.head(batch, settings)
        for which, end, told in ((good, "", ""), (~good, "-left-out", f"left out: {verdict}")):
            if which.any():
                path = self.folder / f"batch-{self.number:06d}{end}.nc"
                save(path, dataclasses.replace(head, provenance=told), batch.x[which])
        self.number += 1

    def trajectories_since(self, number: int) -> int:
        """Trajectories in the batches from `number` on."""
        total = 0
        for path in self.folder.glob("batch-*.nc"):
            if _number(path) >= number:
                with open_recording(path) as recording:
                    total += recording.count
        return total


def _number(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _plain(batch: Batch, settings: Params) -> Description:
    named = jax.tree_util.tree_leaves_with_path(settings)
    return Description(
        np.asarray(batch.t),
        tuple(f"x[{i}]" for i in range(batch.x.shape[2])),
        batch.x.dtype.name,
        settings={_name(path): np.asarray(leaf) for path, leaf in named},
    )


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="_") or "settings"
