"""Tests of the protocol of runs."""

import json
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.methods import Method, compose, methods
from fedloom.methods.base import Client
from fedloom.report import make_comparison_table, read_run_record, write_report_page
from fedloom.report.protocol import TITLES, collect_protocols, describe_protocol, protocol_rows
from tests.support.fake_runs import write_run
from tests.support.report_pages import Page

TINY: dict[str, Any] = {"epochs": 1, "model": "mlp", "engine": "sequential", "report": False, "clients": 8}
DOCS = Path(__file__).parents[2] / "docs"


def test_it_says_model_data_rounds_and_selection(tmp_path: Path) -> None:
    run = fedloom.run("fedavg", out=tmp_path / "run", rounds=20, eval_every=2, **TINY)
    expected = {
        "model": "the global model",
        "data": "the common test set; a client's accuracy weights its classes by the client's training samples",
        "rounds": "mean of the last 2 evaluations, after rounds 18 to 20 of 20",
        "selection": "nothing: the last rounds count, whatever their results",
    }
    assert describe_protocol(read_run_record(run.path)) == run.summary["protocol"] == expected
    assert json.loads((run.path / "summary.json").read_text())["protocol"] == expected
    one = describe_protocol(read_run_record(run.path), window=1)
    assert one == {**expected, "rounds": "the last evaluation, after round 20 of 20"}


def test_the_rounds_are_those_that_are_averaged(tmp_path: Path) -> None:
    """The mean of exactly these rounds is the result."""
    run = fedloom.run("fedavg", out=tmp_path / "run", rounds=11, eval_every=1, window=9, **TINY)
    assert run.summary["protocol"]["rounds"] == "mean of the last 2 evaluations, after rounds 10 to 11 of 11"
    accuracies = [row["accuracy"] for row in run.history if row["round"] in (10, 11)]
    assert run.accuracy == pytest.approx(sum(accuracies) / 2)


def test_it_names_own_test_samples_own_models_and_new_clients(tmp_path: Path) -> None:
    settings = {**TINY, "rounds": 1, "client_test": 0.25, "held_out_clients": 0.3}
    run = fedloom.run("fedbabu", out=tmp_path / "run", **settings)
    assert run.summary["protocol"] == {
        "model": "the global model; “own models”: the personal model of each client",
        "data": "the clients' own test samples, 25 % of each client's samples; no client trains on them",
        "rounds": "the last evaluation, after round 1 of 1",
        "selection": "nothing: the last rounds count, whatever their results",
        "held_out": "2 of 8 clients never trained; each is scored on its own test samples",
        "new_client": methods()["fedbabu"].new_client,
    }


def test_unfinished_runs_and_those_without_tests(tmp_path: Path) -> None:
    stopped = read_run_record(write_run(tmp_path / "stopped", rounds=40, upto=0, finished=False))
    assert describe_protocol(stopped)["rounds"] == "none has been evaluated"
    half = read_run_record(write_run(tmp_path / "half", rounds=40, upto=6, finished=False))
    assert describe_protocol(half)["rounds"] == "mean of the last 3 evaluations, after rounds 2 to 6 of 40"


def test_a_text_that_all_share_appears_once(tmp_path: Path) -> None:
    records = [read_run_record(write_run(tmp_path / name, name, rounds=10)) for name in ("fedavg", "fedmr")]
    groups = make_comparison_table(records).groups
    assert [title for title, _ in protocol_rows(groups)] == list(TITLES.values())[:4]
    assert [one["methods"] for one in collect_protocols(groups)] == [["fedavg", "fedmr"]]
    records.append(read_run_record(write_run(tmp_path / "long", "fedcross", rounds=30)))
    groups = make_comparison_table(records).groups
    titles = [title for title, _ in protocol_rows(groups)]
    assert titles == ["model", "test data", "rounds (fedavg and fedmr)", "rounds (fedcross)", "chosen on"]
    assert [one["methods"] for one in collect_protocols(groups)] == [["fedavg", "fedmr"], ["fedcross"]]
    write_report_page(records, tmp_path / "report.html")
    lines = Page((tmp_path / "report.html").read_text(encoding="utf-8")).text.split("\n")
    assert {text for row in protocol_rows(groups) for text in row} <= set(lines)


def test_the_table_has_the_held_out_clients(tmp_path: Path) -> None:
    few = {**TINY, "rounds": 1, "out": tmp_path / "both", "seeds": 2}
    table = fedloom.compare(["fedavg", "fedprox"], held_out_clients=0.25, **few).table
    titles, rows = table.table("brief")
    column = titles.index("held-out clients %")
    assert titles[column + 1] == "worst held-out %"
    assert [row[column] for row in rows] == [group.held_out.show(100) for group in table.groups if group.held_out]
    assert "“Held-out clients”: mean over clients that never trained." in table.footnote()
    without = fedloom.compare(["fedavg", "fedprox"], **{**few, "out": tmp_path / "none"}).table
    assert not [title for title in without.table()[0] if "held" in title]
    assert "held" not in without.footnote().lower()


def test_runs_with_and_without_held_out_clients_are_two_tasks(tmp_path: Path) -> None:
    """They train on other clients, so neither is the reference of the other."""
    plain = write_run(tmp_path / "plain", rounds=4)
    held = write_run(tmp_path / "held", rounds=4, held_out_clients=0.2)
    tasks = {group.task for group in make_comparison_table([read_run_record(plain), read_run_record(held)]).groups}
    assert tasks == {"0.2 of the clients held out", "no client held out"}
    (alone,) = make_comparison_table([read_run_record(held)]).groups
    assert alone.task == "digits, dirichlet:0.3, 20 clients, 0.2 of the clients held out"


PERSONAL = [name for name, method in methods().items() if method.new_client]


@pytest.mark.parametrize("name", PERSONAL)
def test_each_personalized_method_says_what_a_new_client_gets(name: str) -> None:
    text = (DOCS / "methods.md").read_text(encoding="utf-8")
    assert " ".join(methods()[name].new_client.split()) in " ".join(text.split())


def test_the_sentence_of_other_methods() -> None:
    assert set(PERSONAL) == {"fedbabu", "fedbn", "fedfomo", "fedrep"}
    assert compose("fedcross+fedprox").new_client == "A new client gets the global model."
    assert compose("fedcross+fedbn").new_client == methods()["fedbn"].new_client

    class Adapting(Client[Any]):
        def personalize(self, trainer: Any) -> Any:
            yield from ()

    method = Method(name="mine", summary="", reference="", client=Adapting)
    composed = compose("fedavg")
    assert type(composed)("mine", (method,), {}).new_client.endswith("adapted by the method's personalize().")
