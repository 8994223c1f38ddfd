"""Tests that servers read few numbers per round.

On a GPU the server waits each time it reads one.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate
from fedloom.engines.sequential import SequentialEngine
from fedloom.methods import methods
from fedloom.testing.fixtures import build_small_run
from tests.support.core_methods import CORE_METHODS

MORE = {
    "abavg": "asks how many samples each client's model has right",
    "feddf": "scores its student again and again",
    "fedfomo": "keeps on the host who gained from whom",
    "fedgen": "one_hot looks at its numbers, on a CPU",
    "fedlaw": "tells the losses of the weights that it learns",
    "fedma": "units are assigned on the host",
    "fedma-layers": "units are assigned on the host",
    "gamf": "units are assigned on the host",
}
"""Methods that have a reason to ask for more."""

FEW = 2


class Questions(TorchDispatchMode):
    """Counts how often numbers are asked for, single ones and whole tensors, by where that is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts = Counter[str]()
        self.training = False
        for name in ("cpu", "tolist"):
            monkeypatch.setattr(torch.Tensor, name, self._noting(getattr(torch.Tensor, name)))

    def _noting(self, question: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any, **named: Any) -> Any:
            self._note()
            return question(*given, **named)

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func):
            self._note()
        return func(*args, **(kwargs or {}))

    def _note(self) -> None:
        if self.training:
            return
        frame: Any = sys._getframe(1)
        while frame.f_back is not None and "/fedloom/" not in frame.f_code.co_filename:
            frame = frame.f_back
        self.counts[f"{frame.f_code.co_filename}:{frame.f_lineno}"] += 1


def asked_in_a_round(method: str, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    questions, train = Questions(monkeypatch), SequentialEngine.train

    def training(engine: SequentialEngine, jobs: Sequence[ClientTask]) -> Iterator[ClientUpdate | ClientFailure]:
        answers = train(engine, jobs)
        while True:
            questions.training = True
            answer = next(answers, None)
            questions.training = False
            if answer is None:
                return
            # As from a GPU, which has found out beside the rest whether all numbers are finite.
            yield replace(answer, finite=True) if isinstance(answer, ClientUpdate) else answer

    given = {"engine": "sequential", "clients_per_round": 8, "rounds": 100, "eval_every": 100}
    with build_small_run(method, {}, **given).engine_closed() as experiment:
        experiment.rounds.run_round(0)
        monkeypatch.setattr(SequentialEngine, "train", training)
        questions.counts.clear()
        with questions:
            assert not experiment.rounds.run_round(1)["failed"]
    return questions.counts


@pytest.mark.quick_if(method=CORE_METHODS)
@pytest.mark.parametrize("method", sorted(methods()))
def test_a_server_asks_for_few_numbers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_in_a_round(method, monkeypatch)
    assert (asked.total() > FEW) is (method in MORE), asked


def test_questions_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with Questions(monkeypatch) as questions:
        float(torch.ones(()))
        bool(torch.ones(()) > 0)
        torch.ones(3).cpu()
        torch.ones(3).tolist()
    assert questions.counts.total() == 4
