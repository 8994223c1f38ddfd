"""Tests of what messages of a run contain: LoRA adapters, layers without norms."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.config import Config, replace_config
from fedloom.flower.message import SiteMessage
from fedloom.runs.execute import execute_run
from fedloom.runs.resolve import resolve_run
from fedloom.runs.result import RunResult
from fedloom.utils.storage import read_safetensors
from tests.support.fake_transport import FakeLink, make_run, make_sites, reach

LORA = "vit-tiny-lora:width=24,heads=2,depth=2,rank=2"
NORMED = "cnn:norm=batch"
FLOAT = 4


def make(**settings: Any) -> Config:
    return make_run(**{"clients": 3, "clients_per_round": 3, "rounds": 2, "batch_size": 64, **settings})


def play(config: Config, folder: Path) -> tuple[RunResult, FakeLink]:
    link, out = FakeLink(make_sites(config, folder)), folder / "flower"
    run = execute_run(resolve_run(config), out=out, report=False, remote_engine=reach(link, config, out))
    assert run.summary["failed"] == 0
    return run, link


def sizes(parcels: list[SiteMessage], kind: str) -> set[tuple[tuple[str, int], ...]]:
    """Which blocks the messages of this kind have, and how many numbers each."""
    found = [p for p in parcels if p.kind == kind]
    assert found
    assert all(block.dtype == "float32" for p in found for block in p.arrays.values())
    return {tuple(sorted((name, block.nbytes // FLOAT) for name, block in p.arrays.items())) for p in found}


def content_of(link: FakeLink) -> bytes:
    """All arrays of all messages, both ways."""
    return b"".join(bytes(block.data) for p in (*link.asked, *link.answered) for block in p.arrays.values())


def pieces(tensor: Tensor) -> set[bytes]:
    """All sixteen bytes that lie at a number's place, with enough in them not to be met by chance."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    found = {content[at : at + 16] for at in range(0, len(content) - 15, 16)}
    return {piece for piece in found if len(set(piece)) > 10}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, FakeLink]:
    for library in ("transformers", "peft"):
        pytest.importorskip(library)
    return play(make(model=LORA, method="scaffold"), tmp_path_factory.mktemp("lora"))


def test_with_lora_messages_are_as_large_as_what_is_trained(adapted: tuple[RunResult, FakeLink]) -> None:
    run, link = adapted
    layout = link.sites[100].layout
    by_hand = 2 * 2 * (2 * 24 * 2) + 24 * 10 + 10  # A and B beside queries and values of two blocks; the head
    assert layout.size == layout.trainable == by_hand
    assert {e.name for e in layout.entries if "lora_" not in e.name} == {"head.weight", "head.bias"}
    assert sizes(link.asked, "train") == {(("extra/c", by_hand), ("model", by_hand))}
    assert sizes(link.answered, "trained") == {(("model", by_hand), ("upload/delta_c", by_hand))}
    assert not any(p.arrays for p in (*link.asked, *link.answered) if p.kind not in ("train", "trained"))
    for record in run.history[1:]:
        assert record["bytes_down"] == record["bytes_up"] == 3 * 2 * by_hand * FLOAT


def test_with_lora_no_frozen_weight_is_in_any_message(adapted: tuple[RunResult, FakeLink]) -> None:
    _, link = adapted
    site, content = link.sites[100], content_of(link)
    frozen = {name: p for name, p in site.context.model.named_parameters() if not p.requires_grad}
    assert sum(p.numel() for p in frozen.values()) > 5 * site.layout.size
    searched = {name: pieces(p) for name, p in frozen.items()}
    assert sum(len(found) for found in searched.values()) > 1000
    for name, found in searched.items():
        assert not [piece for piece in found if piece in content], name
    # The search finds what is there: what all begin with.
    assert [piece for piece in pieces(site.initial) if piece in content]


def test_with_lora_the_run_has_the_plain_engines_bits(adapted: tuple[RunResult, FakeLink], tmp_path: Path) -> None:
    run, _ = adapted
    plain = replace_config(make(model=LORA, method="scaffold"), engine="sequential")
    assert execute_run(resolve_run(plain), out=tmp_path / "plain", report=False).digest == run.digest


def test_with_fedbn_no_column_of_a_batch_norm_travels(tmp_path: Path) -> None:
    run, link = play(make(method="fedbn", model=NORMED), tmp_path)
    site = link.sites[100]
    layout, workshop = site.layout, site.context
    norms = {name for name, m in workshop.model.named_modules() if isinstance(m, torch.nn.BatchNorm2d)}
    at_home = [entry.columns for entry in layout.entries if entry.layer in norms]
    names = {entry.name.rpartition(".")[2] for entry in layout.entries if entry.layer in norms}
    assert names == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    travels = layout.size - sum(part.stop - part.start for part in at_home)
    assert travels < layout.size
    for parcels, kind in ((link.asked, "train"), (link.answered, "trained"), (link.asked, "evaluate")):
        assert sizes(parcels, kind) == {(("model", travels),)}
    assert not any(p.arrays for p in link.answered if p.kind != "trained")
    for record in run.history[1:]:
        assert record["bytes_down"] == record["bytes_up"] == 3 * travels * FLOAT
    content, kept = content_of(link), sorted(tmp_path.glob("sites/*/*/client-*/*.safetensors"))
    assert len(kept) >= 3
    for path in kept:  # what each client has of its own: parameters and statistics
        [own] = read_safetensors(path).values()
        assert own.numel() == layout.size - travels
        searched = pieces(own)
        assert len(searched) > 20
        assert not [piece for piece in searched if piece in content], path


def test_what_travels_with_fedbn_are_the_other_columns(tmp_path: Path) -> None:
    """The first question holds the initial model without its batch norms, column by column."""
    _, link = play(make(method="fedbn", model=NORMED, rounds=1), tmp_path)
    site = link.sites[100]
    norms = {name for name, m in site.context.model.named_modules() if isinstance(m, torch.nn.BatchNorm2d)}
    others = [site.initial[entry.columns] for entry in site.layout.entries if entry.layer not in norms]
    expected = torch.cat(others).numpy().tobytes()
    assert [bytes(p.arrays["model"].data) == expected for p in link.asked if p.kind == "train"] == [True] * 3
