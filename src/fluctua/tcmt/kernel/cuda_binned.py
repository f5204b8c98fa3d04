"""The paper's binned baseline on GPUs, in two passes: returns first, then the same noise again.

In the second pass every trajectory is replayed, a few steps at a time, and writes its scores into a
buffer [step][trajectories of a block][site] (`native/cuda/replay.cu`). Each site with its upper
bonds subtracts the baseline of those steps (`native/cuda/bins.cu`, and `columns.cu` for bins of any
size). Bins are sorted every `Binned.every` steps, in registers.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from fluctua.tcmt.kernel.cpu import EnsembleSums, mean_to_go
from fluctua.tcmt.kernel.cuda import (
    address,
    borrow_network,
    check_distinct_sites,
    lay_out,
    require_cupy,
)
from fluctua.tcmt.kernel.cuda_layout import (
    SiteLayout,
    cluster_limits,
    measure_state,
    resident_clusters,
    spread_replay,
)
from fluctua.tcmt.kernel.cuda_memory import Bundle
from fluctua.tcmt.kernel.layout import KernelPlan, cache_per_graph, make_plan, read_blocks
from fluctua.tcmt.kernel.options import Binned, KernelJob

BUFFER_BYTES = 2**32
MAX_SLOTS = 50
"""Largest number of steps per replay, and the buffer for them. A launch of few steps would spend
its time loading the network."""
SHARED_WEIGHTS = 96 * 1024
SOURCES = ("replay.cu", "columns.cu", "bins.cu")
MAX_MEMBERS = 8
"""Largest number of members of a bin in the registers of one lane."""
SHARED_SCORES = 100 * 1024
"""Largest shared memory for the scores of several steps, of which two blocks fit."""
BIN_BLOCKS = 2
SORT_RESERVE = 16 * 1024
"""Shared memory of a block that sorts, without the keys of its trajectories."""
TOGETHER = (4, 2, 1)
TOGETHER_IN_CLUSTERS = (1,)
"""Trajectories per block of the replay, the first that fits. In clusters two blocks that do not
wait for each other share a multiprocessor."""
REPLAYED_SITES = 640
"""Largest number of sites per block of the replay if two share a multiprocessor."""
REPLAYED_BYTES = 5120
"""Largest number of sites per block of the replay, over all of its trajectories, in bytes of a
number."""
MAX_KEYS = 32
"""Largest number of trajectories that a thread sorts in registers."""


def largest_group(e: KernelJob) -> int:
    """Return the largest group with common bins: one block sorts its keys in shared memory."""
    limit = require_cupy().cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
    keys = (limit - SORT_RESERVE) // e.options.real.itemsize
    power_of_two = 1 << (keys.bit_length() - 1)
    return min(power_of_two, (2**31 - 1) // e.width)  # places in the buffers are 31-bit numbers


def run(e: KernelJob) -> EnsembleSums:
    """Run both passes of a job on the current GPU."""
    cp = require_cupy()
    check_distinct_sites(e)
    second = SecondPass(cp, e)
    out = second.run_first_pass()
    if out.overflow[0] < 0:
        if second.general or not second.settle():
            second.settle(general=True)
        out.moments, out.samples = second.compute_moments()
    second.device.release()
    return out


class SecondPass:
    """The second pass of one run, with its buffers on the device."""

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
        self.size = max(self.size, 32)
        self.keys = max(1, min(MAX_KEYS, self.size // 32))
        self.sorters = self.size // self.keys
        warps = self.sorters // 32
        self.sort_bytes = max(self.size * 33 // 32 * self.real.itemsize, 4 * warps * bins)
        self.threads = min(512 if e <= 2048 else 1024, 32 * -(-e // 32))
        per_thread = -(-e // self.threads)
        weights = 4 * e * 2 * self.real.itemsize
        self.weights_shared = weights <= SHARED_WEIGHTS
        per_step = 4 * self.real.itemsize * len(list_work_items(plan)) * e
        room = min(BUFFER_BYTES, cp.cuda.runtime.memGetInfo()[1] // 8)
        self.slots = int(
            np.clip(max(room // per_step, 2), 1, min(MAX_SLOTS, self.binned.every, plan.steps))
        )
        self.copies = int(
            np.clip(-(-3 * attributes["MultiProcessorCount"] // n), 1, max(1, self.slots // 4))
        )
        self.column_bytes = weights if self.weights_shared else 0
        # a warp has a bin: registers for an even share of the trajectories, and a few for ties
        self.members = -(-(-(-e // bins) + 2) // 32)
        row = 32 * (e // 32 + 1)  # a row of scores, and a 0 behind it
        row_bytes = 5 * row * self.real.itemsize
        self.together_steps = next((s for s in (4, 2) if s * row_bytes <= SHARED_SCORES), 1)
        self.score_bytes = self.together_steps * row_bytes
        fits = self.score_bytes <= attributes["MaxSharedMemoryPerBlockOptin"] - 1024
        self.general = self.members > MAX_MEMBERS or bins > 32 or not fits
        self.members = min(self.members, MAX_MEMBERS)
        macros = {
            "COLUMN_THREADS": self.threads,
            "EACH": per_thread,
            "KEEP": int(per_thread <= 4),
            "WEIGHTS_SHARED": int(self.weights_shared),
            "MEMBERS": self.members,
            "STEPS": self.together_steps,
            "ROW": row,
            "BIN_THREADS": min(32 * bins, 1024),
            "BIN_BLOCKS": BIN_BLOCKS if self.members <= 2 else 1,
            "KEYS": self.keys,
            "SORT_THREADS": self.sorters,
            "ALL_BONDS": plan.bonds,
            "ITEMS": len(list_work_items(plan)),
            "Key": "u32" if self.real.itemsize == 4 else "u64",
            "KEY_MAX": "0xFFFFFFFFu" if self.real.itemsize == 4 else "0xFFFFFFFFFFFFFFFFull",
        }
        for max_blocks in cluster_limits(cp):
            how = spread_replay(n, self.real.itemsize, max_blocks)
            if self._compile(first_pass, lay_out(plan, *how), macros):
                break

    def _compile(
        self, first_pass: KernelJob, layout: SiteLayout, macros: dict[str, int | str]
    ) -> bool:
        """Compile the kernels for a layout. Returns False if the GPU cannot run its clusters."""
        cp = self.cp
        plan = self.plan
        item = self.real.itemsize
        limit = cp.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
        poly = 3 * layout.bonds.shape[1] * item if plan.harmonics else 0
        kicks = 2 * (layout.local + layout.mirrors) * 2 * item
        state = -(-measure_state(plan, layout, item) // 16) * 16 + kicks
        for together in TOGETHER if layout.cluster == 1 else TOGETHER_IN_CLUSTERS:
            self.together = together
            self.region = -(-state // 128) * 128 + 32 if together > 1 else -(-state // 16) * 16
            self.replay_bytes = together * (self.region + poly)
            sites = together * layout.local  # as many as registers hold, of all trajectories
            fits = together * layout.threads <= 1024 and self.replay_bytes <= limit
            if fits and sites * item <= REPLAYED_BYTES:
                break
        macros = {
            **macros,
            "TOGETHER": self.together,
            "REGION": f"{self.region}u",
            "REPLAY_BLOCKS": 2 if self.together * layout.local <= REPLAYED_SITES else 1,
        }
        self.device = borrow_network(cp, first_pass, plan, SOURCES, macros, layout)
        self.replay = self.device.module.get_function("replay")
        if self.replay_bytes > 32 * 1024:
            self.replay.max_dynamic_shared_size_bytes = self.replay_bytes
        if layout.cluster == 1:
            return True
        residents = resident_clusters(self.replay, layout, self.replay_bytes, self.together)
        return min(self.device.grid, residents) > 0

    def run_first_pass(self) -> EnsembleSums:
        """Run the first pass: returns, mean rewards and records."""
        e = self.ensemble
        out = EnsembleSums.empty(e)
        self.part = self.device.launch(e.first, e.count, e.records)
        sums = self.part.sums.get()
        bad = np.flatnonzero(sums["overflow"].any(axis=1))
        if bad.size:
            out.overflow[0] = e.first + int(bad[0])
        out.returns = sums["returns"]
        out.reward_sum = sums["reward_sum"]
        self.centre = mean_to_go(out.reward_sum, e.count)
        if out.record is not None:
            out.record = self.part.record.get()
        return out

    def settle(self, general: bool = False) -> bool:
        """Replay, sort into bins and subtract the baseline, over all steps.

        general: use the kernel for bins of any size. Returns False if the faster kernel found a bin
        that is too large for it.
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
        items = list_work_items(plan)
        tables = Bundle.from_host(
            cp,
            {
                "centre": self.centre,
                "upper_start": plan.upper_start,
                "upper_site": plan.upper_site,
                "columns": np.concatenate([np.arange(n), lower]).astype(np.int32),
                "items": items,
                "item": np.flatnonzero(items[:, 3]).astype(np.int32),
                "upper": locate_upper_bonds(plan),
            },
        )
        replayed = {
            "state": empty((e, n, 2)),
            "left": empty(e, np.float64),
            "returns": self.part.sums["returns"],
            "centre": tables["centre"],
            "quad": empty((self.slots, len(items), -(-e // self.together) * self.together, 4)),
            "to_go": empty((self.slots, e)),
            "power": empty((n, e)),
            "waves": empty((e, 2 * plan.harmonics * device.layout.bonds.size)),
            "item": tables["item"],
            "upper": tables["upper"],
        }
        settled = {
            "upper_start": tables["upper_start"],
            "upper_site": tables["upper_site"],
            "place": empty((n + b, e) if general else 1, np.uint32),
            "order": empty((n + b, e), np.uint32),
            "offset": empty((n + b, bins + 1), np.int32),
            "gradient": self.gradient,
            "weights": empty(1 if self.weights_shared else (self.copies * n, 4, e, 2)),
        }

        def addresses(arrays):
            return {name: address(array) for name, array in arrays.items()}

        device.set_constants(
            c_replay=read_blocks()["Replayed"].pack(**addresses(replayed)),
            c_settled=read_blocks()["Settled"].pack(**addresses(settled)),
        )
        columns = tables["columns"]

        f = device.module.get_function
        rebin = f("rebin")
        by_column = f("columns")
        by_bin = f("settle_bins")
        whole = f("settle_whole")
        limit = cp.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
        sizes = (
            (rebin, self.sort_bytes),
            (by_column, self.column_bytes),
            (by_bin, self.score_bytes),
            (whole, self.score_bytes),
        )
        for kernel, size in sizes:
            if 32 * 1024 < size <= limit:
                kernel.max_dynamic_shared_size_bytes = size
        scale = self.real.type(plan.modulation_scale)
        every = self.binned.every
        unfit = cp.zeros(-(-plan.steps // every), np.int32)
        for begin, end in schedule_runs(plan.steps, self.binned, self.slots):
            self.replay(
                (-(-e // self.together) * device.layout.cluster,),
                (device.layout.threads * self.together,),
                (
                    np.uint32(self.ensemble.first),
                    np.int32(e),
                    np.int32(begin),
                    np.int32(end),
                    np.int32(plan.steps),
                    device.piece,
                    scale,
                ),
                shared_mem=self.replay_bytes,
            )
            if begin % every == 0:
                rebin(
                    (n + b,),
                    (self.sorters,),
                    (
                        columns,
                        np.int32(e),
                        np.int32(bins),
                        np.int32(32 * self.members),
                        unfit[begin // every :],
                        np.int32(general),
                    ),
                    shared_mem=self.sort_bytes,
                )
            lengths = (np.int32(e), np.int32(end - begin), np.int32(bins))
            if general:
                by_column((n, self.copies), (self.threads,), lengths, shared_mem=self.column_bytes)
            else:
                # at the start all states are equal: one bin has all trajectories
                (whole if begin < every else by_bin)(
                    (len(items), self.copies),
                    (32 * bins,),
                    (tables["items"], *lengths),
                    shared_mem=self.score_bytes,
                )
        return general or not bool(unfit[1:].any())

    def compute_moments(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return Σv, Σv², Σ(pair)² (3, P), and the samples (E, P) on request."""
        g = self.gradient.sum(axis=0, dtype=np.float64)
        even = g.shape[1] // 2 * 2
        pairs = g[:, 0:even:2] + g[:, 1:even:2]
        moments = self.cp.empty((3, len(g)))
        for row, values in enumerate((g, g * g, pairs * pairs)):
            moments[row] = values.sum(axis=1)
        return moments.get(), g.get().T.astype(self.real) if self.ensemble.samples else None


@cache_per_graph
def list_work_items(plan: KernelPlan) -> np.ndarray:
    """Return work items (items, 4): site, two of its upper bonds (−1 for none), and a flag.

    The flag is 1 for the item that has the site's own parameters.
    """
    items = []
    for site, (begin, end) in enumerate(itertools.pairwise(plan.upper_start)):
        bonds = [*range(begin, end), -1, -1]
        pairs = range(0, max(1, end - begin), 2)
        items += [(site, bonds[i], bonds[i + 1], int(i == 0)) for i in pairs]
    return np.array(items, np.int32)


def locate_upper_bonds(plan: KernelPlan) -> np.ndarray:
    """Return the slots of each site's upper bonds: the first, and from bit 16 on the last + 1."""
    below = np.diff(plan.lower_start).astype(np.uint32)
    return below | (below + np.diff(plan.upper_start).astype(np.uint32)) << 16


def schedule_runs(steps: int, binned: Binned, slots: int) -> list[tuple[int, int]]:
    """Return runs of at most `slots` steps that never cross a sorting; even lengths if possible."""
    runs = []
    for first in range(0, steps, binned.every):
        last = min(first + binned.every, steps)
        length = last - first
        longest = max(1, slots // 2 * 2)
        parts = -(-length // longest)
        run = min(longest, -(-length // (2 * parts)) * 2)
        runs += [(begin, min(begin + run, last)) for begin in range(first, last, run)]
    return runs
