"""What a site with a models key answers, and what it does not, whatever the server asks."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_runs import key_of, nodes, run_of
from fake import FakeLink, make_sites, reach
from torch import nn

from fedloom.api import execute
from fedloom.errors import FedloomError
from fedloom.exchange import LayerExchange
from fedloom.flower.inventory import Entry, Inventory
from fedloom.flower.parcel import Block, Parcel
from fedloom.flower.relay_server import sealed_for
from fedloom.flower.relay_site import _known_as, _mean
from fedloom.flower.sealed import ModelsKey, Session, seal_for
from fedloom.flower.site import Site
from fedloom.flower.starting import plan_of
from fedloom.flower.tensors import pick, put, to_block, travelling
from fedloom.request import replace_config
from fedloom.rows import Layout, Mean


def fails(config: Any, tmp_path: Path, configured: list[dict[str, Any]]) -> str:
    link, out = FakeLink(make_sites(config, tmp_path, configured)), tmp_path / "run"
    with pytest.raises(FedloomError) as error:
        execute(config, out=out, sites=reach(link, config, out))
    assert not any(parcel.kind == "mix/train" for parcel in link.asked)
    return str(error.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([1, 1, None], "client 2 has no models key, but client 0 has one; all sites must have the same"),
        ([None, 1, 1], "client 1 has a models key, but client 0 has none; all sites must have the same"),
        (
            [1, 2, 1],
            "client 1 has a models key, but client 0 has another one, or other settings; all sites must have the same",
        ),
    ],
)
def test_all_sites_have_the_same_key_or_none(
    certificates: Path, tmp_path: Path, keys: list[int | None], words: str
) -> None:
    (tmp_path / "2").write_bytes(ModelsKey().file())
    paths = {1: str(certificates / "models.key"), 2: str(tmp_path / "2")}
    configured = [
        {**node, **({"models-key": paths[key], "folder": "some"} if key else {})}
        for node, key in zip(nodes(certificates, 3), keys, strict=True)
    ]
    assert words in fails(run_of(clients=3, per_round=3), tmp_path, configured)


def test_a_key_that_cannot_be_read_is_named(certificates: Path, tmp_path: Path) -> None:
    configured = nodes(certificates, 3, **{"models-key": str(tmp_path / "nowhere"), "folder": "some"})
    words = fails(run_of(clients=3, per_round=3), tmp_path, configured)
    assert "client 0 cannot take part in the secure exchange" in words
    assert "cannot read the models key" in words


def test_a_refiner_cannot_work_on_models_that_are_sealed(certificates: Path, tmp_path: Path) -> None:
    configured = nodes(certificates, 3, **key_of(certificates))
    config = run_of(method="fedmr+dynafed", clients=3, per_round=3)
    words = fails(config, tmp_path, configured)
    assert "the server refines models one by one, which it cannot where sites seal them for each other" in words


def block(change: Callable[[bytes], bytes]) -> Callable[[Parcel], Parcel]:
    def changed(question: Parcel) -> Parcel:
        sealed = Block.raw(change(bytes(question.blocks["model"].data)))
        return replace(question, blocks={**question.blocks, "model": sealed})

    return changed


def inventory(change: Callable[[bytes], bytes | None]) -> Callable[[Parcel], Parcel]:
    def changed(question: Parcel) -> Parcel:
        blocks, listed = dict(question.blocks), change(bytes(question.blocks["inventory"].data))
        del blocks["inventory"]
        return replace(question, blocks={**blocks, **({"inventory": Block.raw(listed)} if listed is not None else {})})

    return changed


def header(**values: Any) -> Callable[[Parcel], Parcel]:
    return lambda question: replace(question, header={**question.header, **values})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (block(lambda sealed: sealed[:-1]), "the model in the question has"),
        (
            block(lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1])),
            "is not that of the model which the inventory has",
        ),
        (header(slot=7), "the inventory has no model of slot 7"),
        (
            lambda question: replace(question, header={**question.header, "slot": (question.header["slot"] + 1) % 3}),
            "layer 0 is not that of the model which the inventory has",
        ),
        (inventory(lambda listed: listed[:-1]), "no site of this run has vouched for the inventory"),
        (inventory(lambda listed: listed.replace(b"[0,", b"[1,")), "no site of this run has vouched for the inventory"),
        (inventory(lambda listed: ModelsKey().vouch(listed[32:]) + listed[32:]), "no site of this run has vouched"),
        (inventory(lambda listed: b""), "no site of this run has vouched for the inventory"),
        (inventory(lambda listed: None), "there is no inventory in the question"),
        (
            lambda question: replace(question, blocks={**question.blocks, "opener": Block.raw(ModelsKey().public)}),
            "it seals its layers for the sites' models key, and was asked to do so for another",
        ),
    ],
)
def test_questions_that_are_not_right(
    fresh: tuple[Site, Parcel], change: Callable[[Parcel], Parcel], words: str
) -> None:
    site, question = fresh
    answer = site.answer(change(question))
    assert answer.kind == "failed"
    assert words in answer.header["reason"]
    assert site.answer(question).kind == "mix/hello", "and then the right one"


@pytest.mark.parametrize(("away", "kind"), [(0.0, "mix/hello"), (1e-7, "mix/hello"), (0.01, "failed")])
def test_a_site_trains_no_model_of_the_server_s_own_making(
    certificates: Path, tmp_path: Path, away: float, kind: str
) -> None:
    """Or the server might send all others a model that nobody learns anything from, and have the mean to itself."""
    config, key = run_of(clients=3, per_round=3), ModelsKey.read(certificates / "models.key")
    site = make_sites(config, tmp_path, nodes(certificates, 3, **key_of(certificates)))[100]
    site.build()
    row = site.initial.clone()
    row[: site.layout.trainable] += away
    header = {"run": "ab" * 16, "round": 0, "client": 0, "nonce": "cd" * 16, "slot": 0, "attempt": 0}
    blocks = {"row": site.travel.pack(row), "opener": Block.raw(_known_as(site, key))}
    answer = site.answer(Parcel("mix/train", header, blocks))
    assert answer.kind == kind
    if kind == "failed":
        words = "the model in the question is neither sealed nor the one that this run begins with"
        assert words in answer.header["reason"]


def test_nor_the_initial_one_or_any_other_twice(asked: tuple[Site, Parcel]) -> None:
    """With the same models again and one client left out, two means would differ by that one's."""
    site, question = asked
    header = {**question.header, "round": 5}
    assert "it has trained this model before" in site.answer(replace(question, header=header)).header["reason"]
    first = {"row": site.travel.pack(site.initial + 1e-7), "opener": question.blocks["opener"]}
    reason = site.answer(Parcel("mix/train", header, first)).header["reason"]
    assert "it has trained models of this run that are sealed, and does not begin anew" in reason


