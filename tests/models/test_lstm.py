"""Tests of the networks for text: outputs, tokens, federated runs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedloom
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.data import FederatedDataset
from fedloom.errors import InputError
from fedloom.models import build_model, count_parameters
from fedloom.models.initial_weights import InitialWeightsFile, load_initial_weights
from fedloom.models.lstm import TokenLSTM


def network(name: str, classes: int = 3, tokens: int = 0) -> TokenLSTM:
    torch.manual_seed(0)
    module = build_model(name, (6,), classes, tokens)
    assert isinstance(module, TokenLSTM)
    return module


def test_two_modules_compute_what_one_lstm_of_two_layers_does() -> None:
    module = network("lstm-shakespeare:hidden=5,vocabulary=9")
    both = nn.LSTM(8, 5, 2, batch_first=True)
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    for layer, lstm in enumerate((module.lstm1, module.lstm2)):
        both.load_state_dict({f"{name}_l{layer}": getattr(lstm, f"{name}_l0") for name in names}, strict=False)
    tokens = torch.randint(9, (4, 6))
    steps, _ = both(module.embedding(tokens))
    torch.testing.assert_close(module(tokens), module.head(steps[:, -1]))


def test_layers_of_fedmr() -> None:
    units = list(Layout.of(network("lstm-sent140:vocabulary=9")).layer_columns())
    assert units == ["embedding", "lstm1", "lstm2", "fc1", "head"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32])
def test_tokens_may_have_any_type(dtype: torch.dtype) -> None:
    module, tokens = network("lstm-shakespeare:hidden=5,vocabulary=9"), torch.randint(9, (4, 6))
    assert torch.equal(module(tokens.to(dtype)), module(tokens))


@pytest.mark.parametrize(
    ("name", "tokens", "rows"),
    [
        ("lstm-shakespeare", 0, 3),  # as many as classes: what comes next is a character too
        ("lstm-shakespeare", 90, 90),
        ("lstm-shakespeare:vocabulary=50", 90, 50),
        ("lstm-sent140", 0, 400_001),  # one number more for all other words
        ("lstm-sent140", 90, 90),
        ("lstm-sent140:vocabulary=50", 90, 51),
    ],
)
def test_the_vocabulary(name: str, tokens: int, rows: int) -> None:
    with torch.device("meta"):
        assert network(name, tokens=tokens).embedding.num_embeddings == rows


@pytest.mark.parametrize("token", [-1, 9])
def test_a_token_beyond_the_vocabulary_is_named(token: int) -> None:
    module, tokens = network("lstm-shakespeare:hidden=5,vocabulary=9"), torch.zeros(2, 6, dtype=torch.int64)
    tokens[1, 2] = token
    with pytest.raises(InputError, match=rf"tokens {min(0, token)} to {max(0, token)}, .* 0 to 8; .*vocabulary=N"):
        module(tokens)


def test_images_do_not_suit_text() -> None:
    with pytest.raises(InputError, match=r"shape \(1, 8, 8\); it expects rows of tokens"):
        build_model("lstm-shakespeare", (1, 8, 8), 3)
    with pytest.raises(InputError, match="know -1 tokens"):
        build_model("lstm-shakespeare", (8,), 3, -1)


def test_a_frozen_embedding_does_not_travel_and_comes_from_a_file() -> None:
    module = network("lstm-sent140:vocabulary=8,embedding=3,hidden=4,frozen=true")
    layout = Layout.of(module)
    assert layout.frozen == ("embedding.weight",)
    assert layout.size == count_parameters("lstm-sent140:vocabulary=8,embedding=3,hidden=4,frozen=true", (6,), 3)
    vectors = {"embedding.weight": torch.randn(9, 3)}
    load_initial_weights(
        module, InitialWeightsFile(path=Path("theirs"), sha256="", tensors=vectors, metadata={}), RngStreams(0)
    )
    assert torch.equal(module.embedding.weight, vectors["embedding.weight"])


def test_a_federation_learns_to_continue_text(tmp_path: object) -> None:
    """The next character is the one after the last in the alphabet."""
    draw = np.random.default_rng(0)

    def speaker(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = draw.integers(0, 5, (count, 4))
        return x, (x[:, -1] + 1) % 5

    federation = FederatedDataset.from_arrays(
        [speaker(60) for _ in range(4)], test=speaker(100), name="alphabet", classes=5
    )
    settings = {"rounds": 15, "epochs": 2, "batch_size": 10, "lr": 1.0, "clip": 1.0, "out": f"{tmp_path}/run"}
    run = fedloom.run("fedavg", data=federation, model="lstm-shakespeare:hidden=16", report=False, **settings)
    assert run.accuracy is not None
    assert run.accuracy > 0.9
