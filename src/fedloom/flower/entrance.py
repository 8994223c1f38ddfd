"""How a SuperNode gets in: what Flower leaves out when it does not.

A SuperLink takes a node that crashed for connected until its heartbeat has been missing for a minute, and lets nobody
in with its key meanwhile. Flower's SuperNode ends then, with the words it also has for an unknown key; and it says
nothing at all while it tries to reach a server whose certificate it does not trust. Here it waits for that minute and
says what is the matter.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

LOG = logging.getLogger("flwr.fedloom")
NOT_LET_IN = 2004
"""Flower's code for a node that may not connect."""
MINUTE_SECONDS = 100.0
"""How long to go on asking: a node counts as connected for a minute after it was heard last."""
AGAIN_SECONDS = 3.0


def patient(activate: Callable[..., Any], sleep: Callable[[float], None] = time.sleep) -> Callable[..., Any]:
    """The call by which a SuperNode connects, which asks again for a while and says why it must."""
    said: set[str] = set()

    def tell(text: str) -> None:
        if text not in said:
            said.add(text)
            LOG.warning("%s", text)

    def activate_patiently(client: Any, request: Any) -> Any:
        import httpx
        from flwr.supercore.error import FlowerError

        waited = 0.0
        while True:
            try:
                return activate(client, request)
            except httpx.TransportError as error:
                tell(f"cannot reach the SuperLink yet: {_reason(error)}")
                raise  # Flower asks again by itself
            except httpx.HTTPStatusError as error:
                refusal = FlowerError.from_json(error.response.text)
                if refusal is None or refusal.code != NOT_LET_IN or waited >= MINUTE_SECONDS:
                    raise
            tell(
                "the SuperLink does not let this node in: its key is not registered there, or another node is"
                f" connected with it (this one, before a crash?); asking again for {MINUTE_SECONDS:g} s"
            )
            sleep(AGAIN_SECONDS)
            waited += AGAIN_SECONDS

    return activate_patiently


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"its certificate is not one of the authority that this site trusts ({text[:200]})"
    return text[:300]
