"""The number of torch's threads after runs."""

import threading

import torch

from fedloom.devices.threads import SingleThread


def test_overlapping_runs_restore_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found: list[int] = []
        second_started, first_ended = threading.Event(), threading.Event()

        def second() -> None:
            held = SingleThread()
            second_started.set()
            first_ended.wait(10)
            held.release()
            held.release()
            found.append(torch.get_num_threads())

        first = SingleThread()
        thread = threading.Thread(target=second)
        thread.start()
        second_started.wait(10)
        assert torch.get_num_threads() == 1
        first.release()
        first_ended.set()
        thread.join()
        late = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        late.start()
        late.join()
        assert [*found, torch.get_num_threads()] == [3, 3, 3]
    finally:
        torch.set_num_threads(before)


def test_an_engine_that_was_never_closed_does_not_count() -> None:
    before = torch.get_num_threads()
    try:
        forgotten = SingleThread()
        torch.set_num_threads(2)
        threads = SingleThread()
        assert torch.get_num_threads() == 1
        threads.release()
        assert torch.get_num_threads() == 2
        forgotten.release()
    finally:
        torch.set_num_threads(before)
