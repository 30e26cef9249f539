"""Certificates of a federation: the hub's CA, its server certificate and the members' bundles.

Used by the coordinator's commands to create them, and by agents and tests to read a bundle. Keys
are EC P-256. A member is known by the common name of its certificate and by nothing it says.
"""

import datetime as dt
import io
import ipaddress
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.weights import write_atomic

CA_DAYS = 3650
CERTIFICATE_DAYS = 365
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SKEW = dt.timedelta(minutes=5)
"""How far a peer's clock may lag behind the hub's for a fresh certificate to be valid there."""


class IdentityError(ValueError):
    """A name, certificate or bundle is not usable; the message says why and what helps."""


class KeyPair(NamedTuple):
    """A certificate and its private key, PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True)
class Bundle:
    """What a member needs to join: who it is, whom it trusts and where the hub is."""

    member: str
    hub: str
    """``host:port`` of the hub."""
    server_name: str
    """Name in the hub's certificate; may differ from the host that the member dials."""
    ca: bytes
    certificate: bytes
    key: bytes


def check_member_name(name: str) -> str:
    """Return ``name`` if it is a DNS label, else raise IdentityError."""
    if not _LABEL.fullmatch(name):
        raise IdentityError(
            f"{name!r} is no member name; use 1-63 lower-case letters, digits and inner hyphens"
        )
    return name


def _new_key() -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return key, pem


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def create_ca(now: dt.datetime, days: int = CA_DAYS, name: str = "fedsched CA") -> KeyPair:
    """A self-signed CA, valid from ``now`` (aware, UTC)."""
    key, pem = _new_key()
    builder = (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(_subject(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(False, False, False, False, False, True, True, False, False),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    certificate = builder.sign(key, hashes.SHA256())
    return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), pem)


def _issue(
    ca: KeyPair,
    name: str,
    now: dt.datetime,
    days: int,
    usage: x509.ObjectIdentifier,
    alternative: Sequence[x509.GeneralName],
) -> KeyPair:
    authority = x509.load_pem_x509_certificate(ca.certificate)
    signer = serialization.load_pem_private_key(ca.key, None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise IdentityError("the CA's key is no EC key; create the CA by `coordinator init`")
    key, pem = _new_key()
    end = min(now + dt.timedelta(days=days), authority.not_valid_after_utc)
    if end <= now:
        raise IdentityError("the CA has expired; move it away, create a new one and enroll anew")
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(True, False, False, False, False, False, False, False, False),
            critical=True,
        )
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternative), critical=False)
        .add_extension(issuer_id, critical=False)
        .sign(signer, hashes.SHA256())
    )
    return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), pem)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def issue_server(
    ca: KeyPair, hosts: Sequence[str], now: dt.datetime, days: int = CERTIFICATE_DAYS
) -> KeyPair:
    """The hub's certificate for ``hosts`` (names and IP addresses, at least one)."""
    if not hosts:
        raise IdentityError("the hub's certificate needs at least one host name")
    names = [_general_name(host) for host in hosts]
    return _issue(ca, hosts[0], now, days, ExtendedKeyUsageOID.SERVER_AUTH, names)


def issue_member(
    ca: KeyPair, member: str, now: dt.datetime, days: int = CERTIFICATE_DAYS
) -> KeyPair:
    """A member's client certificate; its common name is the member's name."""
    name = x509.DNSName(check_member_name(member))
    return _issue(ca, member, now, days, ExtendedKeyUsageOID.CLIENT_AUTH, [name])


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a PEM certificate, 64 hex digits."""
    return x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex()


def expires(certificate: bytes) -> dt.datetime:
    """End of a PEM certificate's validity, aware, UTC."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def covers(certificate: bytes, hosts: Sequence[str]) -> bool:
    """Whether a PEM certificate names all ``hosts`` as alternative names."""
    extension = x509.load_pem_x509_certificate(certificate).extensions
    names = extension.get_extension_for_class(x509.SubjectAlternativeName).value
    return all(_general_name(host) in names for host in hosts)


def write_key_pair(pair: KeyPair, directory: Path, stem: str) -> None:
    """Write ``stem.key`` (readable by the owner alone), then ``stem.crt``."""
    write_atomic(directory / f"{stem}.key", pair.key, mode=0o600)
    write_atomic(directory / f"{stem}.crt", pair.certificate)


def read_key_pair(directory: Path, stem: str) -> KeyPair:
    """Read what :func:`write_key_pair` wrote; raise IdentityError if a file is missing."""
    try:
        return KeyPair(
            (directory / f"{stem}.crt").read_bytes(), (directory / f"{stem}.key").read_bytes()
        )
    except OSError as error:
        raise IdentityError(
            f"cannot read {error.filename} ({error.strerror}); create it by "
            "`fedsched coordinator init`"
        ) from error


def _bundle_files(bundle: Bundle) -> dict[str, bytes]:
    described = {"member": bundle.member, "hub": bundle.hub, "server_name": bundle.server_name}
    return {
        "ca.crt": bundle.ca,
        "member.crt": bundle.certificate,
        "member.key": bundle.key,
        "member.yaml": yaml.safe_dump(described, sort_keys=False).encode(),
    }


def write_bundle(bundle: Bundle, path: Path) -> None:
    """Write a bundle as a directory, or as one archive when ``path`` ends in ``.tar``.

    Either is readable by its owner alone, for it holds a private key.
    """
    files = _bundle_files(bundle)
    if path.suffix == ".tar":
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(content), 0o600
                archive.addfile(entry, io.BytesIO(content))
        write_atomic(path, buffer.getvalue(), mode=0o600)
        return
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, content in files.items():
        write_atomic(path / name, content, mode=0o600)


def read_bundle(path: Path) -> Bundle:
    """Read a bundle, a directory or a ``.tar``.

    Raises:
        IdentityError: a file is missing or the description is not one of a member.
    """
    files: dict[str, bytes] = {}
    names = ("ca.crt", "member.crt", "member.key", "member.yaml")
    try:
        if path.is_dir():
            files = {name: (path / name).read_bytes() for name in names}
        else:
            with tarfile.open(path) as archive:
                for name in names:
                    entry = archive.extractfile(name)
                    files[name] = entry.read() if entry else b""
    except (OSError, KeyError, tarfile.TarError) as error:
        raise IdentityError(
            f"{path} is no complete enrolment bundle ({error}); "
            "get a new one by `fedsched coordinator enroll`"
        ) from error
    try:
        described = yaml.safe_load(files["member.yaml"])
        return Bundle(
            member=check_member_name(str(described["member"])),
            hub=str(described["hub"]),
            server_name=str(described["server_name"]),
            ca=files["ca.crt"],
            certificate=files["member.crt"],
            key=files["member.key"],
        )
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise IdentityError(
            f"{path}: member.yaml must name member, hub and server_name ({error!r})"
        ) from error
