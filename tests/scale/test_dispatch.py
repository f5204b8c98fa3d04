"""Every result once and in order, with any worker and any failure."""

import pytest

from chaos import Chaos
from fluctua.scale.dispatch import (
    MAX_LOSSES,
    ROUNDS,
    CallResult,
    LocalPool,
    WorkCall,
    WorkerLost,
    gather_results,
)


class Squares:
    def square(self, number):
        return number**2


CALLS = [WorkCall(n, "square", (n,)) for n in range(40)]
EXPECTED = [n**2 for n in range(40)]


@pytest.mark.parametrize("workers", [1, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_results_come_in_the_order_of_the_calls_whoever_dies(workers, seed):
    pool = Chaos(Squares(), workers, seed, risk=0.2)
    assert gather_results(pool, CALLS) == EXPECTED
    assert pool.deaths > 0
    assert len(pool.computed) >= len(CALLS)


def test_this_process_alone():
    assert gather_results(LocalPool(Squares()), CALLS) == EXPECTED


def test_every_worker_has_a_call_before_any_has_two():
    pool = Chaos(Squares(), 4)
    gather_results(pool, CALLS[:4])
    seen = []
    submit = pool.submit
    pool.submit = lambda worker, bundle: seen.append(worker) or submit(worker, bundle)
    gather_results(pool, CALLS[:4])
    assert sorted(seen) == [0, 1, 2, 3]


def test_bundles_shrink_and_what_was_lost_goes_alone():
    sizes = []

    class Counting(Chaos):
        def submit(self, worker, bundle):
            sizes.append([call.number for call in bundle])
            super().submit(worker, bundle)

    gather_results(Counting(Squares(), 2), CALLS)
    lengths = [len(bundle) for bundle in sizes]
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-1]) == (40 // (ROUNDS * 2), 1)
    assert sorted(n for bundle in sizes for n in bundle) == list(range(40))

    sizes.clear()
    gather_results(Counting(Squares(), 2, seed=5, risk=0.05), CALLS)
    seen = set()
    for bundle in sizes:
        assert len(bundle) == 1 or not seen & set(bundle)
        seen |= set(bundle)


def test_a_result_that_comes_twice_counts_once():
    class Twice(Chaos):
        again = None

        def wait(self):
            if self.again is not None:
                report, self.again = self.again, None
                return report._replace(value="another")
            self.again = super().wait()
            return self.again

    assert gather_results(Twice(Squares(), 2), CALLS[:6]) == EXPECTED[:6]


def test_what_a_dead_worker_still_says_is_not_heard():
    class Late(Chaos):
        late = None

        def wait(self):
            if self.late:
                report, self.late = self.late, None
                return report
            report = super().wait()
            if isinstance(report, WorkerLost):
                self.late = CallResult(report.worker, 0, "late")
            return report

    assert gather_results(Late(Squares(), 3, seed=1, risk=0.3), CALLS) == EXPECTED


def test_a_call_that_kills_its_workers_ends_the_run():
    with pytest.raises(
        RuntimeError, match=rf"{MAX_LOSSES} workers failed .* number 7,.* it was killed"
    ):
        gather_results(Chaos(Squares(), 2, risk=1.0), [WorkCall(7, "square", (7,))])


def test_an_error_of_the_work_is_raised_and_not_tried_again():
    pool = Chaos(Squares(), 2)
    with pytest.raises(TypeError):
        gather_results(pool, [WorkCall(0, "square", ("seven",))])
    assert len(pool.computed) == 1


def test_a_lost_call_is_replaced_where_it_must_not_be_repeated():
    pool = Chaos(Squares(), 2, seed=3, risk=0.3)
    fresh = iter(range(1000, 2000))
    replaced = []

    def replace_call(call, reason):
        replaced.append((call.number, reason))
        return call._replace(arguments=(next(fresh),))

    results = gather_results(pool, CALLS, replace_call=replace_call)
    arguments = [call.arguments for call in pool.computed]
    assert len(set(arguments)) == len(arguments)  # nothing was computed twice
    assert replaced
    assert {reason for _, reason in replaced} == {"it was killed"}
    touched = {number for number, _ in replaced}
    assert [r for n, r in enumerate(results) if n not in touched] == [
        r for n, r in enumerate(EXPECTED) if n not in touched
    ]
    assert all(results[n] >= 1000**2 for n in touched)
