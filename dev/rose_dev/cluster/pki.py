"""Certificates and kubeconfigs of a development cluster: one CA, made anew at every start."""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
from collections.abc import Sequence
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rose_wire.certificates import SIGNS_CERTIFICATES

_LIFE = dt.timedelta(days=365)
_SLACK = dt.timedelta(hours=1)


class Authority:
    """A certificate authority that writes what it issues into one folder.

    Args:
        folder: receives ``ca.crt``, and ``NAME.crt`` and ``NAME.key`` of each certificate.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rose-dev-ca")])
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(SIGNS_CERTIFICATES, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = folder / "ca.crt"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def export(self, folder: Path) -> Path:
        """Write the authority itself as a Secret holds it, ``tls.crt`` and ``tls.key``."""
        folder.mkdir(mode=0o700)
        (folder / "tls.crt").write_bytes(self.certificate.read_bytes())
        _write_key(folder / "tls.key", self._key)
        return folder

    def issue(
        self, name: str, common_name: str, group: str = "", hosts: Sequence[str] = ()
    ) -> None:
        """Write a certificate for a client (``group`` is its Kubernetes group) or a server."""
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if group:
            attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
        usages = x509.ExtendedKeyUsage(
            [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        )
        builder = self._builder(x509.Name(attributes), key.public_key()).add_extension(
            usages, critical=False
        )
        if hosts:
            names = x509.SubjectAlternativeName([_host(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        (self.folder / f"{name}.crt").write_bytes(pem)
        _write_key(self.folder / f"{name}.key", key)

    def kubeconfig(self, name: str, server: str) -> Path:
        """Write ``NAME.conf`` for the client certificate ``name``; it needs no other file."""
        path = self.folder / f"{name}.conf"
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(self._kubeconfig(name, server), sort_keys=False))
        return path

    def _kubeconfig(self, name: str, server: str) -> dict[str, object]:
        cluster = {"server": server, "certificate-authority-data": _inline(self.certificate)}
        user = {
            "client-certificate-data": _inline(self.folder / f"{name}.crt"),
            "client-key-data": _inline(self.folder / f"{name}.key"),
        }
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "rose-dev",
            "clusters": [{"name": "rose-dev", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "rose-dev", "context": {"cluster": "rose-dev", "user": name}}],
        }

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SLACK)
            .not_valid_after(now + _LIFE)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )


def service_account_keys(folder: Path) -> None:
    """Write ``sa.key`` and ``sa.pub``, with which service account tokens are signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    _write_key(folder / "sa.key", key)
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (folder / "sa.pub").write_bytes(public)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _inline(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
