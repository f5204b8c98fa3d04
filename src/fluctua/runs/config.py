"""Configuration of a training: frozen records, read from TOML and written with explanations.

A file holds the keys it changes. The others come from the preset it names, or from the paper.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluctua.core.baselines import DEFAULT, TABLE
from fluctua.core.words import close_match
from fluctua.learn.optimisers import BUDGETS, WINDOW
from fluctua.runs import rules
from fluctua.runs.rules import Rule
from fluctua.store.files import require_file
from fluctua.store.folder import fingerprint
from fluctua.tcmt.kernel.options import INTEGRATORS


def _key(default: Any, rule: Rule, comment: str) -> Any:
    metadata = {"rule": rule, "comment": comment}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


SITES = 10_000
ENSEMBLE = 100_000_000
LARGE = 1e9
"""Limit of times and amplitudes in units of the coupling.

Like `SITES` (rows and columns) and `ENSEMBLE` (trajectories per iteration) it catches slips that
would overflow or run out of memory.
"""


def _section(kind: type) -> Any:
    return field(default_factory=kind)


@dataclass(frozen=True)
class LatticeConfig:
    """A rectangular lattice with leads on opposite corners."""

    rows: int = _key(11, rules.whole_number(1, SITES), "leads sit on opposite corners")
    columns: int = _key(13, rules.whole_number(1, SITES), "")
    gamma_e: float = _key(1.0, rules.number(above=0), "coupling of the leads")
    gamma: float = _key(0.02, rules.number(minimum=0), "radiative loss of every resonator")


@dataclass(frozen=True)
class TaskConfig:
    """Reward, drive and noise."""

    reward: str = _key(
        "transmission", rules.word("transmission", "isolation"), "time-averaged power fraction"
    )
    horizon: float = _key(20.0, rules.number(above=0, below=LARGE), "T, in units of 1 / coupling")
    dt: float = _key(1e-3, rules.number(above=0), "time step")
    integrator: str = _key(
        "euler",
        rules.word(*INTEGRATORS),
        "euler: the paper's; heun: of second order, for longer steps",
    )
    sigma_w: float = _key(0.5, rules.number(above=0), "noise amplitude of every open channel")
    sigma_kappa: float = _key(
        0.0, rules.number(minimum=0), "amplitude of the antagonistic modulation"
    )
    amplitude: float = _key(10.0, rules.number(above=0, below=LARGE), "of the drive, s⁺")
    frequency: float = _key(10.0, rules.number(), "of the drive; omega is the detuning from it")


@dataclass(frozen=True)
class Start:
    """Initial parameters: kappa = 1, no detuning."""

    chi_std: float = _key(1e-4, rules.number(minimum=0), "spread of the initial Kerr coefficients")


@dataclass(frozen=True)
class BoundsConfig:
    """Bounds onto which every step is projected.

    The paper does not state its bounds: quote these with a J.

    omega: a site detuned by 5 couplings is decoupled already, and beyond √(2γ/Δt) = 6.3 Euler steps
        of 1e-3 are unstable.
    kappa: without an upper bound couplings grow for ever and J with them; twice the initial value
        leaves room for a waveguide.
    chi: 0.05·|ψ|² is a detuning of a few couplings at the intensities of the drive.
    """

    omega: tuple[float, float] = _key(
        (-5.0, 5.0), rules.interval(), "detunings; beyond ±6.3 Euler steps of 1e-3 grow"
    )
    kappa: tuple[float, float] = _key(
        (0.0, 2.0), rules.interval(), "couplings; without a ceiling J just follows them"
    )
    chi: tuple[float, float] = _key(
        (-0.05, 0.05), rules.interval(), "Kerr; ±0.05 detunes by a few couplings"
    )


@dataclass(frozen=True)
class EnsembleConfig:
    """Number of trajectories per iteration."""

    schedule: str = _key(
        "fixed", rules.word("fixed", "steps", "escalation"), "which of the keys below count"
    )
    trajectories: int = _key(1000, rules.whole_number(2, ENSEMBLE), "fixed: of every iteration")
    steps: tuple[tuple[int, int], ...] = _key(
        (), rules.steps(), "steps: [[iteration, trajectories], ...]"
    )
    budgets: tuple[int, ...] = _key(
        BUDGETS, rules.rising_sizes(), "escalation: one after the other"
    )
    window: int = _key(WINDOW, rules.whole_number(10), "escalation: W, iterations")
    confidence: float = _key(0.95, rules.number(above=0, below=1), "escalation: of the trend test")
    shards: int = _key(
        0,
        rules.whole_number(0, 10**6),
        "ranges that --cluster computes apart and adds in order; 0: one sum",
    )


@dataclass(frozen=True)
class Optimiser:
    """Update rule and learning rate."""

    rule: str = _key("paper", rules.text(), 'or any optimiser of optax: "adam", "sgd", "lion", ...')
    learning_rate: float = _key(0.05, rules.number(above=0), "")
    decay: float = _key(
        0.0, rules.number(minimum=0), "steps shrink as 1/√(1 + iteration/decay); 0: they do not"
    )
    options: dict[str, Any] = _key(
        {}, rules.table(), "further ones of the rule; paper: rho, beta, epsilon"
    )
    omega_scale: float = _key(
        1.0, rules.number(minimum=0), "factor on the steps of omega; 0 leaves it as it is"
    )
    kappa_scale: float = _key(1.0, rules.number(minimum=0), "factor on the steps of kappa")
    chi_scale: float = _key(1.0, rules.number(minimum=0), "factor on the steps of chi")


@dataclass(frozen=True)
class BaselineConfig:
    """Baseline that is subtracted from the return-to-go."""

    kind: str = _key(
        DEFAULT,
        rules.word(*TABLE),
        "time: from a pilot; carried: from the iteration before; binned: the paper's; twin: the "
        "network's own model",
    )
    bins: int = _key(20, rules.whole_number(1), "binned: quantile bins")
    every: int = _key(
        1,
        rules.whole_number(1),
        "binned: steps between two sortings; 1 is the paper's (jax: always 1)",
    )
    rank: int = _key(
        0, rules.whole_number(0), "twin: of its quadratic term, without modulation only; 0 is none"
    )
    forget_after: float = _key(
        100.0,
        rules.number(minimum=1),
        "twin: iterations that resolve its correction, if it is taken; 1: always",
    )


@dataclass(frozen=True)
class DeviceConfig:
    """Hidden errors of the device, drawn with the run's seed; 0 is none.

    kind: sets all keys in `KINDS`; keys that are given explicitly take precedence.
    """

    kind: str = _key(
        "easy",
        rules.word("easy", "hard"),
        "easy: errors of couplings and detunings alone; hard: all that follow but Kerr and second "
        "neighbours",
    )
    gain_error: float = _key(
        0.0, rules.number(minimum=0), "standard deviation of every coupling's gain about 1"
    )
    offset_error: float = _key(0.0, rules.number(minimum=0), "of every detuning's offset")
    loss_error: float = _key(
        0.0, rules.number(minimum=0), "of the logarithm of every radiative loss"
    )
    lead_error: float = _key(
        0.0, rules.number(minimum=0), "of the logarithm of every lead's coupling"
    )
    noise_error: float = _key(
        0.0, rules.number(minimum=0), "of the logarithm of every resonator's noise amplitude"
    )
    kerr_error: float = _key(0.0, rules.number(minimum=0), "of every Kerr coefficient")
    second_neighbours: float = _key(
        0.0, rules.number(minimum=0), "couplings across the cells of the lattice"
    )
    readout: float = _key(
        0.0, rules.number(minimum=0), "noise of every sample, on either quadrature"
    )
    sample_every: int = _key(1, rules.whole_number(1), "steps `task.dt` between two samples")
    read: str = _key(
        "all",
        rules.word("all", "ports", "output"),
        "resonators that are read: all, those of the input and the output, that of the output",
    )
    integrator: str = _key(
        "same", rules.word("same", *INTEGRATORS), "of the device; same: the model's"
    )
    finer: int = _key(1, rules.whole_number(1, 1000), "steps of the device per step `task.dt`")


TREATMENTS = ("ignore", "watch", "fit")
"""Treatments of properties that the nominal structure does not have."""


@dataclass(frozen=True)
class CalibrationConfig:
    """Calibration of the device's unknowns from the trajectories that are rewarded."""

    correction: str = _key(
        "none",
        rules.word("none", "simulated", "measured", "weighted"),
        "to the model's noise-free gradient",
    )
    simulated: int = _key(
        16, rules.whole_number(2), "trajectories of the model per iteration; they cost time only"
    )
    samples: int = _key(
        2,
        rules.whole_number(0),
        "of the calibration's error in the gradient's error bar; 0 leaves it out",
    )
    measure_every: int = _key(1, rules.whole_number(1), "one of so many iterations measures")
    forget_after: float = _key(
        0.0, rules.number(minimum=0), "iterations over which measurements fade; 0: never"
    )
    prior: float = _key(
        1.0, rules.number(above=0), "spread of the prior, in units of that of the hidden errors"
    )
    kerr: str = _key(
        "ignore",
        rules.word_or_flag(*TREATMENTS),
        "errors of Kerr coefficients: not in the model, watched, fitted",
    )
    readout: bool = _key(
        True, rules.flag(), "noise of the readout (device.readout) is known, and taken off"
    )
    second_neighbours: str = _key(
        "ignore",
        rules.word(*TREATMENTS),
        "couplings across the cells: not in the model, watched, fitted",
    )


