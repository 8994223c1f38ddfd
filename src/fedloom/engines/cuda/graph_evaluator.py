"""Evaluation on a GPU: the whole test set as one CUDA graph.

The host waits once, at the end.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from fedloom.core.evaluation import EvaluationResult, evaluation_slices
from fedloom.core.rng import use_generator
from fedloom.data import Samples
from fedloom.devices.cuda_graphs import StaticGraphOwner, make_graph_runner
from fedloom.training.context import TrainingContext
from fedloom.training.trainer import LocalTrainer


class GraphEvaluator(StaticGraphOwner):
    """Evaluate models on one test set, in the same slices as every engine (`evaluation_slices`)."""

    def __init__(self, trainer: LocalTrainer, context: TrainingContext, test: Samples) -> None:
        self._trainer, self._context = trainer, context
        device = trainer.device
        self._test = Samples(test.x.to(device), test.y.to(device))
        self._row = context.layout.empty(device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._correct_per_class = torch.zeros(context.data.classes, dtype=torch.int64, device=device)
        self._is_correct = torch.zeros(len(test) if context.data.classes else 0, dtype=torch.bool, device=device)
        count_per_class = (
            torch.bincount(test.y, minlength=context.data.classes).cpu().numpy()
            if context.data.classes
            else np.zeros(0, np.int64)
        )
        self._count_per_class = count_per_class.astype(np.int64)
        self._generator = torch.Generator(device)
        self._graph_runner = make_graph_runner(device, (self._generator,))

    def close(self) -> None:
        """Release the memory on the device."""
        self._graph_runner.close()

    @contextmanager
    def rng_scope(self) -> Iterator[None]:
        """Draw from a private generator: after a failed capture, a global one would be unusable for all."""
        with super().rng_scope(), use_generator(self._generator, self._trainer.device):
            yield

    @torch.no_grad()
    def evaluate(self, row: Tensor) -> EvaluationResult:
        """Return the result of the model in `row` on the test set."""
        self._row.copy_(row)
        asked = torch.cuda.current_stream(self._trainer.device) if self._trainer.device.type == "cuda" else None
        with self._graph_runner.stream():
            if asked is not None:
                torch.cuda.current_stream().wait_stream(asked)
            self._graph_runner.run("evaluate the test set", None, self._body, self)
            loss, correct_per_class = float(self._loss), self._correct_per_class.cpu().numpy().copy()
            is_correct = self._is_correct.cpu().numpy().copy()
        return EvaluationResult(loss, len(self._test), correct_per_class, self._count_per_class, is_correct)

    def memory(self) -> list[Tensor]:
        """Return the tensors that `_body` writes."""
        return [self._loss, self._correct_per_class, self._is_correct]

    def _body(self) -> None:
        context, module = self._context, self._trainer.module
        self._trainer.bind(self._row)
        module.eval()
        self._loss.zero_()
        self._correct_per_class.zero_()
        for chunk in evaluation_slices(self._test):
            piece = self._test[chunk]
            with self._trainer.module_buffers.untouched():
                output = module(context.data.transform(piece.x, channels_last=context.numerics.channels_last))
            self._loss.add_(context.criterion(output, piece.y).double(), alpha=len(piece))
            if context.data.classes:
                is_correct = output.argmax(dim=1) == piece.y
                self._is_correct[chunk] = is_correct
                self._correct_per_class.scatter_add_(0, piece.y, is_correct.long())
