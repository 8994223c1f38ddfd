"""Tests of the league: complete, continues after a stop, page shows its results."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.league import main as league
from benchmarks.league import tables
from fedloom.methods import methods
from fedloom.methods.registry import BUILT_IN

ROOT = Path(__file__).resolve().parents[3]
PAGE, RESULTS = ROOT / "docs" / "league.md", ROOT / "results" / "league.json"


def made(row: str, seed: int, accuracy: list[float], **more: Any) -> dict[str, Any]:
    """A record as a run leaves it, evaluated every third round."""
    record = {"data": "digits", "partition": "iid", "row": row, "seed": seed, "rounds": [3 * i for i in range(4)]}
    record |= {"accuracy": accuracy, "worst": [each / 2 for each in accuracy], "clients": accuracy[-1]}
    return record | {"bytes_down": 3_000_000, "bytes_up": 1_000_000, "seconds": 1.5, "failed": 0} | more


def results(*records: dict[str, Any]) -> dict[str, Any]:
    return {"command": "it", "sources": {"fedavg": "the paper", "b": "chosen"}, "planned": 6, "runs": list(records)}


def test_the_page_has_the_tables_of_the_results() -> None:
    page, found = PAGE.read_text(encoding="utf-8"), json.loads(RESULTS.read_text(encoding="utf-8"))
    assert tables.filled(page, found) == page
    assert all(f"<!-- league: {name} -->" in page for name in tables.blocks(found))
    assert found["command"] in page
    assert tables.dump(found) == RESULTS.read_text(encoding="utf-8")


def test_every_method_has_a_line_in_every_task() -> None:
    for task in league.TASKS:
        assert {row.method for row in league.rows(task)} == {name for name in BUILT_IN if not methods()[name].bracket}
        names = [row.name for row in league.rows(task)]
        assert len(set(names)) == len(names)


def test_all_methods_get_the_same_data_and_no_sample_is_held_twice() -> None:
    task = league.Task("digits", {"clients": 8}, samples=400)
    jobs = [league.PlannedRun(task, "dirichlet:0.5", row, seed=3, rounds=1) for row in league.rows(task)[:2]]
    federation, same = (job.federated_data() for job in jobs)
    assert all(np.array_equal(a, b) for a, b in zip(federation.client_indices, same.client_indices, strict=True))
    held = np.concatenate(federation.client_indices)
    assert len(held) == len(set(held)) == 380
    assert len(federation.server_data) == 20
    taken = {federation.pool.x[at].numpy().tobytes() for at in held}
    images = [image.numpy().tobytes() for image in federation.server_data.x]
    assert not taken.intersection(images)


@pytest.mark.exhaustive
def test_runs_are_made_once_and_the_file_holds_them(tmp_path: Path) -> None:
    words = ["--work", "work", "--out", "out.json", "--processes", "1", "--data", "digits", "--partitions", "shards:2"]
    words += ["--seeds", "1", "--rounds", "1", "--only", "fedavg", "fedbn"]
    command = [sys.executable, "-m", "benchmarks", "league", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def call() -> str:
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    assert "2 runs, 0 of them finished" in call()
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [run["row"] for run in found["runs"]] == ["fedavg", "fedbn"]
    assert found["runs"][0]["digest"] == found["runs"][1]["digest"]  # the network has no batch norm
    assert found["runs"][0]["rounds"] == [0, 1]
    assert found["command"].endswith("--data digits --partitions shards:2 --only fedavg fedbn --seeds 1 --rounds 1")
    (tmp_path / "work" / "digits-shards_2-fedbn-seed0.json").unlink()
    assert "2 runs, 1 of them finished" in call()
    assert len(json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["runs"]) == 2
    assert str(tmp_path) not in (tmp_path / "out.json").read_text(encoding="utf-8")


def test_a_failure_is_written_down_with_its_reason_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(league.CODE, "fedprox", league.code_of("fedprox"))
    job = league.PlannedRun(league.TASKS[0], "iid", league.Row("bad", "fedprox", "", {"fedprox": {"mu": -1}}), 0, 1)
    record = league.run_one(job)
    assert "fedprox.mu" in record["failure"]
    assert "accuracy" not in record
    (tmp_path / job.file).write_text(json.dumps(record), encoding="utf-8")
    assert league.finished(job, tmp_path) is None


def test_runs_of_other_settings_or_other_code_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "methods"
    shutil.copytree(league.METHODS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(league, "METHODS", folder)
    job = league.PlannedRun(league.TASKS[0], "iid", league.Row("sam", "fedasam", ""), 0, 1)
    (tmp_path / job.file).write_text(json.dumps({"key": job.key(), "code": league.code_of("fedasam")}))
    assert league.finished(job, tmp_path) is not None
    assert league.finished(league.PlannedRun(job.task, "iid", job.row, 0, 2), tmp_path) is None
    other = league.Row("sam", "fedasam", "", {"fedasam": {"rho": 0.1}})
    assert league.finished(league.PlannedRun(job.task, "iid", other, 0, 1), tmp_path) is None

    def change(name: str, old: str, new: str) -> None:
        text = (folder / name).read_text(encoding="utf-8")
        assert old in text
        (folder / name).write_text(text.replace(old, new), encoding="utf-8")

    change("fedasam.py", 'summary="', 'summary="Another, ')
    change("fedasam.py", "\nclass ", "\n# a word\nclass ")
    change("lss.py", "1", "2")
    assert league.finished(job, tmp_path) is not None
    change("fedsam.py", "\n@register", "\nx = 1\n\n\n@register")  # fedasam is built on it
    assert league.finished(job, tmp_path) is None


def test_a_gain_counts_when_it_is_twice_the_spread_of_the_gains() -> None:
    base = [made("fedavg", seed, [0, 0.1 * seed, 0.1 * seed, 0.1 * seed]) for seed in range(3)]

    def verdict(*gains: float) -> str:
        runs = [made("b", seed, [0, *[0.1 * seed + gain] * 3]) for seed, gain in enumerate(gains)]
        return str(tables.TableRow("b", runs, base, 3).mark)

    assert verdict(0.02, 0.03, 0.03) == " ▲"  # though seeds differ by far more among themselves
    assert verdict(-0.02, -0.03, -0.03) == " ▼"
    assert verdict(0.01, 0.03, 0.05) == ""
    assert verdict(0, 0, 0) == ""
    assert verdict(0.02, 0.02) == ""


def test_tables_of_a_few_runs() -> None:
    runs = [
        made("fedavg", 0, [0.1, 0.7, 0.8, 0.9]),
        made("fedavg", 1, [0.1, 0.7, 0.7, 0.7]),
        made("b", 0, [0.1, 0.6, 0.7, 0.8], personal=[0.9, 0.6]),
        made("b", 1, [0.1, 0.4, 0.4, 0.4], personal=[0.8, 0.5]),
        {"data": "digits", "partition": "iid", "row": "c", "seed": 0, "failure": "InputError: no"},
    ]
    text = tables.text(results(*runs))
    assert "| fedavg | 75.0 ± 7.1 |  | 80.0 | 37.5 |  | 3 | 4 | 1.5 |" in text
    # 80 % of 80 and of 70 per cent are 64 and 56: reached in round 6 with one seed, never with the other
    assert "| b | 55.0 ± 21.2 | -20.0 | 60.0 | 27.5 | 85.0 / 55.0 | 6, 1 of 2 seeds | 4 | 1.5 |" in text
    assert "- c, seed 0: InputError: no" in text
    assert "| c | failed |" in text
    assert "| b | chosen |" in text
    assert "5 runs; 1 planned runs are missing." in text


def test_marks_are_counted_over_settings() -> None:
    runs = []
    for on, gain in (("iid", 0.1), ("shards:2", 0.2), ("dirichlet:1", -0.1)):
        for seed in range(3):
            runs.append(made("fedavg", seed, [0.5] * 4, partition=on))
            runs.append(made("b", seed, [0.5 + gain] * 4, partition=on))
            runs.append(made("c", seed, [0.5 + gain * (-1) ** seed] * 4, partition=on))
    runs += [made("d", seed, [0.9] * 4, partition="iid") for seed in range(2)]  # two seeds say nothing
    said = tables.marks(results(*runs)).splitlines()
    assert said[0].endswith(": b (2 of 3).")
    assert said[1].endswith(": b (1 of 3).")
    assert said[2].endswith(": c.")


def test_a_page_is_filled_between_its_marks_only(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- league: choices -->\nold\n<!-- end -->\nafter\n", encoding="utf-8")
    tables.write_into(page, results())
    text = page.read_text(encoding="utf-8")
    assert "Not run yet" in tables.filled("<!-- league: digits iid -->\n<!-- end -->", results())
    assert "old" not in text
    assert text.startswith("before\n<!-- league: choices -->\n\n| method | hyperparameters |\n")
    assert text.endswith("| b | chosen |\n\n<!-- end -->\nafter\n")


def test_what_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--only", "nothing"], ["--data", "nothing"]):
        with pytest.raises(SystemExit) as ended:
            league.main(words)
        assert ended.value.code == 2
        assert "'nothing'" in capsys.readouterr().err
