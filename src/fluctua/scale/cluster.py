"""Workers on a Ray cluster: actors that hold a backend, one per GPU, share of cores or instrument.

Ray starts, monitors and connects processes; `dispatch` decides what is computed, in which order it
is added and what is repeated. Ray itself repeats nothing: a lost call is reported.
"""

from __future__ import annotations

import itertools
import os
import pickle
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fluctua.scale.dispatch import CallResult, WorkCall, WorkerLost

PATIENCE = 300.0
"""Seconds without any worker after which a run gives up."""


def require_ray() -> Any:
    """Import Ray, or raise an error with the package to install."""
    try:
        import ray
    except ImportError:
        raise ImportError(
            "ensembles on several machines need Ray: pip install 'fluctua[cluster]'. With "
            "`address=None` the same shards are computed in this process."
        ) from None
    return ray


class Cores(NamedTuple):
    """The cores of a worker.

    count: number of cores.
    place: index of the worker on its machine.
    """

    count: int  # type: ignore[assignment]
    place: int


class Slot(NamedTuple):
    """A place for a worker.

    node: the machine.
    place: index on that machine.
    """

    node: str
    place: int


class Worker:
    """The class that an actor runs.

    Args:
        pickled: the object it holds, unpickled after double precision is enabled.
        double: whether the driver computes in double precision.
        flags: of the driver for XLA.
        cores: number of cores, and index of the worker on its machine.
    """

    def __init__(self, pickled: bytes, double: bool, flags: str, cores: Cores | None):
        os.environ["XLA_FLAGS"] = flags  # read when JAX first looks for devices
        if cores is not None and hasattr(os, "sched_setaffinity"):
            count, place = cores
            assigned = sorted(os.sched_getaffinity(0))[place * count : (place + 1) * count]
            if len(assigned) == count:
                # XLA and the kernels take as many threads as there are cores
                os.sched_setaffinity(0, assigned)
        jax.config.update("jax_enable_x64", double)
        self.subject = pickle.loads(pickled)
        # the reference that was fetched last, and its value
        self.shared: tuple[Any, Any] = (None, None)

    def about(self) -> tuple[str, ...]:
        """Versions and hardware on which the bits of a result depend."""
        return jax.__version__, jax.default_backend(), jax.devices()[0].device_kind, _processor()

    def execute(self, bundle: Sequence[WorkCall]) -> list[Any]:
        """Execute calls and return their results."""
        results = [
            getattr(self.subject, call.method)(*map(self._value, call.arguments)) for call in bundle
        ]
        return jax.device_get(results)  # numbers travel, devices do not

    def _value(self, argument: Any) -> Any:
        """Resolve a shared argument, fetched once."""
        if not hasattr(argument, "task_id"):  # of references alone
            return argument
        if argument != self.shared[0]:
            self.shared = argument, require_ray().get(argument)
        return self.shared[1]


