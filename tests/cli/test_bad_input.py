"""Tests that bad input gives one sentence, an exit code and no files.

The sentence goes to stderr and names what is wrong. There is no traceback.
"""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from fedloom.data.sources import cifar
from fedloom.methods import registry
from tests.support.refusals import TINY, Command, refused

WRONG: list[tuple[str, tuple[str, ...]]] = [
    ("run fedavgg", ("'fedavgg'", "'fedavg'")),
    ("run FedProx2", ("'fedprox'",)),
    ("run fedprox+scaffold", ("fedprox", "scaffold", "client")),
    ("run fedprox+fedprox", ("twice",)),
    ("run +", ("there are: " + ", ".join(sorted(registry.BUILT_IN)) + ".",)),
    ("run", ("method",)),
    ("rnu fedavg", ("rnu",)),
    ("run fedavg --data digitz", ("'digitz'", "'digits'")),
    ("run fedavg --data none.csv", ("none.csv", "No such file")),
    ("run fedavg --data none.npz", ("none.npz", "No such file")),
    ("run fedavg --data none/", ("none is not a folder",)),
    ("compare fedavg --data none.npz,tset=0.1", ("'tset'", "'test'")),
    ("run fedavg --data digits:size=3", ("unknown option of 'digits' 'size'; there is none.",)),
    ("run fedavg --model resnet20:width=99999999999", ("'resnet20:width=99999999999'", "does not fit into memory")),
    ("run fedavg --model mpl", ("'mpl'", "'mlp'")),
    ("run fedavg --partition dirichlett:0.3", ("'dirichlett'", "'dirichlet'")),
    ("run fedavg --partition dirichlet", ("alpha", "above 0")),
    ("run fedavg --partition dirichlet:0", ("alpha", "'0'")),
    ("run fedavg --partition dirichlet:-1", ("alpha", "'-1'")),
    ("run fedavg --partition dirichlet:nan", ("alpha",)),
    ("run fedavg --partition shards:0", ("shards", "'0'")),
    ("run fedavg --partition shards:9999", ("1438",)),
    ("run fedavg --partition iid:3", ("'3'",)),
    ("run fedavg --partition dirichlet:1,mni=3", ("'mni'",)),
    ("run fedavg --partition own", ("unknown partition",)),
    ("run fedavg --server-data digitz", ("'digitz'", "'digits'")),
    ("run fedavg --server-data digits", ("what the clients hold",)),
    ("run fedavg --server-data own", ("'digits' has none",)),
    ("run feddf --server-data split:2.5", ("'split:2.5'", "between 0 and 1")),
    ("run feddf --server-data split:1438", ("1438", "nothing would be left")),
    ("run feddf --server-data split:half", ("'split:half'",)),
    ("run fedavg --clients 5000 --partition iid", ("1438", "5000")),
    ("run fedavg --clients 200", ("200", "1438")),
    ("run fedavg --clients 0", ("clients", "1")),
    ("run fedavg --clients many", ("clients", "'many'")),
    ("run fedavg --clients-per-round 21", ("21", "20")),
    ("run fedavg --rounds 0", ("rounds",)),
    ("run fedavg --rounds 1.5", ("rounds", "'1.5'")),
    ("run fedavg --rouds 3", ("--rouds", "--rounds")),
    ("run fedavg --seed -1", ("seed",)),
    ("run fedavg --lr nan", ("lr",)),
    ("run fedavg --lr inf", ("lr",)),
    ("run fedavg --lr -0.1", ("lr", "-0.1")),
    ("run fedavg --momentum 1", ("momentum",)),
    ("run fedavg --nesterov", ("momentum",)),
    ("run fedavg --optimizer sdg", ("'sgd'", "'sdg'")),
    ("run fedavg --augment flap", ("'flap'", "'flip'")),
    ("run fedavg --failure-rate 1", ("failure_rate",)),
    ("run fedavg --min-clients 11", ("11", "10")),
    ("run fedavg --engine gpu", ("'multiprocess'", "'gpu'")),
    ("run fedavg --engine multiprocess --device cuda", ("multiprocess", "--engine cuda")),
    ("run fedavg --engine cuda", ("device 'cuda' cannot be used here",)),
    ("run fedavg --engine cuda --device cpu", ("--device cuda",)),
    ("run fedavg --precision bf16", ("bf16", "GPU")),
    ("run fedavg --device toaster", ("'toaster'",)),
    ("run fedavg --device meta", ("'meta'",)),
    ("run fedavg --workers -1", ("workers",)),
    ("run fedavg --checkpoint-seconds -1", ("checkpoint_seconds",)),
    ("run fedprox --set fedprox.nu=1", ("'nu'", "'mu'")),
    ("run fedprox --set fedpro.mu=1", ("'fedpro'", "'fedprox'")),
    ("run fedprox --set fedprox.mu=-1", ("fedprox.mu", "-1")),
    ("run fedprox --set fedprox.mu=much", ("fedprox.mu", "'much'")),
    ("run fedprox --set fedprox.mu=nan", ("fedprox.mu", "nan")),
    ("run fedprox --set fedprox.mu", ("METHOD.OPTION=VALUE",)),
    ("run fedprox --set mu=1", ("METHOD.OPTION=VALUE",)),
    ("run fedavg --set fedprox.mu=1", ("'fedprox'", "'fedavg'")),
    ("run scaffold --optimizer adam", ("sgd", "scaffold.option=I")),
    ("run fedavg --import nowhere.py", ("nowhere.py",)),
    ("compare fedavg fedavg", ("twice",)),
    ("compare fedavg fedprx", ("'fedprox'",)),
    ("compare fedavg --set fedprox.mu=1", ("fedprox", "no part")),
    ("compare fedavg --set fedprx.mu=1", ("fedprx", "no such method")),
    ("compare fedavg fedprox --set fedprox.nu=1", ("'nu'", "'mu'")),
    ("compare fedavg --seeds 0", ("seeds",)),
    ("compare fedavg --seeds two", ("seeds", "'two'")),
    ("compare fedavg --seeds 2 --seed 9223372036854775807", ("seed",)),
    ("compare fedavg --target 80", ("target", "80")),
    ("compare fedavg --target nan", ("target",)),
    ("compare", ("methods",)),
    ("list metods", ("'metods'", "'methods'")),
    ("list methods --import nowhere.py", ("nowhere.py",)),
    ("resume nowhere", ("nowhere", "not a run")),
    ("verify nowhere", ("nowhere", "not a run")),
    ("report nowhere", ("nowhere",)),
    ("compare fedavg --seeds 99999999999", ("seeds must be from 1 to 10,000, not 99999999999.",)),
    ("run fedavg --epochs 1e23", ("epochs must be a whole number, not '1e23'.",)),
    *(
        (
            f"run fedavg --{name} {10**23}",
            (f"{name.replace('-', '_')} must be less than or equal to {most}, not '1000",),
        )
        for name, most in [
            *dict.fromkeys(("epochs", "steps", "batch-size", "rounds", "clients", "clients-per-round"), 10**9).items(),
            *dict.fromkeys(("eval-every", "min-clients", "keep-checkpoints"), 10**9).items(),
            *dict.fromkeys(("workers", "slots", "nodes"), 1024).items(),
        ]
    ),
    (f"run fedavg --rounds {'9' * 5000}", ("rounds must be a whole number of ordinary size, not '999", "999....")),
    ("pretrain digits --out x.safetensors", ("pretrain",)),
    ("run fedavg --batch-size 9999999999", ("batch_size must be less than or equal",)),
    ("run fedavg --classes 5", ("only one",)),
    ("run fedavg --classes 5-12", ("no class 12",)),
    ("run fedavg --classes 4-2", ("backwards", "2-4")),
    ("run fedavg --classes 0-3,2", ("class 2 twice",)),
    ("run fedavg --classes cats", ("'cats'", "0-4")),
    ("run fedavg --lr-schedule cosin", ("'cosine'", "'cosin'")),
    ("run fedavg --lr-schedule cosine --lr-decay 0.9", ("lr_decay is 0.9", "cosine")),
    ("run fedavg --lr-step 5", ("lr_step is 5", "lr_decay is 1")),
    ("run fedavg --rounds 5 --lr-warmup 5", ("lr_warmup is 5", "only 5 rounds")),
    ("partition digits iid --clients 99999999999", ("clients must be less than or equal to 1000000000",)),
    ("compare fedavg --seeds 1e23", ("seeds must be a whole number, not '1e23'.",)),
    ("compare fedavg --out=", ("--out must be the name of a folder, not ''.",)),
    ("run fedavg --out=", ("--out must be the name of a folder, not ''.",)),
    ("run fedavg --init=", ("init must be a file, the folder of a run or the name of one, not ''.",)),
    ("run fedcda --cache-dir=", ("cache_dir must be a folder, not ''.",)),
    ("run fedcda --cache-dir /dev/null", ("cannot keep rows in /dev/null", "/dev/null is not a folder.")),
    (
        "run fedcda --clients-per-round 20 --rounds 60 --set fedcda.selection=optimal",
        ("would try up to 3^20 combinations", "use fedcda.selection=approximate."),
    ),
    (f"run fedavg --init {'x' * 300}", ("x'", "File name too long")),
    (f"run fedcda --cache-dir {'x' * 300}", ("File name too long",)),
    (f"resume {'x' * 300}", ("File name too long",)),
    (f"report {'x' * 300}", ("File name too long",)),
    (f"run fedavg --out {'x' * 300}", ("File name too long",)),
    (f"compare fedavg --out {'x' * 300}", ("File name too long",)),
]


