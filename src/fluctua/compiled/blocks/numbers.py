"""Numbers that are the same for all trajectories, computed ahead of a run."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fluctua.compiled.blocks.nodes import ArrayGraph
from fluctua.compiled.blocks.program import ArrayProgram, ArrayText
from fluctua.compiled.blocks.sums import evaluate_nodes
from fluctua.compiled.scalar import Unsupported
from fluctua.core.arrays import Array, Params, compute_on_host, jit, on_host

TIMED_BYTES = 2**28
"""Numbers of all steps that depend on θ and the time alone, at most."""


class NumbersOfCall:
    """Computes the numbers that are the same for all trajectories."""

    def __init__(self, program: ArrayProgram, text: ArrayText):
        self.graph: ArrayGraph = program.graph
        self.theta = program.theta
        self.places = text.ahead.places
        self.sizes = text.ahead.sizes
        names = {self.graph[n].data: n for n in program.places}
        self.times = {name: names[f"{name}0"] for name in ("t", "dt")}
        computed = [n for n in self.places if self.graph[n].op not in ("const", "input")]
        self.computed = {
            name: [n for n in computed if self.places[n][0] == name] for name in self.sizes
        }
        self.step_places = [self.graph[node].args[1] for node in program.sums.by_step]
        self._compute = jit(self._evaluate)
        self._find_places = jit(self._evaluate_places)

    def _evaluate(self, theta: list[Any], t: Array, dt: Array) -> tuple[list[Any], list[Any]]:
        known = dict(zip(self.theta, theta, strict=True))
        shared = evaluate_nodes(self.graph, self.computed["shared"], known)

        def at(t: Array, dt: Array) -> list[Any]:
            inputs = {self.times["t"]: t, self.times["dt"]: dt}
            return evaluate_nodes(self.graph, self.computed["timed"], known | inputs)

        return shared, jax.vmap(at)(t, dt)

    def find_step_places(self, theta: Params, times: Any) -> list[np.ndarray]:
        """Return the places of the sums per step, (T, ...) for each node of the plan."""
        leaves = [on_host(leaf) for leaf in jax.tree.leaves(theta)]
        with compute_on_host():
            places = self._find_places(leaves, np.asarray(times.t)[:-1], np.asarray(times.dt))
        return [np.asarray(v) for v in places]

    def _evaluate_places(self, theta: list[Any], t: Array, dt: Array) -> list[Any]:
        known = dict(zip(self.theta, theta, strict=True))

        def at(t: Array, dt: Array) -> list[Any]:
            inputs = {self.times["t"]: t, self.times["dt"]: dt}
            return evaluate_nodes(self.graph, self.step_places, known | inputs)

        return jax.vmap(at)(t, dt)

    def fill(self, theta: Params, times: Any, real: np.dtype) -> dict[str, np.ndarray]:
        """Return the arrays "shared" (·,) and "timed" (T, ·)."""
        leaves = [on_host(leaf) for leaf in jax.tree.leaves(theta)]
        t = np.asarray(times.t)[:-1]
        dt = np.asarray(times.dt)
        steps = len(dt)
        if steps * self.sizes["timed"] * real.itemsize > TIMED_BYTES:
            raise Unsupported(
                "time", f"{self.sizes['timed']} numbers that change with time, at {steps} steps"
            )
        values: dict[int, Any] = dict(zip(self.theta, leaves, strict=True))
        values |= {self.times["t"]: t, self.times["dt"]: dt}
        if any(self.computed.values()):
            with compute_on_host():  # from a GPU, each array would be a transfer
                shared, timed = self._compute(leaves, t, dt)
            values |= dict(zip(self.computed["shared"], shared, strict=True))
            values |= dict(zip(self.computed["timed"], timed, strict=True))
        arrays = {
            "shared": np.zeros(max(1, self.sizes["shared"]), real),
            "timed": np.zeros((steps, max(1, self.sizes["timed"])), real),
        }
        for node, (name, first) in self.places.items():
            of = self.graph[node]
            value = np.asarray(of.data if of.op == "const" else values[node])
            if name == "timed":
                value = value.reshape(steps, -1)
            arrays[name][..., first : first + of.size] = value if name == "timed" else value.ravel()
        return arrays
