"""Tests of the secure exchange in rounds of the Flower engine.

The results are those of the multiprocess engine, and the server sees no layer.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.config import replace_config
from fedloom.errors import FedloomError, InputError, RunStopped
from fedloom.flower.message import MessageArray, SiteMessage, make_failure_message
from fedloom.flower.site.handlers import SiteHandler, SiteHandlerResult
from fedloom.flower.tensors import encode_tensor, encode_tensor_columns
from fedloom.runs.build import build_run
from fedloom.runs.execute import execute_run, resume
from fedloom.runs.resolve import resolve_run
from tests.support.fake_transport import FakeLink, make_sites, reach
from tests.support.secure_exchange_runs import SECURE, Two, federate, nodes, on_host, pieces, recorded, run_of


@pytest.mark.parametrize(
    "options",
    [
        {"secure": True},
        {"secure": True, "mixed": True},
        {"secure": True, "granularity": "tensor", "send_probability": 0.9},
        {"secure": True, "granularity": "segment:0.5", "first_stage": 1},
    ],
)
def test_the_result_has_the_bits_of_the_host(certificates: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    config = run_of(options={"fedmr": options})
    finished, link = federate(config, certificates, tmp_path)
    assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]
    kinds = [parcel.kind for parcel in link.asked]
    first_stage = options.get("first_stage", 0)
    assert kinds.count("mix/train") == 5 * (3 - first_stage)
    assert kinds.count("train") == 5 * first_stage
    assert kinds.count("mix/release") == 5 * (3 - first_stage)


def test_with_what_stays_at_home(certificates: Path, tmp_path: Path) -> None:
    """FedRep's heads do not travel, and so are not exchanged either; the server's models are those of the host."""
    config = run_of(method="fedmr+fedrep", rounds=2, options={**SECURE, "fedrep": {"head_epochs": 1}})
    models = []
    link = FakeLink(make_sites(config, tmp_path, nodes(certificates, 5)))
    for sites in (None, reach(link, config, tmp_path / "run")):
        settings = {} if sites else {"engine": "sequential", "deadline": 600.0}
        experiment = build_run(resolve_run(replace_config(config, **settings)), remote_engine=sites)
        with experiment.engine:
            for round in range(2):
                experiment.rounds.run_round(round)
            models.append(experiment.rounds.parts.server.models().clone())
            stays = experiment.rounds.parts.client.personal_columns(experiment.layout)
    assert stays
    for columns in stays:
        models[0][:, columns] = models[1][:, columns] = 0
    assert torch.equal(*models)
    assert len({row.numpy().tobytes() for row in models[0]}) == 5


@pytest.mark.parametrize("granularity", ["module", "tensor"])
def test_networks_with_counters(certificates: Path, tmp_path: Path, granularity: str) -> None:
    """Integers lie in a row as other numbers' bytes, where they may look like anything."""
    options = {"fedmr": {"secure": True, "granularity": granularity}}
    config = run_of(model="cnn:norm=batch", rounds=2, clients=3, clients_per_round=3, options=options, steps=2)
    finished, _ = federate(config, certificates, tmp_path)
    assert finished.summary["failed"] == 0
    assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]


def test_a_run_that_is_stopped_goes_on_with_the_same_bits(certificates: Path, tmp_path: Path) -> None:
    config, out = run_of(rounds=4), tmp_path / "run"
    link = FakeLink(make_sites(config, tmp_path, nodes(certificates, 5)))
    with pytest.raises(RunStopped):
        execute_run(resolve_run(config), out=out, remote_engine=reach(link, config, out), callbacks=[Two()])
    finished = resume(out, remote_engine=reach(link, config, out))
    assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]


def test_the_server_can_refine_the_models(certificates: Path, tmp_path: Path) -> None:
    quick = {"L": 2, "s": 1, "inner_steps": 2, "iterations": 2, "images_per_class": 1, "refine_epochs": 1}
    config = run_of(method="fedmr+dynafed", options={**SECURE, "dynafed": quick})
    finished, _ = federate(config, certificates, tmp_path)
    assert finished.summary["failed"] == 0
    assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]
    alone = replace_config(config, method="fedmr", options=SECURE)
    (tmp_path / "alone").mkdir()
    assert finished.summary["digest"] != on_host(alone, tmp_path / "alone").summary["digest"], "they are refined"


