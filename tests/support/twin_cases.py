"""Networks and twins on which the kernels, on CPU and GPU, are compared with `twin_reference`."""

import functools

import numpy as np

from kernel_reference import rectangle
from twin_reference import correct

SEED = 0x1234_5678_9ABC_DEF0
FAMILIES = ("omega", "kappa", "chi", "damping", "log_diffusion", "drive", "gain")


def wrong(spec):
    """A twin that is wrong about everything it may be wrong about."""
    return spec.replace(
        omega=1.05 * spec.omega + 0.01,
        kappa=0.95 * spec.kappa,
        chi=1.2 * spec.chi,
        damping=1.1 * spec.damping,
        drive=1.03 * spec.drive,
        port_gain=0.98 * spec.port_gain,
        start=0.9 * spec.start,
    )


CASES = {
    "the network itself": ({}, {}),
    "another twin": ({}, {"twin": wrong}),
    "lab frame with an envelope": ({"lab": True}, {"twin": wrong}),
    "modulated": ({"sigma_kappa": 0.2, "steps": 71, "dt": 2e-3}, {"twin": wrong}),
    "modulated, and the twin does not know": (
        {"sigma_kappa": 0.2},
        {"twin": wrong, "knows": False},
    ),
    "antithetic": ({"sigma_kappa": 0.2}, {"antithetic": True}),
    "in segments": ({"steps": 63}, {"twin": wrong, "segment": 10}),
    "a chain": ({"rows": 1, "columns": 5}, {"twin": wrong}),
    "one resonator": ({"rows": 1, "columns": 1}, {"twin": wrong}),
    "quadratic": ({}, {"twin": wrong, "rank": 5, "segment": 7}),
    "quadratic of full rank": ({"lab": True, "steps": 41}, {"rank": 12, "segment": 1}),
    "quadratic, modulated": ({"sigma_kappa": 0.2}, {"rank": 3, "segment": 16, "knows": False}),
}


@functools.cache
def problem(case):
    """Network, options of the kernel, and the reference."""
    network, options = CASES[case]
    spec = rectangle(**network)
    options = dict(options)
    twin = options.pop("twin", lambda same: same)(spec)
    count = 18 if options.get("antithetic") else 19  # not a multiple of the block
    table = np.linspace(3e-3, 0, spec.steps + 1)
    reference = correct(spec, SEED, count, table, twin=twin, **options)
    options["knows_modulation"] = options.pop("knows", True)
    return (
        spec,
        {**options, "twin": twin, "table": table, "rates": True, "samples": True},
        count,
        reference,
    )


def deviation(actual, expected, scale=None):
    """Largest deviation in units of the largest value, or of `scale`; a chain of one has no
    bonds to deviate.
    """
    largest = lambda v: np.abs(v).max(initial=0.0)
    return largest(actual - expected) / ((largest(expected) if scale is None else scale) or 1.0)
