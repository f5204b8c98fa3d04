"""Response and drift of a particle driven round a ring, from a record of its angle.

χ(t) is that of ⟨sin θ⟩ to the amplitude a of the potential, U/kT → U/kT − a sin θ, so the drift
gains a D cos θ. **From scores**: `fl.response`, drift (Fourier) and D fitted in folds. **From
correlations**: the generalised fluctuation–dissipation theorem with V = Q = sin θ,

    χ(t) = C(0) − C(t) − ∫₀ᵗ b(s) ds,   C(t) = ⟨Q(t) V(0)⟩,   b(t) = ⟨Q(t) v(0) V′(0)⟩,

v = j/ρ being the mean local velocity (Chetrite, Falkovich and Gawędzki 2008). It follows from
D R(t) = ⟨Q(t) (v V′ − LV)(0)⟩ = −dC/dt − b(t), since LV = L*V + 2vV′ for the generator L and its
time reversal L*. A simulation with an exact response is beside them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy.interpolate import CubicSpline

import fluctua as fl

TURN = 2 * np.pi
NOMINAL_D = 0.01264
"""kT/(6πηr a²) with T = 20 °C, r = 1 µm and the ring's radius a = 4.12 µm, as in the program."""

BINS = 100
SMOOTHING = 31
"""Bins of the robust regression of v. The program leaves the number to Matlab's default; this one
reproduces the published figure to 0.002 at nine times from 1 s to 33 s."""


