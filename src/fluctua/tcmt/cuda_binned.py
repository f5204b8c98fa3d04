"""The paper's binned baseline on the GPU: the returns first, then the same noise again, in lockstep.

Some steps at a time, every trajectory is replayed into a buffer [step][site][trajectory]
(`native/replay.cu`), and every site with its upper bonds settles those steps against the baseline
(`native/columns.cu`). Bins are sorted afresh every `Binned.every` steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fluctua.tcmt.cuda import Device
from fluctua.tcmt.spec import KernelSpec

if TYPE_CHECKING:
    from fluctua.tcmt.kernel import Binned, KernelResult, Options

BUFFER_BYTES = 40 * 2**20
"""Of the buffer between replay and columns: within the L2 cache of a large GPU."""
MOST_SLOTS = 16
SHARED_WEIGHTS = 96 * 1024
SOURCES = ("replay.cu", "columns.cu")


def run_binned(cp: Any, spec: KernelSpec, o: Options) -> KernelResult:
    """`kernel.run` with `Binned` on the current CuPy device."""
    from fluctua.tcmt import kernel

    assert o.binned is not None
    first_pass = o._replace(scores=False, samples=False, binned=None)
    second = Second(cp, spec, o, kernel.flat(spec, first_pass))
    out = second.returns()
    if out["overflow"][0] < 0:
        second.settle()
        out["moments"], out["samples"] = second.moments()
    return kernel.result(spec, o, out)


class Second:
    """The second pass of one run; owns its buffers on the device."""

    def __init__(self, cp: Any, spec: KernelSpec, o: Options, flat: dict[str, Any]) -> None:
        assert o.binned is not None
        self.cp, self.spec, self.o, self.binned = cp, spec, o, o.binned
        self.real = np.dtype(o.dtype)
        e, n = o.trajectories, spec.omega.size
        self.size = 1 << (e - 1).bit_length()
        attributes = cp.cuda.Device().attributes
        self.sort_bytes = max(self.size * self.real.itemsize, 32 * o.binned.bins * 4)
        if self.sort_bytes + 4096 > attributes["MaxSharedMemoryPerBlockOptin"]:
            raise ValueError(
                f"{e} trajectories are more than the GPU can sort into bins at once. Estimate in parts with "
                "`first_trajectory`, or use a time-only baseline or backend='cpu'."
            )
        self.threads = min(512 if e <= 2048 else 1024, 32 * -(-e // 32))
        each = -(-e // self.threads)
        weights = 4 * e * 2 * self.real.itemsize
        self.weights_shared = weights <= SHARED_WEIGHTS
        per_step = 4 * self.real.itemsize * n * e
        self.slots = int(np.clip(max(BUFFER_BYTES // per_step, 2), 1, min(MOST_SLOTS, o.binned.every, spec.steps)))
        if max(self.slots * n, 2 * n + len(spec.bonds)) * e >= 2**31:
            raise ValueError(f"{e} trajectories of {n} resonators are too many at once. Estimate in parts.")
        self.copies = int(np.clip(-(-3 * attributes["MultiProcessorCount"] // n), 1, max(1, self.slots // 4)))
        self.column_bytes = weights if self.weights_shared else 0
        self.device = Device(
            cp,
            spec,
            o._replace(scores=False, samples=False, binned=None),
            flat,
            SOURCES,
            {
                "COLUMN_THREADS": self.threads,
                "EACH": each,
                "KEEP": int(each <= 4),
                "WEIGHTS_SHARED": int(self.weights_shared),
                "Key": "u32" if self.real.itemsize == 4 else "u64",
                "KEY_MAX": "0xFFFFFFFFu" if self.real.itemsize == 4 else "0xFFFFFFFFFFFFFFFFull",
            },
        )

    def returns(self) -> dict[str, Any]:
        """The first pass."""
        from fluctua.tcmt.cuda import _explain_overflow

        spec, o = self.spec, self.o
        records = spec.steps // o.record_every + 1 if o.record_every else 0
        self.reward_sum = self.cp.zeros(spec.steps)
        self.part = self.device.launch(o.first, o.trajectories, self.reward_sum, records)
        bad = np.flatnonzero(self.part.overflow.get())
        if bad.size:
            _explain_overflow(spec, o, o.first + int(bad[0]))
        return {
            "returns": self.part.returns.get(),
            "reward_sum": self.reward_sum.get(),
            "record": self.part.record.get() if records else None,
            "overflow": np.full(2, -1, np.int64),
        }

    def settle(self) -> None:
        """Replay, sort into bins and settle, over all steps."""
        from fluctua.tcmt.kernel import mean_to_go

        cp, spec, o, device, e = self.cp, self.spec, self.o, self.device, self.o.trajectories
        n, b, bins = spec.omega.size, len(spec.bonds), self.binned.bins
        empty = lambda shape, dtype=self.real: cp.empty(shape, dtype)
        self.gradient = cp.zeros((self.copies, 2 * n + b, e), self.real)
        centre = cp.asarray(mean_to_go(self.reward_sum.get(), e))
        replayed = [
            empty((e, n, 2)),
            empty(e, np.float64),
            self.part.returns,
            centre,
            empty((self.slots, n, e, 4)),
            empty((self.slots, e)),
            empty((e, 2 * spec.harmonics * b)),
        ]
        upper_start, upper_site = (
            cp.asarray(device.flat["upper_start"]),
            cp.asarray(device.flat["upper_site"]),
        )
        settled = [
            upper_start,
            upper_site,
            empty((n + b, e), np.uint32),
            empty((n + b, bins + 1), np.int32),
            self.gradient,
            empty(1 if self.weights_shared else (self.copies * n, 4, e, 2)),
        ]
        for name, arrays in (("c_replay", replayed), ("c_settled", settled)):
            device.set_constant(name, np.array([a.data.ptr for a in arrays], np.uint64))
        lower = np.repeat(np.arange(n), np.diff(device.flat["upper_start"]))
        columns = cp.asarray(np.concatenate([np.arange(n), lower]).astype(np.int32))

        replay, rebin, settle = (device.module.get_function(f) for f in ("replay", "rebin", "columns"))
        for kernel, size in ((replay, device.shared), (rebin, self.sort_bytes), (settle, self.column_bytes)):
            if size > 32 * 1024:
                kernel.max_dynamic_shared_size_bytes = size
        piece = np.int32(device.flat["modulation_steps"] if spec.harmonics else 32)
        scale = self.real.type(device.flat["modulation_scale"])
        sorters = int(np.clip(self.size // 2, 32, 1024))
        for begin, end in schedule(spec.steps, self.binned, self.slots):
            replay(
                (min(device.grid, e),),
                (device.layout.threads,),
                (np.uint32(o.first), np.int32(e), np.int32(begin), np.int32(end), piece, scale),
                shared_mem=device.shared,
            )
            if begin % self.binned.every == 0:
                rebin(
                    (n + b,),
                    (sorters,),
                    (columns, np.int32(e), np.int32(self.size), np.int32(bins)),
                    shared_mem=self.sort_bytes,
                )
            settle(
                (n, self.copies),
                (self.threads,),
                (np.int32(e), np.int32(end - begin), np.int32(bins)),
                shared_mem=self.column_bytes,
            )

    def moments(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Σv, Σv², Σ(pair)² (3, P), and the samples (E, P) on request."""
        g = self.gradient.sum(axis=0, dtype=np.float64)
        even = g.shape[1] // 2 * 2
        pairs = g[:, 0:even:2] + g[:, 1:even:2]
        moments = np.stack([v.get() for v in (g.sum(axis=1), (g * g).sum(axis=1), (pairs * pairs).sum(axis=1))])
        return moments, g.get().T.astype(self.real) if self.o.samples else None


def schedule(steps: int, binned: Binned, slots: int) -> list[tuple[int, int]]:
    """Runs of at most `slots` steps that never cross a sorting; of even length where that can be."""
    runs = []
    for first in range(0, steps, binned.every):
        last = min(first + binned.every, steps)
        length, most = last - first, max(1, slots // 2 * 2)
        parts = -(-length // most)
        run = min(most, -(-length // (2 * parts)) * 2)
        runs += [(begin, min(begin + run, last)) for begin in range(first, last, run)]
    return runs
