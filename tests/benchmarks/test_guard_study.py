"""The study of the residual guard in small: right models pass, faults are found."""

import pytest

import residual_guard as study

pytestmark = pytest.mark.long


@pytest.mark.parametrize("kind", range(6))
def test_right_models_pass(kind):
    """40 batches each; the study has 5,000 (`results/guard`)."""
    model = list(study.right_models())[kind]
    assert not [
        doubt for seed in range(4) for doubt in study.watch(model, model.device, seed, 10) if doubt
    ]


def test_faults_of_two_states_are_found():
    for fault, model, device in study.faults_of_two_states():
        assert all(any(study.watch(model, device, seed, 4)) for seed in range(2)), fault


def test_faults_of_a_lattice_are_found():
    for row in study.study_lattice(1):
        assert row["first batch"] == (row["fault"] != "none"), row["fault"]
