"""Tests of the minimum number of client updates in a round over sites.

The default is more than half of the sampled clients.
"""

from pathlib import Path

import pytest

from fedloom.errors import FedloomError
from fedloom.flower.message import SiteMessage, make_failure_message
from fedloom.runs.execute import resume
from tests.support.fake_transport import FakeLink, make_run, make_sites, reach
from tests.support.flower_runs import plainly, play


def without(link: FakeLink, clients: set[int], from_round: int = 0) -> FakeLink:
    """A link on which the updates of these clients never arrive."""

    def meddle(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage | None:
        gone = question.kind == "train" and question.header["client_id"] in clients
        return None if gone and question.header["round"] >= from_round else answer

    link.meddle = meddle
    return link


@pytest.mark.parametrize(("asked", "needed"), [(5, 3), (4, 3), (2, 2), (1, 1)])
def test_more_than_half_must_answer(asked: int, needed: int, tmp_path: Path) -> None:
    config = make_run(clients=asked, clients_per_round=asked, rounds=1, deadline=0.05, min_clients=None)
    enough = without(FakeLink(make_sites(config, tmp_path)), set(range(asked - needed)))
    assert play(config, tmp_path, enough)[0].summary["failed"] == asked - needed
    (tmp_path / "again").mkdir()
    too_few = without(FakeLink(make_sites(config, tmp_path / "again")), set(range(asked - needed + 1)))
    says = rf"round 1: {needed - 1} of {asked} clients answered, but min_clients is {needed} by default \(client 0: no"
    with pytest.raises(FedloomError, match=says):
        play(config, tmp_path / "again", too_few)


@pytest.mark.parametrize("refusing", [4, 5])
def test_sites_that_claim_to_fail_forever_do_not_lower_the_minimum(refusing: int, tmp_path: Path) -> None:
    config = make_run(rounds=1, deadline=0.05, min_clients=None)
    link = FakeLink(make_sites(config, tmp_path))

    def meddle(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage | None:
        refused = question.kind == "train" and question.header["client_id"] < refusing
        return make_failure_message(question, "never", permanent=True) if refused else answer

    link.meddle = meddle
    with pytest.raises(FedloomError, match=f"round 1: {5 - refusing} of 5 clients answered, but min_clients is 3"):
        play(config, tmp_path, link)


def test_an_explicit_0_goes_on_with_whoever_answers(tmp_path: Path) -> None:
    config = make_run(rounds=2, deadline=0.05, min_clients=0)
    link = without(FakeLink(make_sites(config, tmp_path)), {0, 1, 2, 3, 4}, from_round=1)
    assert play(config, tmp_path, link)[0].summary["failed"] == 5


def test_simulations_go_on_with_whoever_answers(tmp_path: Path) -> None:
    config = make_run(rounds=3, failure_rate=0.9, min_clients=None)
    assert min(record.get("failed", 5) for record in plainly(config, tmp_path).history) >= 3


def test_rounds_with_noise_go_on_with_whoever_answers(tmp_path: Path) -> None:
    """That a run ends when few answer would tell who took part, which the guarantee does not cover."""
    pytest.importorskip("dp_accounting")
    config = make_run(rounds=2, deadline=0.05, min_clients=None, clip_update=0.5, noise=1.0, clients_per_round=3)
    link = without(FakeLink(make_sites(config, tmp_path)), {0, 1, 2, 3, 4})
    run, _ = play(config, tmp_path, link)
    assert len(run.history) == 3


def test_a_run_that_ended_so_goes_on_by_the_same_rule(tmp_path: Path) -> None:
    config, out = make_run(rounds=3, deadline=0.05, min_clients=None), tmp_path / "flower"
    link = without(FakeLink(make_sites(config, tmp_path)), {0, 1, 2}, from_round=1)
    for _ in range(2):
        with pytest.raises(FedloomError, match="round 2: 2 of 5 clients answered, but min_clients is 3 by default"):
            play(config, tmp_path, link) if not out.exists() else resume(out, remote_engine=reach(link, config, out))
    assert "min_clients" not in (out / "config.toml").read_text()
    without(link, set())
    assert resume(out, remote_engine=reach(link, config, out)).digest == plainly(config, tmp_path).digest
