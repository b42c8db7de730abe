"""Keys, authorities, requests, certificates of nodes and routers, and the folder of a pair.

``rose_wire.tls`` uses what is made here. A node or a router makes its key itself and asks for a
certificate (``rose_core.wire.enrolment``); the operator signs with the authority of its kind. Where
nobody else makes these authorities, and that of all other listeners, the operator makes them itself
(``rose_operator.own_secrets``; when: ``rose_core.rotation``). All but ``keep`` are pure functions
from PEM to PEM.
"""

from __future__ import annotations

import datetime as dt
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# Clocks of nodes differ by less.
_SLACK = dt.timedelta(minutes=5)
SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)
"""What the key of an authority is for."""


def request(common_name: str) -> tuple[bytes, bytes]:
    """A new key, and the request to sign it for this name."""
    key = ec.generate_private_key(ec.SECP256R1())
    asked = x509.CertificateSigningRequestBuilder().subject_name(_name(common_name))
    signed = asked.sign(key, hashes.SHA256())
    return _pem(key), signed.public_bytes(serialization.Encoding.PEM)


def sign(
    asked: bytes,
    common_name: str,
    authority: tuple[bytes, bytes],
    life: dt.timedelta,
    hosts: Sequence[str] = (),
) -> bytes:
    """A client's certificate for the key of a request, under this name whatever the request says.

    Args:
        asked: the request, PEM.
        common_name: whom the certificate names.
        authority: its key and its certificate, PEM.
        life: how long it is good.
        hosts: names under which it listens; then it is a server's certificate as well.

    Raises:
        ValueError: the request is none, or not signed by its own key.
    """
    found = x509.load_pem_x509_csr(asked)
    if not found.is_signature_valid:
        raise ValueError("the signing request is not signed by its own key")
    key = _signing_key(authority[0])
    issuer = x509.load_pem_x509_certificate(authority[1])
    now = dt.datetime.now(dt.UTC)
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    usages += [ExtendedKeyUsageOID.SERVER_AUTH] if hosts else []
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(common_name))
        .issuer_name(issuer.subject)
        .public_key(found.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SLACK)
        .not_valid_after(min(now + life, issuer.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    )
    if hosts:
        names = x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def make_own(common_name: str, life: dt.timedelta, now: dt.datetime) -> tuple[bytes, bytes]:
    """A listener's key and a certificate that nobody has signed, PEM; known by ``fingerprint``."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(common_name)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SLACK)
        .not_valid_after(now + life)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pem(key), certificate.public_bytes(serialization.Encoding.PEM)


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a certificate, PEM, in hex."""
    return x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex()


def keep(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace what a folder holds in one step: who reads meets a key with its own certificate.

    The folder is a link to the newest generation beside it. The generation before stays, because
    somebody may be reading it.

    Args:
        folder: the link; its parent is made where it is missing.
        files: contents by name; readable by their owner alone.

    Raises:
        OSError: they cannot be written.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    generation = folder.with_name(f"{folder.name}.{time.time_ns()}")
    generation.mkdir(mode=0o700)
    for name, content in files.items():
        path = generation / name
        path.touch(mode=0o600)
        path.write_bytes(content)
    link = folder.with_name(f"{folder.name}.next")
    link.unlink(missing_ok=True)
    link.symlink_to(generation.name)
    before = folder.resolve() if folder.is_symlink() else generation
    link.replace(folder)
    for other in folder.parent.glob(f"{folder.name}.*"):
        if other not in {generation, before}:
            shutil.rmtree(other)


def make_authority(common_name: str, life: dt.timedelta, now: dt.datetime) -> tuple[bytes, bytes]:
    """A new authority: its key and its certificate, PEM.

    Its certificate's subject holds a serial number of its own, so that two of one name in one
    bundle are told apart.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    number = x509.random_serial_number()
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
            x509.NameAttribute(NameOID.SERIAL_NUMBER, f"{number:x}"),
        ]
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(number)
        .not_valid_before(now - _SLACK)
        .not_valid_after(now + life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(SIGNS_CERTIFICATES, critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pem(key), certificate.public_bytes(serialization.Encoding.PEM)


def issue(
    names: Sequence[str], authority: tuple[bytes, bytes], life: dt.timedelta, now: dt.datetime
) -> tuple[bytes, bytes]:
    """A listener's key and certificate for these host names, good as server and as client, PEM.

    Args:
        names: the first is its common name as well.
        authority: key and certificate of who signs.
        life: how long it is good, at most as long as the authority.
        now: when.

    Raises:
        ValueError: the authority is none.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.load_pem_x509_certificate(authority[1])
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(names[0]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SLACK)
        .not_valid_after(min(now + life, issuer.not_valid_after_utc))
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(n) for n in names]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .sign(_signing_key(authority[0]), hashes.SHA256())
    )
    return _pem(key), certificate.public_bytes(serialization.Encoding.PEM)


def names_node(node: str, names: Collection[str]) -> bool:
    """Whether these names of a certificate are a node's: its own, or what kubelets' say."""
    return node in names or f"system:node:{node}" in names


def is_signed_by(certificate: bytes, authority: bytes) -> bool:
    """Whether this authority's key signed the certificate.

    Raises:
        ValueError: one of them is no certificate.
    """
    found = x509.load_pem_x509_certificate(certificate)
    try:
        found.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def names_of(certificate: bytes) -> tuple[str, ...]:
    """The host names that a certificate is good for.

    Raises:
        ValueError: it is none.
    """
    found = x509.load_pem_x509_certificate(certificate)
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(names.get_values_for_type(x509.DNSName))


def split(bundle: bytes) -> tuple[bytes, ...]:
    """The certificates of a bundle, each as PEM.

    Raises:
        ValueError: there is something else in it.
    """
    if not bundle.strip():
        return ()
    pem = serialization.Encoding.PEM
    return tuple(one.public_bytes(pem) for one in x509.load_pem_x509_certificates(bundle))


def check_authority(key: bytes, certificate: bytes) -> None:
    """Whether these belong together and may sign.

    Raises:
        ValueError: they do not.
    """
    public = _signing_key(key).public_key()
    if x509.load_pem_x509_certificate(certificate).public_key() != public:
        raise ValueError("the authority's key and certificate do not belong together")


def window(certificate: bytes) -> tuple[float, float]:
    """From when to when a certificate is good, Unix seconds.

    Raises:
        ValueError: it is none.
    """
    found = x509.load_pem_x509_certificate(certificate)
    return found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()


def _signing_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the authority's key must be an elliptic curve key")  # noqa: TRY004  # a file's content
    return key


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form, open_text = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, open_text)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
