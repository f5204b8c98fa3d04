"""The paper's binned baseline on the GPU: the returns first, then the same noise again, in
lockstep.

Some steps at a time, every trajectory is replayed into a buffer [step][site][trajectory]
(`native/cuda/replay.cu`), and every site with its upper bonds settles those steps against the
baseline (`native/cuda/columns.cu`). Bins are sorted afresh every `Binned.every` steps.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from fluctua.tcmt.kernel.cpu import EnsembleSums, mean_to_go
from fluctua.tcmt.kernel.cuda import address, borrowed, lay_out, refuse, require_cupy
from fluctua.tcmt.kernel.cuda_memory import Bundle
from fluctua.tcmt.kernel.layout import KernelPlan, blocks, make_plan, once_for_a_graph
from fluctua.tcmt.kernel.options import Binned, KernelJob

BUFFER_BYTES = 128 * 2**20
MOST_SLOTS = 50
"""Steps between replay and settling, and the buffer for them.

Longer runs cost less than a buffer within L2 saves.
"""
SHARED_WEIGHTS = 96 * 1024
SOURCES = ("replay.cu", "columns.cu", "bins.cu")
MOST_MEMBERS = 8
"""Of a bin, in the registers of one lane."""
SHARED_SCORES = 40 * 1024
BIN_BLOCKS = 2
SORT_RESERVE = 4096
"""Shared memory of a block that sorts, besides the keys of its trajectories."""


def largest_group(e: KernelJob) -> int:
    """Most trajectories that share bins on the current GPU: their keys are sorted in the memory
    of one block.
    """
    limit = require_cupy().cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
    keys = (limit - SORT_RESERVE) // e.options.real.itemsize
    power_of_two = 1 << (keys.bit_length() - 1)
    return min(power_of_two, (2**31 - 1) // e.width)  # places in the buffers are 31-bit numbers


def run(e: KernelJob) -> EnsembleSums:
    """Both passes on the current GPU; groups of trajectories that have bins of their own go to
    all of them.
    """
    cp = require_cupy()
    refuse(e)
    second = Second(cp, e)
    out = second.returns()
    if out.overflow[0] < 0:
        if second.general or not second.settle():
            second.settle(general=True)
        out.moments, out.samples = second.moments()
    second.device.give_back()
    return out


class Second:
    """The second pass of one run; owns its buffers on the device."""

    def __init__(self, cp: Any, ensemble: KernelJob) -> None:
        assert ensemble.binned is not None
        self.cp = cp
        self.ensemble = ensemble
        self.binned = ensemble.binned
        self.real = ensemble.options.real
        first_pass = ensemble.replace(scores=False, samples=False, binned=None)
        plan = make_plan(first_pass)
        bins = self.binned.bins
        self.plan = plan
        e = ensemble.count
        n = plan.sites
        self.size = 1 << (e - 1).bit_length()
        attributes = cp.cuda.Device().attributes
        self.sort_bytes = max(self.size * self.real.itemsize, 32 * bins * 4)
        self.threads = min(512 if e <= 2048 else 1024, 32 * -(-e // 32))
        each = -(-e // self.threads)
        weights = 4 * e * 2 * self.real.itemsize
        self.weights_shared = weights <= SHARED_WEIGHTS
        per_step = 4 * self.real.itemsize * n * e
        self.slots = int(
            np.clip(
                max(BUFFER_BYTES // per_step, 2), 1, min(MOST_SLOTS, self.binned.every, plan.steps)
            )
        )
        self.copies = int(
            np.clip(-(-3 * attributes["MultiProcessorCount"] // n), 1, max(1, self.slots // 4))
        )
        self.column_bytes = weights if self.weights_shared else 0
        # A warp owns a bin: registers for an even share of the trajectories, and a few more for
        # ties.
        self.members = -(-(-(-e // bins) + 2) // 32)
        self.batch = int(np.clip(SHARED_SCORES // (5 * e * self.real.itemsize), 1, 4))
        self.score_bytes = self.batch * 5 * e * self.real.itemsize
        fits = self.score_bytes <= attributes["MaxSharedMemoryPerBlockOptin"] - 1024
        self.general = self.members > MOST_MEMBERS or bins > 32 or not fits
        self.members = min(self.members, MOST_MEMBERS)
        layout = lay_out(plan)
        self.together = 4 if 4 * layout.threads <= 1024 else 1  # trajectories a block of the replay
        buffers = 4 * layout.rows * self.real.itemsize  # two states of a trajectory
        self.region = -(-buffers // 128) * 128 + 32 if self.together > 1 else buffers
        poly = 3 * plan.bonds * self.real.itemsize if plan.harmonics else 0
        self.replay_bytes = self.together * (self.region + poly)
        self.device = borrowed(
            cp,
            first_pass,
            plan,
            SOURCES,
            {
                "COLUMN_THREADS": self.threads,
                "EACH": each,
                "KEEP": int(each <= 4),
                "WEIGHTS_SHARED": int(self.weights_shared),
                "TOGETHER": self.together,
                "REGION": f"{self.region}u",
                "REPLAY_BLOCKS": 2 if self.together > 1 else 1,
                "MEMBERS": self.members,
                "BATCH": self.batch,
                "BIN_THREADS": min(32 * bins, 1024),
                "BIN_BLOCKS": BIN_BLOCKS if self.members <= 2 else 1,
                "Key": "u32" if self.real.itemsize == 4 else "u64",
                "KEY_MAX": "0xFFFFFFFFu" if self.real.itemsize == 4 else "0xFFFFFFFFFFFFFFFFull",
            },
            layout,
        )

    def returns(self) -> EnsembleSums:
        """The first pass."""
        e = self.ensemble
        out = EnsembleSums.empty(e)
        self.part = self.device.launch(e.first, e.count, e.records)
        sums = self.part.sums.get()
        bad = np.flatnonzero(sums["overflow"])
        if bad.size:
            out.overflow[0] = e.first + int(bad[0])
        out.returns = sums["returns"]
        out.reward_sum = sums["reward_sum"]
        self.centre = mean_to_go(out.reward_sum, e.count)
        if out.record is not None:
            out.record = self.part.record.get()
        return out

    def settle(self, general: bool = False) -> bool:
        """Replay, sort into bins and settle, over all steps.

        general: with the kernel that takes bins of any size. False if the faster one met a bin it
        cannot settle.
        """
        cp = self.cp
        plan = self.plan
        device = self.device
        e = self.ensemble.count
        n = plan.sites
        b = plan.bonds
        bins = self.binned.bins

        def empty(shape, dtype=self.real):
            return cp.empty(shape, dtype)

        self.gradient = cp.zeros((self.copies, 2 * n + b, e), self.real)
        lower = np.repeat(np.arange(n), np.diff(plan.upper_start))
        tables = Bundle.from_host(
            cp,
            {
                "centre": self.centre,
                "upper_start": plan.upper_start,
                "upper_site": plan.upper_site,
                "columns": np.concatenate([np.arange(n), lower]).astype(np.int32),
                "items": work_items(plan),
            },
        )
        replayed = {
            "state": empty((e, n, 2)),
            "c": empty(e, np.float64),
            "returns": self.part.sums["returns"],
            "centre": tables["centre"],
            "quad": empty((self.slots, n, e, 4)),
            "to_go": empty((self.slots, e)),
            "waves": empty((e, 2 * plan.harmonics * b)),
        }
        settled = {
            "upper_start": tables["upper_start"],
            "upper_site": tables["upper_site"],
            "place": empty((n + b, e), np.uint32),
            "order": empty((n + b, e), np.uint32),
            "offset": empty((n + b, bins + 1), np.int32),
            "gradient": self.gradient,
            "weights": empty(1 if self.weights_shared else (self.copies * n, 4, e, 2)),
        }

        def places(arrays):
            return {name: address(array) for name, array in arrays.items()}

        device.set_constants(
            c_replay=blocks()["Replayed"].packed(**places(replayed)),
            c_settled=blocks()["Settled"].packed(**places(settled)),
        )
        columns = tables["columns"]
        items = tables["items"]

        f = device.module.get_function
        replay = f("replay")
        rebin = f("rebin")
        by_column = f("columns")
        by_bin = f("settle_bins")
        limit = cp.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
        sizes = (
            (replay, self.replay_bytes),
            (rebin, self.sort_bytes),
            (by_column, self.column_bytes),
            (by_bin, self.score_bytes),
        )
        for kernel, size in sizes:
            if 32 * 1024 < size <= limit:
                kernel.max_dynamic_shared_size_bytes = size
        scale = self.real.type(plan.modulation_scale)
        sorters = int(np.clip(self.size // 2, 32, 1024))
        every = self.binned.every
        unfit = cp.zeros(-(-plan.steps // every), np.int32)
        for begin, end in schedule(plan.steps, self.binned, self.slots):
            replay(
                (-(-e // self.together),),
                (device.layout.threads * self.together,),
                (
                    np.uint32(self.ensemble.first),
                    np.int32(e),
                    np.int32(begin),
                    np.int32(end),
                    device.piece,
                    scale,
                ),
                shared_mem=self.replay_bytes,
            )
            if begin % every == 0:
                rebin(
                    (n + b,),
                    (sorters,),
                    (
                        columns,
                        np.int32(e),
                        np.int32(self.size),
                        np.int32(bins),
                        np.int32(32 * self.members),
                        unfit[begin // every :],
                    ),
                    shared_mem=self.sort_bytes,
                )
            lengths = (np.int32(e), np.int32(end - begin), np.int32(bins))
            if (
                general or begin < every
            ):  # at the start all states are equal: one bin holds everything
                by_column((n, self.copies), (self.threads,), lengths, shared_mem=self.column_bytes)
            else:
                by_bin(
                    (len(items), self.copies),
                    (32 * bins,),
                    (items, *lengths),
                    shared_mem=self.score_bytes,
                )
        return general or not bool(unfit[1:].any())

    def moments(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Σv, Σv², Σ(pair)² (3, P), and the samples (E, P) on request."""
        g = self.gradient.sum(axis=0, dtype=np.float64)
        even = g.shape[1] // 2 * 2
        pairs = g[:, 0:even:2] + g[:, 1:even:2]
        moments = self.cp.empty((3, len(g)))
        for row, values in enumerate((g, g * g, pairs * pairs)):
            moments[row] = values.sum(axis=1)
        return moments.get(), g.get().T.astype(self.real) if self.ensemble.samples else None


@once_for_a_graph
def work_items(plan: KernelPlan) -> np.ndarray:
    """(items, 4) of site, two of its upper bonds (−1: none), and 1 where the site's own
    parameters are settled.
    """
    items = []
    for site, (begin, end) in enumerate(itertools.pairwise(plan.upper_start)):
        bonds = [*range(begin, end), -1, -1]
        pairs = range(0, max(1, end - begin), 2)
        items += [(site, bonds[i], bonds[i + 1], int(i == 0)) for i in pairs]
    return np.array(items, np.int32)


def schedule(steps: int, binned: Binned, slots: int) -> list[tuple[int, int]]:
    """Runs of at most `slots` steps that never cross a sorting; of even length where that can
    be.
    """
    runs = []
    for first in range(0, steps, binned.every):
        last = min(first + binned.every, steps)
        length = last - first
        most = max(1, slots // 2 * 2)
        parts = -(-length // most)
        run = min(most, -(-length // (2 * parts)) * 2)
        runs += [(begin, min(begin + run, last)) for begin in range(first, last, run)]
    return runs
