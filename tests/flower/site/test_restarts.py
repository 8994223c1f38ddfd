"""Tests of sites that restart in the middle of a run."""

from pathlib import Path

from fedloom.config import replace_config
from fedloom.flower.message import SiteMessage
from fedloom.runs.execute import execute_run
from fedloom.runs.resolve import resolve_run
from tests.support.fake_transport import FakeLink, make_run, make_sites, reach


def test_a_site_that_the_server_gave_its_number_still_has_it_after_a_restart(tmp_path: Path) -> None:
    """Its node's address is the same, so nobody asks it again who it is."""
    config = make_run(method="scaffold", rounds=3)
    nodes = [{} for _ in range(5)]
    link, restarted = FakeLink(make_sites(config, tmp_path, nodes)), make_sites(config, tmp_path, nodes)

    def meddle(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage:
        if question.kind == "train" and question.header["round"] == 0 and node == 103:
            link.sites[103] = restarted[103]
        return answer

    link.meddle = meddle
    out = tmp_path / "flower"
    run = execute_run(resolve_run(config), out=out, report=False, remote_engine=reach(link, config, out, join=30))
    assert [record.get("failed_clients") for record in run.history[1:]] == [{}, {}, {}]
    plain = execute_run(resolve_run(replace_config(config, engine="sequential")), out=tmp_path / "plain", report=False)
    assert run.digest == plain.digest
