"""Tests of the classifier head, and of MOON's projection before it."""

import pytest
import torch
from torch import nn

from fedloom import Layout
from fedloom.errors import InputError
from fedloom.methods._support.classifier_head import capture_head_inputs, find_classifier_head
from fedloom.models.registry import NETWORKS, build_model, count_parameters
from fedloom.testing.fixtures import build_small_run, small_run

IMAGES = [name for name, network in NETWORKS.items() if network.text_size is None and not name.startswith("vit")]


@pytest.mark.parametrize("name", IMAGES)
def test_the_classifier_works_on_two_more_layers_of_the_papers_widths(name: str) -> None:
    torch.manual_seed(0)
    plain = build_model(name, (1, 16, 16), 7)
    d = plain.get_submodule("head").in_features
    module = build_model(f"{name}+projection", (1, 16, 16), 7).eval()
    where, head = find_classifier_head(module, "moon")
    layers = [layer for layer in module.get_submodule("head") if not isinstance(layer, nn.ReLU)]
    assert [tuple(layer.weight.shape) for layer in layers] == [(d, d), (256, d), (7, 256)]
    assert (where, head) == ("head.head", layers[-1])
    with capture_head_inputs(head) as seen:
        scores = module(torch.rand(2, 1, 16, 16))
    assert (seen[0].shape, scores.shape) == ((2, 256), (2, 7))
    before = count_parameters(name, (1, 16, 16), 7)
    expected = before - (d + 1) * 7 + (d + 1) * d + (d + 1) * 256 + 257 * 7
    assert count_parameters(f"{name}+projection", (1, 16, 16), 7) == expected == Layout.of(module).trainable


@pytest.mark.parametrize("name", ["vit-tiny{}", "vit-tiny-lora{}:rank=4"])
def test_what_is_counted_without_a_library_is_counted_with_a_projection_too(name: str) -> None:
    d, before = 192, count_parameters(name.format(""), (3, 32, 32), 10)
    expected = before - (d + 1) * 10 + (d + 1) * d + (d + 1) * 256 + 257 * 10
    assert count_parameters(name.format("+projection"), (3, 32, 32), 10) == expected


def test_options_go_behind_the_whole_name_and_text_is_no_trouble() -> None:
    module = build_model("resnet20+projection:norm=group,width=4", (1, 8, 8), 10)
    assert module.get_submodule("head.fc1").in_features == 16
    assert any(isinstance(part, nn.GroupNorm) for part in module.modules())
    text = build_model("lstm-shakespeare+projection:hidden=8", (20,), 80)
    assert text(torch.zeros(3, 20, dtype=torch.int64)).shape == (3, 80)


@pytest.mark.parametrize("name", ["lenet+projections", "lenet+", "+projection"])
def test_other_words_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="unknown model"):
        build_model(name, (1, 28, 28), 10)


def network() -> nn.Module:
    return build_model("mlp-128+projection", (64,), 10)


def test_moon_contrasts_what_comes_out_of_the_projection() -> None:
    with build_small_run("moon", {}, model=network, rounds=3).engine_closed() as experiment:
        local = experiment.rounds.parts.client
        widths, frozen = [], local.frozen

        def noted(*given: object) -> torch.Tensor:
            z = frozen(*given)
            widths.append(z.shape[1])
            return z

        local.frozen = noted
        experiment.rounds.run_round(0)
        assert set(widths) == {256}


def test_with_the_same_network_and_no_weight_moon_is_fedavg() -> None:
    expected = small_run("fedavg", {}, model=network).digest
    assert small_run("moon", {"moon": {"mu": 0.0}}, model=network).digest == expected
    assert small_run("moon", {}, model=network).digest != expected


@pytest.mark.parametrize("method", ["fedrep", "fedbabu", "fedgen", "fedma", "gamf"])
def test_methods_that_look_for_the_head_find_it(method: str) -> None:
    given = {"fedrep": {"head_epochs": 1}, "fedgen": {"alpha": 0.1, "beta": 0.1, "steps": 2}}.get(method, {})
    with build_small_run(method, {method: given}, model=network, rounds=2).engine_closed() as experiment:
        for round in range(2):
            assert experiment.rounds.run_round(round)["failed"] == 0
        if method in ("fedrep", "fedbabu"):
            kept = sum(torch.Size(shape).numel() for shape in experiment.engine.client_states.shapes.values())
            assert kept == 257 * 10
