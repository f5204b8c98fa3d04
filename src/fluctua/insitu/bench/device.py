"""The box on the virtual bench: a resonator network that differs from its data sheet.

    ω = ω_hidden + g ω_set + ageing(shots),    κ = κ_hidden + g κ_set + δκ(t),    χ = g χ_set,
    γ = γ_nominal (1 + spread),                σ² = σ_W² + injected²

What it is set to is not what it does: fabrication disorder, actuators with gain errors, and slow
ageing. One generator modulates the couplings, δκ, and records what it played (`tcmt.Modulation`);
another injects noise into every channel. What is sampled is not quite the state: every
`oversample`-th step of the simulation, with readout noise, rounded to the codes of an
analogue-to-digital converter and clipped at its range. With `read` = "ports" only the resonators of
the leads are sampled: the input and the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua import tcmt
from fluctua.learn.effective import KnobLine
from fluctua.tcmt.conversion import kernel_spec
from fluctua.tcmt.coupled_modes import Draw
from fluctua.tcmt.kernel import run as kernel
from fluctua.tcmt.kernel.options import KernelSpec

FAMILIES = ("omega", "kappa", "chi")
"""The knobs."""
LIMITS = {"omega": (-3.0, 3.0), "kappa": (0.0, 2.5), "chi": (-0.1, 0.1)}
"""Lowest and highest setting of each family."""
MAX_NOISE = 2.0
"""Amplitude of the noise that can be injected, in the units of σ_W."""
MAX_MODULATION = 1.0
READ = ("all", "ports")
"""Resonators that a bench records: all, or those of its leads."""
MODULATION = tcmt.Modulation(0.0)
"""Harmonics and highest frequency of δκ; its strength is a setting."""


@dataclass(frozen=True)
class Sheet:
    """The data sheet, and how far the box is from it. Rates are in units of the nominal coupling.

    rows, columns: of the lattice.
    seed: of the hidden errors and of the noise.
    interval: time between two samples.
    oversample: simulation steps per interval; with 1 a sample is one Euler step.
    disorder, kappa_disorder: standard deviations of the hidden offsets.
    gain_error: standard deviation of the gains of the actuators.
    loss_spread: standard deviation of the losses, relative.
    ageing: amplitude of the slow change of ω.
    ageing_shots: trajectories per period of the ageing.
    readout: standard deviation of the noise on each quadrature.
    adc_range: full scale of the converter.
    bits: of the converter.
    sigma_w: amplitude of the noise.
    read: one of `READ`.
    """

    rows: int = 3
    columns: int = 4
    seed: int = 0
    interval: float = 0.01
    oversample: int = 10
    disorder: float = 0.4
    kappa_disorder: float = 0.2
    gain_error: float = 0.2
    loss_spread: float = 0.2
    ageing: float = 0.05
    ageing_shots: float = 20_000.0
    readout: float = 1e-3
    adc_range: float = 16.0
    bits: int = 16
    sigma_w: float = 0.5
    read: str = "all"

    def __post_init__(self) -> None:
        for name, wanted, fits in (
            ("rows", "1 or more", self.rows >= 1),
            ("columns", "1 or more", self.columns >= 1),
            ("interval", "above 0 and below 1000", 0 < self.interval < 1e3),
            ("oversample", "1 to 1000", 1 <= self.oversample <= 1000),
            *(
                (name, "0 or more", getattr(self, name) >= 0)
                for name in (
                    "disorder",
                    "kappa_disorder",
                    "gain_error",
                    "loss_spread",
                    "ageing",
                    "readout",
                )
            ),
            *(
                (name, "positive", getattr(self, name) > 0)
                for name in ("ageing_shots", "adc_range", "sigma_w")
            ),
            ("bits", "4 to 16", 4 <= self.bits <= 16),
            ("read", " or ".join(READ), self.read in READ),
        ):
            if not fits:
                raise ValueError(
                    f"`{name}` of a bench must be {wanted}; got {getattr(self, name)!r}."
                )
        if not 2 <= self.rows * self.columns <= 400:
            raise ValueError(f"a bench has 2 to 400 resonators; got {self.rows} x {self.columns}.")

    @cached_property
    def nominal(self) -> tcmt.Network:
        """The network of the data sheet."""
        return tcmt.rectangular(self.rows, self.columns, sigma_w=self.sigma_w)

    @property
    def sites(self) -> tuple[int, ...]:
        """Resonators that are read."""
        leads = self.nominal.lead_sites
        chosen = leads if self.read == "ports" else np.arange(self.nominal.sites)
        return tuple(int(site) for site in chosen)

    @property
    def full_code(self) -> int:
        """The largest code; its negative is the smallest that is a measurement."""
        return 2 ** (self.bits - 1) - 1

    @property
    def scale(self) -> float:
        """Units per code."""
        return self.adc_range / self.full_code


INVALID = -(2**15)
"""Code of an invalid sample."""


class Hidden(NamedTuple):
    """Parameters of the box that a laboratory does not know.

    offset, gain: of each knob, by family.
    gamma: losses (N,).
    phase: of the ageing of each site (N,).
    chi_gain: gain of the knobs of χ, which have no offset.
    """

    offset: dict[str, np.ndarray]
    gain: dict[str, np.ndarray]
    gamma: np.ndarray
    phase: np.ndarray
    chi_gain: np.ndarray


def draw_hidden(sheet: Sheet) -> Hidden:
    """Draw the hidden parameters of the box from the seed of its data sheet."""
    rng = np.random.default_rng([sheet.seed, 0])
    sites = sheet.nominal.sites
    bonds = len(sheet.nominal.bonds)
    offset = {
        "omega": sheet.disorder * rng.normal(size=sites),
        "kappa": sheet.kappa_disorder * rng.normal(size=bonds),
    }
    gain = {
        name: np.clip(1 + sheet.gain_error * rng.normal(size=v.size), 0.3, 1.7)
        for name, v in offset.items()
    }
    gamma = sheet.nominal.gamma * np.clip(1 + sheet.loss_spread * rng.normal(size=sites), 0.2, 2.0)
    phase = rng.uniform(0, 2 * np.pi, sites)
    kerr = np.random.default_rng([sheet.seed, 4]).normal(size=sites)
    return Hidden(offset, gain, gamma, phase, np.clip(1 + sheet.gain_error * kerr, 0.3, 1.7))


def compute_offsets(sheet: Sheet, box: Hidden, shots: float) -> dict[str, np.ndarray]:
    """Offsets of the knobs after so many trajectories; the ageing of a site is a sine from zero."""
    turn = 2 * np.pi * shots / sheet.ageing_shots
    aged = sheet.ageing * (np.sin(turn + box.phase) - np.sin(box.phase))
    return {**box.offset, "omega": box.offset["omega"] + aged}


def compute_parameters(
    sheet: Sheet, box: Hidden, settings: dict[str, np.ndarray], shots: float = 0.0
) -> dict[str, np.ndarray]:
    """True θ of the network at these settings."""
    off = compute_offsets(sheet, box, shots)
    linear = {name: KnobLine(off[name], box.gain[name]).set(settings[name]) for name in off}
    kerr = {"chi": KnobLine(gain=box.chi_gain).set(settings["chi"])} if "chi" in settings else {}
    return linear | kerr | {"gamma": box.gamma}


def reset_settings(sheet: Sheet) -> dict[str, np.ndarray]:
    """Settings after switching on: no detuning, every coupling at 1; χ is left out."""
    return {"omega": np.zeros(sheet.nominal.sites), "kappa": np.ones(len(sheet.nominal.bonds))}


def measure(
    sheet: Sheet,
    box: Hidden,
    settings: dict[str, np.ndarray],
    *,
    count: int,
    points: int,
    amplitude: float = 10.0,
    shots: int = 0,
    noise: float = 0.0,
    sigma_kappa: float = 0.0,
) -> np.ndarray:
    """Run `count` trajectories from empty resonators: codes (E, points, 2D), int16, [Re ψ, Im ψ].

    D is the number of `Sheet.sites`, all N resonators of a bench that reads them all.

    shots: trajectories before these; noise and ageing follow from it. The ageing stays as it is
        during a call.
    noise: amplitude that is injected, in units of σ_W.
    sigma_kappa: strength of the modulation, which `draw_modulation` repeats.
    """
    spec = _unit_spec(sheet, points)
    driven = tcmt.parameters(sheet.nominal, compute_parameters(sheet, box, settings, shots))
    spec = spec.replace(
        omega=driven["omega"],
        kappa=driven["kappa"],
        chi=driven["chi"],
        drive=amplitude * spec.drive,
        damping=spec.damping - sheet.nominal.gamma + box.gamma,
        noise=np.sqrt(1 + (noise / sheet.sigma_w) ** 2)
        * np.sqrt(spec.noise**2 + 2 * sheet.nominal.sigma_r**2 * (box.gamma - sheet.nominal.gamma)),
        sigma_kappa=sigma_kappa,
        harmonics=MODULATION.harmonics,
        Omega=MODULATION.omega_max / MODULATION.harmonics,
    )
    run = kernel.run(
        spec, _seed(sheet, shots), count, scores=False, record_every=sheet.oversample, threads=1
    )
    assert run.trajectories is not None
    psi = run.trajectories
    if sheet.read != "all":
        psi = psi[..., list(sheet.sites)]
    x = np.concatenate([psi.real, psi.imag], axis=-1)
    rng = np.random.default_rng([sheet.seed, 3, shots])
    full = sheet.full_code
    codes = np.empty(x.shape, np.int16)
    # one by one: an acquisition is large, and its copies are larger
    for seen, code in zip(x, codes, strict=True):
        seen += sheet.readout * rng.standard_normal(seen.shape, dtype=np.float32)
        code[...] = np.clip(np.rint(seen / np.float32(sheet.scale)), -full, full)
    return codes


def draw_modulation(sheet: Sheet, count: int, shots: int) -> dict[str, np.ndarray]:
    """Draw the modulation of those trajectories, per bond and harmonic: (E, B, K) each."""
    draw = Draw(len(sheet.nominal.bonds), MODULATION.harmonics)
    seed = _seed(sheet, shots)
    key = jax.random.wrap_key_data(jnp.array([seed >> 32, seed & 0xFFFF_FFFF], jnp.uint32))
    each = jax.vmap(lambda j: draw(key, j))(jnp.arange(count))
    return {name: np.asarray(v, np.float32) for name, v in each.items()}


def _seed(sheet: Sheet, shots: int) -> int:
    return int(np.random.default_rng([sheet.seed, 2, shots]).integers(2**63))


@lru_cache(maxsize=8)
def _unit_spec(sheet: Sheet, points: int) -> KernelSpec:
    """The nominal network with a drive of 1 on its first lead."""
    dt = sheet.interval / sheet.oversample
    task = tcmt.transmission(
        sheet.nominal,
        horizon=(points - 1) * sheet.interval,
        dt=dt,
        drive=tcmt.Drive(0, 1.0, frequency=10.0),
    )
    return kernel_spec(task, {})
