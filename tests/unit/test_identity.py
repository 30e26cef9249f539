"""Certificates and bundles."""

import datetime as dt
import stat

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.identity import (
    Bundle,
    IdentityError,
    check_member_name,
    covers,
    create_ca,
    expires,
    fingerprint,
    issue_member,
    issue_server,
    read_bundle,
    read_key_pair,
    write_bundle,
    write_key_pair,
)

NOW = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)


@pytest.fixture(scope="module")
def ca():
    return create_ca(NOW)


@pytest.mark.parametrize("name", ["a", "cluster-1", "9lives", "x" * 63])
def test_dns_labels_are_member_names(name):
    assert check_member_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a.b", "a_b", "x" * 64, "a\n", "ü"])
def test_other_names_are_refused(name):
    with pytest.raises(IdentityError, match="no member name"):
        check_member_name(name)


def test_member_certificate_carries_its_name_and_is_for_clients_only(ca):
    pair = issue_member(ca, "alpha", NOW, days=30)
    certificate = x509.load_pem_x509_certificate(pair.certificate)
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert name.value == "alpha"
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert expires(pair.certificate) == NOW + dt.timedelta(days=30)
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(ca.certificate))


def test_certificate_does_not_outlive_its_ca():
    short = create_ca(NOW, days=10)
    assert expires(issue_member(short, "alpha", NOW).certificate) == NOW + dt.timedelta(days=10)
    with pytest.raises(IdentityError, match="CA has expired"):
        issue_member(short, "alpha", NOW + dt.timedelta(days=11))


def test_server_certificate_covers_its_names_and_addresses(ca):
    pair = issue_server(ca, ["hub.example", "10.0.0.7"], NOW)
    assert covers(pair.certificate, ["10.0.0.7", "hub.example"])
    assert not covers(pair.certificate, ["other.example"])


def test_renewed_certificate_has_a_fingerprint_of_its_own(ca):
    prints = {fingerprint(issue_member(ca, "alpha", NOW).certificate) for _ in range(2)}
    assert len(prints) == 2


def test_private_keys_are_readable_by_their_owner_alone(ca, tmp_path):
    write_key_pair(ca, tmp_path, "ca")
    assert stat.S_IMODE((tmp_path / "ca.key").stat().st_mode) == 0o600
    assert read_key_pair(tmp_path, "ca") == ca
    with pytest.raises(IdentityError, match="coordinator init"):
        read_key_pair(tmp_path, "server")


@pytest.mark.parametrize("out", ["bundle", "alpha.tar"])
def test_bundle_comes_back_as_it_was_written(ca, tmp_path, out):
    pair = issue_member(ca, "alpha", NOW)
    bundle = Bundle("alpha", "hub:8443", "hub", ca.certificate, pair.certificate, pair.key)
    write_bundle(bundle, tmp_path / out)
    assert read_bundle(tmp_path / out) == bundle
    secret = tmp_path / out / "member.key" if out == "bundle" else tmp_path / out
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_incomplete_bundle_says_how_to_get_a_new_one(tmp_path):
    (tmp_path / "ca.crt").write_bytes(b"")
    with pytest.raises(IdentityError, match="coordinator enroll"):
        read_bundle(tmp_path)
    with pytest.raises(IdentityError, match="no complete enrolment bundle"):
        read_bundle(tmp_path / "missing.tar")
