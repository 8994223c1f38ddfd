"""Where a GPU is short of memory there are fewer slots, fewer places, or samples that come and go; on the CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_cuda import answers, assert_alike, jobs_for

from fedloom.data import PooledFederation, Samples
from fedloom.engines import CudaEngine, Shop
from fedloom.engines.slot import SlotBench
from fedloom.experiment import Experiment
from fedloom.small_runs import small_experiment


@contextmanager
def experiment(**settings: Any) -> Iterator[Experiment]:
    with small_experiment("fedavg", {}, engine="plain", **settings).engine_closed() as plain:
        yield plain


def short(when: Callable[[], bool], then: Callable[..., Any]) -> Callable[..., Any]:
    """The same, where there is memory."""

    def tried(*given: Any, **named: Any) -> Any:
        if when():
            raise torch.OutOfMemoryError("out of memory")
        return then(*given, **named)

    return tried


def pooled(shop: Shop) -> Shop:
    """The same clients, out of one pool."""
    given = shop.federation
    clients = [given.client(k) for k in range(len(given))]
    ends = np.cumsum([len(c) for c in clients])
    pool = PooledFederation(
        Samples(torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])),
        [np.arange(end - len(c), end) for end, c in zip(ends, clients, strict=True)],
        classes=given.classes,
        prepare=given.prepare,
        test=given.test,
    )
    return replace(shop, federation=pool)


@pytest.mark.parametrize("where", ["at first", "for a slot", "for a step"])
def test_samples_that_do_not_fit_come_with_their_clients(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def has_pool() -> bool:
        return where == "at first" or engine.gpus[0]._pool is not None

    with experiment() as plain, caplog.at_level("WARNING", "fedloom"):
        jobs = jobs_for(plain, [4, 0, 1, 2])
        expected, shop = answers(plain.engine, jobs), pooled(plain.engine.shop)
        if where == "at first":
            moved, to = shop.federation.pool, torch.Tensor.to  # type: ignore[attr-defined]

            def no_room(self: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
                if self is moved.x:
                    raise torch.OutOfMemoryError("out of memory")
                return to(self, *given, **named)

            monkeypatch.setattr(torch.Tensor, "to", no_room)
        engine = CudaEngine(shop, "cpu", 2)
        if where == "for a slot":
            monkeypatch.setattr("fedloom.engines.gpu.SlotBench", short(has_pool, SlotBench))
        elif where == "for a step":
            monkeypatch.setattr(SlotBench, "_take", short(has_pool, SlotBench._take))
        assert_alike(answers(engine, jobs), expected)
        assert len(engine.slots) == (1 if where == "for a step" else 2)
        assert engine.gpus[0]._pool is None
    assert caplog.text.count("has no room for all samples") == 1
