"""J of given parameters, measured afresh: other noise, other seeds, more trajectories, a finer step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.runs.build import FAMILIES, make_task, resolve_backend
from fluctua.runs.config import Config
from fluctua.tcmt.network import Network

FRESH = 0x4A
"""Sets the noise of an evaluation apart from that of a training with the same seed."""


class Measurement(NamedTuple):
    """J with its standard error, and the spread of single returns."""

    J: float
    J_stderr: float
    spread: float
    trajectories: int
    sigma_w: float
    sigma_kappa: float
    dt: float
    seed: int
    seconds: float


def evaluate(
    config: Config,
    theta: dict[str, Any],
    *,
    trajectories: int = 1000,
    seed: int = 0,
    sigma_w: float | None = None,
    sigma_kappa: float | None = None,
    dt: float | None = None,
    backend: str | None = None,
) -> Measurement:
    """Measure J at θ. What is not given is as in `config`. sigma_w = 0 is allowed: no score is taken."""
    device = resolve_backend(config.backend if backend is None else backend)
    device = "cpu" if device == "jax" else device  # the same noise and the same law, in a fraction of the time
    task = make_task(config, sigma_w=sigma_w, sigma_kappa=sigma_kappa, dt=dt)
    estimator: Any = task.estimator(device, baseline="none")
    key = jax.random.fold_in(jax.random.key(seed), FRESH)
    begun = time.perf_counter()
    result = estimator.run(key, theta, trajectories, scores=False)
    return Measurement(
        result.value,
        result.value_stderr,
        float(np.std(result.returns, ddof=1)),
        trajectories,
        config.task.sigma_w if sigma_w is None else sigma_w,
        config.task.sigma_kappa if sigma_kappa is None else sigma_kappa,
        config.task.dt if dt is None else dt,
        seed,
        time.perf_counter() - begun,
    )


def load_parameters(path: Path, network: Network) -> dict[str, Any]:
    """Some of omega, kappa, chi from an .npz of plain arrays; the others are the network's own."""
    try:
        with np.load(path, allow_pickle=False) as file:
            given = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as an .npz of plain arrays ({error}).") from None
    unknown = sorted(set(given) - set(FAMILIES))
    if unknown or not given:
        raise ValueError(f"parameters are some of omega, kappa, chi; {path} holds {', '.join(given) or 'nothing'}.")
    for name, array in given.items():
        if array.shape != network.shape(name):
            raise ValueError(f"`{name}` must have shape {network.shape(name)} for this lattice; got {array.shape}.")
    dtype = jnp.result_type(float)
    return {name: jnp.asarray(given.get(name, getattr(network, name)), dtype) for name in FAMILIES}
