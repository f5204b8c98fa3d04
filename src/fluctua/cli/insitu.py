"""`fluctua insitu`: train an instrument, or see the whole of it against a virtual one."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fluctua.cli.common import EXPECTED, STOPPED, fail, free_folder, say

if TYPE_CHECKING:
    from fluctua.insitu import Model
    from fluctua.insitu.bench.demo import DemoResult
    from fluctua.insitu.bench.population import PopulationComparison
    from fluctua.insitu.device_training.plan import Plan
    from fluctua.insitu.device_training.run_and_resume import Rows
    from fluctua.insitu.instrument import VirtualBench
    from fluctua.insitu.instrument.virtual import BenchDescription as Sheet
    from fluctua.tcmt import Network

app = typer.Typer(
    name="insitu",
    no_args_is_help=True,
    help="Train an instrument on the bench instead of a simulation.",
)


_as_trained = partial(typer.Option, rich_help_panel="With --calibration training")


@app.callback()
def _main() -> None:
    pass


@app.command()
def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            help="folder for the run and the figure; runs/insitu-demo-1, -2, … if not given"
        ),
    ] = None,
    iterations: Annotated[int, typer.Option(help="of the training in situ")] = 100,
    trajectories: Annotated[int, typer.Option(help="of each iteration")] = 300,
    baseline: Annotated[
        str, typer.Option(help="none, time, mean, optimal or twin (the calibrated drift)")
    ] = "twin",
    seed: Annotated[int, typer.Option(help="of the box, so of its hidden disorder")] = 3,
    devices: Annotated[
        int,
        typer.Option(
            min=1,
            max=32,
            help="several boxes that differ, trained alone and together, four held out",
        ),
    ] = 1,
    fault_rate: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="probability that an acquisition goes wrong")
    ] = 0.0,
    record: Annotated[
        bool, typer.Option(help="keep every trajectory on disk, about a gigabyte")
    ] = False,
    figure: Annotated[
        Path | None, typer.Option(help="the picture; OUT/in_situ.png if not given")
    ] = None,
) -> None:
    """Show the sim-to-real gap and how it closes: one bench, three trainings.

    Starts a bench with hidden disorder, calibrates it from recordings, trains it over its socket,
    and compares with a training of the nominal simulation and one that knows the hidden parameters.
    """
    from fluctua.insitu.bench import demo as of_one
    from fluctua.insitu.bench import population as of_many
    from fluctua.insitu.bench.device import Sheet
    from fluctua.insitu.device_training.plan import Plan
    from fluctua.plot.training import draw_in_situ, draw_population

    out = free_folder("insitu-array" if devices > 1 else "insitu-demo") if out is None else out
    picture = figure or out / ("array.png" if devices > 1 else "in_situ.png")
    try:
        plan = Plan(
            iterations=iterations,
            trajectories=trajectories,
            baseline=baseline,
            record=record,
            longest_pause=2.0,
        )
        say(_opening(plan))
        warnings.showwarning = _note
        options: dict[str, Any] = {
            "sheet": Sheet(seed=seed),
            "plan": plan,
            "say": say,
            "report": _tell,
            "bench_options": ("--fault-rate", str(fault_rate)),
            "show": lambda rows: _shown(rows, plan),
        }
        if devices > 1:
            population = of_many.compare(out, devices=devices, **options)
            say(_table_of_many(population))
            draw_population(population).savefig(picture, dpi=150)
            say(f"figure     {picture}   numbers   {out / 'array.csv'}")
            return
        result = of_one.run(out, address=_visa_if_there(), **options)
    except EXPECTED as error:
        fail(str(error))
    say(_verdict(result))
    draw_in_situ(result).savefig(picture, dpi=150)
    say(f"figure     {picture}")
    if record:
        size = sum(p.stat().st_size for p in (out / "recordings").iterdir())
        say(f"recorded   {out / 'recordings'}, {size / 2**20:,.0f} MiB")


def _table_of_many(result: PopulationComparison) -> str:
    from fluctua.core.text import with_error

    k = result.devices
    names = {"before": "before training", "one device": "trained on box 1, carried over"}
    names |= {
        "settings": "trained together, the same settings",
        "parameters": "trained together, settings corrected",
    }
    names |= {"whole range": "the same, whole range of the knobs"}
    lines = [
        "",
        f"J measured on   {'':<23} box 1   {f'boxes 1 to {k}, mean':<20} boxes that took no part",
    ]
    for design in result.designs:
        together, others = (
            with_error(*design.over(which)) for which in (slice(0, k), slice(k, None))
        )
        lines.append(
            f"  {names[design.name]:<36} {design.levels[0].J:>6.3f}   {together:<20} {others}"
        )
    return "\n".join([*lines, "", "± is the standard error between boxes."])


@app.command()
def train(
    context: typer.Context,
    address: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ADDRESS",
            help="tcp://HOST:PORT or a VISA resource; several are trained together; not needed "
            "with --resume",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the folder of the run")] = None,
    resume: Annotated[Path | None, typer.Option(help="go on with the run in this folder")] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            help="how many, those before a --resume included", show_default="100, or as before"
        ),
    ] = None,
    trajectories: Annotated[
        int | None,
        typer.Option(help="of each iteration", show_default="300; 2 with --calibration training"),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="of Adam; falls to a twentieth")] = 0.1,
    calibration: Annotated[
        str,
        typer.Option(
            help="probes: at random settings, before the training; training: by the trajectories "
            "of the training "
            "itself, with one model that every batch refines"
        ),
    ] = "probes",
    memory: Annotated[
        float, _as_trained(help="batches over which measurements fade; 0 keeps all")
    ] = 0.0,
    measure_every: Annotated[int, _as_trained(help="iterations of which one measures")] = 1,
    renew: Annotated[
        bool, _as_trained(help="forget what came before a batch that was not expected")
    ] = False,
    readout: Annotated[
        str,
        _as_trained(
            help="noise of the readout on each quadrature, or measured, as every batch has it"
        ),
    ] = "0",
    most_omega: Annotated[
        float, typer.Option(help="largest detuning that a knob is set to, of either sign")
    ] = 2.0,
    most_kappa: Annotated[float, typer.Option(help="largest coupling that a knob is set to")] = 1.5,
    probes: Annotated[int, typer.Option(help="settings at which to calibrate")] = 6,
    baseline: Annotated[
        str, typer.Option(help="none, time, mean, optimal or twin (the calibrated drift)")
    ] = "twin",
    points: Annotated[int, typer.Option(help="samples of a trajectory")] = 601,
    attempts: Annotated[int, typer.Option(help="failures in a row before giving up")] = 8,
    timeout: Annotated[float, typer.Option(help="seconds to wait for an answer")] = 30.0,
    time_limit: Annotated[
        float | None,
        typer.Option(
            help="seconds that one acquisition may take", show_default="300, or as before"
        ),
    ] = None,
    on_doubt: Annotated[
        str | None,
        typer.Option(
            help="after a batch that is not what the calibrated model does: stop, or continue with "
            "an incident",
            show_default="stop, or as before",
        ),
    ] = None,
    record: Annotated[bool, typer.Option(help="keep every trajectory on disk")] = True,
    share: Annotated[
        str,
        typer.Option(
            help="of several devices: settings (the same for all) or parameters (settings "
            "corrected by calibration)"
        ),
    ] = "settings",
    noise: Annotated[
        str,
        typer.Option(
            help="σ_W to which noise is injected, or auto: what fluctua advise recommends; as it "
            "is if not given"
        ),
    ] = "",
    modulation: Annotated[
        float, typer.Option(help="σ_κ of the modulation of the couplings, which is recorded")
    ] = 0.0,
    kerr: Annotated[bool, typer.Option("--kerr", help="train the Kerr coefficients too")] = False,
) -> None:
    """Calibrate and train an instrument.

    It is at ADDRESS and speaks the commands of docs/virtual_bench.md. Several addresses are devices
    of one kind, which are trained together: docs/laboratory.md, Arrays. Failures of the line or the
    box are retried, bad trajectories are discarded and counted, everything is recorded. Ctrl-C or a
    kill loses the iteration at hand; --resume goes on.
    """
    from fluctua.insitu.device_training import run_and_resume as loop
    from fluctua.insitu.device_training.plan import Plan
    from fluctua.insitu.instrument.virtual import VirtualBench

    try:
        if resume is not None:
            _refuse_changes(context)
            plan = loop.read_plan(resume)
            folder = resume
            points = plan.points
            where = address or plan.address.split()
        elif not address or out is None:
            raise ValueError(
                "give the address of an instrument and --out FOLDER; or --resume FOLDER."
            )
        else:
            folder = out
            where = address
            as_usual = 2 if calibration == "training" else 300
            plan = Plan(
                iterations=100 if iterations is None else iterations,
                trajectories=as_usual if trajectories is None else trajectories,
                probes=probes,
                learning_rate=learning_rate,
                baseline=baseline,
                attempts=attempts,
                record=record,
                address=" ".join(address),
                points=points,
                share=share,
                sigma_kappa=modulation,
                kerr=kerr,
                calibration=calibration,
                forget_after=memory,
                measure_every=measure_every,
                renew=renew,
                readout=readout if readout == "measured" else _number("readout", readout),
                omega_max=most_omega,
                kappa_max=most_kappa,
                time_limit=300.0 if time_limit is None else time_limit,
                on_doubt=on_doubt or "stop",
            )
        warnings.showwarning = _note
        sheet = _sheet_of(
            [partial(VirtualBench, one, timeout=timeout) for one in where], plan.attempts
        )
        if noise:
            plan = dataclasses.replace(plan, noise=_injected(noise, sheet, plan))
        options: dict[str, Any] = {
            "points": points,
            "timeout": timeout,
            "noise": plan.noise,
            "sigma_kappa": plan.sigma_kappa,
        }
        each = [partial(VirtualBench, one, **options) for one in where]
        connect = each if len(each) > 1 else each[0]
        model = _model_of(sheet, plan)
        if resume is not None:
            plan = dataclasses.replace(
                plan, iterations=plan.iterations if iterations is None else iterations
            )
            rows = loop.resume(
                connect,
                model,
                resume,
                iterations=iterations,
                time_limit=time_limit,
                on_doubt=on_doubt,
                report=_tell,
            )
        else:
            say(_opening(plan))
            rows = loop.run(connect, model, plan, folder, report=_tell)
        done = [row for row, _ in _shown(rows, plan)]
    except KeyboardInterrupt:
        say(f"\nStopped. Go on with: fluctua insitu train --resume {folder}")
        raise typer.Exit(STOPPED) from None
    except EXPECTED as error:
        fail(str(error))
    if not done:
        say("nothing was left to do; --iterations says how many there are in all.")
        return
    last = done[-1]
    say(
        f"J = {last.J:.4f} ± {last.J_stderr:.4f} after {last.trajectories:,} trajectories on the "
        "instrument"
    )
    say(f"settings   {folder / 'final.npz'}   history   {folder / 'history.csv'}")
    say(
        "what the instrument is like   "
        f"{folder / ('calibration.txt' if len(where) == 1 else 'calibration-*.txt')}"
    )
    if len(where) > 1:
        say((folder / "devices.txt").read_text().strip())


def _refuse_changes(context: typer.Context) -> None:
    """Options that a resumed run would not follow are not passed over in silence."""
    changed = [
        f"--{name.replace('_', '-')}"
        for name in context.params
        if name not in ("resume", "address", "iterations", "timeout", "time_limit", "on_doubt")
        and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if changed:
        raise ValueError(
            f"{', '.join(changed)} cannot be changed with --resume, which keeps to the plan in the "
            "folder; "
            "--iterations, --timeout, --time-limit, --on-doubt and the address can. For another "
            "plan begin another "
            "run: --out."
        )


def _sheet_of(connects: Sequence[Callable[[], VirtualBench]], attempts: int) -> Sheet:
    """What the instrument says it is, the first of several that answers.

    A garbled answer is asked for again, a line that is dead is not.
    """
    from fluctua.insitu.instrument import CommandRejected, InstrumentError

    for left, connect in zip(reversed(range(len(connects))), connects, strict=True):
        try:
            instrument = _answering(connect, attempts)
            break
        except InstrumentError as error:
            if not left or isinstance(error, CommandRejected):
                raise
            _note(str(error))
    instrument.close()
    return instrument.description


def _network_of(sheet: Sheet) -> Network:
    from fluctua import tcmt

    return tcmt.rectangular(sheet.rows, sheet.columns, sigma_w=sheet.sigma_w)


def _model_of(sheet: Sheet, plan: Plan) -> Model:
    """The network of a data sheet as an experiment."""
    from fluctua.insitu import network_model

    bounds = {"omega": (-plan.omega_max, plan.omega_max), "kappa": (0.0, plan.kappa_max)}
    if plan.kerr:
        # at the edge it detunes by a few couplings where the light is
        bounds["chi"] = (-0.05, 0.05)
    return network_model(
        _network_of(sheet),
        interval=sheet.interval,
        points=plan.points,
        bounds=bounds,
        sigma_kappa=plan.sigma_kappa,
    )


def _injected(text: str, sheet: Sheet, plan: Plan) -> float:
    """The noise to inject for the wanted σ_W: what is there adds in squares."""
    import jax
    import numpy as np

    from fluctua import tcmt
    from fluctua.insitu.bench.device import MOST_NOISE
    from fluctua.runs.advise import advise

    own = sheet.sigma_w
    most = float(np.hypot(sheet.sigma_w, MOST_NOISE))
    if text == "auto":
        task = tcmt.transmission(
            _network_of(sheet),
            horizon=(plan.points - 1) * sheet.interval,
            dt=sheet.interval,
            sigma_kappa=plan.sigma_kappa,
        )
        grid = np.geomspace(own, most, 4).tolist()
        start = {"omega": np.zeros(task.network.sites), "kappa": np.ones(len(task.network.bonds))}
        best = advise(
            jax.random.key(plan.seed),
            task,
            start,
            trajectories=plan.trajectories,
            sigma_w=grid,
            baseline="time",
        ).best
        wanted = best.sigma_w
        say(
            f"noise      σ_W = {wanted:.3g} of {own:.3g} to {most:.3g}, limited by the "
            f"{best.limited_by}"
        )
    else:
        try:
            wanted = float(text)
        except ValueError:
            raise ValueError(f"--noise is σ_W, a number, or auto; got {text!r}.") from None
    if not own * (1 - 1e-9) <= wanted <= most * (1 + 1e-9):
        raise ValueError(
            f"--noise must be {own:g} to {most:.3g}: what the device has of its own, and what can "
            "be added to it; got "
            f"{wanted:g}."
        )
    return float(np.sqrt(max(wanted**2 - own**2, 0.0)))


def _answering(connect: Callable[[], VirtualBench], attempts: int) -> VirtualBench:
    from fluctua.insitu.instrument import InvalidReply

    for _ in range(attempts - 1):
        try:
            return connect()
        except InvalidReply as error:
            _note(str(error))
    return connect()


def _visa_if_there() -> Any:
    """Through PyVISA where it is installed, else over a bare socket."""
    try:
        import pyvisa  # noqa: F401
        import pyvisa_py  # noqa: F401
    except ImportError:
        return None
    return lambda host, port: f"TCPIP::{host}::{port}::SOCKET"


def _note(message: Warning | str, *rest: Any, **more: Any) -> None:
    """A warning as a line."""
    say(f"note: {message}", err=True, fg=typer.colors.YELLOW)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f'--{name} is a number or "measured"; got {text!r}.') from None


def _opening(plan: Plan) -> str:
    if plan.calibration == "training":
        seldom = f", measured in one of {plan.measure_every}" if plan.measure_every > 1 else ""
        return (
            f"plan       train and calibrate at once, {plan.iterations} iterations of "
            f"{plan.trajectories}{seldom}"
        )
    return (
        f"plan       calibrate at {plan.probes} settings, {plan.probe_trajectories} trajectories "
        "each; then train, "
        f"{plan.iterations} iterations of {plan.trajectories}"
    )


def _tell(incident: Any) -> None:
    say(f"note: {incident.message}", err=True, fg=typer.colors.YELLOW)


def _shown(rows: Rows, plan: Plan) -> Iterator[Any]:
    """Rows with a progress display, bar or lines."""
    from fluctua.cli.progress import watch

    kept: list[Any] = []

    def records() -> Iterator[Any]:
        for row, record in rows:
            kept.append(row)
            yield record._replace(trajectories=row.trajectories)

    for record in watch(records(), plan.iterations):
        yield kept[-1], record


def _verdict(result: DemoResult) -> str:
    from fluctua.core.text import with_error

    def shown(level):
        return with_error(level.J, level.stderr)

    better = result.in_situ.J > result.nominal.J
    rows = (
        ("before training", result.before, ""),
        (
            "trained on the nominal simulation, carried over",
            result.nominal,
            f"the simulation promised {result.nominal_promised:.3f}",
        ),
        (
            "trained in situ",
            result.in_situ,
            f"{result.rows[-1].trajectories:,} trajectories on the bench",
        ),
        ("trained with the bench's true parameters", result.true, ""),
    )
    lines = ["", "J measured on the bench"]
    lines += [
        f"  {what:<49} {shown(level):<18} {note and f'({note})'}".rstrip()
        for what, level, note in rows
    ]
    times = (
        f", and {result.in_situ.J / result.nominal.J:.1f} times the nominal training"
        if better
        else ""
    )
    lines += ["", f"In situ reaches {result.share:.0%} of what the true parameters reach{times}."]
    known = ", ".join(f"{name} to {error:.3f}" for name, error in result.calibration_error.items())
    return "\n".join([*lines, f"At the end the calibration knew {known} (root mean square)."])
