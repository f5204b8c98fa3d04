"""What shards and a cluster cost: against the plain estimator, and with the number of workers and
of shards.

    python benchmarks/cluster.py [--out results/cluster]

Needs Ray (pip install 'fluctua[cluster]'). Everything runs on this machine; workers are processes
of it."""

import argparse
import time
from pathlib import Path

import jax
import numpy as np

import fluctua as fl
from fluctua import tcmt
from fluctua.scale.cluster import Cluster
from fluctua.scale.dispatch import LocalPool, WorkCall, gather_results
from fluctua.scale.distributed import Distributed
from fluctua.scale.parts import Part, sum_parts
from fluctua.tcmt.kernel.options import count_cores

PARAMETERS = 548  # of 11 × 13 resonators: ω, χ and κ
WORKERS, SHARDS = (1, 2, 4, 8), (16, 64, 256, 1024)
SECONDS = 2.0


class Nothing:
    """Shards that cost nothing to compute, with sums of the size of θ."""

    def part(self, shared, first, count):
        v = np.full(PARAMETERS + 1, 1.0 + first)
        return Part(count, count, v, v, v, v, v)


class Waiting:
    """Shards that take their share of `SECONDS` and no processor: what is more is the cost of
    handing out.
    """

    def part(self, shared, first, count):
        time.sleep(SECONDS / shared[1])
        return Nothing().part(shared, first, count)


def iteration(pool, shards, theta):
    """Hand out, gather and add the shards of one iteration."""
    shared = pool.put((theta, shards))
    calls = [WorkCall(n, "part", (shared, n, 10)) for n in range(shards)]
    return sum_parts(gather_results(pool, calls))


def best(function, repeats):
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def dispatch(say):
    """Milliseconds of an iteration whose shards cost nothing."""
    theta = np.zeros(PARAMETERS)
    say("| workers | " + " | ".join(f"{n} shards" for n in SHARDS) + " |")
    say("| --- |" + " --- |" * len(SHARDS))
    here = [best(lambda n=n: iteration(LocalPool(Nothing()), n, theta), 5) for n in SHARDS]
    say("| this process | " + " | ".join(f"{1e3 * t:.1f} ms" for t in here) + " |")
    for workers in WORKERS:
        pool = Cluster(Nothing(), each={"cpu": 1}, maximum=workers)
        while len(pool.workers()) < workers:
            time.sleep(0.05)
        times = [best(lambda n=n, p=pool: iteration(p, n, theta), 5) for n in SHARDS]
        say(f"| {workers} | " + " | ".join(f"{1e3 * t:.1f} ms" for t in times) + " |")
        pool.close()


def waiting(say, repeats):
    """An iteration that takes one worker `SECONDS`, against this process, whose waiting is as
    inexact.
    """
    theta = np.zeros(PARAMETERS)
    say(
        f"An iteration whose shards wait for {SECONDS:g} s together, and how much longer it takes "
        "than a fair share:\n"
    )
    say("| workers | " + " | ".join(f"{n} shards" for n in SHARDS[:2]) + " |")
    say("| --- |" + " --- |" * 2)
    alone = [
        best(lambda n=n: iteration(LocalPool(Waiting()), n, theta), repeats) for n in SHARDS[:2]
    ]
    say("| this process | " + " | ".join(f"{t:.3f} s" for t in alone) + " |")
    for workers in WORKERS:
        pool = Cluster(Waiting(), each={"cpu": 1}, maximum=workers)
        while len(pool.workers()) < workers:
            time.sleep(0.05)
        times = [best(lambda n=n, p=pool: iteration(p, n, theta), repeats) for n in SHARDS[:2]]
        more = [
            f"{t:.3f} s, {100 * (t * workers / base - 1):+.1f} %"
            for t, base in zip(times, alone, strict=True)
        ]
        say(f"| {workers} | " + " | ".join(more) + " |")
        pool.close()


def processor_seconds(estimator):
    """Of this process and its workers: what other programs do meanwhile is not in it."""
    total = time.process_time()
    if isinstance(estimator, Distributed) and isinstance(estimator.pool, Cluster):
        ray = estimator.pool.ray

        def clock(worker):
            return time.process_time()

        total += sum(
            ray.get([actor.__ray_call__.remote(clock) for actor in estimator.pool.actors.values()])
        )
    return total


def overhead(say, seconds, repeats):
    """An iteration of about so many seconds: plain, in shards, and in shards on one worker with
    all cores.
    """
    task = tcmt.transmission(tcmt.rectangular(11, 13), horizon=1.0, dt=1e-3)
    theta = tcmt.initial_parameters(jax.random.key(0), task.network)
    key, plain = jax.random.key(1), task.estimator("cpu", baseline="carried")
    plain(key, theta, 256)
    before = time.process_time()
    plain(key, theta, 1024)
    each = (time.process_time() - before) / 1024
    count = int(seconds * count_cores() / each) // 1024 * 1024
    made = {"plain": plain}
    for shards in (16, 64):

        def again():
            return task.estimator("cpu", baseline="carried")

        made[f"{shards} shards, this process"] = fl.distributed(again(), None, shards=shards)
        there = fl.distributed(
            again(), "auto", shards=shards, each={"cpu": 4}, workers=1
        )  # both find a place
        made[f"{shards} shards, one worker of a cluster"] = there
    times = {name: [] for name in made}
    for e in made.values():
        e(key, theta, count)
    for _ in range(repeats):  # in turn, so that what else the machine does meets all of them
        for name, e in made.items():
            before = processor_seconds(e)
            e(key, theta, count)
            times[name].append(processor_seconds(e) - before)
    say(
        f"{count:,} trajectories of 11 × 13 resonators and 1,000 steps, processor time of all "
        "processes:\n"
    )
    say(f"| | seconds, best of {repeats} | against plain |\n| --- | --- | --- |")
    base = min(times["plain"])
    for name, of in times.items():
        say(f"| {name} | {min(of):.3f} | {100 * (min(of) / base - 1):+.1f} % |")
    for e in made.values():
        if hasattr(e, "close"):
            e.close()


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path)
    options.add_argument("--seconds", type=float, default=2.0)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--kernels-only", action="store_true")
    asked = options.parse_args()
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    lines = []

    def say(text):
        return (lines.append(text), print(text, flush=True))

    if not asked.kernels_only:
        say("An iteration whose shards cost nothing, by workers and shards:\n")
        dispatch(say)
        say("")
        waiting(say, asked.repeats)
        say("")
    overhead(say, asked.seconds, asked.repeats)
    ray.shutdown()
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "cost.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
