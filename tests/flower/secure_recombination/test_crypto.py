"""Tests of hellos, channels, boards and keys of the secure exchange."""

from contextlib import suppress
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.flower.secure_recombination import crypto
from fedloom.flower.secure_recombination.crypto import (
    STAGES,
    CryptoHello,
    CryptoLayerBoard,
    CryptoRejected,
    CryptoSession,
    CryptoTerms,
    EncryptedChannel,
    LayerKeyPair,
    _unframe_crypto_parts,
    crypto_digest,
    crypto_frame,
    decrypt_model,
    encrypt_model,
    hash_hello_transcript,
)
from tests.support.relay_fixtures import RUN, identity, roster

quick = settings(deadline=None, max_examples=50)
SERVER = LayerKeyPair()
TERMS = CryptoTerms((16, 0, 40), 0.5, False, SERVER.public)
SESSION = CryptoSession(RUN, 3, 1)
LAYERS = [bytes(range(16)), b"", bytes(range(40))]


def greeting(number: int, session: CryptoSession = SESSION) -> tuple[X25519PrivateKey, CryptoHello]:
    private = X25519PrivateKey.generate()
    fresh = private.public_key().public_bytes_raw()
    hello = CryptoHello(session, f"site-{number}", number, TERMS.digest, fresh, bytes(32))
    return private, hello.signed(identity(number))


def pair(
    first: int = 0, second: int = 1, session: CryptoSession = SESSION
) -> tuple[EncryptedChannel, EncryptedChannel]:
    (one, mine), (two, theirs) = greeting(first, session), greeting(second, session)
    record = hash_hello_transcript([mine, theirs])
    return EncryptedChannel(one, mine, theirs, record), EncryptedChannel(two, theirs, mine, record)


# Frames


@quick
@given(st.lists(st.binary(max_size=20), max_size=5))
def test_frames_come_apart_as_they_were_put_together(parts: list[bytes]) -> None:
    assert _unframe_crypto_parts(crypto_frame(*parts), len(parts)) == parts


@quick
@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_different_parts_have_different_frames(one: list[bytes], other: list[bytes]) -> None:
    assert (crypto_frame(*one) == crypto_frame(*other)) == (one == other)


@quick
@given(st.binary(max_size=60), st.integers(0, 4))
def test_other_bytes_are_refused(data: bytes, count: int) -> None:
    with suppress(CryptoRejected):
        assert crypto_frame(*_unframe_crypto_parts(data, count)) == data


# Hellos


def test_a_hello_says_again_what_it_said() -> None:
    _, hello = greeting(0)
    assert CryptoHello.decode(hello.encode()) == hello
    hello.check(roster(2), SESSION, TERMS.digest)


@quick
@given(st.binary(max_size=300))
def test_anything_else_is_no_hello(data: bytes) -> None:
    with pytest.raises(CryptoRejected):
        CryptoHello.decode(data)


@quick
@given(st.integers(0, 10**6), st.integers(0, 7))
def test_a_changed_bit_is_refused(at: int, bit: int) -> None:
    data = bytearray(greeting(0)[1].encode())
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(CryptoRejected):
        CryptoHello.decode(bytes(data)).check(roster(2), SESSION, TERMS.digest)


@pytest.mark.parametrize("text", [b"01", b"+1", b" 1", b"1_0", b"\xd9\xa1"])
def test_numbers_are_written_in_one_way(text: bytes) -> None:
    """Else one hello could be shown to different sites as different bytes."""
    _, hello = greeting(0)
    body = crypto_frame(hello.session.encode(), hello.name, text, hello.terms, hello.fresh, hello.board)
    with pytest.raises(CryptoRejected, match="a hello is malformed"):
        CryptoHello.decode(crypto_frame(body, identity(0).sign("x", body)))


@pytest.mark.parametrize("field", ["terms", "fresh", "board"])
def test_lengths_are_fixed(field: str) -> None:
    short = replace(greeting(0)[1], **{field: bytes(31)}).signed(identity(0))
    with pytest.raises(CryptoRejected, match="a hello is malformed"):
        CryptoHello.decode(short.encode())


@pytest.mark.parametrize(
    "terms",
    [
        replace(TERMS, sizes=(16, 40, 0)),
        replace(TERMS, sizes=(16, 0)),
        replace(TERMS, send_probability=0.25),
        replace(TERMS, mixed=True),
        replace(TERMS, opener=LayerKeyPair().public),
    ],
)
def test_terms_differ_in_everything_that_matters(terms: CryptoTerms) -> None:
    assert terms.digest != TERMS.digest
    with pytest.raises(CryptoRejected, match="on other terms"):
        greeting(0)[1].check(roster(2), SESSION, terms.digest)


# Channels


@quick
@given(st.integers(0, 5), st.sampled_from(STAGES), st.binary(max_size=64))
def test_a_message_opens_at_its_place(exchange: int, stage: str, text: bytes) -> None:
    one, two = pair()
    assert two.open(exchange, stage, one.seal(exchange, stage, text), len(text)) == text
    assert one.open(exchange, stage, two.seal(exchange, stage, text), len(text)) == text


def test_and_nowhere_else() -> None:
    one, two = pair()
    text = one.seal(1, "answer", b"text")
    with pytest.raises(CryptoRejected, match="changed, moved or replayed"):
        two.open(0, "answer", text, 4)
    with pytest.raises(CryptoRejected, match="changed, moved or replayed"):
        two.open(1, "offer", text, 4)
    with pytest.raises(CryptoRejected, match="changed, moved or replayed"):
        one.open(1, "answer", text, 4)  # reflected
    with pytest.raises(CryptoRejected, match="changed, moved or replayed"):
        pair()[1].open(1, "answer", text, 4)  # other fresh keys
    with pytest.raises(CryptoRejected, match="has 4 bytes, not 5"):
        two.open(1, "answer", text, 5)