def test_choices_are_private_unless_a_site_says_otherwise(certificates: Path, tmp_path: Path) -> None:
    config = run_of(rounds=2, options={"fedmr": {"secure": True, "granularity": "tensor"}})
    digests = set()
    for k in range(3):
        (tmp_path / str(k)).mkdir()
        finished, _ = federate(config, certificates, tmp_path / str(k), **{"exchange-draws": "private"})
        digests.add(finished.summary["digest"])
    assert len(digests) == 3


# What the server has


def test_the_server_never_has_a_trained_model_nor_a_layer_before_the_end(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trained = recorded(monkeypatch)
    config = run_of(options={"fedmr": {"secure": True, "mixed": True}})
    received: list[bytes] = []

    def watch(link: FakeLink) -> None:
        def see(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage:
            received.extend(bytes(block.data) for block in answer.arrays.values())
            received.append(repr(dict(answer.header)).encode())
            return answer

        link.meddle = see

    finished, _ = federate(config, certificates, tmp_path, watch)
    assert finished.summary["failed"] == 0
    experiment = build_run(resolve_run(replace_config(config, engine="sequential")))
    layers = experiment.rounds.parts.server._layers  # type: ignore[attr-defined]
    experiment.engine.close()
    content = b"".join(received) + caplog.text.encode()
    assert len(trained) == 15
    searched = [piece for _, _, row in trained for piece in pieces(row, layers)]
    assert len(searched) > 200
    assert not [piece for piece in searched if piece in content], "nothing that was received can be read"
    assert searched[7] in content + encode_tensor_columns(trained[0][2], layers[0]) + encode_tensor_columns(
        trained[0][2], layers[1]
    ), "else it is found"

    # The files of the run hold recombined models only: no row of any checkpoint is what one client trained.
    files = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    last = [row for round, _, row in trained if round == 2]
    assert not [row for row in last if row.numpy().tobytes() in files]


def test_nor_do_the_engine_s_updates_hold_one(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update is made of several clients' layers, and together they have each layer once."""
    from fedloom.flower.server.engine import FlowerEngine

    trained, updates = recorded(monkeypatch), list[tuple[int, torch.Tensor]]()
    update = FlowerEngine._update

    def keep(engine: FlowerEngine, job: Any, answer: SiteMessage) -> Any:
        made = update(engine, job, answer)
        updates.append((job.client_id, made.row.clone()))
        return made

    monkeypatch.setattr(FlowerEngine, "_update", keep)
    config = run_of(rounds=1, options={"fedmr": {"secure": True, "mixed": True}})
    federate(config, certificates, tmp_path)
    experiment = build_run(resolve_run(replace_config(config, engine="sequential")))
    layers = experiment.rounds.parts.server._layers  # type: ignore[attr-defined]
    experiment.engine.close()
    assert len(updates) == len(trained) == 5
    for columns in layers:
        before = sorted(encode_tensor_columns(row, columns) for _, _, row in trained)
        assert sorted(encode_tensor_columns(row, columns) for _, row in updates) == before
    assert not any(torch.equal(row, whole) for _, row in updates for _, _, whole in trained)


# Drop-outs and trouble


def gone_at(kind: str, node: int) -> Callable[[FakeLink], None]:
    def change(link: FakeLink) -> None:
        def meddle(at: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage | None:
            return None if (at, question.kind) == (node, kind) else answer

        link.meddle = meddle

    return change


@pytest.mark.parametrize("kind", ["mix/train", "mix/offer", "mix/lock"])
def test_a_site_that_drops_out_leaves_a_round_of_the_others(certificates: Path, tmp_path: Path, kind: str) -> None:
    config = run_of(rounds=2, clients=4, clients_per_round=4, deadline=0.4)
    finished, _ = federate(config, certificates, tmp_path, gone_at(kind, 102))
    records = [record for record in finished.history if record["round"]]
    assert [record["failed"] for record in records] == [1, 1]
    assert records[0]["failed_clients"] == {"2": "no answer within 0.4 s"}
    attempts = 1 if kind == "mix/train" else 2
    assert records[0]["diagnostics"]["engine.exchange_attempts"] == attempts


def test_a_client_lost_before_the_exchange_is_the_same_in_all_engines(certificates: Path, tmp_path: Path) -> None:
    config = run_of(failure_rate=0.3, rounds=3)
    finished, _ = federate(config, certificates, tmp_path, **{"fewest-sites": 2})
    lost = [record["failed"] for record in finished.history if record["round"]]
    assert any(lost)
    assert max(lost) <= 3, "at least two are left"
    assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]


def test_an_answer_that_would_be_refused_is_refused_before_others_layers_are_in_it(
    certificates: Path, tmp_path: Path
) -> None:
    def lie(link: FakeLink) -> None:
        def meddle(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage:
            if (node, answer.kind) != (101, "mix/hello"):
                return answer
            return replace(answer, header={**answer.header, "num_examples": answer.header["num_examples"] + 1})

        link.meddle = meddle

    finished, link = federate(run_of(rounds=1), certificates, tmp_path, lie)
    assert list(finished.history[-1]["failed_clients"]) == ["1"]
    assert "it says that it trained on" in finished.history[-1]["failed_clients"]["1"]
    offered = [parcel for parcel in link.asked if parcel.kind == "mix/offer"]
    assert len(offered) == 4
    assert all(sum(name.startswith("hello/") for name in parcel.arrays) == 4 for parcel in offered)


def test_a_round_in_which_everybody_goes_away_changes_nothing(certificates: Path, tmp_path: Path) -> None:
    config = run_of(rounds=3, clients=3, clients_per_round=3, deadline=0.4)

    def leave(link: FakeLink) -> None:
        def meddle(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage:
            if (question.kind, question.header["round"], node) == ("mix/commit", 1, 102):
                link.away = set(link.sites)
            return answer

        link.meddle = meddle

    finished, _ = federate(config, certificates, tmp_path, leave)
    assert [record["failed"] for record in finished.history[1:]] == [0, 3, 3]
    assert set(finished.history[2]["failed_clients"].values()) == {"rejected: no site released the key to its model."}
    assert set(finished.history[3]["failed_clients"].values()) == {"its site is not connected"}
    (tmp_path / "one").mkdir()
    first = on_host(replace_config(config, rounds=1), tmp_path / "one")
    assert finished.summary["digest"] == first.summary["digest"]


def test_a_client_that_trains_to_nothing_finite_takes_no_part(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = SiteHandler.train

    def spoil(site: SiteHandler, question: SiteMessage) -> SiteHandlerResult:
        done = train(site, question)
        if question.header["client_id"] == 1:
            done.memory.row[3] = np.nan
        return done

    monkeypatch.setattr(SiteHandler, "train", spoil)
    finished, _ = federate(run_of(rounds=1), certificates, tmp_path)
    assert finished.history[-1]["failed_clients"] == {"1": "its model is not finite"}


def test_a_site_without_credentials_is_named(certificates: Path, tmp_path: Path) -> None:
    config = run_of(clients=3, clients_per_round=3)
    configured = nodes(certificates, 3)
    del configured[1]["roster"]
    out = tmp_path / "run"
    link = FakeLink(make_sites(config, tmp_path, configured))
    with pytest.raises(FedloomError, match=r"client 1 cannot take part .*all sites' public keys: set roster="):
        execute_run(resolve_run(config), out=out, remote_engine=reach(link, config, out))


def test_two_sites_are_too_few_unless_they_say_otherwise(certificates: Path, tmp_path: Path) -> None:
    config = run_of(clients=2, clients_per_round=2, rounds=1, min_clients=0)
    (tmp_path / "a").mkdir()
    finished, _ = federate(config, certificates, tmp_path / "a")
    assert "2 sites take part, but site-" in finished.history[-1]["failed_clients"]["0"]
    assert "needs at least 3" in finished.history[-1]["failed_clients"]["1"]
    (tmp_path / "b").mkdir()
    finished, _ = federate(config, certificates, tmp_path / "b", **{"fewest-sites": 2})
    assert finished.summary["failed"] == 0


def test_in_a_simulation_the_server_exchanges_as_it_always_does(tmp_path: Path) -> None:
    config = run_of(rounds=2)
    link = FakeLink(make_sites(config, tmp_path, [{"partition-id": k, "num-partitions": 5} for k in range(5)]))
    out = tmp_path / "run"
    finished = execute_run(resolve_run(config), out=out, remote_engine=reach(link, config, out))
    assert {parcel.kind for parcel in link.asked} == {"hello", "train"}
    assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]


def test_what_travels_beside_the_models_would_tell_all(certificates: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"fedmr.secure hides nothing if clients send .* beside their models"):
        federate(run_of(method="fedmr+scaffold"), certificates, tmp_path)


def test_a_site_itself_refuses_to_send_what_would_tell_what_it_trained(certificates: Path, tmp_path: Path) -> None:
    """The server's refusal is not what protects the site."""
    config = run_of(method="fedmr+scaffold", clients=3, clients_per_round=3)
    site = make_sites(config, tmp_path, nodes(certificates, 3))[100]
    site.build()
    header = {
        "run": "ab" * 16,
        "round": 0,
        "client_id": 0,
        "nonce": "0" * 32,
        "model_index": 0,
        "attempt": 0,
        "accepted": None,
    }
    control = {"extra/c": encode_tensor(torch.zeros(site.layout.trainable))}
    blocks = {"model": site.codec.encode(site.initial), "opener": MessageArray.raw(bytes(range(32))), **control}
    reason = site.handle(SiteMessage("mix/train", header, blocks)).header["reason"]
    assert "what it sends beside its model would reveal what was trained" in reason


def test_several_clients_at_one_site(certificates: Path, tmp_path: Path) -> None:
    """Each of them is a participant of its own; three sites are three."""
    config = run_of()
    configured = nodes(certificates, 3)
    for k, node in enumerate(configured):
        del node["client"]
        node["clients"] = ",".join(str(c) for c in range(k, 5, 3))
    out = tmp_path / "run"
    link = FakeLink(make_sites(config, tmp_path, configured))
    finished = execute_run(resolve_run(config), out=out, remote_engine=reach(link, config, out))
    assert finished.summary["failed"] == 0
    assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]


@pytest.fixture
def asked(certificates: Path, tmp_path: Path) -> tuple[SiteHandler, SiteMessage]:
    """A site that has played a round, and what it was asked first."""
    _, link = federate(run_of(clients=3, clients_per_round=3, rounds=1), certificates, tmp_path)
    question = next(parcel for parcel in link.asked if parcel.kind == "mix/train" and parcel.header["client_id"] == 0)
    return link.sites[100], question


def refusal(site: SiteHandler, question: SiteMessage, kind: str | None = None, **header: Any) -> str:
    answer = site.handle(SiteMessage(kind or question.kind, {**question.header, **header}, question.arrays))
    assert answer.kind == "failed"
    return str(answer.header["reason"])


def test_a_client_trains_three_times_for_a_round_and_no_more(asked: tuple[SiteHandler, SiteMessage]) -> None:
    """Whatever slot it is told, and whatever it is asked about other rounds in between."""
    site, question = asked
    for slot in (1, 2):
        assert (
            site.handle(SiteMessage(question.kind, {**question.header, "model_index": slot}, question.arrays)).kind
            == "mix/hello"
        )
        later = SiteMessage(question.kind, {**question.header, "round": 6 + slot}, question.arrays)
        assert site.handle(later).kind == "mix/hello"
    assert "it has trained for the exchange of round 1 3 times already" in refusal(site, question)
    assert "it has trained for the exchange of round 1 3 times already" in refusal(site, question, model_index=2)


def test_nor_does_it_send_its_model_in_any_other_way(asked: tuple[SiteHandler, SiteMessage]) -> None:
    site, question = asked
    assert "it sends its models only through the secure exchange of layers" in refusal(site, question, "train")
    assert "it sends its models only through the secure exchange of layers" in refusal(site, question, "train", round=5)


def test_a_site_exchanges_only_what_its_run_says(certificates: Path, tmp_path: Path) -> None:
    config = run_of(clients=3, clients_per_round=3, rounds=2, options={"fedmr": {"secure": True, "first_stage": 1}})
    _, link = federate(config, certificates, tmp_path)
    question = next(parcel for parcel in link.asked if parcel.kind == "mix/train" and parcel.header["client_id"] == 0)
    assert "in round 1 of this run no layers are exchanged" in refusal(link.sites[100], question, round=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_index": -1}, "invalid model_index: -1"),
        ({"model_index": "first"}, "invalid model_index: 'first'"),
        ({"model_index": None}, "model_index"),
    ],
)
def test_bad_slots_are_refused(asked: tuple[SiteHandler, SiteMessage], change: dict[str, Any], words: str) -> None:
    site, question = asked
    assert words in refusal(site, question, **change)
    assert words in refusal(site, question, "mix/offer", **change)


def test_a_question_without_a_key_to_seal_for_is_refused(asked: tuple[SiteHandler, SiteMessage]) -> None:
    site, question = asked
    blocks = {name: block for name, block in question.arrays.items() if name != "opener"}
    answer = site.handle(SiteMessage(question.kind, {**question.header, "round": 1}, blocks))
    assert "the request contains no key to seal layers for" in answer.header["reason"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"exchange-draws": "mine"}, "exchange-draws in the node configuration must be private or seeded, not 'mine'"),
        ({"fewest-sites": "few"}, "fewest-sites in the node configuration must be an integer of at least 1, not 'few'"),
        ({"fewest-sites": 0}, "fewest-sites in the node configuration must be an integer of at least 1, not '0'"),
    ],
)
def test_bad_settings_of_a_node_are_named(certificates: Path, tmp_path: Path, more: dict[str, Any], words: str) -> None:
    finished, _ = federate(
        run_of(clients=3, clients_per_round=3, rounds=1, min_clients=0), certificates, tmp_path, **more
    )
    assert words in finished.history[-1]["failed_clients"]["0"]


