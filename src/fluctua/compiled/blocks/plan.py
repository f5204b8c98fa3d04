"""Which arrays a function of a kernel stores, and which it computes where they are used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from fluctua.compiled.blocks.elementwise import FORMS
from fluctua.compiled.blocks.nodes import LANE, ArrayGraph, find_strides

KEPT_COST = 10
"""Cost per element from which a number is kept between the two passes, in additions."""


def is_stored(op: str) -> bool:
    """Whether an operation always has an array of its own."""
    return op in ("dot", "assemble") or op.startswith("reduce_")


def find_operand(graph: ArrayGraph, node: int) -> int:
    """Return the array that a product reads: the source of a view with strides, or the node."""
    source, places = graph.trace_source(node)
    if places is None or find_strides(places, graph[node].shape) is not None:
        return source
    return node


class Demand(NamedTuple):
    """Purpose of a function.

    stored: nodes that must be stored.
    added: nodes that are added up, in a loop of their own.
    existing: nodes that are stored already.
    """

    stored: Sequence[int]
    added: Sequence[int]
    existing: Iterable[int]


class Use(NamedTuple):
    """A loop that evaluates a node. owner: what it computes. size: evaluations. way: views."""

    owner: int
    size: int
    way: tuple[int, ...] = ()


def plan_storage(graph: ArrayGraph, demand: Demand) -> list[int]:
    """Return the nodes to store, in the order in which they are computed."""
    existing = set(demand.existing)
    lanes = [n for n in graph.reachable([*demand.stored, *demand.added]) if graph[n].depends & LANE]
    cost = _make_cost(graph, existing)
    # loops that evaluate a node, by owner, and the views through which they see it: an element is
    # evaluated once per loop and way
    uses: dict[int, set[Use]] = defaultdict(set)
    forced = set(demand.stored)
    for node in demand.added:
        uses[node].add(Use(-1 - node, graph[node].size))
    stored = []
    for n in reversed(lanes):
        of = graph[n]
        if n in existing or of.op == "input" or not (n in forced or uses[n]):
            continue
        work = cost(n)
        keep = n in forced or is_stored(of.op)
        if of.op != "view":
            evaluations = sum(use.size for use in uses[n])
            keep = keep or evaluations * work > of.size * (work + 1) + evaluations
        if keep:
            stored.append(n)
        for arg in dict.fromkeys(of.args):
            if not graph[arg].depends & LANE:
                continue
            if of.op == "dot":
                forced.add(find_operand(graph, arg))
            elif keep:
                size = graph[arg].size if is_stored(of.op) else of.size
                uses[arg].add(Use(n, size, (n,) if of.op in ("view", "assemble") else ()))
            else:
                way = (n,) if of.op == "view" else ()
                uses[arg] |= {use._replace(way=use.way + way) for use in uses[n]}
    return stored[::-1]


def _make_cost(graph: ArrayGraph, existing: set[int]):
    @cache
    def cost(node: int) -> int:
        """Cost of one element where it is computed at its use."""
        of = graph[node]
        if node in existing or is_stored(of.op) or of.op == "input" or not of.depends & LANE:
            return 1
        own = FORMS[of.op][1] if of.op in FORMS else 0
        return own + sum(cost(a) for a in dict.fromkeys(of.args))

    return cost


def choose_kept(graph: ArrayGraph, forward: Sequence[int], backward: Sequence[int]) -> list[int]:
    """Return the nodes of the first pass that the second reads instead of computing them again.

    forward, backward: roots of either pass.
    """
    first = {n for n in graph.reachable(forward) if graph[n].depends & LANE}
    second = [n for n in graph.reachable(backward) if graph[n].depends & LANE]
    common = first & set(second)
    frontier: set[int] = {graph.trace_source(n)[0] for n in backward} & common
    for n in second:
        if n not in common:
            frontier |= {graph.trace_source(a)[0] for a in graph[n].args} & common
    kept: list[int] = []
    for n in sorted(frontier):
        of = graph[n]
        if of.op == "input" or of.kind != "f":
            continue
        if _count_work(graph, n, set(kept)) >= KEPT_COST * of.size:
            kept.append(n)
    return kept


def _count_work(graph: ArrayGraph, node: int, known: set[int]) -> int:
    """Return the cost of a node from known ones."""
    total = 0
    seen: set[int] = set()
    waiting = [node]
    while waiting:
        n = waiting.pop()
        of = graph[n]
        if n in seen or n in known or not of.depends & LANE:
            continue
        seen.add(n)
        if of.op == "dot":
            total += of.size * graph[of.args[0]].shape[2]
        elif of.op in FORMS:
            total += of.size * FORMS[of.op][1]
        elif is_stored(of.op):
            total += graph[of.args[0]].size
        waiting.extend(of.args)
    return total
