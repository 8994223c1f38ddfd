"""Tests that the Flower engine gives the sequential engine's bits.

Personal tensors must not be sent.
"""

from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import FedloomError, InputError
from fedloom.flower.site_data import SiteDataServerView
from fedloom.runs.execute import resume
from fedloom.utils.storage import read_json
from tests.support.fake_transport import FakeLink, make_run, make_sites
from tests.support.flower_runs import plainly, play

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedcross": {},
    "fedmr": {},
    "fedcda": {"fedcda": {"warmup": 1}},
    "lss": {"lss": {"models": 2}},
    "dynafed": {"dynafed": {"L": 2, "s": 1, "iterations": 2, "images_per_class": 1}},
    "scaffold": {},
    "moon": {},
    "fedfomo": {},
}


@pytest.mark.parametrize("method", METHODS)
def test_it_gives_the_same_bits_as_the_plain_engine(method: str, tmp_path: Path) -> None:
    config = make_run(method=method, options=METHODS[method], clients_per_round=4)
    run, _ = play(config, tmp_path)
    plain = plainly(config, tmp_path)
    assert run.digest == plain.digest
    for mine, other in zip(run.history, plain.history, strict=True):
        for name in ("accuracy", "loss", "train_loss", "bytes_down", "bytes_up", "personal_accuracy_mean"):
            assert mine.get(name) == other.get(name), name


def test_several_clients_at_a_node_give_the_same_bits(tmp_path: Path) -> None:
    config = make_run(method="scaffold", validation=0.2)
    link = FakeLink(make_sites(config, tmp_path, [{"clients": "0,2,4"}, {"clients": "1,3"}]))
    run, _ = play(config, tmp_path, link)
    assert run.digest == plainly(config, tmp_path).digest


def test_what_stays_home_does_not_travel(tmp_path: Path) -> None:
    config = make_run(method="fedrep", rounds=2)
    run, link = play(config, tmp_path)
    plain = plainly(config, tmp_path)
    assert [r.get("personal_accuracy_mean") for r in run.history] == [
        r.get("personal_accuracy_mean") for r in plain.history
    ]
    rows = [p.arrays["model"].shape[0] for p in (*link.asked, *link.answered) if "model" in p.arrays]
    layout = next(iter(link.sites.values())).layout
    head = sum(part.stop - part.start for part in next(iter(link.sites.values())).context.client.personal_columns)
    assert set(rows) == {layout.size - head}
    assert run.history[-1]["bytes_up"] == 5 * (layout.size - head) * 4


def test_the_server_learns_counts_and_no_samples(tmp_path: Path) -> None:
    config = make_run(rounds=1, validation=0.25)
    run, link = play(config, tmp_path)
    hellos = [p for p in link.answered if p.kind == "hello"]
    assert len(hellos) == 5
    assert all(not p.arrays for p in hellos)
    plain = plainly(config, tmp_path)
    assert run.digest == plain.digest
    server = SiteDataServerView(link.sites[100].context.data, 5, lambda k: 3)
    with pytest.raises(FedloomError, match="at its site, not here"):
        server.client_samples(0)
    saved = read_json(tmp_path / "flower" / "sites.json")["clients"]
    for client, (_, samples, trains) in saved.items():
        federation = link.sites[100 + int(client)].context.data
        assert samples == federation.num_examples(int(client))
        assert trains == samples - min(int(0.25 * samples + 0.5), samples - 1)


def test_a_run_does_not_move_between_sites_and_this_machine(tmp_path: Path) -> None:
    config = make_run(rounds=1)
    play(config, tmp_path)
    plainly(config, tmp_path)
    with pytest.raises(InputError, match="cannot continue with 'multiprocess'"):
        resume(tmp_path / "flower", engine="multiprocess")
    with pytest.raises(InputError, match="cannot continue with 'flower'"):
        resume(tmp_path / "sequential", engine="flower")
