"""A lab cluster's certificates, service-account key and kubeconfigs; made by ``ControlPlane``."""

import base64
import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.identity import KeyPair, create_ca, issue_server, write_key_pair
from common.weights import write_atomic

DAYS = 30
HOSTS = ("127.0.0.1", "localhost", "kubernetes.default.svc", "10.0.0.1")
"""What the API server's certificate names: how processes here, and pods if there were any, call."""


def create(folder: Path, now: dt.datetime) -> KeyPair:
    """Write ``ca`` and ``apiserver`` (.crt, .key) and ``sa`` (.pub, .key), and return the CA.

    The last is the key pair of service-account tokens.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    ca = create_ca(now, DAYS, name="lab CA")
    write_key_pair(ca, folder, "ca")
    write_key_pair(issue_server(ca, HOSTS, now, DAYS), folder, "apiserver")
    tokens = ec.generate_private_key(ec.SECP256R1())
    write_atomic(folder / "sa.key", _pem(tokens), mode=0o600)
    public = tokens.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    write_atomic(folder / "sa.pub", public)
    return ca


def issue_user(ca: KeyPair, user: str, groups: Sequence[str], now: dt.datetime) -> KeyPair:
    """A client certificate that Kubernetes takes for ``user`` (its CN) in ``groups`` (its O)."""
    authority = x509.load_pem_x509_certificate(ca.certificate)
    signer = serialization.load_pem_private_key(ca.key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([*names, x509.NameAttribute(NameOID.COMMON_NAME, user)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(authority.not_valid_before_utc)
        .not_valid_after(min(now + dt.timedelta(days=DAYS), authority.not_valid_after_utc))
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def user_entry(pair: KeyPair) -> dict[str, Any]:
    """A kubeconfig's ``user`` for a client certificate."""
    return {
        "client-certificate-data": base64.b64encode(pair.certificate).decode(),
        "client-key-data": base64.b64encode(pair.key).decode(),
    }


def write_kubeconfig(
    path: Path, url: str, ca: bytes, cluster: str, user: dict[str, Any], namespace: str = "default"
) -> Path:
    """Write a kubeconfig with one context, named like the cluster, for its owner's eyes alone."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": cluster,
                "cluster": {
                    "server": url,
                    "certificate-authority-data": base64.b64encode(ca).decode(),
                },
            }
        ],
        "users": [{"name": "user", "user": user}],
        "contexts": [
            {
                "name": cluster,
                "context": {"cluster": cluster, "user": "user", "namespace": namespace},
            }
        ],
        "current-context": cluster,
    }
    write_atomic(path, yaml.safe_dump(content, sort_keys=False).encode(), mode=0o600)
    return path
