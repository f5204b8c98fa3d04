"""Ensembles on several GPUs.

A large ensemble is split into pieces, which go to all visible GPUs in turn. Pieces do not depend on
the number of GPUs, and the host adds their sums in order: one GPU and eight of the same model give
the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fluctua.compiled.toolchain import require_cupy

PIECE = 2**15
"""Largest number of trajectories per launch: fills a GPU many times over."""


def list_gpus(cp: Any) -> list[int]:
    """Return the GPUs that are visible to this process, the current one first."""
    count = cp.cuda.runtime.getDeviceCount()
    current = cp.cuda.Device().id
    return [(current + i) % count for i in range(count)]


def iterate_pieces(
    cp: Any, count: int, make: Callable[[], Any], launch: Callable[[Any, int, int], Any]
) -> Iterator[tuple[int, int, Any, Any]]:
    """Launch pieces of an ensemble on the visible GPUs in turn.

    Yields (begin, end, device, output) in order, with the GPU of the piece as the current one.

    make: lays out the network on the current GPU; its `chunk` is the size of a piece, and it is
    released at the end. launch: (device, begin, end), asynchronous.
    """
    gpus = list_gpus(cp)
    devices = [make()]
    edges = [*range(0, count, devices[0].chunk), count]
    pieces = list(itertools.pairwise(edges))
    try:
        for start in range(0, len(pieces), len(gpus)):
            launched = []
            for slot, (begin, end) in enumerate(pieces[start : start + len(gpus)]):
                with cp.cuda.Device(gpus[slot]):
                    if slot == len(devices):
                        devices.append(make())
                    launched.append((slot, begin, end, launch(devices[slot], begin, end)))
            for slot, begin, end, part in launched:
                with cp.cuda.Device(gpus[slot]):
                    yield begin, end, devices[slot], part
    finally:
        for device in devices:
            device.release()


def map_over_gpus(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Return function(item) of every item, in order, computed on all visible GPUs at once."""
    cp = require_cupy()
    gpus = list_gpus(cp)[: len(items)]
    if len(gpus) < 2:
        return [function(item) for item in items]

    def share(slot: int) -> list[Any]:
        with cp.cuda.Device(gpus[slot]):
            return [function(item) for item in items[slot :: len(gpus)]]

    with ThreadPoolExecutor(len(set(gpus))) as threads:
        shares = list(threads.map(share, range(len(gpus))))
    return [shares[i % len(gpus)][i // len(gpus)] for i in range(len(items))]


def choose_piece(count: int, largest: int) -> int:
    """Return the size of a piece if `largest` fit the memory: even, for any number of GPUs."""
    if min(count, largest) > PIECE:
        pieces = -(-count // PIECE)
        largest = min(largest, -(-count // pieces) + 1)
    return int(max(2, min(count, largest) // 2 * 2))