def test_sites_that_were_told_different_settings_do_not_exchange(certificates: Path, tmp_path: Path) -> None:
    """The server tells them: with a rate of nothing for all but one, the mean would be that one's model."""
    key, names = ModelsKey.read(certificates / "models.key"), set()
    configured = nodes(certificates, 3, **key_of(certificates))
    for number, lr in enumerate((0.1, 1e-12)):
        (tmp_path / str(number)).mkdir()
        site = make_sites(run_of(clients=3, per_round=3, lr=lr), tmp_path / str(number), configured)[100]
        names.add(_known_as(site, key))
    assert len(names) == 2
    (tmp_path / "elsewhere").mkdir()
    same = make_sites(run_of(clients=3, per_round=3, lr=0.1, deadline=9.0), tmp_path / "elsewhere", configured)[101]
    assert _known_as(same, key) in names, "how long the server waits is no matter"
    config = run_of(clients=3, per_round=3, lr=0.1, options={"fedmr": {"secure": True, "mixed": True}})
    site = make_sites(config, tmp_path / "elsewhere", configured)[100]
    turned = Site(dict(reversed(list(site.given.items()))), site.node, site.app, site.folder)
    assert _known_as(turned, key) == _known_as(site, key), "nor is the order in which settings come"


def test_a_server_cannot_seal_a_model_of_its_own_making(fresh: tuple[Site, Parcel], certificates: Path) -> None:
    """All that it knows of the models key is its name."""
    site, question = fresh
    name = _known_as(site, ModelsKey.read(certificates / "models.key"))
    session, sizes = Session(question.header["run"], 0), [len(pick(site.initial, c)) for c in columns_of(site)]
    for seal in (seal_for(name), ModelsKey(name).seal):
        forged = b"".join(seal(bytes(size), session, number) for number, size in enumerate(sizes))
        blocks = {**question.blocks, "model": Block.raw(forged)}
        answer = site.answer(replace(question, blocks=blocks))
        assert "layer 0 is not that of the model which the inventory has" in answer.header["reason"]
        listed = Inventory(question.header["run"], {question.header["slot"]: Entry(session)}).vouched(ModelsKey(name))
        answer = site.answer(replace(question, blocks={**blocks, "inventory": Block.raw(listed)}))
        assert "no site of this run has vouched for the inventory" in answer.header["reason"]


