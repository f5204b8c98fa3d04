"""The commands of the virtual bench, one function each: (session, arguments) -> an answer or None.

docs/virtual_bench.md lists them, and the tests compare the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from fluctua.insitu.bench.box import Problem
from fluctua.insitu.bench.device import FAMILIES, LIMITS
from fluctua.insitu.bench.faults import KINDS, Fault
from fluctua.insitu.instrument import scpi

if TYPE_CHECKING:
    from fluctua.insitu.bench.virtual import Session

IDENTITY = "fluctua,virtual bench,{seed},{version}"

# ------------------------------------------------------------------------------------------ arguments


def _number(text: str, low: float, high: float) -> float:
    value = scpi.number(text)
    if value is None:
        raise Problem(-120, f"a decimal number was expected, not {text[:30]}")
    if not low <= value <= high:
        raise Problem(-222, f"{value:g} is outside {low:g} to {high:g}")
    return value


def _whole(text: str, low: int, high: int) -> int:
    value = _number(text, low, high)
    if value != int(value):
        raise Problem(-104, f"a whole number was expected, not {text[:30]}")
    return int(value)


# ------------------------------------------------------------------------------------------- commands

Handler = Callable[["Session", tuple[str, ...]], str | bytes | None]
TABLE: list[tuple[re.Pattern[str], Handler, tuple[int, int]]] = []
LARGE = 10_000


def command(form: str, least: int = 0, most: int | None = None) -> Callable[[Handler], Handler]:
    """Register a handler. least, most: how many parameters it takes."""

    def register(run: Handler) -> Handler:
        query = r"\?" if form.endswith("?") else ""
        compiled = re.compile(scpi.pattern(form.rstrip("?")).pattern + query)
        TABLE.append((compiled, run, (least, least if most is None else most)))
        return run

    return register


@command("*IDN?")
def _identify(s: Session, a: tuple[str, ...]) -> str:
    from importlib.metadata import version

    return IDENTITY.format(seed=s.bench.sheet.seed, version=version("fluctua"))


@command("*RST")
def _reset(s: Session, a: tuple[str, ...]) -> None:
    s.bench.reset()


@command("*CLS")
def _clear(s: Session, a: tuple[str, ...]) -> None:
    s.errors.clear()
    s.events = 0


@command("*ESR?")
def _events(s: Session, a: tuple[str, ...]) -> str:
    told = s.events | (128 if s.bench.power_on else 0)
    s.events, s.bench.power_on = 0, False
    return str(told)


@command("*OPC?")
def _complete(s: Session, a: tuple[str, ...]) -> str:
    return "1"  # commands are carried out one after the other


@command("*OPC")
def _complete_event(s: Session, a: tuple[str, ...]) -> None:
    s.events |= 1


@command("*WAI")
def _wait(s: Session, a: tuple[str, ...]) -> None:
    pass


@command("*TST?")
def _self_test(s: Session, a: tuple[str, ...]) -> str:
    return "0"


@command("*ESE", 1)
def _mask(s: Session, a: tuple[str, ...]) -> None:
    s.mask = _whole(a[0], 0, 255)


@command("*ESE?")
def _mask_told(s: Session, a: tuple[str, ...]) -> str:
    return str(s.mask)


@command("*SRE", 1)
def _service(s: Session, a: tuple[str, ...]) -> None:
    s.service = _whole(a[0], 0, 255)


@command("*SRE?")
def _service_told(s: Session, a: tuple[str, ...]) -> str:
    return str(s.service)


@command("*STB?")
def _status(s: Session, a: tuple[str, ...]) -> str:
    events = s.events | (128 if s.bench.power_on else 0)
    byte = (4 if s.errors else 0) | (32 if events & s.mask else 0)
    return str(byte | (64 if byte & s.service else 0))


@command("SYSTem:ERRor[:NEXT]?")
def _error(s: Session, a: tuple[str, ...]) -> str:
    return str(s.errors.popleft() if s.errors else scpi.NO_ERROR)


@command("SYSTem:ERRor:COUNt?")
def _error_count(s: Session, a: tuple[str, ...]) -> str:
    return str(len(s.errors))


@command("SYSTem:VERSion?")
def _version(s: Session, a: tuple[str, ...]) -> str:
    return "1999.0"


@command("NETWork:SITes?")
def _sites(s: Session, a: tuple[str, ...]) -> str:
    return str(s.bench.sheet.nominal.sites)


@command("NETWork:LATTice?")
def _lattice(s: Session, a: tuple[str, ...]) -> str:
    return f"{s.bench.sheet.rows},{s.bench.sheet.columns}"


@command("NETWork:BONDs?")
def _bonds(s: Session, a: tuple[str, ...]) -> str:
    return ",".join(map(str, s.bench.sheet.nominal.bonds.ravel()))


@command("NETWork:NOISe?")
def _noise(s: Session, a: tuple[str, ...]) -> str:
    return f"{s.bench.sheet.sigma_w!r}"


@command("SOURce:DRIVe", 1)
def _drive(s: Session, a: tuple[str, ...]) -> None:
    s.bench.amplitude = _number(a[0], 0.0, 1000.0)


@command("SOURce:DRIVe?")
def _drive_told(s: Session, a: tuple[str, ...]) -> str:
    return repr(s.bench.amplitude)


def _knob(name: str, form: str) -> None:
    """The commands of one family of knobs."""

    def put(s: Session, a: tuple[str, ...]) -> None:
        expected = s.bench.settings[name].size
        if len(a) != expected:
            raise Problem(-109 if len(a) < expected else -223, f"{expected} numbers were expected, not {len(a)}")
        s.bench.settings[name] = np.array([_number(text, *LIMITS[name]) for text in a])

    command(form, 1, LARGE)(put)
    command(form + "?")(lambda s, a: scpi.numbers(s.bench.settings[name]))
    command(form + ":RANGe?")(lambda s, a: scpi.numbers(np.array(LIMITS[name])))


for _name, _form in zip(FAMILIES, ("SOURce:OMEGa", "SOURce:KAPPa"), strict=True):
    _knob(_name, _form)


@command("ACQuire:COUNt", 1)
def _count(s: Session, a: tuple[str, ...]) -> None:
    s.bench.count = _whole(a[0], 1, 10_000)


@command("ACQuire:COUNt?")
def _count_told(s: Session, a: tuple[str, ...]) -> str:
    return str(s.bench.count)


@command("ACQuire:POINts", 1)
def _points(s: Session, a: tuple[str, ...]) -> None:
    s.bench.points = _whole(a[0], 2, 100_000)


@command("ACQuire:POINts?")
def _points_told(s: Session, a: tuple[str, ...]) -> str:
    return str(s.bench.points)


@command("ACQuire:INTerval?")
def _interval(s: Session, a: tuple[str, ...]) -> str:
    return repr(s.bench.sheet.interval)


@command("ACQuire:SCALe?")
def _scale(s: Session, a: tuple[str, ...]) -> str:
    return repr(s.bench.sheet.scale)


@command("ACQuire:RANGe?")
def _range(s: Session, a: tuple[str, ...]) -> str:
    return repr(s.bench.sheet.adc_range)


@command("ACQuire:SHOTs?")
def _shots(s: Session, a: tuple[str, ...]) -> str:
    return str(s.bench.shots)


@command("INITiate[:IMMediate]")
def _initiate(s: Session, a: tuple[str, ...]) -> None:
    s.bench.initiate()
    if s.bench.fault == "reboot":
        s.then = "reboot"


@command("ABORt")
def _abort(s: Session, a: tuple[str, ...]) -> None:
    s.bench.codes = None


@command("FETCh[:WAVeform]?")
def _fetch(s: Session, a: tuple[str, ...]) -> bytes:
    codes, fault = s.bench.codes, s.bench.fault
    if codes is None:
        raise Problem(-230, "nothing was acquired; INIT first")
    s.bench.fault = ""
    if fault in ("drop", "stall"):
        s.then = fault
    data = codes.astype("<i2", copy=False).tobytes()
    return scpi.block(data[: len(data) // 3] if fault == "short" else data)


@command("DIAGnostic:FAULt", 1, 3)
def _fault(s: Session, a: tuple[str, ...]) -> None:
    kind = a[0].lower()
    if kind not in KINDS:
        raise Problem(-224, f"one of {' '.join(KINDS)} was expected")
    after, times = (_whole(a[i], 1, 10**6) if len(a) > i else 1 for i in (1, 2))
    if len(s.bench.faults.pending) >= 100:
        raise Problem(-223, "a hundred faults are pending")
    s.bench.faults.pending.append(Fault(kind, after, times))


@command("DIAGnostic:FAULt?")
def _faults_told(s: Session, a: tuple[str, ...]) -> str:
    return ",".join(map(str, s.bench.faults.pending)) or "none"


@command("DIAGnostic:FAULt:CLEar")
def _faults_cleared(s: Session, a: tuple[str, ...]) -> None:
    s.bench.faults.pending.clear()
