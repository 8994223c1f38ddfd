"""Tests of the `fedloom` command: output, files and exit codes."""

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom.config import Config
from fedloom.core.layout import Layout, model_digest
from fedloom.runs.build import build_run
from fedloom.runs.directory import RunDirectory
from fedloom.runs.resolve import resolve_run
from fedloom.utils.storage import read_json, read_safetensors, write_checked_safetensors, write_json

Command = Callable[..., Any]
TINY = ("--clients", 6, "--clients-per-round", 4, "--rounds", 2, "--model", "logreg", "--epochs", 1)


class _Page(HTMLParser):
    """Counts the tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1


def row_digest(folder: Path) -> str:
    """The digest of the model in a run's folder, worked out from its file alone."""
    config = RunDirectory.open(folder).config
    experiment = build_run(resolve_run(Config(**{**config.model_dump(), "engine": "sequential"})))
    experiment.engine.close()
    tensors, layout = read_safetensors(folder / "model.safetensors"), experiment.layout
    row = layout.empty()
    for entry in layout.entries:
        entry.view(row).copy_(tensors[entry.name])
    return model_digest(row)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold"])
def test_json_is_one_line_and_its_digest_that_of_the_model(command: Command, tmp_path: Path, method: str) -> None:
    summary = command("run", method, *TINY, "--seed", 7, "--json").result
    wanted = "method seed rounds accuracy loss best_accuracy bytes_up bytes_down seconds run digest"
    assert set(wanted.split()) <= summary.keys()
    assert (summary["method"], summary["seed"], summary["rounds"]) == (method, 7, 2)
    folder = tmp_path / summary["run"]
    for name in ("config.toml", "metrics.jsonl", "summary.json", "model.safetensors", "report.html"):
        assert (folder / name).stat().st_size, name
    written = json.loads((folder / "summary.json").read_text())
    assert {key: written[key] for key in summary} == summary
    assert written.keys() - summary.keys() == {"sha256", "metrics_sha256", "rounds_read"}
    assert summary["digest"] == row_digest(folder)
    history = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["round"] for record in history] == [0, 1, 2]
    assert summary["accuracy"] == history[-1]["accuracy"]
    assert summary["best_accuracy"] == max(record["accuracy"] for record in history[1:])
    models = 2 if method == "scaffold" else 1  # a model and a control variate each way
    assert summary["bytes_up"] == summary["bytes_down"] == 2 * 4 * models * 650 * 4
    assert summary["failed"] == 0
    assert summary["seconds"] > 0


