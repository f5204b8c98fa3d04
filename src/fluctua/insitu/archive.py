"""Every acquisition on disk, the bad ones too: one recording a batch, numbered, never overwritten.

They are recordings like any other (docs/recordings.md): `fluctua inspect`, xarray and h5py read them. What was set is
in their settings, why trajectories were left out in their provenance, and which in the context: `good` is 1 or 0.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from fluctua.insitu.description import Description
from fluctua.insitu.instrument import Batch
from fluctua.insitu.reader import open_recording
from fluctua.insitu.writer import save
from fluctua.types import Params


class Archive:
    """A folder of batches."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.number = 1 + max((int(p.stem.removeprefix("batch-")) for p in self.folder.glob("batch-*.nc")), default=-1)

    def add(self, batch: Batch, settings: Params, good: np.ndarray, verdict: str) -> Path:
        """Write one batch. good: (E,), which of its trajectories may be averaged. verdict: why not the others."""
        x = batch.x
        named = jax.tree_util.tree_leaves_with_path(settings)
        description = Description(
            np.asarray(batch.t),
            tuple(f"x[{i}]" for i in range(x.shape[2])),
            x.dtype.name,
            context={"good": ()},
            settings={_name(path): np.asarray(leaf) for path, leaf in named},
            provenance=f"left out: {verdict}" if verdict else "",
        )
        path = self.folder / f"batch-{self.number:06d}.nc"
        save(path, description, x, {"good": np.asarray(good, float)})
        self.number += 1
        return path

    def trajectories_since(self, number: int) -> int:
        """Trajectories in the batches from `number` on."""
        total = 0
        for k in range(number, self.number):
            path = self.folder / f"batch-{k:06d}.nc"
            if path.exists():  # numbers have no gaps unless somebody tidied up
                with open_recording(path) as recording:
                    total += recording.count
        return total


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="_") or "settings"
