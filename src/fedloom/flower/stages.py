"""A site's answer to each question of the relay (relay.py): the stages of the sealed exchange, as notes."""

from fedloom.flower.notes import Note, parts_for
from fedloom.flower.sealed import Refusal
from fedloom.flower.sealed_site import Again, SealedSite


def serve(site: SealedSite, stage: str, question: Note) -> Note:
    """What a site answers to a question of the relay."""
    attempt, exchange = (_number(question, name) for name in ("attempt", "exchange"))
    if stage == "hello":
        hello, board = site.hello(attempt)
        return Note(parts={"hello": hello, "board": board})
    if stage == "offer":
        hellos = question.by_slot("hello")
        return Note(parts=parts_for("offer", site.offer(attempt, [hellos[slot] for slot in sorted(hellos)])))
    if stage == "answer":
        return Note(parts=parts_for("answer", site.answer(attempt, exchange, question.by_slot("offer"))))
    if stage == "lock":
        model, words = site.lock(attempt, exchange, question.by_slot("answer"), question.by_slot("board"))
        return Note(parts={"model": model, **parts_for("lock", words)})
    if stage == "commit":
        said = site.commit(attempt, exchange, question.by_slot("lock"))
        return Note(parts=parts_for("offer", said.offers) if isinstance(said, Again) else parts_for("commit", said))
    if stage == "release":
        return Note(parts=parts_for("key", site.release(attempt, exchange, question.by_slot("commit"))))
    raise Refusal(f"an exchange has no stage {stage!r}.")


def _number(question: Note, name: str) -> int:
    value = question.header.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refusal(f"{name} must be a whole number, not {value!r}.")
    return value
