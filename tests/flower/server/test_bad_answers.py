"""Tests that bad replies of sites are rejected by name, without other effects."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.config import replace_config
from fedloom.flower.message import MessageArray, SiteMessage
from tests.support.fake_transport import FakeLink, make_run, make_sites
from tests.support.flower_runs import plainly, play
from tests.support.lossy_engine import LosingSites

BAD: dict[str, tuple[Callable[[SiteMessage, SiteMessage | None], SiteMessage], str]] = {}


def bad(says: str) -> Callable[[Callable[[SiteMessage, SiteMessage | None], SiteMessage]], Any]:
    """A way in which an answer may be wrong: (answer, the one of the round before) -> what arrives."""

    def note(change: Callable[[SiteMessage, SiteMessage | None], SiteMessage]) -> Any:
        BAD[change.__name__] = change, says
        return change

    return note


def with_arrays(answer: SiteMessage, **arrays: MessageArray) -> SiteMessage:
    return SiteMessage(answer.kind, answer.header, {**answer.arrays, **arrays})


def with_header(answer: SiteMessage, **header: Any) -> SiteMessage:
    return SiteMessage(answer.kind, {**answer.header, **header}, answer.arrays)


@bad("rejected: its model is not finite")
def nan(answer: SiteMessage, before: SiteMessage | None) -> SiteMessage:
    size = answer.arrays["model"].shape[0]
    return with_arrays(answer, model=MessageArray("float32", (size,), torch.full((size,), torch.nan).numpy().tobytes()))


@bad("rejected: its model is float32 of shape (3,), not")
def short(answer: SiteMessage, before: SiteMessage | None) -> SiteMessage:
    return with_arrays(answer, model=MessageArray("float32", (3,), bytes(12)))


@bad("rejected: its model is float32 of shape (8000000,), not")
def huge(answer: SiteMessage, before: SiteMessage | None) -> SiteMessage:
    return with_arrays(answer, model=MessageArray("float32", (8_000_000,), bytes(32_000_000)))


@bad("rejected: its model is float64")
def wide(answer: SiteMessage, before: SiteMessage | None) -> SiteMessage:
    size = answer.arrays["model"].shape[0]
    return with_arrays(answer, model=MessageArray("float64", (size,), bytes(8 * size)))


@bad("rejected: it sent model, more, not model")
def more(answer: SiteMessage, before: SiteMessage | None) -> SiteMessage:
    return with_arrays(answer, more=MessageArray.raw(b"x"))


@bad("rejected: its answer has the round '0', not 1")
def stale(answer: SiteMessage, before: SiteMessage | None) -> SiteMessage:
    assert before is not None
    return before


@bad("rejected: its answer has the nonce")
def replayed(answer: SiteMessage, before: SiteMessage | None) -> SiteMessage:
    assert before is not None
    return with_header(before, round=1)


@bad("rejected: its answer has the client_id '0', not 2")
def another_clients(answer: SiteMessage, before: SiteMessage | None) -> SiteMessage:
    return with_header(answer, client_id=0)


@bad("rejected: its answer has the run")
def another_runs(answer: SiteMessage, before: SiteMessage | None) -> SiteMessage:
    return with_header(answer, run="0" * 32)


@bad("rejected: it says that it trained on 999999 samples, but it registered")
def boastful(answer: SiteMessage, before: SiteMessage | None) -> SiteMessage:
    return with_header(answer, num_examples=999_999)


@bad("rejected: it sent no valid num_examples, steps and loss")
def silent(answer: SiteMessage, before: SiteMessage | None) -> SiteMessage:
    return with_header(answer, loss="low")


@bad("rejected: it sent 'evaluated', not a trained model")
def another_kind(answer: SiteMessage, before: SiteMessage | None) -> SiteMessage:
    return SiteMessage("evaluated", answer.header, answer.arrays)


@bad("out of order")
def failing(answer: SiteMessage, before: SiteMessage | None) -> SiteMessage:
    return SiteMessage("failed", {**answer.header, "reason": "out of\norder"})


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_answer_is_refused_named_and_harms_nobody(fault: str, tmp_path: Path) -> None:
    change, says = BAD[fault]
    config = make_run(rounds=3, deadline=5)
    link = FakeLink(make_sites(config, tmp_path))
    before: dict[int, SiteMessage] = {}

    def meddle(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage:
        if question.kind != "train" or question.header["client_id"] != 2:
            return answer
        if question.header["round"] == 1:
            return change(answer, before.get(0))
        before[question.header["round"]] = answer
        return answer

    link.meddle = meddle
    run, _ = play(config, tmp_path, link)
    reasons = [r["failed_clients"] for r in run.history[1:]]
    assert reasons[0] == reasons[2] == {}
    assert list(reasons[1]) == ["2"]
    assert reasons[1]["2"].startswith(says), reasons[1]
    assert run.digest == plainly(config, tmp_path, remote_engine=LosingSites(frozenset({(1, 2)}))).digest


def test_an_answer_from_another_node_is_refused(tmp_path: Path) -> None:
    config = make_run(rounds=1)
    link = FakeLink(make_sites(config, tmp_path))
    receive = link.receive

    def swapped(tickets: Sequence[str]) -> list[Any]:
        found = receive(tickets)
        swap = {101: 102, 102: 101}
        trained = [a.message is not None and a.message.kind == "trained" for a in found]
        return [
            replace(a, node=swap.get(a.node, a.node)) if is_trained else a
            for a, is_trained in zip(found, trained, strict=True)
        ]

    link.receive = swapped  # type: ignore[method-assign]
    run, _ = play(config, tmp_path, link)
    assert run.history[1]["failed_clients"] == {
        "1": "rejected: its answer came from node 102, and node 101 was asked",
        "2": "rejected: its answer came from node 101, and node 102 was asked",
    }


def test_a_site_with_another_network_is_not_asked(tmp_path: Path) -> None:
    config = make_run(rounds=1)
    link = FakeLink(make_sites(config, tmp_path))
    (tmp_path / "other").mkdir()
    odd = make_sites(replace_config(config, model="cnn"), tmp_path / "other")
    link.sites[104] = odd[104]
    run, _ = play(config, tmp_path, link)
    assert list(run.history[1]["failed_clients"]) == ["4"]
    assert "its network differs from the server's" in run.history[1]["failed_clients"]["4"]
    assert not [p for p in link.asked if p.kind == "train" and p.header["client_id"] == 4]