@dataclass(frozen=True)
class Stop:
    """Limits of a run; 0 is none. The first one reached ends the run."""

    max_trajectories: int = _key(
        0, rules.whole_number(0), "in total; no iteration starts that would exceed it"
    )
    max_minutes: float = _key(0.0, rules.number(minimum=0), "of training, over all resumptions")


@dataclass(frozen=True)
class KeepConfig:
    """Files that are written, and how often."""

    parameters_every: int = _key(
        10, rules.whole_number(1), "iterations between two records of the parameters"
    )
    checkpoint_seconds: float = _key(
        20.0, rules.number(minimum=0), "between two checkpoints; 0: every iteration"
    )
    checkpoints: int = _key(
        3, rules.whole_number(2), "how many are kept; at least two, in case the newest is damaged"
    )


@dataclass(frozen=True)
class Config:
    """The configuration of a training."""

    preset: str = _key(
        "paper",
        rules.word("demo", "fast", "isolation", "paper", "paper-quick", "ports", "unknown"),
        "where keys that are not given come from",
    )
    seed: int = _key(
        0,
        rules.whole_number(0, rules.SEEDS),
        "of the noise, the modulation and the initial Kerr coefficients",
    )
    iterations: int = _key(10_000, rules.whole_number(1), "")
    backend: str = _key(
        "auto",
        rules.word("auto", "cpu", "cuda", "jax"),
        "auto: cuda where there is a GPU, else cpu",
    )
    lattice: LatticeConfig = _section(LatticeConfig)
    task: TaskConfig = _section(TaskConfig)
    start: Start = _section(Start)
    bounds: BoundsConfig = _section(BoundsConfig)
    ensemble: EnsembleConfig = _section(EnsembleConfig)
    optimiser: Optimiser = _section(Optimiser)
    baseline: BaselineConfig = _section(BaselineConfig)
    device: DeviceConfig = _section(DeviceConfig)
    calibration: CalibrationConfig = _section(CalibrationConfig)
    stop: Stop = _section(Stop)
    keep: KeepConfig = _section(KeepConfig)


