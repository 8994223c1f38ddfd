"""Tests that tokens reach the network as integers on every engine."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedloom
from fedloom import FederatedDataset
from fedloom.data import Augment, InputTransform, Samples
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.engines.multiprocess.engine import multiprocess_engine_available as can_fork
from fedloom.engines.sequential import SequentialEngine
from fedloom.errors import InputError

WORDS, LENGTH = 12, 5


class Reader(nn.Module):
    """The mean of embedded tokens; refuses what is not int64, as an embedding would take int32 too."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.dtype == torch.int64, tokens.dtype
        scores: Tensor = self.head(self.embedding(tokens).mean(dim=1))
        return scores


def texts(count: int, seed: int, kind: type[np.generic] = np.int64) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).integers(0, WORDS, (count, LENGTH)).astype(kind)
    return x, (x.sum(axis=1) > WORDS * LENGTH / 2).astype(np.int64)


def federation(**more: object) -> FederatedDataset:
    return FederatedDataset.from_arrays([texts(30, k) for k in range(4)], test=texts(60, 9), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_prepare_makes_int64_of_every_integer(kind: torch.dtype) -> None:
    x = torch.arange(12).reshape(2, 6).to(kind)
    samples = Samples(x, torch.zeros(2, dtype=torch.int64))
    assert samples.are_tokens
    assert not samples.are_images
    assert samples.shape == (6,)
    out = samples.default_transform()(x, channels_last=True)
    assert out.dtype == torch.int64
    assert torch.equal(out, torch.arange(12).reshape(2, 6))


def test_large_tokens_are_not_rounded() -> None:
    x = torch.tensor([[2**53 + 1, 2**24 + 1]])
    assert torch.equal(InputTransform.identity()(x), x)
    assert InputTransform.identity()(x) is x  # nothing was copied


def test_truth_values_and_images_are_no_tokens() -> None:
    labels = torch.zeros(2, dtype=torch.int64)
    assert not Samples(torch.zeros(2, 3, dtype=torch.bool), labels).are_tokens
    assert not Samples(torch.zeros(2, 4, 4, 1, dtype=torch.uint8), labels).are_tokens
    assert InputTransform.identity()(torch.ones(2, 3, dtype=torch.bool)).dtype == torch.float32


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int64])
def test_own_integers_are_tokens(kind: type[np.generic]) -> None:
    made = FederatedDataset.from_arrays([texts(4, 0, kind), texts(3, 1)], test=texts(2, 2, kind))
    assert made.client_samples(0).x.dtype == made.client_samples(1).x.dtype == torch.int64
    assert np.array_equal(made.client_samples(0).x.numpy(), texts(4, 0)[0])
    assert made.test is not None
    assert made.test.are_tokens
    assert made.shape == (LENGTH,)
    assert made.vocabulary_size == WORDS


def test_own_data_sets_of_tokens() -> None:
    x, y = (torch.from_numpy(values) for values in texts(4, 0))
    made = FederatedDataset.from_datasets([TensorDataset(x.int(), y)], classes=2)
    assert torch.equal(made.client_samples(0).x, x)
    assert made.client_samples(0).x.dtype == torch.int64


def test_own_truth_values_and_floats_are_float32() -> None:
    for x in (np.ones((2, 3), np.bool_), np.ones((2, 3), np.float64)):
        assert FederatedDataset.from_arrays([(x, np.array([0, 1]))]).client_samples(0).x.dtype == torch.float32


def test_tokens_and_floats_do_not_mix() -> None:
    x, y = texts(3, 0)
    with pytest.raises(InputError, match=r"client 1 has inputs of type torch\.float32 .* expected torch\.int64"):
        FederatedDataset.from_arrays([(x, y), (x.astype(np.float32), y)])


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8])
def test_tokens_are_not_augmented(kind: torch.dtype) -> None:
    with pytest.raises(InputError, match=r"cannot augment .* only images can be augmented"):
        Augment(flip=True)(torch.zeros(2, 5, dtype=kind), torch.Generator())
    with pytest.raises(InputError, match="cannot augment tokens of shape"):
        Augment(flip=True)(torch.zeros(2, 5, 4, 3, dtype=torch.int64), torch.Generator())


def test_a_run_that_augments_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot augment tokens"):
        fedloom.run(data=federation(), model=Reader, augment="flip", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_network_without_an_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its inputs are token ids, so it needs a network for text"):
        fedloom.run(data=federation(), model="mlp", out=tmp_path / "run")


def test_engines_agree_on_tokens(tmp_path: Path) -> None:
    engines = ["sequential", *(["multiprocess"] if can_fork() else [])]
    settings = {"rounds": 3, "epochs": 2, "lr": 0.5, "batch_size": 8, "validation": 0.2, "report": False}
    runs = [
        fedloom.run(data=federation(), model=Reader, engine=engine, out=tmp_path / engine, **settings)
        for engine in engines
    ]
    assert len({run.digest for run in runs}) == 1
    assert runs[0].accuracy is not None
    losses = [record["loss"] for record in runs[0].history]
    assert losses[-1] < losses[0]


def test_the_cuda_engine_takes_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the CPU, where it does the same without recordings."""

    def run(engine: type) -> str:
        def make(shop: object, *_: object) -> object:
            return engine(shop, "cpu")

        monkeypatch.setattr("fedloom.engines.sequential.SequentialEngine", make)
        monkeypatch.setattr("fedloom.runs.build.choose_engine", lambda *_: SequentialEngine)
        settings = {"rounds": 2, "epochs": 1, "lr": 0.5, "batch_size": 8, "report": False}
        out = tmp_path / engine.__name__
        return fedloom.run(data=federation(), model=Reader, engine="sequential", out=out, **settings).digest

    assert run(CudaEngine) == run(SequentialEngine)


def test_the_largest_token_is_tried_before_a_run(tmp_path: Path) -> None:
    """The first samples alone would fit a smaller embedding."""
    x, y = texts(30, 0)
    x[:, :] %= 3
    x[-1, -1] = WORDS - 1
    made = FederatedDataset.from_arrays([(x, y)], test=(x, y))
    with pytest.raises(InputError, match="cannot be trained on 'own'"):
        fedloom.run(data=made, model=lambda: Reader(WORDS - 1), out=tmp_path / "run")
    fedloom.run(data=made, model=Reader, rounds=1, out=tmp_path / "run", report=False)