def columns_of(site: Site) -> list[list[slice]]:
    plan = plan_of(site, 0)
    assert plan is not None
    return travelling(plan, site.travel)


@pytest.mark.parametrize("first_stage", [1, 2])
def test_there_are_no_rounds_in_the_open(certificates: Path, tmp_path: Path, first_stage: int) -> None:
    """The server could send each client whatever it liked, and ask for its model."""
    options = {"fedmr": {"secure": True, "first_stage": first_stage}}
    config = run_of(clients=3, per_round=3, rounds=3, options=options)
    configured = nodes(certificates, 3, **key_of(certificates))
    words = fails(config, tmp_path, configured)
    assert "client 0 has a models key, and with one it takes part in exchanges of layers alone" in words
    (tmp_path / "alone").mkdir()
    site = make_sites(config, tmp_path / "alone", configured)[100]
    site.build()
    header = {"run": "ab" * 16, "round": 0, "client": 0, "nonce": "cd" * 16, "slot": 0, "attempt": 0}
    question = Parcel("train", header, {"row": site.travel.pack(site.initial)})
    assert "through the secure exchange of layers alone" in site.answer(question).header["reason"]
    opener = Block.raw(_known_as(site, ModelsKey.read(certificates / "models.key")))
    later = Parcel("mix/train", {**header, "round": first_stage}, {**question.blocks, "opener": opener})
    assert "with a models key there are no rounds in the open" in site.answer(later).header["reason"]