def apply_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy with other values, checked: {"iterations": 10, "task.sigma_kappa": 0.2}.

    `device.kind` is applied first, since it sets other keys.
    """
    if KIND in changes:
        kind = _rule(DeviceConfig, "kind")(KIND, changes[KIND])
        changes = {**KINDS[kind], **changes}
    for name, value in changes.items():
        *section, key = name.split(".")
        if len(section) > 1:
            raise ValueError(f"`{name}` is too deep: keys are `key` or `section.key`.")
        tree = {section[0]: {key: value}} if section else {key: value}
        config = _fill(config, tree, "")
    return config


def parse(tree: Mapping[str, Any]) -> Config:
    """The configuration of a parsed TOML file."""
    tree = _rename_keys(tree, {old: new for new, old in EARLIER_NAMES.items()})
    name = _rule(Config, "preset")("preset", tree.get("preset", "paper"))
    config = PRESETS[name]
    device = tree.get("device")
    if isinstance(device, Mapping):
        kind = device.get("kind", "easy" if set(device) >= EARLIER_DEVICE else config.device.kind)
        config = apply_changes(config, {KIND: kind}) if kind != config.device.kind else config
    return _fill(config, {k: v for k, v in tree.items() if k != "preset"}, "")


def load(path: str | Path) -> Config:
    """Read a TOML file."""
    require_file(Path(path), "a TOML file")
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}. Presets are {', '.join(PRESETS)}.") from None
    except UnicodeDecodeError:
        raise ValueError(
            f"{path} is not a file of settings, which is text (TOML). Presets are "
            f"{', '.join(PRESETS)}."
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}.") from None
    try:
        return parse(tree)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def dump(config: Config) -> str:
    """The configuration as TOML, every key with an explanation. `load` reads it back."""
    lines = [
        _format_line(config, f)
        for f in dataclasses.fields(config)
        if not _is_section(config, f.name)
    ]
    for f in dataclasses.fields(config):
        if _is_section(config, f.name):
            part = getattr(config, f.name)
            lines += ["", f"[{f.name}]", *(_format_line(part, g) for g in dataclasses.fields(part))]
    return "\n".join(lines) + "\n"


ADJUSTABLE = ("iterations", "stop.max_trajectories", "stop.max_minutes")
"""Keys that may change when a run is continued: its length, and nothing that it computes."""
_STAMP = re.compile(r"# run ([0-9a-f]{16}) keys ([0-9a-f]{16})\n")


def digest(text: str) -> str:
    """Fingerprint of the keys of a TOML file, without the adjustable ones and comments."""
    # earlier names: a run that began with them keeps its fingerprint
    tree = _rename_keys(tomllib.loads(text), EARLIER_NAMES)
    for name in ADJUSTABLE:
        *section, key = name.split(".")
        (tree.get(section[0], {}) if section else tree).pop(key, None)
    return fingerprint(json.dumps(tree, sort_keys=True).encode())


def stamp(config: Config, run: str) -> str:
    """`dump` with a last line that identifies the run; a truncated file has none or another.

    run: the fingerprint of the run; that of the configuration if empty.
    """
    text = dump(config)
    keys = digest(text)
    return f"{text}# run {run or keys} keys {keys}\n"


def read_stamp(path: Path) -> str:
    """The checked fingerprint of the run that a `stamp` file belongs to; empty if it has none."""
    text = path.read_text(encoding="utf-8")
    stamp = _STAMP.fullmatch(text[text.rfind("\n# run ") + 1 :]) if "\n# run " in text else None
    if stamp is None:
        return ""
    if stamp[2] != digest(text):
        raise ValueError(
            f"the keys in {path} are not those that this run started with: it was edited, or is "
            f"damaged. A run continues as it started, only {', '.join(ADJUSTABLE)} can change; for "
            "another training start another run."
        )
    return stamp[1]


def load_unedited(path: Path) -> Config:
    """The configuration of a run; an error if its keys were edited since.

    A file without a stamp, which does not belong to a run, is read as it is.
    """
    config = load(path)
    read_stamp(path)
    return config


# ------------------------------------------------------------------------------------------ helpers

RETIRED = {"baseline.twin_error": 0.0}
"""Keys of earlier files, with the value at which they have no effect."""

EARLIER_NAMES = {
    "task.integrator": "task.step",
    "baseline.forget_after": "baseline.memory",
    "calibration.forget_after": "calibration.memory",
}
"""Present names of keys, and their names in earlier run folders."""

EARLIER_DEVICE = frozenset(
    {
        "gain_error",
        "offset_error",
        "kerr_error",
        "second_neighbours",
        "readout",
        "sample_every",
    }
)
"""Keys of `device` in run folders of versions without `device.kind`, whose devices are easy."""


def _rename_keys(tree: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A copy of a parsed file with some `section.key` renamed."""
    renamed = {k: dict(v) if isinstance(v, Mapping) else v for k, v in tree.items()}
    for before, after in names.items():
        section, old = before.split(".")
        new = after.split(".")[1]
        part = renamed.get(section)
        if isinstance(part, dict) and old in part and new not in part:
            part[new] = part.pop(old)
    return renamed


