"""Certificates and node keys for tests.

They are a certificate authority, a server certificate, and a key pair for each node.

    ca.crt          the authority's certificate, which sites trust       (its private key is not kept)
    server.pem      the server's certificate, for the given hosts        server.key  its private key
    nodes/NAME      a node's private key, in the SuperNode's format      nodes/NAME.pub  its public key
    roster.pub      all public keys with names, by which sites verify each other

In production, each site creates its own key and hands over the public half, and the server's certificate comes from an
authority that the sites trust. Here one machine makes all of them, so whoever has this folder can pose as anybody.
"""

import datetime
import ipaddress
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedloom.errors import FedloomError, InputError
from fedloom.flower.trust.identity import Identity, check_identity_name

DAYS = 90
"""How long the certificates are valid. Node keys do not expire."""
HERE = ("127.0.0.1", "localhost")
MOST_NODES = 10_000


def make_certificates(folder: Path, names: Sequence[str], hosts: Sequence[str] = HERE, force: bool = False) -> None:
    """Write all files into `folder`. Existing files are an error unless `force`."""
    checked_names = [check_identity_name(name) for name in names]
    if not 1 <= len(checked_names) <= MOST_NODES:
        raise InputError(f"{len(checked_names)} nodes were asked for, but there must be 1 to {MOST_NODES}.")
    if twice := [name for name, count in Counter(checked_names).items() if count > 1]:
        raise InputError(f"two nodes cannot both be called {twice[0]}.")
    if taken := next((name for name in checked_names if name.endswith(".pub")), None):
        raise InputError(f"a node cannot be called {taken}: public keys end in .pub.")
    files = _contents(checked_names, dict.fromkeys([*hosts, *HERE]))
    if not force and (there := [name for name in files if (folder / name).exists()]):
        raise InputError(
            f"{folder} has {there[0]} already{f' and {len(there) - 1} more of these files' if there[1:] else ''}; "
            "--force replaces them, and the server then refuses nodes with old keys."
        )
    try:
        (folder / "nodes").mkdir(parents=True, exist_ok=True)
        (folder / "nodes").chmod(0o700)
        for name, (content, private) in files.items():
            _write(folder / name, content, 0o600 if private else 0o644)
    except OSError as error:
        raise FedloomError(f"cannot write {error.filename or folder}: {error.strerror or error}.") from error


def _contents(names: Sequence[str], hosts: Iterable[str]) -> dict[str, tuple[bytes, bool]]:
    """Return all files by name: the content, and whether it is private."""
    authority, ca_key = _authority()
    server, server_key = _server(authority, ca_key, hosts)
    files = {
        "ca.crt": (authority.public_bytes(Encoding.PEM), False),
        "server.pem": (server.public_bytes(Encoding.PEM), False),
        "server.key": (server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), True),
    }
    roster = ""
    for name in names:
        identity = Identity.new()
        line = identity.public_line(name)
        roster += line
        files[f"nodes/{name}"] = (identity.private_bytes(), True)
        files[f"nodes/{name}.pub"] = (line.encode(), False)
    files["roster.pub"] = (roster.encode(), False)
    return files


def _authority() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedloom, for trying out")])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _dated(x509.CertificateBuilder())
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def _server(
    authority: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, hosts: Iterable[str]
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _dated(x509.CertificateBuilder())
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedloom server, for trying out")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return certificate, key


def _dated(builder: x509.CertificateBuilder) -> x509.CertificateBuilder:
    """Set a serial number and dates. They start an hour ago, because the clocks of sites differ."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _alternative(host: str) -> x509.GeneralName:
    """Return a host in the form for a certificate: an address or a name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        labels = host.removesuffix(".").split(".")
        fits = all(part and len(part) <= 63 and part.strip("-") == part for part in labels)
        plain = host.isascii() and all(letter.isalnum() or letter in "-." for letter in host)
        if not (fits and plain and len(host) <= 253):
            raise InputError(
                f"the host must be a name or an address such as server.example.org, not {host!r}."
            ) from None
        return x509.DNSName(host)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a file atomically. Others can never read a private one, not even for an instant."""
    part = path.with_name(f".{path.name}.part")
    with suppress(FileNotFoundError):
        part.unlink()
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, mode)
            file.write(content)
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
