"""The Flower engine over a network in memory: the same bits as other engines, whatever happens on the way."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake import FakeLink, make_run, make_sites, reach

from fedloom.api import Run, execute, resume
from fedloom.config import Config
from fedloom.engines import Engine, PlainEngine, Shop
from fedloom.errors import FedloomError, InputError
from fedloom.exchange import Job, Lost, Update
from fedloom.flower.data import ServerFederation
from fedloom.flower.parcel import Block, Parcel
from fedloom.request import replace_config
from fedloom.storage import read_json

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


def play(config: Config, folder: Path, link: FakeLink | None = None) -> tuple[Run, FakeLink]:
    link = link or FakeLink(make_sites(config, folder))
    out = folder / "flower"
    return execute(config, out=out, report=False, sites=reach(link, config, out)), link


def plainly(config: Config, folder: Path, **more: Any) -> Run:
    return execute(replace_config(config, engine="plain"), out=folder / "plain", report=False, **more)


@pytest.mark.parametrize("method", METHODS)
def test_it_gives_the_same_bits_as_the_plain_engine(method: str, tmp_path: Path) -> None:
    config = make_run(method=method, options=METHODS[method], per_round=4)
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
    rows = [p.blocks["row"].shape[0] for p in (*link.asked, *link.answered) if "row" in p.blocks]
    layout = next(iter(link.sites.values())).layout
    head = sum(part.stop - part.start for part in next(iter(link.sites.values())).shop.workshop.stays_home)
    assert set(rows) == {layout.size - head}
    assert run.history[-1]["bytes_up"] == 5 * (layout.size - head) * 4


class Leaky(PlainEngine):
    """Some answers get lost on their way back, after the client has trained."""

    lost: frozenset[tuple[int, int]] = frozenset()

    def train(self, round: int, jobs: Sequence[Job]) -> Iterator[Update | Lost]:
        for answer in super().train(round, jobs):
            if isinstance(answer, Update) and (round, answer.client) in self.lost:
                yield Lost(answer.job, "no answer within 0.05 s")
            else:
                yield answer


class LeakySites:
    def __init__(self, lost: frozenset[tuple[int, int]]) -> None:
        self.lost = lost

    def seen(self, federation: Any) -> Any:
        return federation

    def engine(self, shop: Shop) -> Engine:
        engine = Leaky(shop)
        engine.lost = self.lost
        return engine


@pytest.mark.parametrize("method", ["scaffold", "fedcross", "moon"])
def test_lost_answers_leave_the_clients_as_they_were(method: str, tmp_path: Path) -> None:
    """A client whose answer is lost has trained, and must not have kept anything of it."""
    lost = frozenset({(0, 1), (1, 1), (1, 3), (2, 0)})
    config = make_run(method=method, rounds=4, deadline=0.05)
    link = FakeLink(make_sites(config, tmp_path))

    def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel | None:
        gone = question.kind == "train" and (question.header["round"], question.header["client"]) in lost
        return None if gone else answer

    link.meddle = meddle
    run, _ = play(config, tmp_path, link)
    plain = plainly(config, tmp_path, sites=LeakySites(lost))
    assert run.digest == plain.digest
    assert [r.get("lost_clients") for r in run.history] == [r.get("lost_clients") for r in plain.history]
    assert run.summary["lost"] == len(lost)


def test_late_answers_are_dropped_and_counted(tmp_path: Path) -> None:
    config = make_run(rounds=3, deadline=0.05)
    link = FakeLink(make_sites(config, tmp_path))

    def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel | None:
        if question.header["round"] == 1 and question.kind == "train":
            link.let_go()  # what was late in the round before arrives now
        late = (question.header["round"], question.header["client"]) in {(0, 2), (0, 4)} and question.kind == "train"
        return None if late else answer

    link.meddle = meddle
    run, _ = play(config, tmp_path, link)
    assert [r["lost"] for r in run.history[1:]] == [2, 0, 0]
    assert "engine.late" not in run.history[1].get("diagnostics", {})
    assert run.history[2]["diagnostics"]["engine.late"] == 2
    assert run.digest == plainly(config, tmp_path, sites=LeakySites(frozenset({(0, 2), (0, 4)}))).digest


BAD: dict[str, tuple[Callable[[Parcel, Parcel | None], Parcel], str]] = {}


def bad(says: str) -> Callable[[Callable[[Parcel, Parcel | None], Parcel]], Any]:
    """A way in which an answer may be wrong: (answer, the one of the round before) -> what arrives."""

    def note(change: Callable[[Parcel, Parcel | None], Parcel]) -> Any:
        BAD[change.__name__] = change, says
        return change

    return note


def with_blocks(answer: Parcel, **blocks: Block) -> Parcel:
    return Parcel(answer.kind, answer.header, {**answer.blocks, **blocks})


def with_header(answer: Parcel, **header: Any) -> Parcel:
    return Parcel(answer.kind, {**answer.header, **header}, answer.blocks)


@bad("refused: its model is not finite")
def nan(answer: Parcel, before: Parcel | None) -> Parcel:
    size = answer.blocks["row"].shape[0]
    return with_blocks(answer, row=Block("float32", (size,), torch.full((size,), torch.nan).numpy().tobytes()))


@bad("refused: its model is float32 of shape (3,), not")
def short(answer: Parcel, before: Parcel | None) -> Parcel:
    return with_blocks(answer, row=Block("float32", (3,), bytes(12)))


@bad("refused: its model is float32 of shape (8000000,), not")
def huge(answer: Parcel, before: Parcel | None) -> Parcel:
    return with_blocks(answer, row=Block("float32", (8_000_000,), bytes(32_000_000)))


@bad("refused: its model is float64")
def wide(answer: Parcel, before: Parcel | None) -> Parcel:
    size = answer.blocks["row"].shape[0]
    return with_blocks(answer, row=Block("float64", (size,), bytes(8 * size)))


@bad("refused: it sent more, row, not row")
def more(answer: Parcel, before: Parcel | None) -> Parcel:
    return with_blocks(answer, more=Block.raw(b"x"))


@bad("refused: its answer has the round '0', not 1")
def stale(answer: Parcel, before: Parcel | None) -> Parcel:
    assert before is not None
    return before


@bad("refused: its answer has the nonce")
def replayed(answer: Parcel, before: Parcel | None) -> Parcel:
    assert before is not None
    return with_header(before, round=1)


@bad("refused: its answer has the client '0', not 2")
def another_clients(answer: Parcel, before: Parcel | None) -> Parcel:
    return with_header(answer, client=0)


@bad("refused: its answer has the run")
def another_runs(answer: Parcel, before: Parcel | None) -> Parcel:
    return with_header(answer, run="0" * 32)


@bad("refused: it says that it trained on 999999 samples, but it registered")
def boastful(answer: Parcel, before: Parcel | None) -> Parcel:
    return with_header(answer, samples=999_999)


@bad("refused: it does not say how it trained")
def silent(answer: Parcel, before: Parcel | None) -> Parcel:
    return with_header(answer, loss="low")


@bad("refused: it sent 'scored', not a trained model")
def another_kind(answer: Parcel, before: Parcel | None) -> Parcel:
    return Parcel("scored", answer.header, answer.blocks)


@bad("out of order")
def failing(answer: Parcel, before: Parcel | None) -> Parcel:
    return Parcel("failed", {**answer.header, "reason": "out of\norder"})


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_answer_is_refused_named_and_harms_nobody(fault: str, tmp_path: Path) -> None:
    change, says = BAD[fault]
    config = make_run(rounds=3, deadline=5)
    link = FakeLink(make_sites(config, tmp_path))
    before: dict[int, Parcel] = {}

    def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel:
        if question.kind != "train" or question.header["client"] != 2:
            return answer
        if question.header["round"] == 1:
            return change(answer, before.get(0))
        before[question.header["round"]] = answer
        return answer

    link.meddle = meddle
    run, _ = play(config, tmp_path, link)
    reasons = [r["lost_clients"] for r in run.history[1:]]
    assert reasons[0] == reasons[2] == {}
    assert list(reasons[1]) == ["2"]
    assert reasons[1]["2"].startswith(says), reasons[1]
    assert run.digest == plainly(config, tmp_path, sites=LeakySites(frozenset({(1, 2)}))).digest


def test_an_answer_from_another_node_is_refused(tmp_path: Path) -> None:
    config = make_run(rounds=1)
    link = FakeLink(make_sites(config, tmp_path))
    receive = link.receive

    def swapped(tickets: Sequence[str]) -> list[Any]:
        found = receive(tickets)
        swap = {101: 102, 102: 101}
        trained = [a.parcel is not None and a.parcel.kind == "trained" for a in found]
        return [
            replace(a, node=swap.get(a.node, a.node)) if is_trained else a
            for a, is_trained in zip(found, trained, strict=True)
        ]

    link.receive = swapped  # type: ignore[method-assign]
    run, _ = play(config, tmp_path, link)
    assert run.history[1]["lost_clients"] == {
        "1": "refused: its answer came from node 102, and node 101 was asked",
        "2": "refused: its answer came from node 101, and node 102 was asked",
    }


def test_a_node_that_comes_back_is_used_again(tmp_path: Path) -> None:
    config = make_run(method="scaffold", rounds=3, deadline=0.2)
    link = FakeLink(make_sites(config, tmp_path))

    def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel:
        if question.kind == "train" and question.header["client"] == 4:
            link.away = {103} if question.header["round"] == 0 else set()
        return answer

    link.meddle = meddle
    run, _ = play(config, tmp_path, link)
    assert [r["lost_clients"] for r in run.history[1:]] == [{}, {"3": "its site is not connected"}, {}]
    assert [r["models_down"] for r in run.history[1:]] == [10.0, 8.0, 10.0], "nothing is sent to nobody"
    assert run.digest == plainly(config, tmp_path, sites=LeakySites(frozenset({(1, 3)}))).digest


def test_a_node_with_a_new_address_is_the_same_client(tmp_path: Path) -> None:
    config = make_run(method="scaffold", rounds=3)
    link = FakeLink(make_sites(config, tmp_path))
    trained = 0

    def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel:
        nonlocal trained
        trained += question.kind == "train"
        if trained == 5 and 103 in link.sites:  # the first round's last
            link.sites[900] = link.sites.pop(103)
        return answer

    link.meddle = meddle
    run, _ = play(config, tmp_path, link)
    assert run.summary["lost"] == 0
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

    def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel:
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
    run = resume(out, report=False, sites=reach(link, config, out))
    assert run.digest == whole.digest
    assert [r.get("personal_accuracy_mean") for r in run.history] == [
        r.get("personal_accuracy_mean") for r in whole.history
    ]


def test_a_site_that_lost_what_it_kept_starts_anew(tmp_path: Path) -> None:
    config = make_run(method="scaffold", rounds=3)
    link = FakeLink(make_sites(config, tmp_path))

    def meddle(node: int, question: Parcel, answer: Parcel) -> Parcel:
        if question.kind == "train" and question.header["round"] == 0 and node == 102:
            for file in link.sites[102].folder.rglob("*"):
                if file.parent.name == "client-2":
                    file.unlink()
        return answer

    link.meddle = meddle
    run, _ = play(config, tmp_path, link)
    assert [r["lost_clients"] for r in run.history[1:]] == [
        {},
        {"2": "what it kept is not there any more; it will start anew"},
        {},
    ]


def test_too_few_answers_end_the_run(tmp_path: Path) -> None:
    config = make_run(rounds=2, min_clients=4, deadline=0.05)
    link = FakeLink(make_sites(config, tmp_path))
    link.meddle = lambda node, question, answer: None if node < 102 and question.kind == "train" else answer
    with pytest.raises(FedloomError, match=r"3 of 5 clients answered, but min_clients is 4 \(client 0: no answer"):
        play(config, tmp_path, link)


def test_a_site_with_another_network_is_not_asked(tmp_path: Path) -> None:
    config = make_run(rounds=1)
    link = FakeLink(make_sites(config, tmp_path))
    (tmp_path / "other").mkdir()
    odd = make_sites(replace_config(config, model="cnn"), tmp_path / "other")
    link.sites[104] = odd[104]
    run, _ = play(config, tmp_path, link)
    assert list(run.history[1]["lost_clients"]) == ["4"]
    assert "its network is another one than the server's" in run.history[1]["lost_clients"]["4"]
    assert not [p for p in link.asked if p.kind == "train" and p.header["client"] == 4]


def test_the_server_learns_counts_and_no_samples(tmp_path: Path) -> None:
    config = make_run(rounds=1, validation=0.25)
    run, link = play(config, tmp_path)
    hellos = [p for p in link.answered if p.kind == "hello"]
    assert len(hellos) == 5
    assert all(not p.blocks for p in hellos)
    plain = plainly(config, tmp_path)
    assert run.digest == plain.digest
    server = ServerFederation(link.sites[100].shop.federation, 5, lambda k: 3)
    with pytest.raises(FedloomError, match="at its site, not here"):
        server.client(0)
    saved = read_json(tmp_path / "flower" / "sites.json")["clients"]
    for client, (_, samples, trains) in saved.items():
        federation = link.sites[100 + int(client)].shop.federation
        assert samples == federation.samples(int(client))
        assert trains == samples - min(int(0.25 * samples + 0.5), samples - 1)


def test_a_run_does_not_move_between_sites_and_this_machine(tmp_path: Path) -> None:
    config = make_run(rounds=1)
    play(config, tmp_path)
    plainly(config, tmp_path)
    with pytest.raises(InputError, match="cannot go on with 'host'"):
        resume(tmp_path / "flower", engine="host")
    with pytest.raises(InputError, match="cannot go on with 'flower'"):
        resume(tmp_path / "plain", engine="flower")
