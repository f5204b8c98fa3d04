"""Evaluate J of given parameters of a lattice afresh: other noise, seeds, ensembles or steps."""

from __future__ import annotations

import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.runs.build import FAMILIES, make_device_task, make_task, resolve_backend
from fluctua.runs.conditions import is_unknown
from fluctua.runs.config import ENSEMBLE, Config
from fluctua.runs.rules import SEEDS, whole_number
from fluctua.store.files import require_file
from fluctua.tcmt.network import Network

FRESH = 0x4A
"""Sets the noise of an evaluation apart from that of a training with the same seed, which descends
from key 1 of a split."""

_SEED = whole_number(0, SEEDS)
_COUNT = whole_number(2, ENSEMBLE)


class Measurement(NamedTuple):
    """J of given parameters, with its settings.

    J, J_stderr: value and standard error.
    spread: standard deviation of single returns.
    trajectories: how many were run.
    sigma_w, sigma_kappa, dt, seed: of the evaluation.
    seconds: wall time.
    """

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
    """Evaluate J at θ, of the device itself if it has hidden errors. Defaults: `config`.

    sigma_w = 0 is allowed, since no score is computed.
    """
    device = resolve_backend(config.backend if backend is None else backend)
    # GPUs of a cluster
    alone = device == "cuda" and config.ensemble.shards and resolve_backend("auto") != "cuda"
    # the same noise and the same law, in a fraction of the time
    device = "cpu" if device == "jax" or alone else device
    _COUNT("trajectories", trajectories)
    task = make_task(config, sigma_w=sigma_w, sigma_kappa=sigma_kappa, dt=dt)
    if is_unknown(config):  # J is that of the device, not of its calibrated model
        from fluctua.runs.unknown import make_true_system

        def make(network):
            return make_device_task(config, network, sigma_kappa=sigma_kappa, dt=dt)

        task, parameters = make_true_system(config, task.network, make)
        theta = parameters(theta)
    estimator: Any = task.estimator(device, baseline="none")
    key = jax.random.fold_in(jax.random.key(_SEED("seed", seed)), FRESH)
    start = time.perf_counter()
    result = estimator.run(key, theta, trajectories, scores=False)
    return Measurement(
        result.value,
        result.value_stderr,
        float(np.std(result.returns, ddof=1)),
        trajectories,
        config.task.sigma_w if sigma_w is None else sigma_w,
        config.task.sigma_kappa if sigma_kappa is None else sigma_kappa,
        (config.task.dt if dt is None else dt) / config.device.finer,
        seed,
        time.perf_counter() - start,
    )


def load_parameters(
    path: Path, network: Network, others: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Load omega, kappa and chi from an .npz of plain arrays.

    Args:
        path: the file.
        network: the network they belong to.
        others: values of families that the file does not hold; by default the network's own.
    """
    require_file(path, "an .npz file")
    if not path.exists():
        raise ValueError(f"there is no file {path}.")
    try:
        if path.suffix != ".npy" and not zipfile.is_zipfile(path):
            raise ValueError("it is another kind of file, or truncated")
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise ValueError(
                "it holds one array without a name: numpy.savez(path, omega=..., kappa=..., "
                "chi=...)"
            )
        with file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as an .npz of plain arrays ({error}).") from None
    unknown = sorted(set(arrays) - set(FAMILIES))
    if unknown or not arrays:
        raise ValueError(
            f"parameters are some of omega, kappa, chi; {path} holds "
            f"{', '.join(arrays) or 'nothing'}."
        )
    for name, array in arrays.items():
        if array.dtype.kind not in "fiu":
            raise ValueError(f"`{name}` in {path} must be real numbers; got {array.dtype}.")
        if array.shape != network.shape(name):
            raise ValueError(
                f"`{name}` must have shape {network.shape(name)} for this lattice; got "
                f"{array.shape}."
            )
    rest = others or {name: getattr(network, name) for name in FAMILIES}
    return {
        name: jnp.asarray(arrays.get(name, rest[name]), jnp.result_type(float)) for name in FAMILIES
    }
