"""SBML models as jump processes, and the statistics of the stochastic test suite."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy

pytest.importorskip("libsbml", reason="models of the test suite are read by python-libsbml")

import dsmts
import fluctua as fl
import sbml

MATH = 'xmlns="http://www.w3.org/1998/Math/MathML"'
HEAD = (
    '<?xml version="1.0" encoding="UTF-8"?>'
    '<sbml xmlns="http://www.sbml.org/sbml/level3/version1/core" level="3" version="1">'
)


def apply(operator, *arguments):
    parts = "".join(a if a.startswith("<") else f"<ci>{a}</ci>" for a in arguments)
    return f"<apply>{operator}{parts}</apply>"


def number(value):
    return f"<cn>{value}</cn>"


TIME = '<csymbol encoding="text" definitionURL="http://www.sbml.org/sbml/symbols/time">t</csymbol>'


def event(trigger, species, formula):
    return (
        '<event useValuesFromTriggerTime="true"><trigger initialValue="false" persistent="true">'
        f"<math {MATH}>{trigger}</math></trigger><listOfEventAssignments>"
        f'<eventAssignment variable="{species}"><math {MATH}>{formula}</math></eventAssignment>'
        "</listOfEventAssignments></event>"
    )


def write_model(law, events="", rules="", local="", stoichiometry=1):
    """One species X in a volume of 2 that is made from a boundary species by one reaction."""
    return f"""{HEAD}<model name="tiny">
      <listOfFunctionDefinitions><functionDefinition id="twice"><math {MATH}><lambda>
        <bvar><ci>z</ci></bvar>{apply("<times/>", number(2), "z")}</lambda></math>
      </functionDefinition></listOfFunctionDefinitions>
      <listOfCompartments><compartment id="cell" size="2" spatialDimensions="3" constant="true"/>
      </listOfCompartments>
      <listOfSpecies>
        <species id="X" compartment="cell" initialAmount="0" hasOnlySubstanceUnits="true"
          boundaryCondition="false" constant="false"/>
        <species id="source" compartment="cell" initialConcentration="3"
          hasOnlySubstanceUnits="false" boundaryCondition="true" constant="false"/>
        <species id="y" compartment="cell" hasOnlySubstanceUnits="true"
          boundaryCondition="false" constant="false"/>
      </listOfSpecies>
      <listOfParameters><parameter id="k" value="7" constant="true"/></listOfParameters>
      <listOfRules><assignmentRule variable="y"><math {MATH}>{apply("<times/>", number(2), "X")}
        </math></assignmentRule>{rules}</listOfRules>
      <listOfReactions><reaction id="make" reversible="false" fast="false">
        <listOfReactants><speciesReference species="source" stoichiometry="1" constant="true"/>
        </listOfReactants>
        <listOfProducts><speciesReference species="X" stoichiometry="{stoichiometry}"
          constant="true"/></listOfProducts>
        <kineticLaw><math {MATH}>{law}</math>{local}</kineticLaw>
      </reaction></listOfReactions>
      <listOfEvents>{events}</listOfEvents></model></sbml>"""


LOCAL = '<listOfLocalParameters><localParameter id="k" value="0.5"/></listOfLocalParameters>'
CONSTANT = apply("<times/>", "k", "source")  # 0.5 × 3 with the local k


def make_case(text, t):
    model = sbml.read_model(text)
    nothing = {"X": np.zeros(len(t))}
    return dsmts.Case(1, model, 1, np.asarray(t), nothing, nothing, (-3, 3), (-5, 5))


def test_rates_have_concentrations_functions_rules_and_local_parameters():
    law = apply("<plus/>", CONSTANT, apply("<ci>twice</ci>", "y"), "k")
    model = sbml.read_model(write_model(law, local=LOCAL, stoichiometry=5))
    assert model.state == ("X", "source")
    assert model.start.tolist() == [0.0, 6.0]  # an amount, from 3 per unit of the volume 2
    rates = model.process.rates(model.theta, jnp.array([4.0, 6.0]), 0.0)
    assert rates.tolist() == [0.5 * 3 + 2 * (2 * 4) + 0.5]
    assert model.process.changes == ((5.0, 0.0),)  # a boundary species is not used up
    assert set(model.theta) == {"k", "make.k"}
    amounts = model.amounts(model.theta, jnp.array([4.0, 6.0]))
    assert {name: float(value) for name, value in amounts.items()} == {
        "X": 4.0,
        "source": 6.0,
        "y": 8.0,
    }


def test_a_state_event_acts_with_the_reaction_that_triggers_it():
    trigger = apply("<gt/>", "X", number(3))
    text = write_model(CONSTANT, local=LOCAL, events=event(trigger, "X", number(0)))
    count = 4000
    x = dsmts.simulate(make_case(text, [0.0, 2.0]), count, seed=0)["X"][:, -1]
    many = np.arange(40)
    weights = scipy.stats.poisson.pmf(many, 1.5 * 2.0)  # X is the number of events modulo 4
    shares = np.bincount(many % 4, weights)
    found = np.bincount(x.astype(int), minlength=4) / count
    assert len(found) == 4
    z = (found - shares) / np.sqrt(shares * (1 - shares) / count)
    assert np.abs(z).max() < 4


def test_a_timed_event_between_output_times_sets_the_state():
    trigger = apply("<geq/>", TIME, number(0.5))
    text = write_model(CONSTANT, local=LOCAL, events=event(trigger, "X", number(20)))
    case = make_case(text, [0.0, 1.0, 2.0])
    assert [reset.time for reset in case.model.resets] == [0.5]
    count = 2000
    x = dsmts.simulate(case, count, seed=1)["X"]
    for place, mean in ((1, 1.5 * 0.5), (2, 1.5 * 1.5)):  # Poisson since the reset
        assert abs(x[:, place].mean() - 20 - mean) < 4 * np.sqrt(mean / count)


def test_what_is_not_translated_is_refused_by_name():
    rule = f'<rateRule variable="k"><math {MATH}>{number(1)}</math></rateRule>'
    with pytest.raises(ValueError, match="rule that is not an assignment"):
        sbml.read_model(write_model(CONSTANT, rules=rule))
    with pytest.raises(ValueError, match="sin"):
        sbml.read_model(write_model(apply("<sin/>", "X")))


def test_statistics_are_those_of_the_guide():
    x = np.array([[1.0, 5.0], [3.0, 5.0]])
    found = dsmts.judge(x, np.array([1.5, 5.0]), np.array([2.0, 0.0]))
    spread = (0.5**2 + 1.5**2) / 2
    assert found.z[0] == pytest.approx(np.sqrt(2) * 0.5 / 2)
    assert found.y[0] == pytest.approx(np.sqrt(2 / 2) * (spread / 4 - 1))
    assert np.isnan(found.z[1])
    assert found.exact
    assert not dsmts.judge(x, np.array([1.5, 5.1]), np.array([2.0, 0.0])).exact


def test_statistics_of_normal_samples_have_unit_variance():
    rng = np.random.default_rng(0)
    x = 3 + 2 * rng.normal(size=(500, 400))  # 400 independent times
    found = dsmts.judge(x, np.full(400, 3.0), np.full(400, 2.0))
    for values in (found.z, found.y, found.y_own):
        assert abs(values.mean()) < 4 / np.sqrt(400)
        assert abs(values.std() - 1) < 4 / np.sqrt(800)


def test_the_mean_of_linear_rates_and_its_gradient_are_exact():
    law = apply("<times/>", "k", apply("<plus/>", "X", number(2)))
    model = sbml.read_model(write_model(law))
    assert dsmts.is_linear(model)
    theta = {"k": jnp.array(0.3)}
    mean = dsmts.exact_mean(model, theta, 2.0)[0]
    assert float(mean) == pytest.approx(2 * np.exp(0.3 * 2.0) - 2, rel=1e-5)


def test_the_error_of_a_variance_is_that_of_the_fourth_moment():
    process = fl.Jumps(lambda th, x: jnp.array([1.5]), [[1.0]])
    poisson = sbml.Model("poisson", process, {}, np.zeros(1), ("X",), None, ())
    factors = dsmts.error_factors(poisson, np.array([0.0, 2.0]))  # μ₄/σ⁴ = 3 + 1/3
    assert np.isnan(factors[0])
    assert factors[1] == pytest.approx(np.sqrt((2 + 1 / 3) / 2))


@pytest.mark.long
def test_gradients_of_a_birth_process_are_exact():
    law = apply("<times/>", "make.k", apply("<plus/>", "X", number(2))).replace("make.k", "k")
    local = '<listOfLocalParameters><localParameter id="k" value="0.3"/></listOfLocalParameters>'
    case = make_case(write_model(law, local=local), [0.0, 1.0, 2.0])
    (slope,) = dsmts.check_gradient(case, 4000, "jax")
    assert slope.exact == pytest.approx(2 * 2.0 * np.exp(0.6), rel=1e-4)
    assert abs(slope.estimate - slope.exact) < 4 * slope.stderr


def test_a_change_of_random_size_is_not_linear():
    trigger = apply("<gt/>", "X", number(3))
    model = sbml.read_model(
        write_model(CONSTANT, local=LOCAL, events=event(trigger, "X", number(0)))
    )
    assert isinstance(model.process.changes, fl.RandomJump)
    assert not dsmts.is_linear(model)