def test_no_two_messages_have_one_nonce() -> None:
    """Under one nonce equal beginnings would look equal, and what differs would tell the texts."""
    one, _ = pair()
    text = bytes(64)
    starts = {one.seal(exchange, stage, text)[:64] for exchange in range(12) for stage in STAGES}
    assert len(starts) == 12 * len(STAGES)


@pytest.mark.parametrize("gone", ["_number", "_place"])
def test_number_and_place_each_hold_by_themselves(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair()
    monkeypatch.setattr(crypto, gone, lambda *_: bytes(12))
    text = one.seal(1, "answer", b"text")
    assert two.open(1, "answer", text, 4) == b"text"
    for exchange, stage in ((0, "answer"), (1, "lock"), (2, "answer")):
        with pytest.raises(CryptoRejected, match="changed, moved or replayed"):
            two.open(exchange, stage, text, 4)


@pytest.mark.parametrize("what", ["session", "transcript", "model_index", "name"])
def test_keys_depend_on_all_that_was_agreed(what: str) -> None:
    (private, mine), (other, theirs) = greeting(0), greeting(1)
    record = hash_hello_transcript([mine, theirs])
    text = EncryptedChannel(private, mine, theirs, record).seal(0, "offer", b"text")
    assert EncryptedChannel(other, theirs, mine, record).open(0, "offer", text, 4) == b"text"
    if what == "transcript":
        record = hash_hello_transcript([mine, theirs, greeting(2)[1]])
    elif what == "session":
        mine, theirs = (replace(hello, session=replace(SESSION, round=4)) for hello in (mine, theirs))
    elif what == "model_index":
        mine = replace(mine, model_index=7)
    else:
        mine = replace(mine, name="site-7")
    with pytest.raises(CryptoRejected, match="changed, moved or replayed"):
        EncryptedChannel(other, theirs, mine, record).open(0, "offer", text, 4)


def test_the_transcript_is_of_signed_hellos_in_their_order() -> None:
    (_, one), (_, two) = greeting(0), greeting(1)
    assert hash_hello_transcript([one, two]) != hash_hello_transcript([two, one])
    assert hash_hello_transcript([one, two]) != hash_hello_transcript([replace(one, signature=b""), two])


# Boards, locks, and the server's seal


def test_a_layer_is_taken_with_its_key_and_opened_by_the_server() -> None:
    board = CryptoLayerBoard.of(LAYERS, SERVER.public, SESSION, "site-0#0")
    assert len(board.content) == sum(TERMS.locked_sizes)
    for number, layer in enumerate(LAYERS):
        taken = CryptoLayerBoard.take(board.content, number, board.keys[number], TERMS, SESSION, "site-0#0")
        assert SERVER.open(taken, SESSION, number) == layer
        with pytest.raises(CryptoRejected, match="is not sealed for this key, this round and this place"):
            SERVER.open(taken, SESSION, number + 1)
        with pytest.raises(CryptoRejected, match="is not sealed for this key"):
            SERVER.open(taken, replace(SESSION, round=9), number)
        with pytest.raises(CryptoRejected, match="is not sealed for this key"):
            LayerKeyPair().open(taken, SESSION, number)


def test_keys_open_one_layer_of_one_board_of_one_attempt() -> None:
    board = CryptoLayerBoard.of(LAYERS, SERVER.public, SESSION, "site-0#0")
    wrong = [
        (2, board.keys[0], SESSION, "site-0#0"),
        (0, board.keys[2], SESSION, "site-0#0"),
        (0, board.keys[0], SESSION, "site-1#0"),
        (0, board.keys[0], SESSION, "site-0#1"),
        (0, board.keys[0], replace(SESSION, attempt=2), "site-0#0"),
        (0, board.keys[0], replace(SESSION, run="cd" * 16), "site-0#0"),
    ]
    for number, key, session, who in wrong:
        with pytest.raises(CryptoRejected, match="the key that was passed on does not open"):
            CryptoLayerBoard.take(board.content, number, key, TERMS, session, who)


def test_two_boards_of_the_same_layers_have_nothing_in_common() -> None:
    one, two = (CryptoLayerBoard.of(LAYERS, SERVER.public, SESSION, "site-0#0") for _ in range(2))
    assert not set(one.keys) & set(two.keys)
    assert crypto_digest(one.content) != crypto_digest(two.content)


def test_a_lock_opens_with_its_key_at_its_place() -> None:
    key, other = bytes(32), bytes([1] * 32)
    locked = encrypt_model(key, b"model", SESSION, 0, "site-0#0")
    assert decrypt_model(key, locked, SESSION, 0, "site-0#0") == b"model"
    for wrong in ((other, SESSION, 0, "site-0#0"), (key, SESSION, 1, "site-0#0"), (key, SESSION, 0, "site-1#0")):
        with pytest.raises(CryptoRejected, match="does not open with the key that was released"):
            decrypt_model(wrong[0], locked, *wrong[1:])
    with pytest.raises(CryptoRejected, match="does not open"):
        decrypt_model(b"short", locked, SESSION, 0, "site-0#0")
    with pytest.raises(CryptoRejected, match="does not open"):
        decrypt_model(key, locked, replace(SESSION, attempt=2), 0, "site-0#0")
