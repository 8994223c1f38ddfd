"""Tests of the certificates and node keys for tests."""

import socket
import ssl
import stat
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedloom.errors import InputError
from fedloom.flower.trust.certificates import DAYS, make_certificates
from fedloom.flower.trust.identity import Identity, SiteKeys

NODES = ["site-0", "site-1", "site-2"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_certificates(folder, NODES, ["fl.example.org", "10.0.0.7"])
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_files_are_there_and_private_keys_are_private(made: Path) -> None:
    nodes = [f"nodes/site-{k}" for k in range(3)]
    private = {"server.key", *nodes}
    assert set(contents(made)) == {"ca.crt", "server.pem", "roster.pub", *private, *(f"{name}.pub" for name in nodes)}
    for name in contents(made):
        assert stat.S_IMODE((made / name).stat().st_mode) == (0o600 if name in private else 0o644)
    assert stat.S_IMODE((made / "nodes").stat().st_mode) == 0o700


def test_node_keys_are_what_supernodes_want(made: Path) -> None:
    for name in NODES:
        private = load_ssh_private_key((made / "nodes" / name).read_bytes(), None)
        public = load_ssh_public_key((made / "nodes" / f"{name}.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert isinstance(private.curve, ec.SECP384R1)
        assert private.public_key() == public


def test_the_roster_names_all_of_them(made: Path) -> None:
    roster = SiteKeys.read(made / "roster.pub")
    assert [roster.name_of(Identity.read(made / "nodes" / name)) for name in NODES] == NODES


def test_dates_and_hosts(made: Path) -> None:
    server = x509.load_pem_x509_certificate((made / "server.pem").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "127.0.0.1"]
    for name in ("ca.crt", "server.pem"):
        certificate = x509.load_pem_x509_certificate((made / name).read_bytes())
        left = certificate.not_valid_after_utc - datetime.now(UTC)
        assert timedelta(days=DAYS - 1) < left <= timedelta(days=DAYS)
    assert b"PRIVATE" not in (made / "ca.crt").read_bytes(), "the authority's key is nowhere"


def shake_hands(server: Path, trusted: Path, host: str) -> None:
    """A TLS connection over loopback to a server that says it is `host`."""
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(server / "server.pem", server / "server.key")
    outside = ssl.create_default_context(cafile=str(trusted / "ca.crt"))
    outside.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = socket.socketpair()

    def answer() -> None:
        try:
            with inside.wrap_socket(theirs, server_side=True) as secure:
                secure.sendall(b"hello")
        except (ssl.SSLError, OSError):
            theirs.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with outside.wrap_socket(ours, server_hostname=host) as secure:
            assert secure.recv(5) == b"hello"
    finally:
        ours.close()
        thread.join()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "fl.example.org", "10.0.0.7"])
def test_sites_accept_the_server(made: Path, host: str) -> None:
    shake_hands(made, made, host)


def test_but_not_under_another_name_nor_from_another_authority(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(made, made, "elsewhere.example.org")
    make_certificates(tmp_path, ["one"])
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tmp_path, made, "localhost")


def test_nothing_is_replaced_unless_it_is_forced(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["one"])
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"has ca.crt already and 5 more of these files; --force replaces them"):
        make_certificates(tmp_path, ["one"])
    with pytest.raises(InputError, match="--force"):
        make_certificates(tmp_path, ["two"])
    assert contents(tmp_path) == before
    make_certificates(tmp_path, ["one"], force=True)
    after = contents(tmp_path)
    assert after.keys() == before.keys()
    assert not any(after[name] == before[name] for name in after)
    assert stat.S_IMODE((tmp_path / "nodes" / "one").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("nodes", "hosts", "words"),
    [
        ([], ["localhost"], "0 nodes were asked for"),
        (["a", "b", "a"], ["localhost"], "two nodes cannot both be called a"),
        (["a/b"], ["localhost"], "'a/b' cannot name a site"),
        (["a.pub"], ["localhost"], "a node cannot be called a.pub"),
        (["a"], ["no host"], "the host must be a name or an address such as server.example.org, not 'no host'"),
        (["a"], [""], "the host must be"),
        (["a"], ["https://x"], "the host must be"),
        (["a"], ["a..b"], "the host must be"),
        (["a"], ["x" * 64], "the host must be"),
    ],
)
def test_bad_wishes_leave_nothing_behind(tmp_path: Path, nodes: list[str], hosts: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_certificates(tmp_path / "new", nodes, hosts)
    assert not (tmp_path / "new").exists()


# The command


def test_the_command_says_what_it_made(command: Callable[..., Any]) -> None:
    outcome = command("flower", "certificates", "c", "--nodes", "2", "--host", "fl.example.org")
    assert outcome.code == 0
    assert "for fl.example.org, 127.0.0.1, localhost, valid for 90 days" in outcome.out
    assert "site-0 to site-1" in outcome.out
    assert "They are for tests" in outcome.out
    assert set(contents(Path("c"))) > {"ca.crt", "nodes/site-1"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nodes", "two"], "nodes must be an integer of at least 1, not 'two'"),
        (["--nodes", "0"], "0 nodes were asked for, but there must be 1 to 10000"),
        (["--nodes", "-1"], "nodes must be an integer of at least 1, not '-1'"),
        (["--nodes", "1", "--host", "a b"], "not 'a b'"),
    ],
)
def test_the_command_refuses_bad_input(command: Callable[..., Any], words: list[str], sentence: str) -> None:
    outcome = command("flower", "certificates", "c", *words)
    assert outcome.code == 2
    assert sentence in outcome.err
    assert not Path("c").exists()


def test_the_command_replaces_nothing(command: Callable[..., Any]) -> None:
    command("flower", "certificates", "c", "--nodes", "1")
    before = contents(Path("c"))
    outcome = command("flower", "certificates", "c", "--nodes", "1")
    assert outcome.code == 2
    assert "c has ca.crt already" in outcome.err
    assert contents(Path("c")) == before
    assert command("flower", "certificates", "c", "--nodes", "1", "--force").code == 0
