"""Tests of storage: round trip, damaged files, failed writes."""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_by_the_library
from torch import Tensor

from fedloom.errors import FedloomError, InputError
from fedloom.utils import storage
from fedloom.utils.storage import (
    join_stored_tensors,
    read_json,
    read_safetensors,
    split_stored_tensors,
    write_atomically,
    write_json,
    write_safetensors,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = torch.randint(0, 2**15, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return values.to(draw(st.sampled_from(DTYPES)))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_]))
    return generator.integers(0, 200, shape).astype(dtype) if shape else np.array(draw(st.integers(0, 99)), dtype)


KEYS = st.one_of(st.integers(-5, 200), st.text(st.sampled_from("ab/@1#é"), max_size=4))
LEAVES = st.one_of(
    tensors(), arrays(), st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)


def equal(a: Any, b: Any) -> bool:
    """Equal in value and in kind, down to the last leaf."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def round_trip(state: Any, folder: Path) -> Any:
    tree, found = split_stored_tensors(state)
    write_json(folder / "tree.json", {"state": tree})
    digest = write_safetensors(folder / "tensors.safetensors", found)
    return join_stored_tensors(
        read_json(folder / "tree.json")["state"], read_safetensors(folder / "tensors.safetensors", digest)
    )


@given(state=STATES)
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_states_come_back_from_the_disk_as_they_were(state: Any, tmp_path: Path) -> None:
    assert equal(round_trip(state, tmp_path), state)


def test_keys_that_look_alike_keep_their_own_tensors(tmp_path: Path) -> None:
    one, two, three, four = (torch.full((2,), float(i)) for i in range(4))
    state = {1: one, "1": two, "a": {"b": three}, "a/b": four}
    assert equal(round_trip(state, tmp_path), state)


def test_infinities_tuples_and_nan_are_kept(tmp_path: Path) -> None:
    back = round_trip({"a": (1, float("inf")), "b": float("-inf"), "c": float("nan"), "d": 0.1 + 0.2}, tmp_path)
    assert back["a"] == [1, float("inf")], "tuples come back as lists"
    assert back["b"] == float("-inf")
    assert back["c"] != back["c"]
    assert back["d"] == 0.1 + 0.2


def test_tensors_that_share_memory_are_each_stored(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    state = {"a": base, "b": base, "row": base[2:4], "t": base.view(2, 3).t(), "w": torch.ones(3, requires_grad=True)}
    back = round_trip(state, tmp_path)
    assert all(torch.equal(back[name], state[name]) for name in state)
    back["a"].fill_(9)
    assert torch.equal(back["b"], torch.arange(6.0))


def test_views_and_arrays_of_any_stride_are_stored(tmp_path: Path) -> None:
    frozen = np.arange(4)
    frozen.setflags(write=False)
    state = {"backward": np.arange(5)[::-1], "column": np.arange(6).reshape(2, 3)[:, 1], "frozen": frozen}
    back = round_trip(state, tmp_path)
    assert all(np.array_equal(back[name], state[name]) for name in state)
    back["frozen"][0] = 7


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), b"bytes", 1j, np.float32(1), np.array(["text"]), np.array([None]), {(1, 2): 3}]
)
def test_unsupported_values_are_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        split_stored_tensors({"part": [value]})


def test_the_refusal_names_the_place() -> None:
    with pytest.raises(TypeError, match=r"/server/models/1 of a state is a set, which cannot be saved"):
        split_stored_tensors({"server": {"models": [1, {2}]}})


# damage

VALUE = {"round": 12, "state": {"x": [1.5, None, "é"]}, "inf": float("inf")}


@pytest.fixture
def json_file(tmp_path: Path) -> Path:
    write_json(tmp_path / "whole.json", VALUE)
    return tmp_path / "whole.json"


@pytest.fixture
def tensor_file(tmp_path: Path) -> Path:
    path = tmp_path / "whole.safetensors"
    write_safetensors(path, {"a": torch.arange(5.0), "b": torch.tensor([True]), "c": torch.zeros(0, 2)})
    return path


def damaged(content: bytes, place: int, mask: int, cut: bool) -> bytes:
    """The content cut at a place, or with some bits flipped there."""
    place %= len(content)
    return content[:place] + (b"" if cut else bytes([content[place] ^ mask]) + content[place + 1 :])


def attempt(read: Callable[[Path], dict[str, Any]], path: Path) -> tuple[dict[str, Any] | None, str]:
    """What is read, or the sentence with which it is refused."""
    try:
        return read(path), ""
    except InputError as error:
        return None, str(error)


def test_any_damage_of_a_tensor_file_is_refused_by_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    digest = write_safetensors(path, {"a": torch.arange(5.0), "b": torch.tensor(True)})
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(InputError, match=r"t\.safetensors is damaged"):
            read_safetensors(path, digest)
        path.write_bytes(content[:place])
        with pytest.raises(InputError, match=r"t\.safetensors is damaged"):
            read_safetensors(path, digest)
    path.write_bytes(content)
    assert torch.equal(read_safetensors(path, digest)["a"], torch.arange(5.0))


@given(place=st.integers(0, 10_000), mask=st.integers(1, 255), cut=st.booleans())
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_without_digest_gives_tensors_or_a_sentence(
    place: int, mask: int, cut: bool, tensor_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(damaged(tensor_file.read_bytes(), place, mask, cut))
    found, sentence = attempt(read_safetensors, path)
    if found is None:
        assert "t.safetensors is not a whole safetensors file" in sentence
    else:
        assert not cut
        assert all(isinstance(tensor, Tensor) for tensor in found.values())


@given(place=st.integers(0, 10_000), mask=st.integers(1, 255), cut=st.booleans())
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_json_never_reads_as_another_value(
    place: int, mask: int, cut: bool, json_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "v.json"
    path.write_bytes(damaged(json_file.read_bytes(), place, mask, cut))
    found, sentence = attempt(read_json, path)
    if found is None:
        assert "v.json is damaged" in sentence
    else:
        assert found == VALUE, "only white space may have changed"


@pytest.mark.parametrize("text", ["", "[1]", "7", "null", '"text"', "{}", '{"sha256": 3}', "{", "[" * 100_000])
def test_other_json_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"v\.json is damaged"):
        read_json(path)


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    for read in (read_json, read_safetensors):
        with pytest.raises(InputError, match=r"cannot read .*missing: No such file or directory\."):
            read(tmp_path / "missing")
        with pytest.raises(InputError, match=r"cannot read .*: Is a directory\."):
            read(tmp_path)


# writing


def test_a_write_makes_the_folders_it_needs(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "b" / "f", b"new")
    assert (tmp_path / "a" / "b" / "f").read_bytes() == b"new"
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["f"]


@pytest.mark.parametrize("step", ["fsync", "replace", "open"])
def test_a_failed_write_keeps_the_old_content(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "f.json"
    write_atomically(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os if step == "fsync" else Path, step, fail)
        with pytest.raises(FedloomError, match=r"^cannot write .*f\.json: No space left on device\.$"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"], "a full disk is not filled further"
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_crash_in_writing_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    path = tmp_path / "f"
    write_atomically(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", die)
        with pytest.raises(Killed):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    write_atomically(path, b"newer")
    assert path.read_bytes() == b"newer"


def test_content_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("sync"), fsync(handle))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (events.append("name"), replace(self, to))[1])
    write_atomically(tmp_path / "f", b"x")
    assert events == ["sync", "name", "sync"]


def test_unwritable_places_are_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FedloomError, match=r"cannot write .*: (Not a directory|File exists)\."):
        write_atomically(tmp_path / "file" / "f", b"")


def test_json_carries_its_checksum(tmp_path: Path) -> None:
    write_json(tmp_path / "v.json", {"b": 1, "a": [2]})
    stored = json.loads((tmp_path / "v.json").read_text())
    assert set(stored) == {"a", "b", "sha256"}
    assert read_json(tmp_path / "v.json") == {"b": 1, "a": [2]}


@st.composite
def named_tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    """Tensors of every kind, also views that are not contiguous."""
    found = {}
    for name in draw(st.lists(st.text(max_size=6), max_size=6, unique=True)):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        tensor = torch.randint(0, 2, shape, generator=seed).to(draw(st.sampled_from(list(storage.DTYPES))))
        found[name] = tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor
    return found


@given(tensors=named_tensors(), about=st.none() | st.fixed_dictionaries({"fedloom": st.text(max_size=5)}))
def test_files_are_what_the_library_would_write(tensors: dict[str, Tensor], about: dict[str, str] | None) -> None:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert b"".join(storage._safetensors_pieces(tensors, about)) == save_by_the_library(whole, about)


@given(tensors=named_tensors(), small=st.integers(0, 9), large=st.integers(1, 40))
def test_the_size_of_the_pieces_changes_neither_file_nor_digest(
    tensors: dict[str, Tensor], small: int, large: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("pieces") / "file"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "SMALL", small)
        patch.setattr(storage, "LARGE", large)
        digest = write_safetensors(path, tensors)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert path.read_bytes() == save_by_the_library(whole)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_large_pieces_go_to_the_disk_while_the_next_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[int] = []
    monkeypatch.setattr(storage, "_begin_to_store", lambda handle: stored.append(os.fstat(handle).st_size))
    monkeypatch.setattr(storage, "LARGE", 100)
    write_atomically(tmp_path / "f", [bytes(10), bytes(100), bytes(20), bytes(100), bytes(1)])
    assert stored == [110, 230]


@pytest.mark.parametrize("known", [False, True])
def test_systems_that_take_no_advice_write_the_same(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(storage, "LARGE", 100)
    content = [bytes(range(100)), bytes(100)]
    if known:
        monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    else:
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
    write_atomically(tmp_path / "plain", content)
    assert (tmp_path / "plain").read_bytes() == b"".join(content)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_are_written_as_those_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LARGE", 1 << 16)
    step = storage.LARGE // 4
    sizes = (0, 1, step - 1, step, step + 1, 5 * step, 5 * step + 3)
    host = {f"{size} {dtype}": torch.randn(size).mul(99).to(dtype) for size in sizes for dtype in DTYPES}
    host["turned"] = torch.randn(3 * step, 5).t()
    device = {name: tensor.cuda() for name, tensor in host.items()}
    assert write_safetensors(tmp_path / "device", device) == write_safetensors(tmp_path / "host", host)
    read = read_safetensors(tmp_path / "device")
    assert all(torch.equal(read[name], tensor) for name, tensor in host.items())


@pytest.mark.parametrize("strides", [(0,), (1,), (7,)])
def test_tensors_without_numbers_are_written_whatever_their_strides(tmp_path: Path, strides: tuple[int, ...]) -> None:
    write_safetensors(tmp_path / "file", {"none": torch.empty(4).as_strided((0,), strides), "one": torch.ones(1)})
    read = read_safetensors(tmp_path / "file")
    assert read["none"].shape == (0,)
    assert torch.equal(read["one"], torch.ones(1))


def test_parts_of_tensors_are_written_whatever_their_strides(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    written = {"repeated": whole[:1, 3].expand(5), "column": whole[:, 2], "one": whole[1:2, 3], "last": whole[3, 5]}
    write_safetensors(tmp_path / "file", written)
    read = read_safetensors(tmp_path / "file")
    assert all(torch.equal(read[name], tensor) for name, tensor in written.items())


def test_tensors_that_share_memory_are_written_each(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    written = {"whole": whole, "part": whole[3:9], "same": whole, "rows": whole.view(3, 4)}
    write_safetensors(tmp_path / "file", written)
    read = read_safetensors(tmp_path / "file")
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in written.items())


def test_a_write_that_breaks_off_between_two_tensors_leaves_what_was_there(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "file", {"a": torch.ones(3)})
    with pytest.raises(FedloomError, match="cannot write"):
        write_atomically(tmp_path / "file", (_raise(OSError(errno.ENOSPC, "No space left")) for _ in range(2)))
    assert torch.equal(read_safetensors(tmp_path / "file")["a"], torch.ones(3))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_numbers_that_cannot_be_stored_are_told_and_nothing_is_left(tmp_path: Path) -> None:
    wrong = {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.complex128)}
    with pytest.raises(FedloomError, match=r"b cannot be stored: .* no numbers of type torch\.complex128\."):
        write_safetensors(tmp_path / "file", wrong)
    assert not list(tmp_path.iterdir())


def _raise(error: Exception) -> bytes:
    raise error
