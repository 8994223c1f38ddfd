"""Tests of lost or late replies: the round continues without these clients.

The clients keep their old state.
"""

from pathlib import Path

import pytest

from fedloom.errors import FedloomError
from fedloom.flower.message import SiteMessage
from tests.support.fake_transport import FakeLink, make_run, make_sites
from tests.support.flower_runs import plainly, play
from tests.support.lossy_engine import LosingSites


@pytest.mark.parametrize("method", ["scaffold", "fedcross", "moon"])
def test_lost_answers_leave_the_clients_as_they_were(method: str, tmp_path: Path) -> None:
    """A client whose answer is lost has trained, and must not have kept anything of it."""
    lost = frozenset({(0, 1), (1, 1), (1, 3), (2, 0)})
    config = make_run(method=method, rounds=4, deadline=0.05)
    link = FakeLink(make_sites(config, tmp_path))

    def meddle(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage | None:
        gone = question.kind == "train" and (question.header["round"], question.header["client_id"]) in lost
        return None if gone else answer

    link.meddle = meddle
    run, _ = play(config, tmp_path, link)
    plain = plainly(config, tmp_path, remote_engine=LosingSites(lost, "no answer within 0.05 s"))
    assert run.digest == plain.digest
    assert [r.get("failed_clients") for r in run.history] == [r.get("failed_clients") for r in plain.history]
    assert run.summary["failed"] == len(lost)


def test_late_answers_are_dropped_and_counted(tmp_path: Path) -> None:
    config = make_run(rounds=3, deadline=0.05)
    link = FakeLink(make_sites(config, tmp_path))

    def meddle(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage | None:
        if question.header["round"] == 1 and question.kind == "train":
            link.let_go()  # what was late in the round before arrives now
        late = (question.header["round"], question.header["client_id"]) in {(0, 2), (0, 4)} and question.kind == "train"
        return None if late else answer

    link.meddle = meddle
    run, _ = play(config, tmp_path, link)
    assert [r["failed"] for r in run.history[1:]] == [2, 0, 0]
    assert "engine.late" not in run.history[1].get("diagnostics", {})
    assert run.history[2]["diagnostics"]["engine.late"] == 2
    assert run.digest == plainly(config, tmp_path, remote_engine=LosingSites(frozenset({(0, 2), (0, 4)}))).digest


def test_too_few_answers_end_the_run(tmp_path: Path) -> None:
    config = make_run(rounds=2, min_clients=4, deadline=0.05)
    link = FakeLink(make_sites(config, tmp_path))
    link.meddle = lambda node, question, answer: None if node < 102 and question.kind == "train" else answer
    with pytest.raises(FedloomError, match=r"3 of 5 clients answered, but min_clients is 4 \(client 0: no answer"):
        play(config, tmp_path, link)