def test_the_report_is_one_page_that_needs_nothing_else(command: Command, tmp_path: Path) -> None:
    command("run", "fedavg", *TINY, "--out", "r", "--json").result  # noqa: B018
    text = (tmp_path / "r" / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert page.tags["html"] == page.tags["body"] == 1
    assert page.tags.get("link", 0) == 0
    assert "<script src=" not in text


def test_what_a_person_reads_after_a_run(command: Command, tmp_path: Path) -> None:
    ended = command("run", "fedavg", *TINY)
    assert ended.code == 0
    words = [line.split()[0] for line in ended.out.splitlines()]
    assert words == ["accuracy", "clients", "sent", "time", "run", "report", "digest"]
    assert "fedavg on digits, seed 0: 2 rounds" in ended.err
    assert "round 2/2" in ended.err
    report = next(line.split()[1] for line in ended.out.splitlines() if line.startswith("report"))
    assert (tmp_path / report).is_file()


def test_quiet_is_quiet(command: Command) -> None:
    ended = command("run", "fedavg", *TINY, "--quiet", "--json")
    assert ended.err == ""
    assert ended.result["rounds"] == 2


def test_runs_are_numbered_and_never_overwritten(command: Command, tmp_path: Path) -> None:
    names = [command("run", "fedavg", *TINY, "--json").result["run"] for _ in range(2)]
    assert names == ["runs/fedavg-digits-seed0-001", "runs/fedavg-digits-seed0-002"]
    before = (tmp_path / names[0] / "summary.json").read_bytes()
    ended = command("run", "fedavg", *TINY, "--out", names[0])
    assert ended.code == 2
    assert "is not empty" in ended.err
    assert (tmp_path / names[0] / "summary.json").read_bytes() == before


def test_eval_every_scores_the_last_round_whatever_it_is(command: Command, tmp_path: Path) -> None:
    command("run", "fedavg", *TINY, "--rounds", 5, "--eval-every", 3, "--out", "r", "--json").result  # noqa: B018
    scored = [r["round"] for r in RunDirectory.open(tmp_path / "r").history() if "accuracy" in r]
    assert scored == [0, 3, 5]


def test_the_result_is_the_mean_of_the_window_wherever_it_is_shown(command: Command, tmp_path: Path) -> None:
    ended = command("run", "fedavg", *TINY, "--rounds", 11, "--window", 7, "--out", "c/r")
    accuracies = [r["accuracy"] for r in RunDirectory.open(tmp_path / "c" / "r").history()]
    mean, deviation = statistics.mean(accuracies[-2:]), statistics.stdev(accuracies[-2:])
    words = f"{100 * mean:.2f} % on test data, mean of the last 2 of 11 evaluations (sd {100 * deviation:.2f} %)"
    assert f"accuracy  {words}\n" in ended.out
    assert f"last      {100 * accuracies[-1]:.2f} % after round 11 (loss " in ended.out
    summary = command("resume", "c/r", "--json").result
    assert (summary["window"], summary["accuracy"], summary["accuracy_std"]) == (2, mean, pytest.approx(deviation))
    assert summary["last_accuracy"] == accuracies[-1]
    assert command("report", "c", "-o", "all.html").code == 0
    assert "mean of the last 2 evaluations" in (tmp_path / "all.html").read_text()
    assert command("report", "c", "-o", "all.html", "--window", 1).code == 0
    assert f"{100 * accuracies[-1]:.2f}" in (tmp_path / "all.html").read_text()


@pytest.mark.parametrize(
    ("window", "said"),
    [("0", "the window must be 1 evaluation or more, not 0."), ("few", "window must be a whole number, not 'few'.")],
)
def test_a_window_that_is_none_is_refused(command: Command, tmp_path: Path, window: str, said: str) -> None:
    command("run", "fedavg", *TINY, "--out", "r", "--json").result  # noqa: B018
    ended = command("report", "r", "-o", "all.html", "--window", window)
    assert (ended.code, ended.err) == (2, f"fedloom: {said}\n")
    assert not (tmp_path / "all.html").exists()
    assert command("run", "fedavg", "--window", window).code == 2


def test_a_run_can_be_described_by_its_own_config(command: Command, tmp_path: Path) -> None:
    """Every setting that was given is in config.toml, defaults included, and reads back as it was."""
    options = ("--set", "fedprox.mu=0.25", "--lr", 0.125, "--clip", 3, "--momentum", 0.5, "--nesterov")
    command("run", "fedprox", *TINY, *options, "--out", "r", "--json").result  # noqa: B018
    config = RunDirectory.open(tmp_path / "r").config
    assert config.options["fedprox"] == {"mu": 0.25}
    assert (config.lr, config.clip, config.momentum, config.nesterov) == (0.125, 3.0, 0.5, True)


@pytest.mark.parametrize("what", ["methods", "datasets", "models", "partitions"])
def test_lists_are_tables_and_json(command: Command, what: str) -> None:
    entries = command("list", what, "--json").result
    assert entries
    text = " ".join(command("list", what).out.split())  # a long line goes on in the next
    for entry in entries:
        assert entry["name"] in text
        assert entry["summary"] in text


def test_networks_are_listed_with_what_each_may_have(command: Command) -> None:
    assert "--model NAME+projection" in command("list", "models").out


def test_methods_are_listed_with_their_year_and_cost_in_a_hundred_columns(command: Command) -> None:
    lines = command("list", "methods").out.splitlines()
    assert max(len(line) for line in lines) <= 100
    for entry in command("list", "methods", "--json").result:
        costs = ("models a round", "client state", "server state", "extra compute", "server data")
        row = [entry["name"], ", ".join(entry["provides"]), *(entry[cost] for cost in costs)]
        assert sum(re.split(r"\s{2,}", line.strip()) == row for line in lines) == 1, row
        year = [entry["name"], str(entry["year"] or entry["summary"])]
        assert sum(re.split(r"\s{2,}", line.strip())[:2] == year for line in lines) == 1


@pytest.mark.parametrize(("what", "sign"), [("methods", "."), ("models", ":")])
def test_lists_name_every_option(command: Command, what: str, sign: str) -> None:
    text = " ".join(command("list", what).out.split())
    entries = command("list", what, "--json").result
    assert any(entry["options"] for entry in entries)
    for entry in entries:
        for option in entry["options"]:
            assert f"{entry['name']}{sign}{option['name']} " in text
            assert option["help"] in text


def test_help_and_version(command: Command) -> None:
    assert command("--version").out == f"fedloom {fedloom.__version__}\n"
    for words in (["--help"], ["run", "--help"], ["compare", "--help"], ["resume", "--help"]):
        ended = command(*words)
        assert (ended.code, ended.err) == (0, "")
        assert "Usage" in ended.out
    everything = command("run", "--help").out
    for name in Config.model_fields:
        if name not in ("method", "options", "variant", "imports"):
            assert f"-{name.replace('_', '-')} " in everything  # whole, even at 80 characters


def test_help_speaks_of_options_as_they_are_typed(command: Command) -> None:
    names = [name for name in Config.model_fields if "_" in name]
    for words in ("run", "compare", "resume"):
        text = command(words, "--help").out
        assert [name for name in names if name in text] == []


def test_a_reader_that_goes_away_is_no_accident() -> None:
    """`fedloom list methods | true`: no traceback."""
    process = subprocess.run(
        f"{sys.executable} -m fedloom list methods | true",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.stderr == ""


# compare


def test_compare_prints_a_table_and_writes_one_report(command: Command, tmp_path: Path) -> None:
    ended = command("compare", "fedavg", "fedprox", *TINY, "--seeds", 2, "--seed", 3, "--out", "c", "--quiet")
    assert ended.code == 0, ended.err
    for word in ("FedAvg", "FedProx"):
        assert word.lower() in ended.out.lower()
    assert "\nResults on test data: last evaluation, ± standard deviation over seeds.\n" in ended.out
    assert ended.out.rstrip().endswith("report: c/report.html")
    assert (tmp_path / "c" / "report.html").stat().st_size > 10_000
    found = sorted(path.parent.name for path in (tmp_path / "c").glob("*/summary.json"))
    assert found == ["fedavg-seed3", "fedavg-seed4", "fedprox-seed3", "fedprox-seed4"]


def test_compare_in_json(command: Command) -> None:
    result = command("compare", "fedavg", "scaffold", *TINY, "--json").result
    assert [run["method"] for run in result["runs"]] == ["fedavg", "scaffold"]
    assert result["headline"]
    assert result["result"] == "last evaluation"
    assert Path(result["path"], "report.html").is_file()


def test_compare_gives_the_bits_of_run(command: Command) -> None:
    alone = command("run", "fedprox", *TINY, "--seed", 5, "--json").result
    compared = command("compare", "fedavg", "fedprox", *TINY, "--seed", 5, "--json").result
    assert compared["runs"][1]["digest"] == alone["digest"]


def test_options_of_one_method_go_to_that_method(command: Command, tmp_path: Path) -> None:
    ended = command("compare", "fedavg", "fedprox", *TINY, "--set", "fedprox.mu=0.0", "--out", "c", "--json")
    first, second = ended.result["runs"]
    assert first["digest"] == second["digest"]
    assert "fedprox" not in RunDirectory.open(tmp_path / "c" / "fedavg-seed0").config.options


def test_compare_goes_on_and_does_not_redo_what_is_done(command: Command, tmp_path: Path) -> None:
    words = ("compare", "fedavg", "scaffold", *TINY, "--out", "c", "--json")
    whole = command(*words).result
    done, half = tmp_path / "c" / "fedavg-seed0", tmp_path / "c" / "scaffold-seed0"
    (half / "summary.json").unlink()
    (half / "model.safetensors").unlink()
    (tmp_path / "c" / "report.html").unlink()
    kept = {path: path.stat().st_mtime_ns for path in done.rglob("*") if path.is_file()}
    again = command(*words).result
    assert [run["digest"] for run in again["runs"]] == [run["digest"] for run in whole["runs"]]
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*") if path.is_file()} == kept
    assert (half / "summary.json").is_file()
    assert (tmp_path / "c" / "report.html").is_file()


def test_compare_with_another_config_is_refused_before_anything_is_run(command: Command, tmp_path: Path) -> None:
    assert command("compare", "scaffold", *TINY, "--out", "c", "--quiet").code == 0
    ended = command("compare", "fedavg", "scaffold", *TINY, "--lr", 0.01, "--out", "c")
    assert ended.code == 2
    assert "lr 0.05, not 0.01" in ended.err
    assert not (tmp_path / "c" / "fedavg-seed0").exists()


def test_settings_that_leave_the_result_alone_may_change_in_between(command: Command) -> None:
    first = command("compare", "fedavg", *TINY, "--out", "c", "--json").result
    second = command("compare", "fedavg", *TINY, "--out", "c", "--workers", 1, "--json").result
    assert first["runs"] == second["runs"]


# resume, verify, report


def test_resume_of_a_finished_run_prints_its_result(command: Command) -> None:
    first = command("run", "fedavg", *TINY, "--out", "r", "--json").result
    assert command("resume", "r", "--json").result == first
    assert first["digest"] in command("resume", "r").out


def test_verify_proves_or_disproves(command: Command, tmp_path: Path) -> None:
    command("run", "scaffold", *TINY, "--out", "r", "--json").result  # noqa: B018
    assert "is exact" in command("verify", "r", "--quiet").out
    assert command("verify", "r", "--json").result["same"] is True
    path = tmp_path / "r" / "summary.json"
    write_json(path, {**read_json(path), "digest": "0" * 64})
    ended = command("verify", "r", "--json", "--quiet")
    assert ended.code == 1
    assert json.loads(ended.out)["same"] is False
    assert ended.err.startswith("fedloom: r gave 0000")
    assert ended.err.count("\n") == 1


def test_verify_looks_at_the_model_file_too(command: Command, tmp_path: Path) -> None:
    command("run", "fedavg", *TINY, "--out", "r", "--quiet")
    file = tmp_path / "r" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    ended = command("verify", "r", "--quiet")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("fedloom: r/model.safetensors is damaged")
    write_checked_safetensors(file, {name: tensor + 1 for name, tensor in read_safetensors(file).items()})
    ended = command("verify", "r", "--quiet")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("fedloom: r/model.safetensors is not the model of the run")
    file.unlink()
    ended = command("verify", "r", "--quiet")
    said = "fedloom: r/model.safetensors is gone; write it again with: fedloom resume r\n"
    assert (ended.code, ended.err) == (2, said)


def test_verify_knows_of_answers_that_were_lost(command: Command, tmp_path: Path) -> None:
    """Of a run over sites, say, whose losses nobody repeats."""
    rounds = command("run", "fedavg", *TINY, "--out", "r", "--json").result["rounds"]
    run = RunDirectory.open(tmp_path / "r")
    history, path = run.history(), tmp_path / "r" / "summary.json"
    run.rewind(-1)
    for record in history:
        run.append_record({**record, "failed": 2} if record["round"] else record)
    write_json(path, {**read_json(path), "digest": "0", "metrics_sha256": run.metrics_checksum})
    ended = command("verify", "r", "--quiet")
    assert ended.code == 1
    assert f"now; {2 * rounds} client tasks failed in the first run, and verify does not repeat failures." in ended.err


def test_verify_of_a_run_that_has_not_finished(command: Command, tmp_path: Path) -> None:
    command("run", "fedavg", *TINY, "--out", "r", "--json").result  # noqa: B018
    (tmp_path / "r" / "summary.json").unlink()
    ended = command("verify", "r")
    assert ended.code == 2
    assert ended.err == "fedloom: r has not finished; continue with: fedloom resume r\n"


def test_report_of_runs_and_of_comparisons(command: Command, tmp_path: Path) -> None:
    command("run", "fedavg", *TINY, "--out", "a", "--json").result  # noqa: B018
    command("compare", "fedprox", "scaffold", *TINY, "--out", "c", "--json").result  # noqa: B018
    ended = command("report", "a", "c", "-o", "all.html", "--title", "Everything <so far> & more")
    assert (ended.code, ended.out) == (0, "all.html\n")
    text = (tmp_path / "all.html").read_text()
    assert "Everything &lt;so far&gt; &amp; more" in text
    for method in ("fedavg", "fedprox", "scaffold"):
        assert method in text.lower()


def test_a_moved_run_is_still_a_run(command: Command, tmp_path: Path) -> None:
    first = command("run", "fedavg", *TINY, "--out", "r", "--json").result
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "r").rename(tmp_path / "elsewhere" / "moved")
    assert command("verify", "elsewhere/moved", "--json").result["digest"] == first["digest"]
    assert command("report", "elsewhere/moved", "-o", "r.html").code == 0


def test_a_method_of_ones_own_by_import(command: Command, tmp_path: Path) -> None:
    """A file registers a method; it runs, is listed, composes, is resumed and verified without --import."""
    (tmp_path / "mine.py").write_text(
        "from fedloom import Client, Method, Options, register\n"
        "class MyOptions(Options):\n"
        "    factor: float = 1.0\n"
        "    '''factor on the gradient'''\n"
        "class Mine(Client[MyOptions]):\n"
        "    def adjust_gradient(self, trainer):\n"
        "        trainer.gradient.mul_(self.options.factor)\n"
        "register(Method(name='mine', summary='my own', reference='', options=MyOptions,"
        " client=Mine))\n"
    )
    extra = ("--import", "mine.py")
    plain = command("run", "fedavg", *TINY, "--json").result
    mine = command("run", "mine", *TINY, *extra, "--json").result
    halved = command("run", "mine", *TINY, *extra, "--set", "mine.factor=0.5", "--out", "r", "--json").result
    assert mine["digest"] == plain["digest"] != halved["digest"]
    slow = command("run", "fedavg", *TINY, "--lr", 0.025, "--json").result
    assert halved["digest"] == slow["digest"]  # halving is exact in floats
    listed = command("list", "methods", *extra, "--json").result
    assert {"name": "factor", "default": 1.0, "help": "factor on the gradient"} in next(
        entry["options"] for entry in listed if entry["name"] == "mine"
    )
    assert command("verify", "r", "--json").result["same"] is True
    process = subprocess.run(  # a process that has not seen the file before
        [sys.executable, "-m", "fedloom", "verify", "r", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(process.stdout)["same"] is True


def test_the_layout_of_a_row_is_the_state_dict(command: Command, tmp_path: Path) -> None:
    """model.safetensors loads into an ordinary module, strictly."""
    command("run", "fedavg", *TINY, "--model", "mlp", "--out", "r", "--json").result  # noqa: B018
    from fedloom import models

    module = models.build_model("mlp", (1, 8, 8), 10)
    module.load_state_dict(read_safetensors(tmp_path / "r" / "model.safetensors"))
    assert Layout.of(module).size == sum(tensor.numel() for tensor in module.state_dict().values())
    assert all(torch.isfinite(tensor).all() for tensor in module.state_dict().values())
