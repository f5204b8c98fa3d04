"""Labelled data as contexts of trajectories."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, PyTree


class Examples:
    """Labelled data, one drawn at random for each trajectory: key -> context.

    A context is {"features": (F,), "label": whole number}.

    Args:
        features: one row per example (D, F).
        labels: classes as whole numbers from 0 on (D,).
        jitter: standard deviation of normal noise that is added to the features of each draw, which
            keeps a network from learning the training set by heart.

    >>> examples = tcmt.Examples(np.array([[0.0, 0.0], [0.0, 1.0]]), [0, 1], jitter=0.05)
    >>> context = examples(key)
    >>> sorted(context)
    ['features', 'label']
    """

    def __init__(self, features: Array, labels: Array, *, jitter: float = 0.0):
        self.features = np.asarray(features, np.float64)
        self.labels = np.asarray(labels)
        if self.features.ndim != 2 or self.labels.shape != self.features.shape[:1]:
            raise ValueError(
                "`features` must be (examples, features) and `labels` one class per example; got "
                f"shapes {self.features.shape} and {self.labels.shape}."
            )
        if not len(self.labels) or not np.isfinite(self.features).all():
            raise ValueError("`features` must be finite numbers of at least one example.")
        whole = np.issubdtype(self.labels.dtype, np.integer)
        if not whole or self.labels.min() < 0:
            raise ValueError(
                "`labels` must be whole numbers from 0 on; got "
                f"{self.labels.dtype} from {self.labels.min()}."
            )
        if not (np.isfinite(jitter) and jitter >= 0):
            raise ValueError(f"`jitter` must not be negative; got {jitter!r}.")
        self.jitter = float(jitter)

    def __len__(self) -> int:
        return len(self.labels)

    def __call__(self, key: Array) -> PyTree:
        """Draw one example."""
        k_example, k_jitter = jax.random.split(key)
        number = jax.random.randint(k_example, (), 0, len(self))
        features = jnp.asarray(self.features, jnp.result_type(float))[number]
        if self.jitter:
            features += self.jitter * jax.random.normal(k_jitter, features.shape, features.dtype)
        return {"features": features, "label": jnp.asarray(self.labels, jnp.int32)[number]}
