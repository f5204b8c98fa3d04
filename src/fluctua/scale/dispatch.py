"""Dispatch work to workers that may die: every result once, in the order of the calls.

A call is identified by its number. Results are stored by that number, so that neither their order
nor a second result of the same call matters. The calls of a dead worker are given to another. Where
calls acquire trajectories, it is unknown how many were acquired before the worker died: they are
counted as lost, and the call is replaced by another one, under new numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

AHEAD = 2
"""Bundles of calls queued per worker, so that it need not wait for the next."""

ROUNDS = 4
"""A bundle is this fraction of the calls left per worker: large at first, single calls at the end.
"""

MAX_LOSSES = 5
"""Maximum number of workers lost on one call; after that the call is the cause."""


class WorkCall(NamedTuple):
    """A method call on the object that the workers hold.

    number: identifies the result.
    method: name of the method.
    arguments: of the method.
    """

    number: int
    method: str
    arguments: tuple[Any, ...]


Bundle = dict[int, WorkCall]
"""Calls that were sent together and have no result yet, by their numbers."""


class CallResult(NamedTuple):
    """The result of a call."""

    worker: int
    number: int
    value: Any


class WorkerLost(NamedTuple):
    """A worker that died, with all its calls."""

    worker: int
    reason: str


class Pool(Protocol):
    """Protocol of a pool of workers. Numbers of workers are never reused."""

    def workers(self) -> Sequence[int]:
        """The workers that take calls now; waits until there is one, and starts missing ones."""

    def submit(self, worker: int, bundle: Sequence[WorkCall]) -> None:
        """Send calls to a worker. The loss of a worker is reported by `wait`."""

    def wait(self) -> CallResult | WorkerLost:
        """The next report. An error of the call itself is raised."""

    def put(self, value: Any) -> Any:
        """Store a value that many calls share, and return the argument to pass."""

    def close(self) -> None:
        """Release the workers."""


def gather_results(
    pool: Pool,
    calls: Sequence[WorkCall],
    *,
    ahead: int = AHEAD,
    replace_call: Callable[[WorkCall, str], WorkCall] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Any]:
    """Compute all calls on a pool and return their results in order.

    Args:
        pool: of workers.
        calls: with unique numbers.
        ahead: bundles queued per worker; with 1 a bundle is one call.
        replace_call: (call, reason of its loss) -> the call to make in its place, with the same
            number; by default the same call.
        progress: called with (results, total).

    Returns: one result per call.
    """
    waiting = deque(calls)
    results: dict[int, Any] = {}
    held: dict[int, list[Bundle]] = {}  # by worker
    losses: dict[int, int] = {}
    while len(results) < len(calls):
        _hand_out(pool, waiting, held, ahead, losses)
        report = pool.wait()
        if isinstance(report, CallResult):
            for bundle in held.get(report.worker, []):
                if bundle.pop(report.number, None):  # else it was given up and handed to another
                    results.setdefault(report.number, report.value)
                    if progress:
                        progress(len(results), len(calls))
            held[report.worker] = [bundle for bundle in held.get(report.worker, []) if bundle]
            continue
        for number, call in [
            pair for bundle in held.pop(report.worker, []) for pair in bundle.items()
        ]:
            losses[number] = losses.get(number, 0) + 1
            if losses[number] >= MAX_LOSSES:
                raise RuntimeError(
                    f"{MAX_LOSSES} workers failed in the same piece of work, {call.method} number "
                    f"{number}, the last of them because {report.reason}. Does a worker have the "
                    "memory for a shard?"
                )
            waiting.appendleft(call if replace_call is None else replace_call(call, report.reason))
    return [results[call.number] for call in calls]


def _hand_out(
    pool: Pool,
    waiting: deque[WorkCall],
    held: dict[int, list[Bundle]],
    ahead: int,
    losses: Mapping[int, int],
) -> None:
    """Send every worker one bundle before any has two."""
    workers = pool.workers() if waiting else []
    for limit in range(1, ahead + 1):
        for worker in workers:
            own_bundles = held.setdefault(worker, [])
            if waiting and len(own_bundles) < limit:
                size = 1 if ahead == 1 else max(1, len(waiting) // (ROUNDS * len(workers)))
                bundle = [waiting.popleft()]
                # what was lost before goes alone: should it kill its workers, it takes nothing else
                # with it
                while len(bundle) < size and not losses.keys() & {
                    bundle[0].number,
                    waiting[0].number,
                }:
                    bundle.append(waiting.popleft())
                own_bundles.append({call.number: call for call in bundle})
                pool.submit(worker, bundle)


class LocalPool:
    """A pool of one worker: this process."""

    def __init__(self, subject: Any):
        self.subject = subject
        self._calls: deque[WorkCall] = deque()

    def workers(self) -> Sequence[int]:
        """The only worker."""
        return (0,)

    def submit(self, worker: int, bundle: Sequence[WorkCall]) -> None:
        """Queue calls for `wait`."""
        self._calls.extend(bundle)

    def wait(self) -> CallResult | WorkerLost:
        """Compute the next call."""
        call = self._calls.popleft()
        return CallResult(0, call.number, getattr(self.subject, call.method)(*call.arguments))

    def put(self, value: Any) -> Any:
        """The value itself."""
        return value

    def close(self) -> None:
        """Nothing to release."""
