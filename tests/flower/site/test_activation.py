"""Tests that a rejected SuperNode retries for a while and says why."""

import json
import logging
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx

from fedloom.flower.flwr_patches import MINUTE_SECONDS, _patch_node_activation

pytestmark = pytest.mark.flower


class SuperLink:
    """Answers the call by which nodes connect with these, one after the other."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.slept = list(answers), 0.0

    def activate(self, client: Any, request: Any) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sleep(self, seconds: float) -> None:
        self.slept += seconds

    def call(self) -> Any:
        return _patch_node_activation(self.activate, self.sleep)(None, None)


def refused(code: int) -> httpx.HTTPStatusError:
    text = json.dumps({"code": code, "detail": "no"})
    response = httpx.Response(400, text=text, request=httpx.Request("POST", "https://server"))
    return httpx.HTTPStatusError("no", request=response.request, response=response)


def test_a_key_that_still_counts_as_connected_is_let_in_later(caplog: pytest.LogCaptureFixture) -> None:
    link = SuperLink(refused(2004), refused(2004), "in")
    with caplog.at_level(logging.WARNING, "flwr.fedloom"):
        assert link.call() == "in"
    assert len(caplog.records) == 1
    assert "its key is not registered there, or another node is connected with it" in caplog.text


def test_an_unknown_key_is_not_asked_for_ever() -> None:
    link = SuperLink(refused(2004))
    with pytest.raises(httpx.HTTPStatusError):
        link.call()
    assert MINUTE_SECONDS <= link.slept < MINUTE_SECONDS + 10


def test_other_refusals_are_left_to_flower() -> None:
    link = SuperLink(refused(2003), "in")
    with pytest.raises(httpx.HTTPStatusError):
        link.call()
    assert link.slept == 0


def test_an_untrusted_certificate_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    error = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get issuer")
    call = _patch_node_activation(SuperLink(error).activate)
    with caplog.at_level(logging.WARNING, "flwr.fedloom"):
        for _ in range(3):
            with pytest.raises(httpx.ConnectError):
                call(None, None)
    assert len(caplog.records) == 1
    assert "its certificate is not one of the authority that this site trusts" in caplog.text
