"""The client app of the fault scenarios: an honest site that files can instruct.

The scenarios copy this file into their app as `client_app.py`. The node configuration names a folder, `faults`. A file
`do-CLIENT-ROUND` in it holds one word: what the site does in this round.
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
    request = message_from_flower_records(message.content)
    folder = Path(str(context.node_config.get("faults", "")))
    if request.kind != "train" or not folder.is_absolute():
        return _reply(_answer_message(request, context, Path(__file__).parent), message)
    client, round = request.header["client_id"], request.header["round"] + 1
    instruction = folder / f"do-{client}-{round}"
    word = instruction.read_text() if instruction.exists() else ""
    if word == "wait":
        (folder / f"here-{client}-{round}").touch()
        _wait_while(instruction.exists)
    honest = _answer_message(request, context, Path(__file__).parent)
    sent = folder / f"sent-{client}-{round}"
    part = sent.with_suffix(".part")
    part.write_bytes(encode_message(honest))
    part.replace(sent)
    return _reply(_changed(word, honest, client, round, folder), message)


def _changed(word: str, honest: SiteMessage, client: int, round: int, folder: Path) -> SiteMessage:
    """Return the message to send instead of the honest reply."""
    size = honest.arrays["model"].shape[0]
    if word == "nan":
        return _with(honest, {"model": MessageArray("float32", (size,), b"\xff" * (4 * size))})
    if word == "shape":
        return _with(honest, {"model": MessageArray("float32", (size - 1,), bytes(honest.arrays["model"].data)[4:])})
    if word == "huge":  # no two chunks are equal
        return _with(honest, {"model": MessageArray("float32", (HUGE // 4,), os.urandom(HUGE))})
    if word == "one-piece":
        import flwr.app.message.array as array

        array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE = 1 << 40
        return _with(honest, {"model": MessageArray("float32", (HUGE // 4,), os.urandom(HUGE))})
    if word == "bomb":  # equal chunks are sent once: few bytes on the wire, many in memory
        return _with(honest, {"model": MessageArray("float32", (BOMB // 4,), bytes(BOMB))})
    if word == "stale":
        return decode_message((folder / f"sent-{client}-{round - 1}").read_bytes())
    if word == "another":
        others = folder / f"sent-0-{round}"
        _wait_while(lambda: not others.exists())
        return decode_message(others.read_bytes())
    if word == "another-renamed":  # the model of client 0 under this client's number; the nonce differs
        others = folder / f"sent-0-{round}"
        _wait_while(lambda: not others.exists())
        taken = decode_message(others.read_bytes())
        return SiteMessage(taken.kind, {**taken.header, "client_id": client}, taken.arrays)
    if word == "samples":
        return SiteMessage(honest.kind, {**honest.header, "num_examples": 10**6}, honest.arrays)
    return honest


def _with(honest: SiteMessage, arrays: dict[str, MessageArray]) -> SiteMessage:
    return SiteMessage(honest.kind, honest.header, {**honest.arrays, **arrays})


def _reply(reply: SiteMessage, message: Message) -> Message:
    return Message(content=message_to_flower_records(reply), reply_to=message)


def _wait_while(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LONGEST_WAIT
    while holds() and time.monotonic() < end:
        time.sleep(0.05)