def _fill(record: Any, tree: Mapping[str, Any], where: str) -> Any:
    """The record with the values of `tree`, each checked by its rule."""
    known = [f.name for f in dataclasses.fields(record)]
    values = {}
    for key, value in tree.items():
        full = f"{where}.{key}" if where else key
        if full in RETIRED:
            if value != RETIRED[full]:
                raise ValueError(
                    f"`{full}` = {value!r} is no longer a key; only {RETIRED[full]!r} is passed "
                    "over. A twin that is wrong on purpose is made in benchmarks/estimators.py."
                )
            continue
        if key not in known:
            place = f"[{where}]" if where else "the top level"
            hint = close_match(key, known) or _suggest_key(key)
            raise ValueError(f"`{full}` is no key of {place}, which has {', '.join(known)}.{hint}")
        if _is_section(record, key):
            if not isinstance(value, Mapping):
                raise ValueError(
                    f"`{full}` is a section, whose keys stand below a line [{full}]; got {value!r}."
                )
            values[key] = _fill(getattr(record, key), value, full)
        else:
            values[key] = _rule(type(record), key)(full, value)
    return dataclasses.replace(record, **values)


def _suggest_key(key: str) -> str:
    """A suggestion for a key that belongs to another section or is misspelt."""
    config = Config()
    keys = [f.name for f in dataclasses.fields(config) if not _is_section(config, f.name)]
    for f in dataclasses.fields(config):
        if _is_section(config, f.name):
            keys += [f"{f.name}.{g.name}" for g in dataclasses.fields(getattr(config, f.name))]
    last = {name.split(".")[-1]: name for name in keys}
    if key in last:
        return f' Did you mean "{last[key]}"?'
    return close_match(key, keys)


