"""Workers on a Ray cluster: actors that hold a backend, one a GPU, one a share of the cores, or one
an instrument.

Ray starts, watches and connects processes; what is computed, in which order it is added and what is
computed again is decided in `dispatch`. Ray itself repeats nothing: a call that was lost is lost.
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

from fluctua.scale.dispatch import Done, Gone, WorkCall

PATIENCE = 300.0
"""Seconds without any worker after which a run gives up."""


def require_ray() -> Any:
    """Ray, or an error that says what to install."""
    try:
        import ray
    except ImportError:
        raise ImportError(
            "ensembles on several machines need Ray: pip install 'fluctua[cluster]'. With "
            "`address=None` the same shards are computed in this process."
        ) from None
    return ray


class Cores(NamedTuple):
    """How many cores a worker keeps to, and the number of the worker on its machine."""

    count: int  # type: ignore[assignment]
    place: int


class Slot(NamedTuple):
    """A place for a worker: a machine, and the number of the place on it."""

    node: str
    place: int


class Worker:
    """What an actor runs.

    Args:
        pickled: what it holds. It is unpacked here, since arrays in double precision lose it where
            JAX has none.
        double: whether the process that it works for computes in double precision.
        flags: of that process for XLA.
        cores: how many it keeps to, and the number of this worker among those of its machine.

    """

    def __init__(self, pickled: bytes, double: bool, flags: str, cores: Cores | None):
        os.environ["XLA_FLAGS"] = flags  # read when JAX first looks for devices
        if cores is not None and hasattr(os, "sched_setaffinity"):
            count, place = cores
            mine = sorted(os.sched_getaffinity(0))[place * count : (place + 1) * count]
            if len(mine) == count:
                os.sched_setaffinity(
                    0, mine
                )  # XLA and the kernels take as many threads as there are cores
        jax.config.update("jax_enable_x64", double)
        self.subject = pickle.loads(pickled)
        self.shared: tuple[Any, Any] = (
            None,
            None,
        )  # the reference that was fetched last, and its value

    def about(self) -> tuple[str, ...]:
        """What the bits of a result depend on beside the code."""
        return jax.__version__, jax.default_backend(), jax.devices()[0].device_kind, _processor()

    def do(self, bundle: Sequence[WorkCall]) -> list[Any]:
        """Carry out some calls."""
        results = [
            getattr(self.subject, call.method)(*map(self._value, call.arguments)) for call in bundle
        ]
        return jax.device_get(results)  # numbers travel, devices do not

    def _value(self, argument: Any) -> Any:
        """What many calls share is fetched once."""
        if not hasattr(argument, "task_id"):  # of references alone
            return argument
        if argument != self.shared[0]:
            self.shared = argument, require_ray().get(argument)
        return self.shared[1]


def _processor() -> str:
    """The kind of processor, as far as the system says."""
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
        subject: what every worker holds a copy of.
        address: of the cluster: "auto" for the one that runs here, "local" to begin one on this
            machine, or HOST:PORT.
        each: what a worker takes, {"cpu": 4}, {"gpu": 1} or {"instrument": 1}; a whole machine's
            cores if not given.
        most: workers at most; as many as fit if not given.

    """

    def __init__(
        self,
        subject: Any,
        address: str = "auto",
        each: Mapping[str, float] | None = None,
        most: int | None = None,
    ):
        self.ray = ray = require_ray()
        self.ours = not ray.is_initialized()
        if self.ours:
            options = {} if address == "local" else {"address": address}
            try:
                ray.init(**options, log_to_driver=False, logging_level="ERROR")
            except ConnectionError as error:
                raise ConnectionError(
                    f"no Ray cluster answers at {address!r}: {error} Begin one with `ray start "
                    '--head`, or address="local" for this machine alone.'
                ) from None
        self.each = (
            {"cpu": 0.0} if each is None else {name.lower(): float(v) for name, v in each.items()}
        )
        self.whole = each is None
        self.most = most
        self.pickled = ray.put(ray.cloudpickle.dumps(subject))
        self.slots: dict[Slot, int] = {}  # (node, place on it) -> worker
        self.actors: dict[int, Any] = {}
        self.ready: set[int] = set()
        self.refs: dict[
            Any, tuple[int, list[int]]
        ] = {}  # what is to come -> (worker, numbers; none: that it is ready)
        self.reports: deque[Done | Gone] = deque()
        self.about: dict[int, tuple[str, ...]] = {}
        self.numbers = itertools.count()
        self.warned = False
        self.looked = -1.0

    def workers(self) -> Sequence[int]:
        """Those that are ready; waits for the first."""
        self._begin_missing()
        self._greet(0.0)
        begun = time.monotonic()
        while not self.ready:
            self._greet(1.0)
            if time.monotonic() - begun > PATIENCE:
                raise RuntimeError(
                    f"no worker began within {PATIENCE:g} s: the cluster has "
                    f"{self.ray.cluster_resources()}, and each worker takes {self.each}."
                )
            self._begin_missing()
        return sorted(self.ready)

    def submit(self, worker: int, bundle: Sequence[WorkCall]) -> None:
        """Hand over some calls."""
        self.refs[self.actors[worker].do.remote(list(bundle))] = (
            worker,
            [call.number for call in bundle],
        )

    def wait(self) -> Done | Gone:
        """The next result or loss."""
        while not self.reports:
            refs = list(self.refs)
            self.ray.wait(refs, num_returns=1)
            for ref in self.ray.wait(refs, num_returns=len(refs), timeout=0)[0]:
                if ref in self.refs:  # else its worker was buried meanwhile
                    self._settle(ref)
        return self.reports.popleft()

    def close(self) -> None:
        """End the actors, and the connection if it was made here."""
        if self.ray.is_initialized():
            for actor in self.actors.values():
                self.ray.kill(actor)
            if self.ours:
                self.ray.shutdown()
        self.actors = {}
        self.refs = {}
        self.slots = {}
        self.ready = set()
        self.reports.clear()

    def put(self, value: Any) -> Any:
        """A value that many calls share: it travels once to a machine."""
        return self.ray.put(value)

    def _greet(self, seconds: float) -> None:
        """Take in the workers that have begun; wait so long for one of them."""
        starting = [ref for ref, (_, numbers) in self.refs.items() if not numbers]
        if not starting:
            time.sleep(min(seconds, 0.2))
            return
        self.ray.wait(starting, timeout=seconds)
        for ref in self.ray.wait(starting, num_returns=len(starting), timeout=0)[0]:
            if ref in self.refs:
                self._settle(ref)

    def _settle(self, ref: Any) -> None:
        """Take in what came: results, a loss, or that a worker is ready."""
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
                raise RuntimeError(f"a worker could not begin: {error}") from None
            self._bury(worker, f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return
        if numbers:
            self.reports.extend(
                Done(worker, number, one) for number, one in zip(numbers, value, strict=True)
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

    def _bury(self, worker: int, reason: str) -> None:
        self.refs = {ref: owner for ref, owner in self.refs.items() if owner[0] != worker}
        self.slots = {slot: owner for slot, owner in self.slots.items() if owner != worker}
        self.ready.discard(worker)
        self.looked = -1.0
        self.about.pop(worker, None)
        actor = self.actors.pop(worker, None)
        if actor is not None:
            self.ray.kill(
                actor
            )  # it may only be out of reach: what it still does counts for nothing
        self.reports.append(Gone(worker, reason))

    def _begin_missing(self) -> None:
        """One actor in every place that a living machine has and that is empty; asks the
        cluster once a second.
        """
        if self.ready and time.monotonic() - self.looked < 1.0:
            return
        self.looked = time.monotonic()
        for node in self.ray.nodes():
            if not node["Alive"]:
                continue
            has = {name.lower(): amount for name, amount in node["Resources"].items()}
            wanted = {"cpu": has.get("cpu", 0.0)} if self.whole else self.each
            fits = [
                int(has.get(name, 0) // amount) for name, amount in wanted.items() if amount > 0
            ]
            for place in range(min(fits, default=0)):
                slot = Slot(node["NodeID"], place)
                if slot not in self.slots and (self.most is None or len(self.slots) < self.most):
                    self._begin(slot, wanted)

    def _begin(self, slot: Slot, wanted: Mapping[str, float]) -> None:
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
        cores = Cores(int(cpus), slot.place) if cpus >= 1 and not self.whole else None
        worker = next(self.numbers)
        like = bool(jax.config.read("jax_enable_x64")), os.environ.get("XLA_FLAGS", "")
        self.actors[worker] = (
            self.ray.remote(Worker).options(**options).remote(self.pickled, *like, cores)
        )
        self.slots[slot] = worker
        self.refs[self.actors[worker].about.remote()] = worker, []
