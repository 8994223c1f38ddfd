"""Tests of banks: alignment, shared memory, access from a forked process."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.bank import ALIGN, Bank, aligned_row_stride, bank_tensor_at_address

Maker = Callable[..., Bank]


@pytest.fixture(params=["memory", "shared"])
def make(request: pytest.FixtureRequest) -> Maker:
    """Makes a bank of each sort."""
    return Bank.memory if request.param == "memory" else Bank.shared


def in_child(work: Callable[[], bool]) -> bool:
    """Whether `work` says yes in a forked child."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 16), (4, 17), (2, 1000)])
def test_every_sort_of_bank_behaves_alike(make: Maker, count: int, width: int, dtype: torch.dtype) -> None:
    bank = make(count, width, dtype)
    assert bank.rows.shape == (count, width)
    assert len(bank) == count
    assert bank.rows.dtype is dtype
    assert torch.equal(bank.rows, torch.zeros(count, width, dtype=dtype)), "rows are zeros at first"
    values = torch.randn(count, width, dtype=dtype)
    for index in range(count):
        row = bank.rows[index]
        assert row.is_contiguous()
        assert row.data_ptr() % ALIGN == 0
        row.copy_(values[index])
    assert torch.equal(bank.rows, values), "no row reaches into another"


@given(st.integers(1, 10_000), st.sampled_from([torch.float32, torch.float64]))
@settings(deadline=None, max_examples=50)
def test_stride_is_the_least_aligned_one(width: int, dtype: torch.dtype) -> None:
    stride = aligned_row_stride(width, dtype)
    assert width <= stride < width + ALIGN // dtype.itemsize
    assert stride * dtype.itemsize % ALIGN == 0


def test_empty_banks_are_banks(make: Maker) -> None:
    for count, width in ((0, 5), (3, 0)):
        assert make(count, width, torch.float32).rows.shape == (count, width)


def test_a_forked_child_writes_what_the_parent_sees() -> None:
    bank = Bank.shared(2, 33)

    def fill() -> bool:
        bank.rows[1].fill_(7.5)
        return True

    assert in_child(fill)
    assert bool((bank.rows[1] == 7.5).all())
    assert bool((bank.rows[0] == 0).all())


def test_ordinary_memory_is_not_shared() -> None:
    bank = Bank.memory(1, 4)

    def fill() -> bool:
        bank.rows.fill_(1)
        return True

    assert in_child(fill)
    assert bool((bank.rows == 0).all())


# finding rows again


def test_located_rows_are_the_same_memory(make: Maker) -> None:
    bank = make(4, 10, torch.float32)
    row = bank.rows[2]
    address = Bank.locate(row, Bank.num_mapped())
    if not bank.mapped:
        assert address is None
        return
    assert address == row.data_ptr()
    row.copy_(torch.arange(10.0))
    again = bank_tensor_at_address(address, (10,), torch.float32)
    assert torch.equal(again, row)
    again[3] = -1
    assert row[3] == -1
    assert Bank.locate(row[2:5], Bank.num_mapped()) == row[2:5].data_ptr()
    assert Bank.locate(bank.rows, Bank.num_mapped()) is None, "rows with gaps between them are not one tensor"
    assert Bank.locate(row.clone(), Bank.num_mapped()) is None
    last = bank.rows[3].data_ptr()
    beyond = bank_tensor_at_address(last, (ALIGN // 4 + 1,), torch.float32)
    assert Bank.locate(beyond[:-1], Bank.num_mapped()) == last
    assert Bank.locate(beyond, Bank.num_mapped()) is None, "it ends outside of the bank"
    square = bank_tensor_at_address(address, (2, 5), torch.float32)
    assert square.shape == (2, 5)
    assert square[1, 0] == 5


def test_a_child_finds_rows_by_their_address() -> None:
    bank = Bank.shared(2, 8)
    address = Bank.locate(bank.rows[1], Bank.num_mapped())
    assert address is not None

    def fill() -> bool:
        bank_tensor_at_address(address, (8,), torch.float32).fill_(4.0)
        return True

    assert in_child(fill)
    assert bool((bank.rows[1] == 4).all())


def test_a_bank_made_after_the_fork_is_not_located() -> None:
    early = Bank.shared(1, 4)
    made = Bank.num_mapped()
    late = Bank.shared(1, 4)
    assert Bank.num_mapped() == made + 1
    assert Bank.locate(early.rows[0], made) is not None
    assert Bank.locate(late.rows[0], made) is None
    assert Bank.locate(late.rows[0], Bank.num_mapped()) is not None


def test_memory_that_was_given_back_and_taken_anew_is_not_located() -> None:
    made = Bank.shared(1, 100_000) and Bank.num_mapped()
    later = [Bank.shared(1, 100_000) for _ in range(3)]  # one of them likely at the old address
    assert all(Bank.locate(bank.rows[0], made) is None for bank in later)


def test_ordinary_banks_do_not_count_as_made() -> None:
    made = Bank.num_mapped()
    Bank.memory(3, 3)
    assert Bank.num_mapped() == made


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm here")
def test_nothing_is_left_in_dev_shm() -> None:
    before = set(Path("/dev/shm").iterdir())
    bank = Bank.shared(8, 1000)
    bank.rows.fill_(1)
    mine = {path for path in set(Path("/dev/shm").iterdir()) - before if str(os.getpid()) in path.name}
    assert not mine