@pytest.mark.parametrize(("line", "words"), WRONG, ids=[line[:60] for line, _ in WRONG])
def test_what_is_wrong_is_said_and_nothing_is_written(
    command: Command, tmp_path: Path, line: str, words: tuple[str, ...]
) -> None:
    refused(command(*line.split()), *words)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_fit_the_data_is_refused_before_anything_is_written(
    command: Command, tmp_path: Path
) -> None:
    refused(command("run", "fedavg", "--model", "lenet"), "'lenet'", "8 x 8")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("this is no python!", ("SyntaxError",)),
        ("raise ValueError('two\\nlines')", ("ValueError: two lines",)),
        ("1 / 0", ("ZeroDivisionError",)),
        ("import a_module_that_nobody_has", ("a_module_that_nobody_has",)),
        ("from fedloom import *\nregister(Method('fedavg', '', '', '', client=Client))", ("'fedavg'",)),
        ("from fedloom import *\nregister(Method('a b', '', '', '', client=Client))", ("'a b'",)),
    ],
)
def test_a_broken_file_to_import(command: Command, tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    (tmp_path / "mine.py").write_text(text)
    refused(command("run", "fedavg", *TINY, "--import", "mine.py"), *words)
    assert not (tmp_path / "runs").exists()


def test_a_partition_that_is_a_file_is_told_how_it_is_named(command: Command, tmp_path: Path) -> None:
    (tmp_path / "split.json").write_text("[[0]]")
    refused(command("run", "fedavg", *TINY, "--partition", "split.json"), "'split.json' is a file", "file:split.json.")


def test_a_comparison_does_not_write_into_a_run(command: Command, tmp_path: Path) -> None:
    command("run", "fedavg", *TINY, "--out", "r", "--quiet")
    before = {file.name: file.read_bytes() for file in (tmp_path / "r").iterdir() if file.is_file()}
    refused(command("compare", "fedavg", "fedprox", *TINY, "--out", "r"), "r is a run", "--out")
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "r").iterdir() if file.is_file()}


