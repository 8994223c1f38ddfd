"""Tests that recurrent networks computed layer by layer give equal results."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from fedloom.core.layout import Layout
from fedloom.models.layers.recurrent import split_recurrent_layers
from tests.support.trainers import make_bench

pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights", "ignore:LSTM with projections")
GPU = torch.device("cuda")

WAYS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "two ways": (nn.LSTM, {"bidirectional": True, "batch_first": True}),
    "projected": (nn.LSTM, {"proj_size": 3, "num_layers": 2}),
    "gru": (nn.GRU, {"bias": False}),
    "two ways of gru": (nn.GRU, {"bidirectional": True}),
    "rnn": (nn.RNN, {"nonlinearity": "relu", "batch_first": True}),
}


def flat(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, PackedSequence):
        return [found.data, found.batch_sizes]
    return [tensor for part in found for tensor in flat(part)]


def both(kind: type[nn.RNNBase], **given: Any) -> tuple[nn.RNNBase, nn.RNNBase]:
    """The network as it is, and a copy that is computed layer by layer."""
    torch.manual_seed(0)
    network = kind(5, 4, **{"num_layers": 3, "dropout": 0.5, **given})
    ours: Any = split_recurrent_layers(copy.deepcopy(network), GPU)
    return network, ours


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_it_computes_and_draws_what_the_whole_does(way: str, start: bool, packed: bool) -> None:
    """On the CPU torch itself draws from the usual generator, and so layer by layer the bits are the same."""
    kind, given = WAYS[way]
    theirs, ours = both(kind, **given)
    x: Any = torch.randn(6, 6, 5)
    if packed:
        x = pack_padded_sequence(x, torch.tensor([3, 6, 1, 2, 6, 4]), theirs.batch_first, enforce_sorted=False)
    hx: Any = None
    if start:
        ends = theirs.eval()(x)[1]
        hx = torch.randn_like(ends) if isinstance(ends, Tensor) else tuple(torch.randn_like(end) for end in ends)
    for training in (True, False):
        found = []
        for network in (theirs.train(training), ours.train(training)):
            torch.manual_seed(1)
            made = flat(network(x, hx))
            loss = sum(tensor.square().sum() for tensor in made if tensor.is_floating_point())
            weights = list(network.parameters())
            found.append([*made, *torch.autograd.grad(loss, weights), torch.rand(1)])  # type: ignore[arg-type]
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


def test_a_copy_and_a_row_have_weights_of_their_own() -> None:
    _, ours = both(nn.LSTM)
    names, x = [name for name, _ in ours.named_parameters()], torch.randn(2, 3, 5)
    assert names == list(both(nn.LSTM)[0].state_dict())
    twin = copy.deepcopy(ours)
    layout = Layout.of(twin)
    row = torch.zeros(layout.size)
    layout.bind(twin, row)
    assert not twin.train()(x)[0].any()
    assert ours(x)[0].any()
    row.fill_(0.1)
    assert twin(x)[0].any()


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_weights_stay_in_their_row(way: str, copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is cuDNN, layers put weights that are new to them into memory of their own."""

    def move(self: Any) -> None:
        for weight in self._flat_weights:
            weight.data = weight.data.clone()

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", move)
    kind, given = WAYS[way]
    _, ours = both(kind, **given)
    ours = copy.deepcopy(ours) if copied else ours
    layout = Layout.of(ours)
    row = layout.read(ours)
    layout.bind(ours, row)
    x = torch.randn(2, 3, 5)
    ours.train()(x)
    assert all(weight.untyped_storage().data_ptr() == row.data_ptr() for weight in ours.parameters())


@pytest.mark.parametrize("given", [{"dropout": 0.0}, {"num_layers": 1, "dropout": 0.0}])
def test_a_network_without_dropout_is_left_alone(given: dict[str, Any]) -> None:
    assert "forward" not in vars(both(nn.LSTM, **given)[1])


def test_weights_that_are_made_for_each_step_are_left_alone() -> None:
    """As where connections between hidden units are dropped."""
    network = nn.LSTM(5, 4, 2, dropout=0.5)
    raw = network.weight_hh_l0
    del network.weight_hh_l0
    network.raw = raw
    vars(network)["weight_hh_l0"] = raw * 0.5
    assert "forward" not in vars(split_recurrent_layers(network, GPU))


def test_on_a_cpu_all_are_left_alone_and_every_bench_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    network, asked = nn.LSTM(5, 4, 2, dropout=0.5), list[tuple[nn.Module, torch.device]]()
    assert "forward" not in vars(split_recurrent_layers(network, torch.device("cpu")))

    def noted(module: nn.Module, device: torch.device) -> nn.Module:
        asked.append((module, device))
        return module

    monkeypatch.setattr("fedloom.training.trainer.split_recurrent_layers", noted)
    bench = make_bench()
    assert asked == [(bench.module, torch.device("cpu"))]