def _is_section(record: Any, name: str) -> bool:
    return dataclasses.is_dataclass(getattr(record, name))


def _rule(kind: type, name: str) -> Rule:
    return next(f.metadata["rule"] for f in dataclasses.fields(kind) if f.name == name)


def _format_line(record: Any, f: Any) -> str:
    line = f"{f.name} = {_toml(getattr(record, f.name))}"
    return f"{line:<32}  # {f.metadata['comment']}" if f.metadata["comment"] else line


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        entries = ", ".join(f"{k} = {_toml(v)}" for k, v in value.items())
        return f"{{ {entries} }}" if entries else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # shortest text that reads back as the same number
    # strings, integers and truth values look alike in both
    return json.dumps(value, ensure_ascii=False)


# ------------------------------------------------------------------------------------------ presets

KIND = "device.kind"

KINDS: dict[str, dict[str, Any]] = {
    "easy": {
        # calibrated by the model's own Euler steps
        "task.integrator": "euler",
        "task.dt": 1e-3,
        "device.loss_error": 0.0,
        "device.lead_error": 0.0,
        "device.noise_error": 0.0,
        "device.readout": 0.0,
        "device.sample_every": 1,
        "device.integrator": "same",
        "device.finer": 1,
        "calibration.prior": 1.0,
        "calibration.kerr": "ignore",
        "calibration.second_neighbours": "ignore",
    },
    "hard": {
        "task.integrator": "heun",
        "task.dt": 0.02,
        "device.loss_error": 0.2,
        "device.lead_error": 0.2,
        "device.noise_error": 0.2,
        "device.readout": 0.05,
        "device.sample_every": 1,
        "device.integrator": "heun",
        "device.finer": 40,
        "calibration.prior": 1.5,
        "calibration.kerr": "watch",
        "calibration.second_neighbours": "watch",
    },
}
"""Keys that `device.kind` sets."""

PAPER = apply_changes(
    Config(preset="paper"),
    {
        "ensemble.schedule": "escalation",
        "baseline.kind": "binned",
        "optimiser.options": {"rho": 10.0, "beta": 0.9, "epsilon": 1e-8},
    },
)
"""Everything as in the paper: 11 × 13, T = 20, its rule, its binned baseline, its escalation."""

PAPER_QUICK = apply_changes(
    PAPER,
    {
        "preset": "paper-quick",
        "iterations": 75,
        "ensemble.schedule": "fixed",
        "baseline.every": 50,  # as unbiased, and several times faster on two cores
        "keep.parameters_every": 1,
    },
)
"""The paper's lattice and rule before any escalation: 75 iterations of 1,000 trajectories."""