# data sets


NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape) + values.tobytes()


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small, whole MNIST."""
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for at, name in enumerate(NAMES):
        count = 120 if at < 2 else 30
        shape = (count, 28, 28) if at % 2 == 0 else (count,)
        (folder / name).write_bytes(idx(draw.integers(0, 256 if at % 2 == 0 else 10, shape, dtype=np.uint8)))
    monkeypatch.setenv("FEDLOOM_DATA", str(folder.parent))
    return folder


def spoil(mnist: Path, how: str) -> None:
    images, labels = mnist / NAMES[0], mnist / NAMES[1]
    content = images.read_bytes()
    if how == "cut":
        images.write_bytes(content[:-1])
    elif how == "header":
        images.write_bytes(content[:7])
    elif how == "empty":
        images.write_bytes(b"")
    elif how == "long":
        images.write_bytes(content + b"x")
    elif how == "magic":
        images.write_bytes(b"\x00\x00\x09\x03" + content[4:])
    elif how == "claims":
        images.write_bytes(struct.pack(">4I", 0x803, 2**32 - 1, 28, 28) + content[16:])
    elif how == "label":
        labels.write_bytes(labels.read_bytes()[:-1] + b"\x0b")
    elif how == "fewer":
        labels.write_bytes(idx(np.zeros(119, dtype=np.uint8)))
    elif how == "gzip":
        images.unlink()
        images.with_suffix(".gz").write_bytes(gzip.compress(content)[:-100])
    elif how == "not gzip":
        images.unlink()
        images.with_suffix(".gz").write_bytes(content)
    elif how == "folder":
        images.unlink()
        images.with_suffix(".gz").mkdir()


def test_a_whole_small_mnist_runs(command: Command, mnist: Path) -> None:
    assert mnist.is_dir()
    assert command("run", "fedavg", "--data", "mnist", *TINY, "--partition", "iid", "--json").result["rounds"] == 2


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("cut", "truncated"),
        ("header", "truncated"),
        ("empty", "truncated"),
        ("long", "too long"),
        ("magic", "magic number"),
        ("claims", "truncated"),
        ("label", "label 11"),
        ("fewer", "119 labels"),
        ("gzip", "cannot read"),
        ("not gzip", "cannot read"),
    ],
)
def test_a_broken_mnist(command: Command, tmp_path: Path, mnist: Path, how: str, word: str) -> None:
    spoil(mnist, how)
    refused(command("run", "fedavg", "--data", "mnist", *TINY), word, str(mnist))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("how", "word"), [("cut", "truncated"), ("long", "too long"), ("bits", "SHA-256 differs")])
def test_a_broken_cifar10(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, word: str
) -> None:
    folder = tmp_path / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, size in cifar.CIFAR10.file_sizes().items():
        with (folder / name).open("wb") as handle:
            handle.truncate(size + {"cut": -1, "long": 1, "bits": 0}[how])  # a hole: no bytes are written
    monkeypatch.setenv("FEDLOOM_DATA", str(folder.parent))
    refused(command("run", "fedavg", "--data", "cifar10", *TINY), word, str(folder))
    assert not (tmp_path / "runs").exists()


# folders


def test_a_run_folder_below_a_file(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused(command("run", "fedavg", *TINY, "--out", "file/run"), "file/run")
    refused(command("run", "fedavg", *TINY, "--out", "file"), "file")
    refused(command("compare", "fedavg", *TINY, "--out", "file"), "file")
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_may_not_be_made(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", denied)
        for method in ("run", "compare"):
            refused(command(method, "fedavg", *TINY, "--out", "r"), "cannot make the folder r", "Permission denied")
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written(command: Command, tmp_path: Path) -> None:
    assert command("run", "fedavg", *TINY, "--out", "r", "--quiet").code == 0
    refused(command("report", "r", "-o", "nowhere/report.html"), "nowhere/report.html")
    refused(command("report", "r", "-o", "r"), "'r'")
    (tmp_path / "empty").mkdir()
    refused(command("report", "empty"), "empty", "no run")
    assert not (tmp_path / "report.html").exists()


def test_compare_into_a_folder_with_another_config(command: Command, tmp_path: Path) -> None:
    assert command("compare", "fedavg", *TINY, "--out", "c", "--quiet").code == 0
    refused(command("compare", "fedavg", *TINY, "--out", "c", "--rounds", 9), "rounds 2, not 9", "--out")
    (tmp_path / "c" / "fedprox-seed0").mkdir()
    (tmp_path / "c" / "fedprox-seed0" / "thesis.tex").write_text("precious")
    refused(command("compare", "fedprox", *TINY, "--out", "c", "-q"), "not empty")
    assert [path.name for path in (tmp_path / "c" / "fedprox-seed0").iterdir()] == ["thesis.tex"]