def test_a_server_that_begins_its_round_anew_has_its_sites_begin_anew(certificates: Path, tmp_path: Path) -> None:
    """As after its restart, before anybody had committed: what a client trained then is replaced."""
    config = run_of(clients=3, clients_per_round=3, rounds=1)
    sites = make_sites(config, tmp_path, nodes(certificates, 3))
    link = FakeLink(sites)
    link.meddle = lambda node, question, answer: None if question.kind == "mix/lock" else answer
    behind = reach(link, config, tmp_path / "one")
    execute_run(
        resolve_run(replace_config(config, deadline=0.2, min_clients=0)), out=tmp_path / "one", remote_engine=behind
    )
    before = [site.memory["exchanges"][behind.registry.run, 0, k] for k, site in enumerate(sites.values())]
    again = reach(FakeLink(sites), config, tmp_path / "two")
    again.registry.run = behind.registry.run
    finished = execute_run(resolve_run(config), out=tmp_path / "two", remote_engine=again)
    after = [site.memory["exchanges"][behind.registry.run, 0, k] for k, site in enumerate(sites.values())]
    assert finished.summary["failed"] == 0
    assert finished.summary["digest"] == on_host(config, tmp_path).summary["digest"]
    assert not any(one is two for one, two in zip(before, after, strict=True))


