"""Tests that a run continues with returning nodes and restarted processes."""

from pathlib import Path

import pytest

from fedloom.flower.message import SiteMessage
from fedloom.runs.execute import resume
from tests.support.fake_transport import FakeLink, make_run, make_sites, reach
from tests.support.flower_runs import plainly, play
from tests.support.lossy_engine import LosingSites


def test_a_node_that_comes_back_is_used_again(tmp_path: Path) -> None:
    config = make_run(method="scaffold", rounds=3, deadline=0.2)
    link = FakeLink(make_sites(config, tmp_path))

    def meddle(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage:
        if question.kind == "train" and question.header["client_id"] == 4:
            link.away = {103} if question.header["round"] == 0 else set()
        return answer

    link.meddle = meddle
    run, _ = play(config, tmp_path, link)
    assert [r["failed_clients"] for r in run.history[1:]] == [{}, {"3": "its site is not connected"}, {}]
    assert [r["models_down"] for r in run.history[1:]] == [10.0, 8.0, 10.0], "nothing is sent to nobody"
    assert run.digest == plainly(config, tmp_path, remote_engine=LosingSites(frozenset({(1, 3)}))).digest


def test_a_node_with_a_new_address_is_the_same_client(tmp_path: Path) -> None:
    config = make_run(method="scaffold", rounds=3)
    link = FakeLink(make_sites(config, tmp_path))
    trained = 0

    def meddle(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage:
        nonlocal trained
        trained += question.kind == "train"
        if trained == 5 and 103 in link.sites:  # the first round's last
            link.sites[900] = link.sites.pop(103)
        return answer

    link.meddle = meddle
    run, _ = play(config, tmp_path, link)
    assert run.summary["failed"] == 0
    assert run.digest == plainly(config, tmp_path).digest


class Killed(Exception):
    pass


@pytest.mark.parametrize(("method", "after"), [("scaffold", 6), ("scaffold", 11), ("fedcross", 8), ("fedrep", 13)])
def test_a_server_that_is_killed_goes_on_with_the_same_bits(method: str, after: int, tmp_path: Path) -> None:
    """Killed while the third client of a round trains; the sites have gone on meanwhile."""
    config = make_run(method=method, rounds=3)
    (tmp_path / "whole").mkdir()
    whole, _ = play(config, tmp_path / "whole")
    link = FakeLink(make_sites(config, tmp_path))
    seen = 0

    def meddle(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage:
        nonlocal seen
        seen += question.kind == "train"
        if seen == after and question.kind == "train":
            raise Killed
        return answer

    link.meddle = meddle
    with pytest.raises(Killed):
        play(config, tmp_path, link)
    link.meddle = None
    out = tmp_path / "flower"
    sites = make_sites(config, tmp_path)  # the sites were restarted too
    link = FakeLink({node + 50: site for node, site in sites.items()})
    run = resume(out, report=False, remote_engine=reach(link, config, out))
    assert run.digest == whole.digest
    assert [r.get("personal_accuracy_mean") for r in run.history] == [
        r.get("personal_accuracy_mean") for r in whole.history
    ]


def test_a_site_that_lost_what_it_kept_starts_anew(tmp_path: Path) -> None:
    config = make_run(method="scaffold", rounds=3)
    link = FakeLink(make_sites(config, tmp_path))

    def meddle(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage:
        if question.kind == "train" and question.header["round"] == 0 and node == 102:
            for file in link.sites[102].folder.rglob("*"):
                if file.parent.name == "client-2":
                    file.unlink()
        return answer

    link.meddle = meddle
    run, _ = play(config, tmp_path, link)
    assert [r["failed_clients"] for r in run.history[1:]] == [
        {},
        {"2": "its client state is missing; it will start without one"},
        {},
    ]
