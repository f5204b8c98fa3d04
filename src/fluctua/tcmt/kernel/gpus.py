"""Several GPUs at once.

A large ensemble goes in pieces, to all GPUs that are visible in turn. Pieces do not depend on the
number of GPUs, and what they leave is added in their order on the host: one GPU and eight give the
same bits, if they are of one kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fluctua.compiled.cuda import require_cupy

PIECE = 2**15
"""Trajectories of one launch at most: enough to fill a GPU many times over, and several pieces to
share out.
"""


def visible(cp: Any) -> list[int]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process, the current one first."""
    count = cp.cuda.runtime.getDeviceCount()
    current = cp.cuda.Device().id
    return [(current + i) % count for i in range(count)]


def in_turn(
    cp: Any, count: int, make: Callable[[], Any], launch: Callable[[Any, int, int], Any]
) -> Iterator[tuple[int, int, Any, Any]]:
    """Pieces of an ensemble on the visible GPUs in turn: (begin, end, device, what it left), in
    order.

    make: lays out the network on the current GPU, and knows the size of a piece as `chunk`; given
    back at the end.
    launch: (device, begin, end), asynchronous. What follows is done with the GPU of the piece as
    the current one.
    """
    gpus = visible(cp)
    made = [make()]
    edges = [*range(0, count, made[0].chunk), count]
    pieces = list(itertools.pairwise(edges))
    try:
        for start in range(0, len(pieces), len(gpus)):
            launched = []
            for slot, (begin, end) in enumerate(pieces[start : start + len(gpus)]):
                with cp.cuda.Device(gpus[slot]):
                    if slot == len(made):
                        made.append(make())
                    launched.append((slot, begin, end, launch(made[slot], begin, end)))
            for slot, begin, end, part in launched:
                with cp.cuda.Device(gpus[slot]):
                    yield begin, end, made[slot], part
    finally:
        for device in made:
            device.give_back()


def over_gpus(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """function(item) of every item, on all visible GPUs at once; results in the order of the
    items.
    """
    cp = require_cupy()
    gpus = visible(cp)[: len(items)]
    if len(gpus) < 2:
        return [function(item) for item in items]

    def share(slot: int) -> list[Any]:
        with cp.cuda.Device(gpus[slot]):
            return [function(item) for item in items[slot :: len(gpus)]]

    with ThreadPoolExecutor(len(set(gpus))) as threads:
        shares = list(threads.map(share, range(len(gpus))))
    return [shares[i % len(gpus)][i // len(gpus)] for i in range(len(items))]


def choose_piece(count: int, most: int) -> int:
    """Trajectories of a piece, if `most` fit the memory: even, and the same whatever the number
    of GPUs.
    """
    if min(count, most) > PIECE:
        many = -(-count // PIECE)
        most = min(most, -(-count // many) + 1)
    return int(max(2, min(count, most) // 2 * 2))
