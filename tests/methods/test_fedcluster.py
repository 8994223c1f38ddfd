"""Tests of FedCluster: the order of clients, and its limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.testing import CHECKS
from fedloom.testing.fixtures import SmallFederatedDataset, build_small_run, small_run
from tests.support.task_rounds import in_round


def test_one_cluster_is_fedavg_bit_for_bit() -> None:
    assert small_run("fedcluster", {"fedcluster": {"clusters": 1}}).digest == small_run("fedavg", {}).digest
    assert small_run("fedcluster", {"fedcluster": {"clusters": 2}}).digest != small_run("fedavg", {}).digest


@given(st.integers(1, 12))
@settings(max_examples=12, deadline=None)
def test_clusters_share_the_clients_and_each_has_one_turn_in_a_cycle(clusters: int) -> None:
    given_options = {"fedcluster": {"clusters": clusters}}
    with build_small_run("fedcluster", given_options, clients_per_round=8).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        count = min(clusters, 8)
        assert sorted(client for cluster in server._clusters for client in cluster) == list(range(8))
        sizes = [len(cluster) for cluster in server._clusters]
        assert len(sizes) == count
        assert max(sizes) - min(sizes) <= 1
        for cycle in range(3):
            asked = [client for turn in range(count) for client in server.sample_clients(cycle * count + turn)]
            assert sorted(asked) == list(range(8))


def test_the_order_of_clusters_is_drawn_anew_in_each_cycle() -> None:
    with build_small_run("fedcluster", {"fedcluster": {"clusters": 8}}).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        orders = {tuple(server.cluster_at(8 * cycle + turn) for turn in range(8)) for cycle in range(5)}
        assert len(orders) > 1


def test_no_more_clients_are_asked_than_the_run_allows() -> None:
    with build_small_run(
        "fedcluster", {"fedcluster": {"clusters": 2}}, clients_per_round=3
    ).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        for number in range(6):
            asked = server.sample_clients(number)
            assert len(asked) == len(set(asked)) == 3
            assert set(asked) <= set(server._clusters[server.cluster_at(number)])


def test_a_cluster_for_each_client_is_training_in_sequence() -> None:
    with build_small_run("fedcluster", {"fedcluster": {"clusters": 8}}).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        row = experiment.rounds.context.initial.clone()
        for number in range(8):
            (client,) = server.sample_clients(number)
            jobs = list(server.dispatch(number, [client]))
            assert torch.equal(jobs[0].row, row), "each goes on where the one before it stopped"
            (update,) = experiment.engine.train(in_round(number, jobs))
            row = update.row.clone()
            experiment.rounds.run_round(number)
            assert torch.equal(server.global_model(), row)


def test_a_cluster_without_samples_leaves_the_model_alone() -> None:
    federation = SmallFederatedDataset(sizes={3: 0})
    finished = small_run("fedcluster", {"fedcluster": {"clusters": 8}}, federated_data=federation, rounds=8)
    assert sum(record["idle"] for record in finished.records) == 1
    assert sum("note" in record for record in finished.records) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("title", CHECKS)
@pytest.mark.parametrize("clusters", [1, 2])
def test_it_keeps_the_contract_with_few_clusters(clusters: int, title: str) -> None:
    """With as many as by default, one for each client here: tests/test_testing.py."""
    CHECKS[title]("fedcluster", {"fedcluster": {"clusters": clusters}})
