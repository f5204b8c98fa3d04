"""Every acquisition on disk, the bad ones too: one .npz a batch, numbered, never overwritten.

t (T+1,), samples (E, T+1, M) as they came, scale, full_scale, good (E,) and one array per family of settings.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fluctua.checkpoint import replace
from fluctua.insitu.instrument import Batch
from fluctua.types import Params


class Archive:
    """A folder of batches."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.number = 1 + max((int(p.stem.removeprefix("batch-")) for p in self.folder.glob("batch-*.npz")), default=-1)

    def add(self, batch: Batch, settings: Params, good: np.ndarray, verdict: str) -> Path:
        """Write one batch. good: (E,), which of its trajectories may be averaged. verdict: why not the others."""
        arrays: dict[str, Any] = {
            f"settings{jax.tree_util.keystr(path)}": np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(settings)
        }
        memory = io.BytesIO()
        np.savez(
            memory, t=np.asarray(batch.t), samples=np.asarray(batch.samples), scale=batch.scale,
            full_scale=batch.full_scale, good=good, verdict=np.array(verdict), **arrays,
        )  # fmt: skip
        path = self.folder / f"batch-{self.number:06d}.npz"
        replace(path, memory.getvalue())
        self.number += 1
        return path