DEMO = apply_changes(
    Config(preset="demo"),
    {
        "iterations": 60,
        "lattice.rows": 5,
        "lattice.columns": 8,
        "task.horizon": 20.0,
        "task.dt": 2.5e-3,
        "ensemble.trajectories": 300,
        "optimiser.rule": "adam",
        "optimiser.learning_rate": 0.02,
        "optimiser.chi_scale": 0.01,  # a Kerr coefficient of 0.01 detunes by as much as ω = 0.5
        "baseline.kind": "carried",
        "keep.parameters_every": 1,
        "keep.checkpoint_seconds": 5.0,
    },
)
"""A small lattice that learns in less than a minute on two cores."""

FAST = apply_changes(
    PAPER,
    {
        "preset": "fast",
        "iterations": 300,
        "task.integrator": "heun",  # as exact at 20 times Euler's step
        "task.dt": 0.02,
        "ensemble.schedule": "fixed",
        "ensemble.trajectories": 16,
        "optimiser.rule": "adam",
        "optimiser.learning_rate": 0.1,
        "optimiser.decay": 100.0,
        "optimiser.options": {"b2": 0.99},
        "optimiser.chi_scale": 0.01,
        "baseline.kind": "twin",
        "keep.parameters_every": 1,
    },
)
"""The paper's lattice and bounds with the twin correction: 16 trajectories per iteration.

Heun's steps are 20 times those of the paper, which are Euler's.
"""

ISOLATION = apply_changes(
    FAST,
    {
        "preset": "isolation",
        "iterations": 300,
        "lattice.rows": 4,
        "lattice.columns": 5,
        "task.reward": "isolation",
        "task.integrator": "euler",
        "task.dt": 5e-4,  # a Kerr detuning of 9 is stable still: 2γ/Δω² = 5e-4
        "ensemble.trajectories": 64,
        "optimiser.learning_rate": 0.03,
        "optimiser.decay": 20.0,
        # the noise-free twin errs near bistability: all of the score's correction counts
        "baseline.forget_after": 1.0,
    },
)
"""A small Kerr lattice that transmits one way, with drive, noise, loss and bounds of the paper's.
"""

UNKNOWN = apply_changes(
    FAST,
    {
        "preset": "unknown",
        "iterations": 150,
        "ensemble.trajectories": 2,
        "device.kind": "hard",
        "device.gain_error": 0.2,
        "device.offset_error": 0.2,
        "calibration.measure_every": 3,
    },
)
"""The paper's lattice and bounds, on a device with hidden 20 % errors of every number.

Couplings, detunings, losses, lead couplings and noise amplitudes are off, samples are 0.02 apart
and have readout noise, and the device has 40 steps per step of the model. `device.kind` = "easy"
leaves errors of couplings and detunings alone.
"""

PORTS = apply_changes(
    UNKNOWN,
    {
        "preset": "ports",
        "iterations": 1000,
        "task.dt": 0.0125,
        "task.integrator": "heun",
        "start.chi_std": 0.0,
        "optimiser.learning_rate": 0.05,
        "optimiser.chi_scale": 0.0,
        "device.read": "ports",
        "device.sample_every": 4,
        "device.finer": 10,
        "calibration.kerr": "ignore",
        "calibration.second_neighbours": "ignore",
        "calibration.measure_every": 10,
    },
)
"""The device of `unknown`, of which only the amplitudes at input and output are read, 0.05 apart.

Ten steps of the training are taken per measurement, which is of two trajectories.
"""

PRESETS = {
    "demo": DEMO,
    "fast": FAST,
    "isolation": ISOLATION,
    "paper": PAPER,
    "paper-quick": PAPER_QUICK,
    "ports": PORTS,
    "unknown": UNKNOWN,
}


def find_config(source: str) -> Config:
    """A preset by its name, or the configuration in a TOML file."""
    if source in PRESETS:
        return PRESETS[source]
    if not source.endswith(".toml") and not Path(source).exists():
        raise ValueError(
            f"{source!r} is neither a preset ({', '.join(PRESETS)}) nor a "
            f"file.{close_match(source, PRESETS)}"
        )
    return load(source)