@pytest.mark.parametrize("settings", [{"method": "fedavg", "options": {}}, {"options": {"fedmr": {"secure": False}}}])
def test_nor_is_there_any_run_without_an_exchange(certificates: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """What a run is, the server says: it might say another one."""
    config = run_of(clients=3, per_round=3, rounds=1, **settings)
    words = fails(config, tmp_path, nodes(certificates, 3, **key_of(certificates)))
    assert "client 0 has a models key, and with one it takes part in exchanges of layers alone" in words


def test_without_a_roster_a_models_key_is_reason_enough_to_send_nothing(certificates: Path, tmp_path: Path) -> None:
    config = run_of(clients=3, per_round=3)
    configured = nodes(certificates, 3, **key_of(certificates))
    del configured[0]["roster"]
    site = make_sites(config, tmp_path, configured)[100]
    site.build()
    header = {"run": "ab" * 16, "round": 0, "client": 0, "nonce": "cd" * 16}
    answer = site.answer(Parcel("train", header, {"row": site.travel.pack(site.initial)}))
    assert "through the secure exchange of layers alone" in answer.header["reason"]


def test_a_sealed_model_that_is_not_finite_is_not_trained(
    fresh: tuple[Site, Parcel], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, question = fresh
    opened = ModelsKey.open

    def spoilt(key: ModelsKey, sealed: bytes, session: Session, number: int, *, mean: bool = False) -> bytes:
        nan = torch.full((1,), float("nan")).numpy().tobytes()
        return nan + opened(key, sealed, session, number, mean=mean)[4:]

    monkeypatch.setattr(ModelsKey, "open", spoilt)
    answer = site.answer(question)
    assert "the model in the question is not finite" in answer.header["reason"]


@pytest.mark.parametrize("said", ["none", "ab" * 31, "AB" * 32, ["ab" * 32]])
def test_sites_that_agree_on_something_that_is_no_key_are_refused(said: object) -> None:
    plan = LayerExchange([], 0.5, False)
    with pytest.raises(FedloomError, match=r"the sites say that their models key is .* which is none"):
        sealed_for({client: {"seals_for": said} for client in range(3)}, plan)
    assert sealed_for({client: {"seals_for": "ab" * 32} for client in range(3)}, plan) == "ab" * 32


def test_counters_have_the_largest_as_their_mean() -> None:
    """Bytes of integers lie in a row as floats, and must not be added."""
    numbers = (7, 1 << 40, 5)
    layout = Layout.of(nn.BatchNorm1d(3))
    columns = [[part for parts in layout.units().values() for part in parts]]
    rows, layers = [], []
    for number in numbers:
        module = nn.BatchNorm1d(3)
        module.num_batches_tracked.fill_(number)  # type: ignore[union-attr]
        module.weight.data.normal_(generator=torch.Generator().manual_seed(number))
        rows.append(layout.read(module))
        layers.append(pick(rows[-1], columns[0]))
    mean = Mean(layout)
    for row in rows:
        mean.add(row)
    expected, found = layout.empty(), layout.empty()
    mean.into(expected)
    put(found, columns[0], _mean(layout, columns, 0, layers))
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert layout.state_dict(found)["num_batches_tracked"] == 1 << 40


def test_a_site_refuses_itself_to_send_what_would_tell_what_it_trained(certificates: Path, tmp_path: Path) -> None:
    """Whatever the server thinks of it: the server's own refusal is not what protects the site."""
    config = run_of(method="fedmr+scaffold", clients=3, per_round=3)
    site = make_sites(config, tmp_path, nodes(certificates, 3, **key_of(certificates)))[100]
    site.build()
    address = {"run": "ab" * 16, "round": 0, "client": 0, "nonce": "0" * 32, "slot": 0, "attempt": 0, "accepted": None}
    control = {"extra/c": to_block(torch.zeros(site.layout.trainable))}
    opener = Block.raw(_known_as(site, ModelsKey.read(certificates / "models.key")))
    question = Parcel("mix/train", address, {"row": site.travel.pack(site.initial), "opener": opener, **control})
    answer = site.answer(question)
    assert answer.kind == "failed"
    assert answer.header["reason"] == "what travels beside a model would tell what was trained"


def test_a_site_without_the_key_says_so(asked: tuple[Site, Parcel], certificates: Path, tmp_path: Path) -> None:
    _, question = asked
    config = run_of(clients=3, per_round=3, rounds=2)
    (tmp_path / "other").mkdir()
    site = make_sites(config, tmp_path / "other", nodes(certificates, 3))[100]
    answer = site.answer(question)
    assert "the model in the question is sealed, and this site has no models key" in answer.header["reason"]


def test_a_site_does_not_say_how_models_of_the_servers_choice_do(asked: tuple[Site, Parcel]) -> None:
    site, question = asked
    answer = site.answer(Parcel("score", question.header, {"row": site.travel.pack(site.initial)}))
    assert "does not say how models that the server chooses do on its data" in answer.header["reason"]


def test_sites_that_begin_with_different_files_do_not_exchange(certificates: Path, tmp_path: Path) -> None:
    """Wherever each has its own; the server might name one from which nothing can be learned."""
    key, names = ModelsKey.read(certificates / "models.key"), []
    configured = nodes(certificates, 3, **key_of(certificates))
    for seed in (1, 2, 2):
        folder = tmp_path / str(len(names))
        folder.mkdir()
        plain = replace_config(run_of(rounds=1, options={}, seed=seed), method="fedavg", engine="plain", deadline=600.0)
        first = execute(plain, out=folder / "first")
        config = run_of(clients=3, per_round=3, init=str(first.path / "model.safetensors"))
        names.append(_known_as(make_sites(config, folder, configured)[100], key))
    assert names[0] != names[1]
    assert names[1] == names[2]
    (tmp_path / "none").mkdir()
    assert _known_as(make_sites(run_of(clients=3, per_round=3), tmp_path / "none", configured)[100], key) not in names


def test_a_site_trains_its_own_initial_model_and_does_not_say_how_well(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From losses at many models that are a little off, a server could work out the gradient of one client."""
    began: list[torch.Tensor] = []
    received = Site._received

    def listen(site: Site, question: Parcel) -> torch.Tensor:
        began.append(received(site, question))
        return began[-1]

    monkeypatch.setattr(Site, "_received", listen)
    config, key = run_of(clients=3, per_round=3), ModelsKey.read(certificates / "models.key")
    site = make_sites(config, tmp_path, nodes(certificates, 3, **key_of(certificates)))[100]
    site.build()
    header = {"run": "ab" * 16, "round": 0, "client": 0, "nonce": "cd" * 16, "slot": 0}
    opener = Block.raw(_known_as(site, key))
    for away in (0.0, 1e-6, -1e-6):
        blocks = {"row": site.travel.pack(site.initial + away), "opener": opener}
        answer = site.answer(Parcel("mix/train", header, blocks))
        assert answer.kind == "mix/hello"
        assert math.isnan(answer.header["loss"])
        assert torch.equal(began[-1], site.initial)


def test_records_of_such_a_run_have_no_training_loss(certificates: Path, tmp_path: Path) -> None:
    config, out = run_of(clients=3, per_round=3, rounds=1), tmp_path / "run"
    link = FakeLink(make_sites(config, tmp_path, nodes(certificates, 3, **key_of(certificates))))
    finished = execute(config, out=out, sites=reach(link, config, out))
    assert finished.history[-1]["train_loss"] is None
    assert finished.history[-1]["lost"] == 0
