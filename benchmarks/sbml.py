"""SBML models as jump processes: the part of SBML that the stochastic test suite uses.

A reaction is an event of `fl.Jumps`: its kinetic law is the rate, its stoichiometry the change.
Amounts are the state, parameters are θ. An event of SBML that waits for a time is a `Reset`, at
which a simulation is cut. One that waits for a state can only begin to hold when a reaction fires,
so it is a part of the change of that reaction. What is not translated is refused by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import libsbml
import numpy as np

import fluctua as fl

Lookup = Callable[[str], Any]
Assignment = Callable[[dict, Any, float], Any]

ARITHMETIC = {
    libsbml.AST_PLUS: lambda *v: reduce(operator.add, v, 0.0),
    libsbml.AST_TIMES: lambda *v: reduce(operator.mul, v, 1.0),
    libsbml.AST_MINUS: lambda a, *b: a - b[0] if b else -a,
    libsbml.AST_DIVIDE: operator.truediv,
    libsbml.AST_POWER: operator.pow,
    libsbml.AST_FUNCTION_POWER: operator.pow,
    libsbml.AST_FUNCTION_EXP: jnp.exp,
    libsbml.AST_FUNCTION_LN: jnp.log,
    libsbml.AST_RELATIONAL_GT: operator.gt,
    libsbml.AST_RELATIONAL_GEQ: operator.ge,
    libsbml.AST_RELATIONAL_LT: operator.lt,
    libsbml.AST_RELATIONAL_LEQ: operator.le,
}
NUMBERS = (libsbml.AST_INTEGER, libsbml.AST_REAL, libsbml.AST_REAL_E, libsbml.AST_RATIONAL)
AT_LEAST = (libsbml.AST_RELATIONAL_GT, libsbml.AST_RELATIONAL_GEQ)
AT_MOST = (libsbml.AST_RELATIONAL_LT, libsbml.AST_RELATIONAL_LEQ)


class Reset(NamedTuple):
    """New amounts at a given time. assign: (theta, x, t) -> x (M,)."""

    time: float
    assign: Assignment


class Model(NamedTuple):
    """A translated model.

    name: of the model. process: reactions as events.
    theta: parameters, local ones as "reaction.parameter".
    start: amounts at time 0 (M,). state: names of the components of the state.
    amounts: (theta, x) -> amount of every species, also of those that a rule or nothing changes.
    resets: events at given times, in order.
    """

    name: str
    process: fl.Jumps
    theta: dict[str, Any]
    start: np.ndarray
    state: tuple[str, ...]
    amounts: Callable[[dict, Any], dict[str, Any]]
    resets: tuple[Reset, ...]


def read_model(source: Path | str) -> Model:
    """Translate an SBML file, or the text of one."""
    text = source.read_text() if isinstance(source, Path) else source
    document = libsbml.readSBMLFromString(text)
    if document.getModel() is None:
        raise ValueError(f"no SBML model in {source!s:.80}: {document.getErrorLog().toString()}")
    model = document.getModel().clone()  # formulas live as long as the model
    _refuse_untranslated(model)
    return _Translation(model).translate()


def evaluate(node: libsbml.ASTNode, lookup: Lookup) -> Any:
    """Value of a formula. lookup: name -> value; "time" and function definitions included."""
    kind = node.getType()
    if kind in NUMBERS:
        return node.getValue()
    if kind == libsbml.AST_NAME_TIME:
        return lookup("time")
    if kind == libsbml.AST_NAME:
        return lookup(node.getName())
    values = [evaluate(child, lookup) for child in _children(node)]
    if kind == libsbml.AST_FUNCTION:
        return _call(lookup(node.getName()), values)
    if kind not in ARITHMETIC:
        raise ValueError(f"`{libsbml.formulaToL3String(node)}` has an operator not translated.")
    return ARITHMETIC[kind](*values)


def _call(function: libsbml.FunctionDefinition, values: list[Any]) -> Any:
    """Value of a function that the model defines."""
    names = [function.getArgument(i).getName() for i in range(function.getNumArguments())]
    inside = dict(zip(names, values, strict=True))
    return evaluate(function.getBody(), inside.__getitem__)


def _children(node: libsbml.ASTNode) -> list[libsbml.ASTNode]:
    return [node.getChild(i) for i in range(node.getNumChildren())]


def _refuse_untranslated(model: libsbml.Model) -> None:
    """Refuse elements of a model that would change its process and are not translated."""
    found = {
        "an initial assignment": model.getNumInitialAssignments(),
        "a fast reaction": sum(r.getFast() for r in model.getListOfReactions()),
        "a rule that is not an assignment": sum(
            not r.isAssignment() for r in model.getListOfRules()
        ),
        "a delay of an event": sum(e.isSetDelay() for e in model.getListOfEvents()),
        "a stoichiometry that is a formula": sum(
            side.isSetStoichiometryMath()
            for r in model.getListOfReactions()
            for side in [*r.getListOfReactants(), *r.getListOfProducts()]
        ),
    }
    for what, count in found.items():
        if count:
            raise ValueError(f"the model has {what}, which is not translated to a jump process.")


class _Translation:
    """Names of a model, and what they mean."""

    def __init__(self, model: libsbml.Model) -> None:
        self.model = model
        self.sizes = {
            c.getId(): c.getSize() if c.isSetSize() else np.nan
            for c in model.getListOfCompartments()
        }
        self.functions = {f.getId(): f for f in model.getListOfFunctionDefinitions()}
        self.rules = {r.getVariable(): r.getMath() for r in model.getListOfRules()}
        self.species = {s.getId(): s for s in model.getListOfSpecies()}
        self.state = tuple(
            name
            for name, s in self.species.items()
            if not s.getConstant() and name not in self.rules
        )
        self.theta = {
            p.getId(): p.getValue()
            for p in model.getListOfParameters()
            if p.getId() not in self.rules
        }
        self.local: dict[str, list[str]] = {}
        for reaction in model.getListOfReactions():
            law = reaction.getKineticLaw()
            parameters = [*law.getListOfParameters(), *law.getListOfLocalParameters()]
            self.local[reaction.getId()] = [p.getId() for p in parameters]
            self.theta |= {f"{reaction.getId()}.{p.getId()}": p.getValue() for p in parameters}

    def translate(self) -> Model:
        timed, on_state = [], []
        for event in self.model.getListOfEvents():
            time = _find_time(event.getTrigger().getMath())
            if time is None:
                on_state.append((event.getTrigger().getMath(), self.make_assignment(event)))
            else:
                timed.append(Reset(time, self.make_assignment(event)))
        theta = {name: jnp.asarray(float(value)) for name, value in self.theta.items()}
        start = np.array([self.initial_amount(name) for name in self.state])
        self.rates(theta, jnp.asarray(start), 0.0)  # refuses a law that is not translated
        changes: Any = [self.change(r) for r in self.model.getListOfReactions()]
        if on_state:
            self.refuse_initially_true(on_state, theta, start)
            changes = self.make_jump(np.array(changes), on_state)
        return Model(
            self.model.getName() or self.model.getId(),
            fl.Jumps(self.rates, changes),
            theta,
            start,
            self.state,
            self.amounts,
            tuple(sorted(timed, key=lambda reset: reset.time)),
        )

    def initial_amount(self, name: str) -> float:
        species = self.species[name]
        if species.isSetInitialAmount():
            return species.getInitialAmount()
        return species.getInitialConcentration() * self.sizes[species.getCompartment()]

    def symbol_unit(self, name: str) -> float:
        """Amount that the symbol of a species counts as 1: a concentration has that of its size."""
        species = self.species[name]
        return 1.0 if species.getHasOnlySubstanceUnits() else self.sizes[species.getCompartment()]

    def make_lookup(self, theta: dict, x: Any, t: Any, reaction: str = "") -> Lookup:
        """A function from names to values at a state; rules are evaluated when they are asked."""
        place = {name: i for i, name in enumerate(self.state)}

        def lookup(name: str) -> Any:
            if name in self.local.get(reaction, ()):
                return theta[f"{reaction}.{name}"]
            if name == "time":
                return t
            if name in self.functions:
                return self.functions[name]
            if name in self.rules:
                return evaluate(self.rules[name], lookup)
            if name in place:
                return x[place[name]] / self.symbol_unit(name)
            if name in self.species:
                return self.initial_amount(name) / self.symbol_unit(name)
            value = theta[name] if name in theta else self.sizes.get(name)
            if value is None or (name in self.sizes and not np.isfinite(value)):
                raise ValueError(f"`{name}` has no value in the model.")
            return value

        return lookup

    def rates(self, theta: dict, x: Any, t: Any) -> Any:
        """Kinetic laws, extents per time. Shape (R,)."""
        values = [
            evaluate(r.getKineticLaw().getMath(), self.make_lookup(theta, x, t, r.getId()))
            for r in self.model.getListOfReactions()
        ]
        return jnp.stack([jnp.asarray(value, x.dtype) for value in values])

    def amounts(self, theta: dict, x: Any) -> dict[str, Any]:
        lookup = self.make_lookup(theta, x, 0.0)
        return {name: lookup(name) * self.symbol_unit(name) for name in self.species}

    def change(self, reaction: libsbml.Reaction) -> list[float]:
        """Change of the state by one reaction; boundary species are not changed."""
        total = dict.fromkeys(self.state, 0.0)
        for sign, sides in (
            (-1, reaction.getListOfReactants()),
            (1, reaction.getListOfProducts()),
        ):
            for side in sides:
                if side.getSpecies() in total:
                    total[side.getSpecies()] += sign * side.getStoichiometry()
        return [0.0 if self.species[n].getBoundaryCondition() else total[n] for n in self.state]

    def make_assignment(self, event: libsbml.Event) -> Assignment:
        """What an event does: (theta, x, t) -> x."""
        formulas = {a.getVariable(): a.getMath() for a in event.getListOfEventAssignments()}
        unknown = set(formulas) - set(self.state)
        if unknown:
            raise ValueError(
                f"the event {event.getId()} sets {', '.join(sorted(unknown))}; only species that "
                "reactions can change are the state of a jump process."
            )

        def assign(theta: dict, x: Any, t: float) -> Any:
            lookup = self.make_lookup(theta, x, t)
            new = [
                evaluate(formulas[name], lookup) * self.symbol_unit(name)
                if name in formulas
                else x[i]
                for i, name in enumerate(self.state)
            ]
            return jnp.stack([jnp.asarray(value, x.dtype) for value in new])

        return assign

    def make_jump(self, table: np.ndarray, events: list) -> fl.RandomJump:
        """Changes by reactions and, where one makes a trigger true, by its event too."""

        def sample(key, theta, x, t, context, channel):
            after = x + jnp.asarray(table, x.dtype)[channel]
            for trigger, assign in events:
                before = evaluate(trigger, self.make_lookup(theta, x, t))
                fires = evaluate(trigger, self.make_lookup(theta, after, t)) & ~before
                after = jnp.where(fires, assign(theta, after, t), after)
            return after - x

        def log_density(theta, change, x, t, context, channel):
            return jnp.zeros((), x.dtype)  # no chance beyond that of the channel

        return fl.RandomJump(sample, log_density)

    def refuse_initially_true(self, events: list, theta: dict, start: np.ndarray) -> None:
        for trigger, _ in events:
            if evaluate(trigger, self.make_lookup(theta, start, 0.0)):
                raise ValueError("an event whose trigger holds at the start is not translated.")


def _find_time(trigger: libsbml.ASTNode) -> float | None:
    """Time from which a trigger such as "t >= 25" holds; None if it does not wait for a time."""
    kind = trigger.getType()
    if kind not in (*AT_LEAST, *AT_MOST):
        return None
    left, right = _children(trigger)
    clock, bound = (left, right) if kind in AT_LEAST else (right, left)
    if clock.getType() == libsbml.AST_NAME_TIME and bound.getType() in NUMBERS:
        return float(bound.getValue())
    return None