class Ring(NamedTuple):
    """dθ = F(θ) dt + √(2D) dW. force: coefficients of 1, cos θ, sin θ, cos 2θ, … (1 + 2H,)."""

    force: np.ndarray
    D: float

    def drift(self, x: np.ndarray) -> np.ndarray:
        """F at angles of any shape."""
        return make_waves(x, len(self.force) // 2) @ self.force


def make_waves(x: np.ndarray, harmonics: int) -> np.ndarray:
    """1, cos x, sin x, cos 2x, … (…, 1 + 2H)."""
    phase = x[..., None] * np.arange(1, harmonics + 1)
    waves = np.stack([np.cos(phase), np.sin(phase)], axis=-1)
    return np.concatenate([np.ones((*x.shape, 1)), waves.reshape(*x.shape, -1)], axis=-1)


def correlate_increments(x: np.ndarray) -> float:
    """Correlation of neighbouring increments. x: (E, T)."""
    step = np.diff(x, axis=1)
    step = step - step.mean()
    return float(np.mean(step[:, 1:] * step[:, :-1]) / step.var())


# ------------------------------------------------------------------------- from correlations


def correlate(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """⟨a(n + k) b(n)⟩ over n and traces, for all k ≥ 0. (E, T) each -> (T,)"""
    steps = a.shape[1]
    transforms = [np.fft.rfft(v, 2 * steps, axis=1) for v in (a, b)]
    products = np.fft.irfft(transforms[0] * transforms[1].conj(), 2 * steps, axis=1)
    return products[:, :steps].mean(axis=0) / np.arange(steps, 0, -1)


def smooth_robustly(y: np.ndarray, window: int, passes: int = 5) -> np.ndarray:
    """Quadratic regression in a moving window, outliers discounted by bisquare weights."""
    size = len(y)
    robust = np.ones(size)
    fitted = y
    for _ in range(passes + 1):
        fitted = np.array([_fit_centre(y, i, window, robust) for i in range(size)])
        residual = np.abs(y - fitted)
        scale = max(6 * np.median(residual), 1e-300)
        robust = np.clip(1 - (residual / scale) ** 2, 0, None) ** 2
    return fitted


def _fit_centre(y: np.ndarray, i: int, window: int, robust: np.ndarray) -> float:
    """The regression of the `window` points nearest to i, at i."""
    first = max(0, min(i - window // 2, len(y) - window))
    near = np.arange(first, first + window)
    distance = np.abs(near - i)
    weight = (1 - (distance / distance.max()) ** 3) ** 3 * robust[near]
    root = np.sqrt(weight)
    columns = np.vander(near - i, 3, increasing=True)
    return float(np.linalg.lstsq(columns * root[:, None], y[near] * root, rcond=None)[0][0])


class Correlations(NamedTuple):
    """Responses from correlations, (T,) each.

    theorem: v at the time of the perturbation. program: v at the later time.
    equilibrium: C(0) − C(t), without b. current: j, turns per time.
    """

    theorem: np.ndarray
    program: np.ndarray
    equilibrium: np.ndarray
    current: float


def respond_by_correlations(x: np.ndarray, dt: float) -> Correlations:
    """χ(t) by the generalised fluctuation–dissipation theorem, in the steps of the program.

    x: angles, not reduced to a turn (E, T).
    """
    steps = x.shape[1]
    current = np.polyfit(dt * np.arange(steps), x.mean(axis=0), 1)[0] / TURN
    angle = x % TURN
    bins = np.round(angle * BINS / TURN).astype(int) % BINS
    density = np.bincount(bins.ravel(), minlength=BINS) * BINS / (TURN * x.size)
    if density.min() == 0:
        raise ValueError("an angle was never visited: the local velocity j/ρ is not defined there.")
    velocity = smooth_robustly(np.append(current / density, current / density[0]), SMOOTHING)
    v = CubicSpline(TURN / BINS * np.arange(BINS + 1), velocity)(angle)
    Q = np.sin(angle)
    slope = np.cos(angle)
    C = correlate(Q, Q)
    equilibrium = C[0] - C

    def subtract(b: np.ndarray) -> np.ndarray:
        return equilibrium - dt * np.append(0.0, np.cumsum((b[1:] + b[:-1]) / 2))

    return Correlations(
        subtract(correlate(Q, v * slope)), subtract(correlate(Q * v, slope)), equilibrium, current
    )


def resample(
    x: np.ndarray, function: Callable[[np.ndarray], np.ndarray], repeats: int = 100
) -> np.ndarray:
    """Standard error of function(x) by resampling whole traces."""
    rng = np.random.default_rng(1)
    values = [function(x[rng.integers(len(x), size=len(x))]) for _ in range(repeats)]
    return np.std(values, axis=0, ddof=1)


# --------------------------------------------------------------------------------- from scores


def make_process(harmonics: int) -> tuple[fl.Process, dict[str, Any]]:
    """The driven particle with a Fourier drift, and where a fit starts.

    amplitude: a, of the potential in kT. field: h, the same as a term h cos θ of the drift.
    """
    basis = fl.response.fourier(harmonics)

    def drift(p: dict, x: Any) -> Any:
        perturbation = (p["amplitude"] * p["D"] + p["field"]) * jnp.cos(x[0])
        return (p["force"] @ basis(x) + perturbation)[None]

    start = {
        "force": jnp.zeros(1 + 2 * harmonics),
        "D": jnp.array(NOMINAL_D),
        "amplitude": jnp.array(0.0),
        "field": jnp.array(0.0),
    }
    return fl.Process(drift, lambda p, x: jnp.sqrt(2 * p["D"]) * jnp.ones(1)), start


def respond_by_scores(x: np.ndarray, dt: float, stride: int, harmonics: int, window: float) -> Any:
    """χ(t) by `fl.response`, drift and D fitted in folds. x: angles (E, T)."""
    process, start = make_process(harmonics)
    record = fl.Trajectories(dt * np.arange(x.shape[1]), (x % TURN)[..., None])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # residuals: reported with the result
        return fl.response.step_response(
            process,
            lambda p, x: jnp.sin(x[0]),
            start,
            record,
            window=window,
            stride=stride,
            period=TURN,
            calibration=fl.response.CrossFitted(("force", "D")),
        )


def at_times(answer: Any, name: str, times: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """χ and its error at given times."""
    return tuple(
        np.interp(times, answer.t, np.asarray(tree[name]))
        for tree in (answer.response, answer.stderr)
    )


# ---------------------------------------------------------------------------- simulated copies


def simulate_ring(ring: Ring, dt: float, steps: int, traces: int, seed: int) -> np.ndarray:
    """Angles in the steady state, not reduced to a turn. (traces, steps)"""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, TURN, traces)
    path = np.empty((steps, traces))
    settle = round(60 / dt)
    kick = np.sqrt(2 * ring.D * dt)
    for n in range(-settle, steps):
        if n == 0:
            x = x % TURN
        if n >= 0:
            path[n] = x
        x = x + ring.drift(x) * dt + kick * rng.normal(size=traces)
    return path.T


def exact_response(ring: Ring, dt: float, steps: int, order: int = 60) -> np.ndarray:
    """χ(t) of the Euler chain to `amplitude`, from means of e^{inθ}. (steps + 1,)"""
    n = np.arange(-order, order + 1)
    points = TURN * np.arange(8 * order) / (8 * order)

    def step_matrix(amplitude: float) -> np.ndarray:
        moved = points + dt * (ring.drift(points) + amplitude * ring.D * np.cos(points))
        after = np.exp(1j * n[:, None] * moved - n[:, None] ** 2 * ring.D * dt)
        return after @ np.exp(-1j * np.outer(points, n)) / len(points)

    still = step_matrix(0.0)
    rest = np.delete(np.arange(len(n)), order)
    means = np.ones(len(n), complex)
    means[rest] = np.linalg.solve(np.eye(len(rest)) - still[np.ix_(rest, rest)], still[rest, order])
    small = 1e-3
    paths = []
    for amplitude in (small, -small):
        matrix = step_matrix(amplitude)
        state = means
        path = [state[order + 1].imag]
        for _ in range(steps):
            state = matrix @ state
            path.append(state[order + 1].imag)
        paths.append(np.array(path))
    return (paths[0] - paths[1]) / (2 * small)


class ExactCorrelations(NamedTuple):
    """What `Correlations` are without noise, in continuous time. (len(t),) each."""

    theorem: np.ndarray
    program: np.ndarray


def exact_correlations(ring: Ring, t: Sequence[float], points: int = 256) -> ExactCorrelations:
    """Both forms of the theorem from the generator L = F∂ + D∂², on a grid of angles."""
    x = TURN * np.arange(points) / points
    order = np.fft.fftfreq(points, 1 / points)
    order[points // 2] = 0.0  # the odd derivative of the highest wave
    transform = np.fft.fft(np.eye(points), axis=0)
    slope = np.fft.ifft(1j * order[:, None] * transform, axis=0).real
    generator = ring.drift(x)[:, None] * slope + ring.D * slope @ slope
    # the density is orthogonal to all that L makes; a full turn of it is 1
    balance = np.vstack([generator.T, np.ones(points)])
    density = np.linalg.lstsq(balance, np.append(np.zeros(points), 1.0), rcond=None)[0]
    flux = ring.drift(x) * density - ring.D * slope @ density
    Q, dV = np.sin(x), np.cos(x)
    v = flux.mean() / density
    values, vectors = np.linalg.eig(generator)
    inverse = np.linalg.inv(vectors)
    small = np.abs(values) < 1e-9 * np.abs(values).max()
    safe = np.where(small, 1.0, values)

    def correlate_exactly(later: np.ndarray, earlier: np.ndarray, integral: bool) -> np.ndarray:
        """⟨later(t) earlier(0)⟩, or its integral from 0 to t."""
        left = (density * earlier) @ vectors
        right = inverse @ later
        grown = np.exp(np.outer(t, values))
        if integral:
            grown = np.where(small, np.asarray(t)[:, None], (grown - 1) / safe)
        return (grown @ (left * right)).real

    start = density @ Q**2
    equilibrium = start - correlate_exactly(Q, Q, False)
    return ExactCorrelations(
        equilibrium - correlate_exactly(Q, v * dV, True),
        equilibrium - correlate_exactly(Q * v, dV, True),
    )


# ------------------------------------------------------------------------------------- drift


def infer_by_sfi(x: np.ndarray, dt: float, harmonics: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Coefficients, their errors and D by StochasticForceInference. x: angles (E, T)."""
    import SFI
    from SFI.statefunc import make_basis

    basis = fl.response.fourier(harmonics)
    functions = make_basis(lambda x: basis(x)[None], dim=1, rank=1, n_features=1 + 2 * harmonics)
    data = SFI.TrajectoryCollection.from_arrays(X=jnp.asarray(x.T[..., None]), dt=dt)
    inference = SFI.OverdampedLangevinInference(data)
    inference.compute_diffusion_constant()
    inference.infer_force_linear(functions)
    inference.compute_force_error()
    return (
        np.asarray(inference.force_coefficients),
        np.asarray(inference.force_coefficients_stderr),
        float(np.ravel(inference.diffusion_average)[0]),
    )