def _processor() -> str:
    """The kind of processor, if the system reports it."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(
                (line.partition(":")[2].strip() for line in file if line.startswith("model name")),
                "",
            )
    except OSError:
        return ""


class Cluster:
    """A pool of actors on a Ray cluster.

    Args:
        subject: object of which every worker holds a copy.
        address: of the cluster: "auto" for a running one, "local" to start one on this machine, or
            HOST:PORT.
        each: resources of a worker, {"cpu": 4}, {"gpu": 1} or {"instrument": 1}; by default all
            cores of a machine.
        maximum: number of workers; by default as many as fit.
    """

    def __init__(
        self,
        subject: Any,
        address: str = "auto",
        each: Mapping[str, float] | None = None,
        maximum: int | None = None,
    ):
        self.ray = ray = require_ray()
        self.opened_here = not ray.is_initialized()
        if self.opened_here:
            options = {} if address == "local" else {"address": address}
            try:
                ray.init(**options, log_to_driver=False, logging_level="ERROR")
            except ConnectionError as error:
                raise ConnectionError(
                    f"no Ray cluster answers at {address!r}: {error} Start one with `ray start "
                    '--head`, or address="local" for this machine alone.'
                ) from None
        resources = {"cpu": 0.0} if each is None else each
        self.each = {name.lower(): float(amount) for name, amount in resources.items()}
        self.takes_whole_machine = each is None
        self.maximum = maximum
        self.pickled = ray.put(ray.cloudpickle.dumps(subject))
        self.slots: dict[Slot, int] = {}  # (node, place on it) -> worker
        self.actors: dict[int, Any] = {}
        self.ready: set[int] = set()
        # pending reference -> (worker, numbers of its calls; none while the worker starts)
        self.refs: dict[Any, tuple[int, list[int]]] = {}
        self.reports: deque[CallResult | WorkerLost] = deque()
        self.about: dict[int, tuple[str, ...]] = {}
        self.numbers = itertools.count()
        self.warned = False
        self.looked = -1.0

    def workers(self) -> Sequence[int]:
        """The workers that are ready; waits for the first."""
        self._start_missing()
        self._register_ready(0.0)
        start = time.monotonic()
        while not self.ready:
            self._register_ready(1.0)
            if time.monotonic() - start > PATIENCE:
                raise RuntimeError(
                    f"no worker started within {PATIENCE:g} s: the cluster has "
                    f"{self.ray.cluster_resources()}, and each worker takes {self.each}."
                )
            self._start_missing()
        return sorted(self.ready)

    def submit(self, worker: int, bundle: Sequence[WorkCall]) -> None:
        """Send calls to a worker."""
        ref = self.actors[worker].execute.remote(list(bundle))
        self.refs[ref] = worker, [call.number for call in bundle]

    def wait(self) -> CallResult | WorkerLost:
        """The next result or loss."""
        while not self.reports:
            # one call of Ray per bundle: the next is sent before others are looked at
            for ref in self.ray.wait(list(self.refs), num_returns=1)[0]:
                self._process_report(ref)
        return self.reports.popleft()

    def close(self) -> None:
        """End the actors, and the connection if it was opened here."""
        if self.ray.is_initialized():
            for actor in self.actors.values():
                self.ray.kill(actor)
            if self.opened_here:
                self.ray.shutdown()
        self.actors = {}
        self.refs = {}
        self.slots = {}
        self.ready = set()
        self.reports.clear()

    def put(self, value: Any) -> Any:
        """Store a value that many calls share; it is sent once per machine."""
        return self.ray.put(value)

    def _register_ready(self, seconds: float) -> None:
        """Register the workers that have started, waiting up to `seconds` for one."""
        starting = [ref for ref, (_, numbers) in self.refs.items() if not numbers]
        if not starting:
            if seconds:
                time.sleep(min(seconds, 0.2))
            return
        self.ray.wait(starting, timeout=seconds)
        for ref in self.ray.wait(starting, num_returns=len(starting), timeout=0)[0]:
            if ref in self.refs:
                self._process_report(ref)

    def _process_report(self, ref: Any) -> None:
        """Process a finished reference: results, a loss, or a worker that is ready."""
        worker, numbers = self.refs.pop(ref)
        exceptions = self.ray.exceptions
        try:
            value = self.ray.get(ref)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from error
            raise
        except exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                raise RuntimeError(f"a worker could not start: {error}") from None
            self._remove(worker, f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return
        if numbers:
            self.reports.extend(
                CallResult(worker, number, result)
                for number, result in zip(numbers, value, strict=True)
            )
            return
        self.ready.add(worker)
        self.about[worker] = value
        kinds = set(self.about.values())
        if len(kinds) > 1 and not self.warned:
            self.warned = True
            listed = "; ".join(", ".join(kind) for kind in sorted(kinds))
            warnings.warn(
                f"the workers are not alike ({listed}). Estimates are right, and the same to the "
                "bit only if the same kind of worker computes the same shard.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _remove(self, worker: int, reason: str) -> None:
        self.refs = {ref: owner for ref, owner in self.refs.items() if owner[0] != worker}
        self.slots = {slot: owner for slot, owner in self.slots.items() if owner != worker}
        self.ready.discard(worker)
        self.looked = -1.0
        self.about.pop(worker, None)
        actor = self.actors.pop(worker, None)
        if actor is not None:
            # it may only be out of reach: what it still does counts for nothing
            self.ray.kill(actor)
        self.reports.append(WorkerLost(worker, reason))

    def _start_missing(self) -> None:
        """Start an actor in every empty slot; queries the cluster at most once per second."""
        if self.ready and time.monotonic() - self.looked < 1.0:
            return
        self.looked = time.monotonic()
        for node in self.ray.nodes():
            if not node["Alive"]:
                continue
            has = {name.lower(): amount for name, amount in node["Resources"].items()}
            wanted = {"cpu": has.get("cpu", 0.0)} if self.takes_whole_machine else self.each
            fits = [
                int(has.get(name, 0) // amount) for name, amount in wanted.items() if amount > 0
            ]
            for place in range(min(fits, default=0)):
                slot = Slot(node["NodeID"], place)
                if slot not in self.slots and (
                    self.maximum is None or len(self.slots) < self.maximum
                ):
                    self._start(slot, wanted)

    def _start(self, slot: Slot, wanted: Mapping[str, float]) -> None:
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            slot.node, soft=False
        )
        cpus = wanted.get("cpu", 0.0)
        options = {
            "num_cpus": cpus,
            "num_gpus": wanted.get("gpu", 0.0),
            "resources": {name: v for name, v in wanted.items() if name not in ("cpu", "gpu")},
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": strategy,
        }
        cores = Cores(int(cpus), slot.place) if cpus >= 1 and not self.takes_whole_machine else None
        worker = next(self.numbers)
        double = bool(jax.config.read("jax_enable_x64"))
        flags = os.environ.get("XLA_FLAGS", "")
        actor = self.ray.remote(Worker).options(**options)
        self.actors[worker] = actor.remote(self.pickled, double, flags, cores)
        self.slots[slot] = worker
        self.refs[self.actors[worker].about.remote()] = worker, []
