"""The twin correction on an NVIDIA GPU: lays out the twin beside the network and launches; see `native/twin.cu`.

Where all trajectories share the twin's path, one block tabulates it at every step before the others start. Where each
has its own, a block keeps its path and adjoint at the ends of segments of about √T steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fluctua.tcmt.kernel import cuda
from fluctua.tcmt.kernel import run as kernel
from fluctua.tcmt.kernel.spec import KernelSpec

if TYPE_CHECKING:
    from fluctua.tcmt.kernel.run import Options
    from fluctua.tcmt.kernel.twin import Plan

SOURCES = ("twin_path.cu", "twin.cu")
MOST_BYTES = 2**32
"""Device memory for paths and adjoints."""


def checked(spec: KernelSpec, twin: KernelSpec, o: Options) -> KernelSpec:
    """The twin, if the GPU can run it: drive and incoming wave tabulated in time if those of the network are."""
    cuda.refuse(spec, o)
    same: dict[str, Any] = {}
    for name in ("drive", "incoming"):
        own, of_twin = getattr(spec, name), getattr(twin, name)
        if len(own) < len(of_twin):
            raise ValueError(f"the twin's `{name}` varies in time and the network's does not. Use backend='cpu'.")
        same[name] = np.broadcast_to(of_twin, own.shape)
    return twin._replace(**same)


def run(spec: KernelSpec, plan: Plan) -> dict[str, Any]:
    """What `twin_kernel.result` wants, from the current CuPy device."""
    cp = cuda.require_cupy()
    o, device = plan.options, TwinDevice(cp, spec, plan)
    p, real, count = kernel.width(spec, o), np.dtype(o.dtype), o.trajectories
    out: dict[str, Any] = {
        "returns": np.empty(count),
        "gained": np.empty(count),
        "moments": np.zeros((3, 3, p)),
        "prefix_sum": np.zeros(spec.steps + 1),
        "reward_sum": np.zeros(spec.steps),
        "direct": np.empty((count, p), real) if o.samples else None,
        "correction": np.empty((count, p), real) if o.samples else None,
        "overflow": np.full(2, -1, np.int64),
    }
    if not device.tabulated():
        out["overflow"][1] = o.first
        return out
    for begin in range(0, count, device.chunk):
        end = min(begin + device.chunk, count)
        part = device.launch(o.first + begin, end - begin)
        for name in ("returns", "gained"):
            out[name][begin:end] = getattr(part, name).get()
        for name in ("prefix_sum", "reward_sum"):
            out[name] += getattr(part, name).sum(axis=0).get()
        flags = part.overflow.get()
        for which, bit in enumerate((1, 2)):
            bad = np.flatnonzero(flags & bit)
            if bad.size and out["overflow"][which] < 0:
                out["overflow"][which] = o.first + begin + int(bad[0])
        moments, samples = device.moments(part)
        out["moments"] += moments.reshape(3, 3, p).swapaxes(0, 1)
        if o.samples:
            each = samples.get().reshape(end - begin, 3, p)
            out["direct"][begin:end], out["correction"][begin:end] = each[:, 0], each[:, 1]
    return out


class TwinPart(NamedTuple):
    """What one launch leaves on the device; the first two fields as in `cuda.Part`."""

    trajectories: int
    raw: Any  # (count, 3·kinds·N)
    returns: Any
    overflow: Any
    gained: Any
    prefix_sum: Any  # (blocks, T+1)
    reward_sum: Any  # (blocks, T)


class TwinDevice:
    """A network and its twin on the device, ready to be launched."""

    def __init__(self, cp: Any, spec: KernelSpec, plan: Plan) -> None:
        self.cp, self.spec, self.plan, o = cp, spec, plan, plan.options
        self.own = bool(plan.twin.harmonics)
        flat = kernel.flat(spec, o)
        self.real, self.steps = np.dtype(o.dtype), spec.steps
        attributes = cp.cuda.Device().attributes
        layout = cuda.lay_out(spec.omega.size, flat)
        item, waves = self.real.itemsize, 2 * spec.harmonics * len(spec.bonds)
        state = item * (4 * layout.rows + 32 + (3 * len(spec.bonds) if spec.harmonics else 0))
        # the criterion of `Device`, which decides whether the modulation's waves are in shared memory
        shared_waves = state + item * waves <= attributes["MaxSharedMemoryPerMultiprocessor"] // 8 - 1024
        before = -(-(state + (item * waves if shared_waves else 0)) // 16) * 16
        self.shared = before + item * (4 * layout.rows + 4 * plan.rank) + 64 * 8
        if self.shared > attributes["MaxSharedMemoryPerBlockOptin"]:
            raise ValueError(
                f"{spec.omega.size} resonators and their twins need {self.shared} bytes of shared memory, more than "
                f"the {attributes['MaxSharedMemoryPerBlockOptin']} of this GPU. Use backend='cpu'."
            )
        kinds = 2 + layout.degree + (4 if o.rates else 0)
        each = 3 * item * spec.omega.size * kinds
        self.chunk = int(max(2, min(o.trajectories, cuda.CHUNK_BYTES // each) // 2 * 2))
        blocks = _blocks(attributes, layout.threads, item, self.shared, self.chunk)
        self.segment = self._segment()
        self.segments = -(-self.steps // self.segment)
        kept = (2 * (self.segment + 1) if self.own or plan.rank else 0) + (2 * (self.segments + 1) if self.own else 0)
        row = 2 * item * layout.rows
        self.grid = min(self.chunk, blocks * attributes["MultiProcessorCount"])
        if kept:
            self.grid = max(1, min(self.grid, MOST_BYTES // (kept * row)))
        macros = {
            "RANK": plan.rank,
            "OWN": int(self.own),
            "TWIN_HARMONICS": plan.twin.harmonics,
            "TWIN_AT": f"{before}u",
            "TWIN_BLOCKS": blocks,
        }
        self.device = cuda.Device(cp, spec, o._replace(samples=False), flat, SOURCES, macros)
        self.pass_, self.kinds, self.rows = self.device.module.get_function("twin_pass"), kinds, layout.rows
        self.tabulate = self.device.module.get_function("tabulate")
        if self.shared > 48 * 1024:
            self.pass_.max_dynamic_shared_size_bytes = self.tabulate.max_dynamic_shared_size_bytes = self.shared
        self._upload(kept)

    def _segment(self) -> int:
        plan = self.plan
        if plan.rank:
            return plan.segment  # where a path starts afresh is part of the estimator
        if not self.own:
            return self.steps
        piece = kernel.modulation_steps(plan.twin, plan.options)
        return int(piece * max(1, round(np.sqrt(self.steps) / piece)))

    def _upload(self, kept: int) -> None:
        cp, plan, device, real = self.cp, self.plan, self.device, self.real
        flat = kernel.flat(plan.twin, plan.options._replace(table=None))
        device.set_constant("c_twin", device.inputs(plan.twin, flat, None))
        device.set_constant("c_twin_gain", flat["gain"])
        device.set_constant("c_twin_weight", flat["weight"])
        if not flat["incoming_stride"]:
            device.set_constant("c_twin_incoming", flat["incoming"])
        if not flat["drive_stride"]:
            device.set_constant("c_twin_force", flat["drive"])
        split = lambda v: np.ascontiguousarray(np.stack([v.real, v.imag], axis=-1), real)
        self.path = self.adjoint = self.kept = None
        if not self.own:
            size = (self.steps + 1, self.rows, 2)
            if 2 * np.prod(size, dtype=np.int64) * real.itemsize > MOST_BYTES:
                raise ValueError(
                    f"{self.steps} steps of the twin's path do not fit the {MOST_BYTES >> 30} GiB that are set aside "
                    "for it. Use backend='cpu'."
                )
            self.path, self.adjoint = cp.empty(size, real), cp.empty(size, real)
        if kept:
            self.kept = cp.empty((self.grid, kept, self.rows, 2), real)
        self.basis = self.curvature = 0
        if plan.rank:
            assert plan.basis is not None
            assert plan.curvature is not None
            basis = np.zeros((plan.rank, self.rows), complex)
            basis[:, : len(plan.basis)] = plan.basis.T
            self.basis, self.curvature = device.upload(split(basis)), device.upload(split(plan.curvature))
        self.value = cp.zeros(self.segments + 1)

    def _trail(self, prefix_sum: Any = None, gained: Any = None) -> None:
        address = lambda v: 0 if v is None else v.data.ptr
        here = [address(v) for v in (self.path, self.adjoint, self.kept, prefix_sum, gained)]
        here += [self.basis, self.curvature, address(self.value)]
        self.device.set_constant("c_trail", np.array(here, np.uint64))

    def tabulated(self) -> bool:
        """Make the table of path and adjoint, if the trajectories share one; False if it is not finite."""
        if self.own:
            return True
        self._trail()
        self.tabulate((1,), (self.device.layout.threads,), (np.int32(self.steps),), shared_mem=self.shared)
        n = self.spec.omega.size
        assert self.path is not None
        assert self.adjoint is not None
        if not (np.isfinite(self.path[-1, :n].get()).all() and np.isfinite(self.adjoint[0, :n].get()).all()):
            return False
        if self.plan.rank:
            twin = self.plan.twin
            out = np.stack([self.path[:-1, site].get().astype(float) for site in twin.port_sites], axis=1)
            s = twin.port_gain * (out[..., 0] + 1j * out[..., 1]) - twin.incoming
            to_go = np.append(np.cumsum(((np.abs(s) ** 2) @ twin.port_weight)[::-1])[::-1] * twin.dt, 0.0)
            ends = np.minimum(np.arange(self.segments + 1) * self.segment, self.steps)
            self.value.set(to_go[ends])
        return True

    def launch(self, first: int, count: int) -> TwinPart:
        """Run `count` trajectories from `first`."""
        cp, flat, blocks = self.cp, self.device.flat, min(self.grid, count)
        part = TwinPart(
            count,
            cp.empty((count, 3 * self.kinds * self.spec.omega.size), self.real),
            cp.empty(count),
            cp.empty(count, np.int32),
            cp.empty(count),
            cp.zeros((blocks, self.steps + 1)),
            cp.zeros((blocks, self.steps)),
        )
        waves = 0 if self.device.waves is None else self.device.waves.data.ptr
        out = (part.raw, part.returns, part.reward_sum, None, part.overflow)
        addresses = [0 if v is None else v.data.ptr for v in out] + [waves]
        self.device.set_constant("c_out", np.array(addresses, np.uint64))
        self._trail(part.prefix_sum, part.gained)
        self.pass_(
            (blocks,),
            (self.device.layout.threads,),
            (
                np.uint32(first),
                np.int32(count),
                np.int32(self.steps),
                np.int32(self.segment),
                np.int32(flat["modulation_steps"] if self.spec.harmonics else 32),
                self.real.type(flat["modulation_scale"]),
                np.float64(flat["reference"]),
            ),
            shared_mem=self.shared,
        )
        return part

    def moments(self, part: TwinPart) -> tuple[np.ndarray, Any]:
        """Σv, Σv², Σ(pair)² (3, 3P) of direct, correction and both, and the samples (count, 3P)."""
        a, b = self.device.columns()
        place = np.arange(3)[:, None] * self.kinds * self.spec.omega.size
        first = (place + a).ravel().astype(np.int32)
        second = np.where(b < 0, -1, place + b).ravel().astype(np.int32)
        return self.device.moments_of(part, first, second, self.plan.options.samples)  # type: ignore[arg-type]


def _blocks(attributes: dict[str, int], threads: int, item: int, shared: int, count: int) -> int:
    """Blocks to keep resident on a multiprocessor; a third sum and a held score take half as many registers again."""
    most = cuda.blocks_per_multiprocessor(attributes, threads, item, shared, count)
    registers = 80 if item == 4 else 128
    return max(1, min(most, attributes["MaxRegistersPerMultiprocessor"] // (registers * threads)))
