"""Tests of the result of a run as the command prints it."""

from typing import Any

import pytest

from fedloom.cli.output import _result_lines
from fedloom.config import make_config

NONE = {f"{kind}_accuracy_{of}": None for kind in ("client", "personal") for of in ("mean", "worst10")}
LOSS = {"rounds": 30, "accuracy": None, "last_accuracy": None, "accuracy_std": None, "loss": 0.5, **NONE}


def lines(summary: dict[str, Any]) -> list[str]:
    return [f"{name} {text}" for name, text in _result_lines(summary, make_config({"rounds": 30, "eval_every": 2}))]


def test_of_a_window() -> None:
    summary = {**LOSS, "window": 3, "accuracy": 0.5, "accuracy_std": 0.01, "last_accuracy": 0.51, "last_loss": 1.25}
    summary |= {"client_accuracy_mean": 0.4, "client_accuracy_worst10": 0.1}
    summary |= {"personal_accuracy_mean": 0.6, "personal_accuracy_worst10": 0.2}
    assert lines(summary) == [
        "accuracy 50.00 % on test data, mean of the last 3 of 15 evaluations (sd 1.00 %)",
        "own 60.00 % on average with the clients' own models, 20.00 % for the worst tenth",
        "clients 40.00 % on average, 10.00 % for the worst tenth",
        "last 51.00 % after round 30 (loss 1.2500)",
    ]


def test_of_one_evaluation() -> None:
    summary = {**LOSS, "window": 1, "accuracy": 0.5, "last_accuracy": 0.5, "last_loss": None}
    assert lines(summary) == ["accuracy 50.00 % on test data after round 30 (loss –)"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            {"window": 3, "loss_std": 0.25, "last_loss": 0.75},
            [
                "loss 0.5000 on test data, mean of the last 3 of 15 evaluations (sd 0.2500)",
                "last 0.7500 after round 30",
            ],
        ),
        ({"window": 1, "loss_std": None, "last_loss": 0.5}, ["loss 0.5000 on test data after round 30"]),
        ({"window": 0}, ["result none: there are no test data"]),
    ],
)
def test_of_a_regression_and_of_nothing(more: dict[str, Any], expected: list[str]) -> None:
    assert lines({**LOSS, **more}) == expected
