"""Work for workers that may die: every result once, in the order of the calls.

A call is known by its number. Results are kept by that number, so that neither the order in which
they come nor a second one of the same call changes anything. What a worker had in hand when it died
is handed to another. Where calls acquire trajectories, it is unknown how many of them were acquired
before it died: they are counted as lost, and the call is replaced by another one, under new
numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

AHEAD = 2
"""Bundles of calls in the hands of a worker, so that it need not wait for the next."""

ROUNDS = 4
"""A bundle is such a part of what waits for each worker: large at first, single calls in the end,
so that all end together and handing out costs little."""

MOST_LOSSES = 5
"""Workers that one call may cost. After that it is the call that kills them."""


class WorkCall(NamedTuple):
    """A method of what the workers hold, with its arguments. number: what the result is known
    by.
    """

    number: int
    method: str
    arguments: tuple[Any, ...]


Bundle = dict[int, WorkCall]
"""Calls that were handed over together and have no result yet, by their numbers."""


class Done(NamedTuple):
    """A result."""

    worker: int
    number: int
    value: Any


class Gone(NamedTuple):
    """A worker that will not answer again, with all that it had in hand."""

    worker: int
    reason: str


class Pool(Protocol):
    """Workers, of whatever kind. Numbers of workers are never used again."""

    def workers(self) -> Sequence[int]:
        """Those that take calls now; waits until there is one.

        Begins others where some are missing.
        """

    def submit(self, worker: int, bundle: Sequence[WorkCall]) -> None:
        """Hand over some calls. That the worker is gone is reported by `wait`."""

    def wait(self) -> Done | Gone:
        """The next report. An error of the call itself is raised."""

    def put(self, value: Any) -> Any:
        """A value that many calls have as an argument, as it is handed over."""

    def close(self) -> None:
        """Let the workers go."""


def gather_results(
    pool: Pool,
    calls: Sequence[WorkCall],
    *,
    ahead: int = AHEAD,
    instead: Callable[[WorkCall, str], WorkCall] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Any]:
    """The results of all calls, in their order.

    Args:
        pool: who works.
        calls: with numbers of their own.
        ahead: bundles in the hands of a worker at a time; with 1 a bundle is one call.
        instead: (call, reason of its loss) -> the call to make in its place, with the same number;
            the same call if not given.
        progress: called with (results, of how many).

    Returns: one result a call.

    """
    waiting = deque(calls)
    results: dict[int, Any] = {}
    held: dict[int, list[Bundle]] = {}  # by worker
    losses: dict[int, int] = {}
    while len(results) < len(calls):
        _hand_out(pool, waiting, held, ahead, losses)
        report = pool.wait()
        if isinstance(report, Done):
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
            if losses[number] >= MOST_LOSSES:
                raise RuntimeError(
                    f"{MOST_LOSSES} workers died over the same piece of work, {call.method} number "
                    f"{number}, the last of them because {report.reason}. Does a worker have the "
                    "memory for a shard?"
                )
            waiting.appendleft(call if instead is None else instead(call, report.reason))
    return [results[call.number] for call in calls]


def _hand_out(
    pool: Pool,
    waiting: deque[WorkCall],
    held: dict[int, list[Bundle]],
    ahead: int,
    losses: Mapping[int, int],
) -> None:
    """Give every worker one bundle before any has two."""
    workers = pool.workers() if waiting else []
    for most in range(1, ahead + 1):
        for worker in workers:
            mine = held.setdefault(worker, [])
            if waiting and len(mine) < most:
                size = 1 if ahead == 1 else max(1, len(waiting) // (ROUNDS * len(workers)))
                bundle = [waiting.popleft()]
                # what was lost before goes alone: should it kill its workers, it takes nothing else
                # with it
                while len(bundle) < size and not losses.keys() & {
                    bundle[0].number,
                    waiting[0].number,
                }:
                    bundle.append(waiting.popleft())
                mine.append({call.number: call for call in bundle})
                pool.submit(worker, bundle)


class Here:
    """A pool of one worker: this process."""

    def __init__(self, subject: Any):
        self.subject = subject
        self._calls: deque[WorkCall] = deque()

    def workers(self) -> Sequence[int]:
        """Itself."""
        return (0,)

    def submit(self, worker: int, bundle: Sequence[WorkCall]) -> None:
        """Keep them for `wait`."""
        self._calls.extend(bundle)

    def wait(self) -> Done | Gone:
        """Compute the next one."""
        call = self._calls.popleft()
        return Done(0, call.number, getattr(self.subject, call.method)(*call.arguments))

    def put(self, value: Any) -> Any:
        """As it is."""
        return value

    def close(self) -> None:
        """Nothing to let go."""
