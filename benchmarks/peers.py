"""Our kernels beside diffrax and torchsde on the paper's lattice, in one process on the same work.

Ours include the scores of all 548 parameters; diffrax and torchsde simulate only. They run fewer
steps of the same ensemble, and the time is given per trajectory and step: `pip install '.[bench]';
python benchmarks/peers.py`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fluctua import tcmt
from lattice_speed import DT, STEPS, kernel_call, table, time_calls
from machine import describe_machine


def diffrax_call(trajectories: int, steps: int, tree: bool) -> Callable[[], Any]:
    """tree: noise that an adaptive solver could ask for again, rather than the fastest that a
    fixed step allows.
    """
    import diffrax
    import lineax

    task = tcmt.transmission(tcmt.paper(), horizon=steps * DT, dt=DT)
    theta = tcmt.initial_parameters(jax.random.key(0), task.network)
    drift, noise = task.process.drift, task.process.noise
    assert callable(noise)

    def one(key: Any) -> Any:
        shape = (2 * task.network.sites,)
        if tree:
            path: Any = diffrax.VirtualBrownianTree(0.0, steps * DT, DT / 2, shape, key)
        else:
            path = diffrax.UnsafeBrownianPath(shape, key)
        control = diffrax.ControlTerm(
            lambda t, y, args: lineax.DiagonalLinearOperator(noise(theta, y, t, None)), path
        )
        terms: Any = diffrax.MultiTerm(
            diffrax.ODETerm(lambda t, y, args: drift(theta, y, t, None)), control
        )
        return diffrax.diffeqsolve(
            terms,
            diffrax.Euler(),
            0.0,
            steps * DT,
            DT,
            task.start,
            max_steps=None,
            adjoint=diffrax.ForwardMode(),
        ).ys

    batch = jax.jit(jax.vmap(one))
    return lambda: jax.block_until_ready(batch(jax.random.split(jax.random.key(0), trajectories)))


def torchsde_call(trajectories: int, steps: int) -> Callable[[], Any]:
    import torch
    import torchsde

    network = tcmt.paper()
    bonds = torch.as_tensor(np.array(network.bonds), dtype=torch.int64)
    damping = torch.as_tensor(
        network.gamma + network.lead_weights**2 @ network.gamma_e, dtype=torch.float32
    )
    amplitude = 0.5 * torch.sqrt(2 * damping)
    source = torch.zeros(network.sites)
    source[0] = 10 * np.sqrt(2.0)

    class Lattice(torch.nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def f(self, t: Any, y: Any) -> Any:
            re, im = y.chunk(2, dim=1)

            def h(v):
                return (
                    torch.zeros_like(v)
                    .index_add(1, bonds[:, 0], v[:, bonds[:, 1]])
                    .index_add(1, bonds[:, 1], v[:, bonds[:, 0]])
                )

            return torch.cat([h(im) - damping * re + source, -h(re) - damping * im], dim=1)

        def g(self, t: Any, y: Any) -> Any:
            return torch.cat([amplitude, amplitude]).expand_as(y)

    start = torch.zeros(trajectories, 2 * network.sites)
    ends = torch.tensor([0.0, steps * DT])

    def call() -> Any:
        with torch.no_grad():
            return torchsde.sdeint(Lattice(), start, ends, dt=DT, method="euler")

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument(
        "--quick", action="store_true", help="short runs: a look, not a measurement"
    )
    options = parser.parse_args()
    count, repeats = options.trajectories, 1 if options.quick else 3
    steps = STEPS // 20 if options.quick else STEPS
    slow = 100 if options.quick else 400 if options.backend == "cpu" else 4000
    ours = time_calls(
        f"{options.backend} kernel, time-only",
        kernel_call(options.backend, count, steps),
        count,
        steps,
        repeats,
    )
    peers: list[tuple[str, Callable[[], Callable[[], Any]]]] = [
        ("diffrax Euler, simulation only", lambda: diffrax_call(count, slow, False)),
        ("  the same with its Brownian tree", lambda: diffrax_call(count, slow, True)),
    ]
    if options.backend == "cpu":
        peers.append(("torchsde Euler, simulation only", lambda: torchsde_call(count, slow)))
    rows = [ours]
    for name, make in peers:
        try:
            rows.append(time_calls(name, make(), count, slow, repeats, scores=False))
        except ImportError as error:
            print(f"{name}: left out, {error}")
    print(table(rows))
    print(describe_machine(options.backend))


if __name__ == "__main__":
    main()
