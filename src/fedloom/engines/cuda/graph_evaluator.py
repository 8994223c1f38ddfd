"""Scoring on a GPU: the whole test set as one recording, with one wait at the end."""

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
    """Scores models on one test set, piece by piece as every engine does (see `score_chunks`)."""

    def __init__(self, bench: LocalTrainer, shop: TrainingContext, test: Samples) -> None:
        self._bench, self._shop = bench, shop
        device = bench.device
        self._test = Samples(test.x.to(device), test.y.to(device))
        self._row = shop.layout.empty(device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._hits = torch.zeros(shop.classes, dtype=torch.int64, device=device)
        self._right = torch.zeros(len(test) if shop.classes else 0, dtype=torch.bool, device=device)
        counts = torch.bincount(test.y, minlength=shop.classes).cpu().numpy() if shop.classes else np.zeros(0, np.int64)
        self._seen = counts.astype(np.int64)
        self._generator = torch.Generator(device)
        self._tape = make_graph_runner(device, (self._generator,))

    def close(self) -> None:
        """Give back what the device holds."""
        self._tape.close()

    @contextmanager
    def randomness(self) -> Iterator[None]:
        """Nothing is drawn, or it does not matter what. But a recording that fails leaves a generator behind that
        believes to be recorded still, and everyone's would be of no use to anybody from then on."""
        with super().randomness(), use_generator(self._generator, self._bench.device):
            yield

    @torch.no_grad()
    def score(self, row: Tensor) -> EvaluationResult:
        """How the model in `row` does on the test set."""
        self._row.copy_(row)
        asked = torch.cuda.current_stream(self._bench.device) if self._bench.device.type == "cuda" else None
        with self._tape.stream():
            if asked is not None:
                torch.cuda.current_stream().wait_stream(asked)
            self._tape.play("the test set's score", None, self._body, self)
            loss, hits = float(self._loss), self._hits.cpu().numpy().copy()
            right = self._right.cpu().numpy().copy()
        return EvaluationResult(loss, len(self._test), hits, self._seen, right)

    def memory(self) -> list[Tensor]:
        """What `_body` writes."""
        return [self._loss, self._hits, self._right]

    def _body(self) -> None:
        shop, module = self._shop, self._bench.module
        self._bench.bind(self._row)
        module.eval()
        self._loss.zero_()
        self._hits.zero_()
        for chunk in evaluation_slices(self._test):
            piece = self._test[chunk]
            with self._bench.network_buffers.untouched():
                output = module(shop.prepare(piece.x, channels_last=shop.channels_last))
            self._loss.add_(shop.criterion(output, piece.y).double(), alpha=len(piece))
            if shop.classes:
                right = output.argmax(dim=1) == piece.y
                self._right[chunk] = right
                self._hits.scatter_add_(0, piece.y, right.long())
