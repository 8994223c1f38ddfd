"""The ClientApp of the fault scenarios: an honest site, except in the rounds for which a file tells it otherwise.

The scenarios (flower_scenarios.py) put this file into their app as `client_app.py`. A SuperNode's configuration names a
folder, `faults`; a file `do-CLIENT-ROUND` in it holds one word, and the site does that in this round.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom.flower.message import MessageArray, SiteMessage, decode_message, encode_message
from fedloom.flower.records import message_from_flower_records, message_to_flower_records
from fedloom.flower.site.client_app import _answer_message

app = ClientApp()
HUGE = 64 << 20
BOMB = 512 << 20
LONGEST_WAIT = 300.0


@app.query()
@app.evaluate()
@app.train()
def handle(message: Message, context: Context) -> Message:
    question = message_from_flower_records(message.content)
    folder = Path(str(context.node_config.get("faults", "")))
    if question.kind != "train" or not folder.is_absolute():
        return _reply(_answer_message(question, context, Path(__file__).parent), message)
    client, round = question.header["client"], question.header["round"] + 1
    order = folder / f"do-{client}-{round}"
    word = order.read_text() if order.exists() else ""
    if word == "wait":
        (folder / f"here-{client}-{round}").touch()
        _wait_while(order.exists)
    honest = _answer_message(question, context, Path(__file__).parent)
    kept = folder / f"sent-{client}-{round}"
    part = kept.with_suffix(".part")
    part.write_bytes(encode_message(honest))
    part.replace(kept)
    return _reply(_changed(word, honest, client, round, folder), message)


def _changed(word: str, honest: SiteMessage, client: int, round: int, folder: Path) -> SiteMessage:
    """What is sent instead of an honest answer."""
    size = honest.blocks["row"].shape[0]
    if word == "nan":
        return _with(honest, {"row": MessageArray("float32", (size,), b"\xff" * (4 * size))})
    if word == "shape":
        return _with(honest, {"row": MessageArray("float32", (size - 1,), bytes(honest.blocks["row"].data)[4:])})
    if word == "huge":  # no two pieces are alike
        return _with(honest, {"row": MessageArray("float32", (HUGE // 4,), os.urandom(HUGE))})
    if word == "one-piece":
        import flwr.app.message.array as array

        array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE = 1 << 40
        return _with(honest, {"row": MessageArray("float32", (HUGE // 4,), os.urandom(HUGE))})
    if word == "bomb":  # equal pieces travel once: few bytes on the wire, many in memory
        return _with(honest, {"row": MessageArray("float32", (BOMB // 4,), bytes(BOMB))})
    if word == "stale":
        return decode_message((folder / f"sent-{client}-{round - 1}").read_bytes())
    if word == "another":
        others = folder / f"sent-0-{round}"
        _wait_while(lambda: not others.exists())
        return decode_message(others.read_bytes())
    if word == "another-renamed":  # the model of client 0 as one's own: the nonce gives it away
        others = folder / f"sent-0-{round}"
        _wait_while(lambda: not others.exists())
        taken = decode_message(others.read_bytes())
        return SiteMessage(taken.kind, {**taken.header, "client": client}, taken.blocks)
    if word == "samples":
        return SiteMessage(honest.kind, {**honest.header, "samples": 10**6}, honest.blocks)
    return honest


def _with(honest: SiteMessage, blocks: dict[str, MessageArray]) -> SiteMessage:
    return SiteMessage(honest.kind, honest.header, {**honest.blocks, **blocks})


def _reply(parcel: SiteMessage, message: Message) -> Message:
    return Message(content=message_to_flower_records(parcel), reply_to=message)


def _wait_while(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LONGEST_WAIT
    while holds() and time.monotonic() < end:
        time.sleep(0.05)
