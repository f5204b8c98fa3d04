"""A folder of recordings: every batch that an instrument returned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from fluctua.core.arrays import Params
from fluctua.insitu.instrument.protocol import Batch
from fluctua.insitu.recording.description import Description
from fluctua.insitu.recording.reader import open_recording
from fluctua.insitu.recording.writer import save

Head = Callable[[Batch, Params], Description]
"""(batch, settings) -> the head of its recording."""


class Archive:
    """A folder of recordings, one per batch.

    head: makes the head of a file from a batch and its settings; without one a file holds states
        and settings only.

    >>> archive = insitu.instrument.Archive("recordings")
    >>> substrate = insitu.instrument_substrate(connect, archive=archive, batch=10)
    >>> trajectories = substrate(None, {"force": 0.5}, 20)
    >>> sorted(path.name for path in archive.folder.iterdir())
    ['batch-000000.nc', 'batch-000001.nc']
    """

    def __init__(self, folder: str | Path, head: Head | None = None):
        self.folder = Path(folder)
        self.head = head or _describe_states
        self.folder.mkdir(parents=True, exist_ok=True)
        self.number = 1 + max(
            (_parse_number(path) for path in self.folder.glob("batch-*.nc")), default=-1
        )

    def add(
        self, batch: Batch, settings: Params, good: np.ndarray, verdict: str, doubt: str = ""
    ) -> None:
        """Write one batch.

        Args:
            batch: as it was received.
            settings: that were sent.
            good: which of its trajectories may be averaged (E,).
            verdict: why the others may not.
            doubt: why those that are averaged should not be trusted; empty if they may be.

        """
        head = self.head(batch, settings)
        for which, suffix, provenance in (
            (good, "", f"in doubt: {doubt}" if doubt else ""),
            (~good, "-left-out", f"left out: {verdict}"),
        ):
            if which.any():
                path = self.folder / f"batch-{self.number:06d}{suffix}.nc"
                context = {name: v[which] for name, v in (batch.context or {}).items()}
                save(
                    path,
                    dataclasses.replace(head, provenance=provenance),
                    batch.x[which],
                    context or None,
                )
        self.number += 1

    def count_since(self, number: int) -> int:
        """Count the trajectories in the batches from `number` on."""
        total = 0
        for path in self.folder.glob("batch-*.nc"):
            if _parse_number(path) >= number:
                with open_recording(path) as recording:
                    total += recording.count
        return total


def _parse_number(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _describe_states(batch: Batch, settings: Params) -> Description:
    named = jax.tree_util.tree_leaves_with_path(settings)
    return Description(
        np.asarray(batch.t),
        tuple(f"x[{i}]" for i in range(batch.x.shape[2])),
        batch.x.dtype.name,
        context=list_context_shapes(batch),
        settings={_name_leaf(path): np.asarray(leaf) for path, leaf in named},
    )


def list_context_shapes(batch: Batch) -> dict[str, tuple[int, ...]] | None:
    """Shape of each entry of the context for one trajectory; None without context."""
    return {name: np.shape(v)[1:] for name, v in batch.context.items()} if batch.context else None


def _name_leaf(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="_") or "settings"
