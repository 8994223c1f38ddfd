"""Tests of site keys and rosters."""

import subprocess
from pathlib import Path
from shutil import which

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import InputError
from fedloom.flower.trust.identity import Identity, SiteKeys, check_identity_name

ONE, TWO = Identity.new(), Identity.new()
ROSTER = SiteKeys.parse(ONE.public_line("one") + TWO.public_line("two"))


@settings(deadline=None, max_examples=30)
@given(st.binary(max_size=64), st.text(max_size=20))
def test_what_a_site_signed_is_believed_and_nothing_else(message: bytes, purpose: str) -> None:
    signature = ONE.sign(purpose, message)
    assert ROSTER.signed("one", purpose, message, signature)
    assert not ROSTER.signed("two", purpose, message, signature)
    assert not ROSTER.signed("three", purpose, message, signature)
    assert not ROSTER.signed("one", purpose, message + b"\0", signature)
    assert not ROSTER.signed("one", purpose + "x", message, signature)
    assert not ROSTER.signed("one", purpose, message, signature[:-1])
    assert not ROSTER.signed("one", purpose, message, b"")
    assert not ROSTER.signed("one", purpose, message, TWO.sign(purpose, message))


def test_a_purpose_does_not_run_into_the_message() -> None:
    assert not ROSTER.signed("one", "ab", b"c", ONE.sign("a", b"bc"))
    assert not ROSTER.signed("one", "a:b", b"c", ONE.sign("a", b"b:c"))


def test_keys_are_files(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(ONE.private_bytes())
    assert ROSTER.name_of(Identity.read(tmp_path / "key")) == "one"
    (tmp_path / "roster").write_text("# sites\n\n" + ONE.public_line("one") + "\n" + TWO.public_line("two"))
    assert list(SiteKeys.read(tmp_path / "roster").keys) == ["one", "two"]


@pytest.mark.skipif(which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_keys_of_ssh_keygen_are_read(tmp_path: Path) -> None:
    """As the documentation tells sites to make them."""
    words = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", "clinic-7", "-f", str(tmp_path / "key")]
    subprocess.run(words, check=True)
    roster = SiteKeys.read(tmp_path / "key.pub")
    assert roster.name_of(Identity.read(tmp_path / "key")) == "clinic-7"


def other_key() -> bytes:
    return ed25519.Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def pem_key() -> bytes:
    key = ec.generate_private_key(ec.SECP384R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not an OpenSSH private key without a passphrase"),
        (b"nonsense", "is not an OpenSSH private key"),
        (pem_key(), "is not an OpenSSH private key"),
        (other_key(), "is not an ECDSA key; `ssh-keygen -t ecdsa -b 384` makes one"),
        (ONE.private_bytes()[:200], "is not an OpenSSH private key"),
    ],
    ids=["empty", "nonsense", "PEM", "Ed25519", "cut off"],
)
def test_other_files_are_not_private_keys(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(InputError, match=words):
        Identity.read(tmp_path / "key")


def ed_line() -> str:
    public = ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return f"{public.decode()} site\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no site"),
        ("# nobody\n", "names no site"),
        ("ecdsa-sha2-nistp384 AAAA\n", "line 1 of the roster must hold a key type, a key and a site's name"),
        ("ecdsa-sha2-nistp384 AAAA site\n", "line 1 of the roster holds no public key"),
        (ed_line(), "line 1 of the roster holds a key that is not ECDSA"),
        (ONE.public_line("one") + TWO.public_line("one"), "line 2 of the roster names one for the second time"),
        (ONE.public_line("one") + ONE.public_line("two"), "line 2 of the roster gives two the key of one"),
        (ONE.public_line("one").replace(" one", " ../one"), "'../one' cannot name a site"),
    ],
    ids=["empty", "comment", "no name", "no key", "Ed25519", "name twice", "key twice", "a path"],
)
def test_other_rosters_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        SiteKeys.parse(text)


def test_a_roster_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "roster").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not a file of OpenSSH public keys"):
        SiteKeys.read(tmp_path / "roster")
    with pytest.raises(InputError, match="cannot read the roster"):
        SiteKeys.read(tmp_path / "none")
    with pytest.raises(InputError, match="cannot read the private key"):
        Identity.read(tmp_path / "none")


def test_a_stranger_is_not_in_the_roster() -> None:
    with pytest.raises(InputError, match=r"the roster \(one, two\) does not have this site's own public key"):
        ROSTER.name_of(Identity.new())


@pytest.mark.parametrize("name", ["", "-a", ".a", "a/b", "a b", "a#1", "a" * 64, "ä"])
def test_names_that_no_site_may_have(name: str) -> None:
    with pytest.raises(InputError, match="cannot name a site"):
        check_identity_name(name)