def dying_at(kind: str, config: Any, certificates: Path, tmp_path: Path) -> FakeLink:
    """Sites of a run whose server died in its second round."""
    link, out = FakeLink(make_sites(config, tmp_path, nodes(certificates, 5))), tmp_path / "run"

    def die(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage:
        if (question.kind, question.header["round"]) == (kind, 1):
            raise KeyboardInterrupt
        return answer

    link.meddle = die
    with pytest.raises(KeyboardInterrupt):
        execute_run(resolve_run(config), out=out, remote_engine=reach(link, config, out))
    link.meddle = None
    return link


@pytest.mark.parametrize("kind", ["mix/offer", "mix/release"])
def test_a_server_that_dies_in_an_exchange_goes_on_with_the_bits_that_it_would_have_had(
    certificates: Path, tmp_path: Path, kind: str
) -> None:
    """What clients keep, such as FedRep's heads, goes on too."""
    config = run_of(method="fedmr+fedrep", rounds=3, options={**SECURE, "fedrep": {"head_epochs": 1}})
    link, out = dying_at(kind, config, certificates, tmp_path), tmp_path / "run"
    finished = resume(out, remote_engine=reach(link, config, out))
    assert finished.summary["failed"] == 0
    (tmp_path / "whole").mkdir()
    whole, _ = federate(config, certificates, tmp_path / "whole")
    assert finished.summary["digest"] == whole.summary["digest"]


def test_what_comes_to_nothing_leaves_a_client_as_it_was(certificates: Path, tmp_path: Path) -> None:
    """A server could have it train a thousand times before anybody commits, until it has nothing to learn any more."""
    options = {**SECURE, "fedrep": {"head_epochs": 1}}
    config = run_of(method="fedmr+fedrep", clients=3, clients_per_round=3, rounds=1, options=options)
    staged: list[tuple[str, bool]] = []

    def look(link: FakeLink) -> None:
        def watch(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage:
            if question.kind.startswith("mix/"):
                staged.append((question.kind, any(link.sites[node].state_store(question).folder.glob("*.safetensors"))))
            return answer

        link.meddle = watch

    finished, _ = federate(config, certificates, tmp_path, look)
    assert finished.summary["failed"] == 0
    early = {"mix/train", "mix/offer", "mix/answer", "mix/lock"}
    assert {kind for kind, there in staged if not there} == early
    assert {kind for kind, there in staged if there} == {"mix/commit", "mix/release"}


def test_nobody_commits_itself_to_an_exchange_that_leaves_too_few_answers(certificates: Path, tmp_path: Path) -> None:
    """The run would stop after it, and the server would have had two recombinations when all are there again."""
    config, out = run_of(rounds=2, clients=4, clients_per_round=4, deadline=0.5, min_clients=4), tmp_path / "run"
    link = FakeLink(make_sites(config, tmp_path, nodes(certificates, 4)))
    gone_at("mix/train", 103)(link)
    with pytest.raises(FedloomError, match="round 1: 0 of 4 clients answered, but min_clients is 4"):
        execute_run(resolve_run(config), out=out, remote_engine=reach(link, config, out))
    assert not [parcel for parcel in link.asked if parcel.kind == "mix/offer"]
    link.meddle = None
    finished = resume(out, remote_engine=reach(link, config, out))
    assert [record["failed"] for record in finished.history if record["round"]] == [0, 0]


def test_a_round_that_fails_again_and_again_does_not_hold_up_a_run_for_ever(certificates: Path, tmp_path: Path) -> None:
    config, out = run_of(rounds=2, deadline=0.3, min_clients=3), tmp_path / "run"
    link = FakeLink(make_sites(config, tmp_path, nodes(certificates, 5)))

    def meddle(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage | None:
        return None if (question.kind, question.header["round"], node) == ("mix/commit", 0, 102) else answer

    link.meddle = meddle
    with pytest.raises(FedloomError, match="round 1: 0 of 5 clients answered, but min_clients is 3"):
        execute_run(resolve_run(config), out=out, remote_engine=reach(link, config, out))
    for _ in range(2):
        with pytest.raises(FedloomError, match="round 1: 0 of 5 clients answered, but min_clients is 3"):
            resume(out, remote_engine=reach(link, config, out))
    finished = resume(out, remote_engine=reach(link, config, out))
    assert [record["failed"] for record in finished.history if record["round"]] == [5, 0]
    assert "for the exchange of round 1 3 times already" in finished.history[1]["failed_clients"]["0"]


def test_too_few_answers_stop_a_run_also_when_one_site_says_that_it_never_will(
    certificates: Path, tmp_path: Path
) -> None:
    def lie(link: FakeLink) -> None:
        def meddle(node: int, question: SiteMessage, answer: SiteMessage) -> SiteMessage | None:
            if question.kind != "mix/train" or node < 102:
                return answer
            return make_failure_message(question, "never", permanent=True) if node == 102 else None

        link.meddle = meddle

    with pytest.raises(FedloomError, match="round 1: 0 of 5 clients answered, but min_clients is 3"):
        federate(run_of(rounds=2, deadline=0.5, min_clients=3), certificates, tmp_path, lie)


def test_a_stage_without_training_is_refused(certificates: Path, tmp_path: Path) -> None:
    config = run_of(clients=3, clients_per_round=3, rounds=1)
    _, link = federate(config, certificates, tmp_path)
    question = next(parcel for parcel in link.asked if parcel.kind == "mix/offer" and parcel.header["client_id"] == 0)
    later = SiteMessage(question.kind, {**question.header, "round": 7}, question.arrays)
    answer = link.sites[100].handle(later)
    assert answer.kind == "failed"
    assert "it has no model of round 8 to exchange layers of" in answer.header["reason"]
