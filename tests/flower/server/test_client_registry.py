"""Tests of the client registry: stable client ids, and rejected nodes."""

from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import FedloomError
from fedloom.flower.server.client_registry import ClientRegistry
from tests.support.fake_nodes import Town, site


def places(roster: ClientRegistry) -> dict[int, int]:
    return {c: node for c in range(roster.num_clients) if (node := roster.node_of(c)) is not None}


def test_sites_are_where_they_say(tmp_path: Path) -> None:
    town = Town(n7=site("a", 2), n8=site("b", 0, 1, samples=3))
    roster = ClientRegistry(3)
    roster.join(town, 1)
    assert places(roster) == {0: 8, 1: 8, 2: 7}
    assert [roster.num_examples(client) for client in range(3)] == [3, 3, 10]
    roster.refresh(town)
    assert len(town.asked) == 2  # nobody is asked twice


def test_numbers_are_given_in_the_order_of_arrival_and_kept(tmp_path: Path) -> None:
    town = Town(n7=site("a"))
    roster = ClientRegistry(2)
    roster.refresh(town)
    roster.refresh(town)
    town.says[5] = site("b")
    roster.join(town, 1)
    assert places(roster) == {0: 7, 1: 5}
    roster.save(tmp_path / "sites.json")

    again = ClientRegistry(2)
    again.load(tmp_path / "sites.json")
    assert again.run == roster.run
    again.join(Town(n1=site("b"), n2=site("a")), 1)
    assert places(again) == {0: 2, 1: 1}


def test_a_third_site_is_one_too_many() -> None:
    roster = ClientRegistry(2)
    town = Town(n7=site("a", 0), n8=site("b", 1), n9=site("c"))
    roster.join(town, 1)
    roster.refresh(town)
    assert places(roster) == {0: 7, 1: 8}
    assert "all 2 clients have a site already" in roster.troubles[9]


def test_two_nodes_cannot_be_one_client_unless_the_first_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    roster = ClientRegistry(2)
    town = Town(n7=site("a", 0), n8=site("b", 1), n9=site("b", 1))
    roster.join(town, 1)
    assert places(roster) == {0: 7, 1: 8}
    assert roster.troubles == {9: "it says that it is client 1, which is at node 8 already"}
    del town.says[8]
    roster.refresh(town)
    assert places(roster) == {0: 7}
    assert roster.missing_client_ids() == [1]
    monkeypatch.setattr("fedloom.flower.server.client_registry.AGAIN_SECONDS", 0.0)
    del town.says[9]
    roster.refresh(town)
    town.says |= {8: site("b", 1), 9: site("b", 1)}
    roster.refresh(town)
    assert places(roster) == {0: 7, 1: 8}
    del town.says[8]
    roster.refresh(town)  # the second is asked again after a while, without having gone
    assert places(roster) == {0: 7, 1: 9}
    assert roster.troubles == {}


def test_a_client_has_the_same_samples_throughout() -> None:
    roster = ClientRegistry(1)
    town = Town(n7=site("a", 0))
    roster.join(town, 1)
    town.says = {8: site("a", 0, samples=11)}
    roster.refresh(town)
    assert places(roster) == {}
    assert roster.troubles[8] == "client 0 had 10 samples and now has 11; this must not change during a run"


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"site": 3, "clients": {"0": [1, 1]}},
        {"site": "", "clients": {"0": [1, 1]}},
        {"site": "a" * 1000, "clients": {"0": [1, 1]}},
        {"site": "a", "clients": [0]},
        {"site": "a", "clients": {"2": [1, 1]}},
        {"site": "a", "clients": {"-1": [1, 1]}},
        {"site": "a", "clients": {"x": [1, 1]}},
        {"site": "a", "clients": {"0": [1, 2]}},
        {"site": "a", "clients": {"0": [-1, -1]}},
        {"site": "a", "clients": {"0": [True, True]}},
        {"site": "a", "clients": {"0": [1.0, 1.0]}},
        {"site": "a", "clients": {"0": [1 << 60, 1]}},
        {"site": "a", "clients": {"0": 5}},
    ],
)
def test_nonsense_is_not_registered(header: dict[str, Any]) -> None:
    roster = ClientRegistry(2)
    with pytest.raises(FedloomError, match="no site could be used after"):
        roster.join(Town(n7=header), 0.01)
    assert roster.registered == {}
    assert 7 in roster.troubles


def test_what_a_site_complains_of_is_said() -> None:
    with pytest.raises(FedloomError, match=r"no site could be used after 0.01 s: there is no file x\."):
        ClientRegistry(1).join(Town(n7={"reason": "there is no file x"}), 0.01)


def test_a_silent_node_is_waited_for_but_not_for_ever() -> None:
    roster = ClientRegistry(2)
    town = Town(n7=site("a", 0), n8=site("b", 1))
    town.silent = {8}
    roster.join(town, 0.3)
    assert places(roster) == {0: 7}
    roster.wait_for(town, {1}, 0.1)
    town.silent = set()
    roster.wait_for(town, {1}, 0.1)
    assert places(roster) == {0: 7, 1: 8}
