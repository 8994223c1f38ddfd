"""Tests of downloads from a local server: resumed, verified, complete or absent."""

import gzip
import hashlib
import io
import re
import socket
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedloom.data import cache, registry
from fedloom.data.cache import download_to_cache, extract_to_cache
from fedloom.data.sources import DATASET_SOURCES
from fedloom.data.sources.cifar import CifarSource
from fedloom.data.sources.mnist import MNIST
from fedloom.errors import InputError

CONTENT = np.random.default_rng(0).bytes(300_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `files` with ranges, and can be told to misbehave."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.ranges: list[str | None] = []
        self.knows_ranges = True
        self.break_after: list[int] = []
        """For each coming answer, after how many bytes the connection breaks; then none break."""

    @property
    def home(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        content = self.server.files.get(self.path.lstrip("/"))
        if content is None:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.knows_ranges else 0
        if start >= len(content) > 0:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        stop = self.server.break_after.pop(0) if self.server.break_after else len(content)
        self.wfile.write(content[start : start + stop])

    def log_message(self, format: str, *args: object) -> None:
        pass


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        running.files["file"] = CONTENT
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_a_file_comes_whole_and_is_not_fetched_twice(server: Server, tmp_path: Path) -> None:
    target, steps = tmp_path / "deep" / "down" / "file", []
    for _ in range(2):
        download_to_cache(f"{server.home}/file", target, MD5, lambda *step: steps.append(step))
    assert target.read_bytes() == CONTENT
    assert names(target.parent) == ["file"]
    assert server.ranges == [None]
    assert steps[-1] == ("file", 300_000, 300_000)
    assert [done for _, done, _ in steps] == sorted({done for _, done, _ in steps})


def test_a_broken_connection_is_taken_up_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.break_after = [100_000, 50_000]
    download_to_cache(f"{server.home}/file", tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_a_later_call_goes_on(server: Server, tmp_path: Path) -> None:
    server.break_after = [1000] * cache.ATTEMPTS
    with pytest.raises(InputError, match="the connection broke"):
        download_to_cache(f"{server.home}/file", tmp_path / "file", MD5)
    assert names(tmp_path) == ["file.part"]
    download_to_cache(f"{server.home}/file", tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.ranges[-1] == f"bytes={1000 * cache.ATTEMPTS}-"


def test_a_part_that_is_whole_already_is_recognised(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT)
    download_to_cache(f"{server.home}/file", tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    server.knows_ranges = False
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    download_to_cache(f"{server.home}/file", tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("start", [b"", b"rubbish"])
def test_a_wrong_checksum_leaves_nothing_behind(server: Server, tmp_path: Path, start: bytes) -> None:
    server.files["file"] = CONTENT if start else CONTENT[:-1] + b"?"
    (tmp_path / "file.part").write_bytes(start)
    with pytest.raises(InputError, match=f"expected {MD5}; it was discarded"):
        download_to_cache(f"{server.home}/file", tmp_path / "file", MD5)
    assert names(tmp_path) == []


def test_an_absent_file_is_said_to_be_absent(server: Server, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the server answers 404"):
        download_to_cache(f"{server.home}/nothing", tmp_path / "nothing", MD5)
    assert len(server.ranges) == 1


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="cannot make the folder"):
        download_to_cache("http://127.0.0.1:1/x", tmp_path / "file" / "x", MD5)


def test_many_at_once_fetch_only_once(server: Server, tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=download_to_cache, args=(f"{server.home}/file", tmp_path / "file", MD5))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.ranges == [None]


@pytest.fixture
def empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fedloom"


def test_a_data_set_is_downloaded_once_and_then_at_hand(
    server: Server, empty_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checksums = {}
    for name, (count, digest, _) in MNIST.checksums.items():
        shape = (4, 28, 28) if "images" in name else (4,)
        head = np.array([0x800 + len(shape), *shape], ">u4").tobytes()
        content = gzip.compress(head + np.arange(np.prod(shape)).astype(np.uint8).tobytes())
        server.files[f"{name}.gz"] = content
        checksums[name] = (count, digest, hashlib.md5(content).hexdigest())
    monkeypatch.setitem(DATASET_SOURCES, "mnist", replace(MNIST, base_url=server.home, checksums=checksums))
    with pytest.raises(InputError, match="'mnist' is not on this machine; allow its download or put train-images"):
        registry.load_dataset("mnist", download=False)
    seen = []
    loaded = registry.load_dataset("mnist", progress=lambda name, *_: seen.append(name))
    assert loaded.train.y.tolist() == loaded.test.y.tolist() == [0, 1, 2, 3]
    assert set(seen) == {f"{name}.gz" for name in checksums}
    info = next(info for info in registry.available_datasets() if info.name == "mnist")
    assert (info.state, info.folder) == ("on this machine", empty_machine / "mnist")
    assert len(registry.load_dataset("mnist", download=False).train) == 4
    assert len(server.ranges) == 4


def test_without_a_network_the_error_says_what_to_do(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        home = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setitem(DATASET_SOURCES, "mnist", replace(MNIST, base_url=home))
        with pytest.raises(InputError) as caught:
            registry.load_dataset("mnist")
    message = str(caught.value)
    assert f"cannot download {home}/train-images-idx3-ubyte.gz: Connection refused; " in message
    assert f"into {empty_machine / 'mnist'}" in message
    assert "FEDLOOM_DATA" in message


def archive(members: dict[str, bytes], link: str | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if link:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(info)
    return buffer.getvalue()


def test_only_expected_members_are_unpacked(tmp_path: Path) -> None:
    packed = tmp_path / "a.tar.gz"
    packed.write_bytes(archive({"d/a.bin": b"1234", "../../b.bin": b"5678", "d/c.bin": b"99"}))
    extract_to_cache(packed, tmp_path / "out", ["a.bin", "b.bin"], 4)
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert found == {"a.bin": b"1234", "b.bin": b"5678"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (archive({"a.bin": b"1234"}), r"lacks b\.bin of 4 bytes"),
        (archive({"a.bin": b"1234", "b.bin": b"12345"}), r"lacks b\.bin"),
        (archive({"a.bin": b"1234"}, link="b.bin"), r"lacks b\.bin"),
        (b"not an archive", "cannot unpack"),
        (archive({"a.bin": CONTENT[:4], "z": CONTENT})[:-1000], "cannot unpack"),
    ],
    ids=["one missing", "one too long", "a link", "no archive", "cut off"],  # archives hold the time they were made at
)
def test_archives_that_will_not_do(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.tar.gz").write_bytes(content)
    with pytest.raises(InputError, match=message):
        extract_to_cache(tmp_path / "a.tar.gz", tmp_path, ["a.bin", "b.bin"], 4)


def test_cifar_is_unpacked_and_its_archive_removed(server: Server, tmp_path: Path) -> None:
    source = DATASET_SOURCES["cifar10"]
    assert isinstance(source, CifarSource)
    content = archive({f"cifar-10-batches-bin/{name}": bytes(30_730_000) for name in source.files})
    server.files[source.archive] = content
    local = replace(source, base_url=server.home, md5=hashlib.md5(content).hexdigest())
    assert not local.is_complete(tmp_path)
    local.download(tmp_path, None)
    assert local.is_complete(tmp_path)
    assert names(tmp_path) == sorted(source.files)
    with pytest.raises(InputError, match="not the published file"):
        local.read(tmp_path)


def test_files_of_different_sizes_come_out_of_one_archive(server: Server, tmp_path: Path) -> None:
    source = DATASET_SOURCES["cifar100"]
    assert isinstance(source, CifarSource)
    files = {"train_files": {"train.bin": (5, "")}, "test_files": {"test.bin": (2, "")}}
    content = archive({"cifar-100-binary/train.bin": bytes(5 * 3074), "cifar-100-binary/test.bin": bytes(2 * 3074)})
    server.files[source.archive] = content
    local = replace(source, base_url=server.home, md5=hashlib.md5(content).hexdigest(), **files)
    local.download(tmp_path, None)
    assert [(tmp_path / name).stat().st_size for name in source.files] == [5 * 3074, 2 * 3074]
    assert names(tmp_path) == ["test.bin", "train.bin"]


def test_three_domains_of_digit5_can_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, str] = {}

    def pretend(url: str, target: Path, md5: str, progress: object) -> None:
        asked[url] = md5
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()

    for module in ("digit5", "mnist", "cifar"):
        monkeypatch.setattr(f"fedloom.data.sources.{module}.download_to_cache", pretend)
    source = DATASET_SOURCES["digit5"]
    source.download(tmp_path, None)
    assert source.is_complete(tmp_path)
    assert source.missing_parts(tmp_path) == ("mnist-m", "synth-digits")
    assert len(asked) == 8
    assert all(re.fullmatch(r"https?://[^ ]+", url) and re.fullmatch("[0-9a-f]{32}", asked[url]) for url in asked)
