"""Keys, signing requests and certificates of nodes: pure functions from PEM to PEM.

``rose_wire.tls`` uses what is made here. A node makes its key itself and asks for a certificate
(``rose_core.wire.enrolment``); the operator signs with the installation's authority for nodes.
"""

from __future__ import annotations

import datetime as dt

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# Clocks of nodes differ by less.
_SLACK = dt.timedelta(minutes=5)


def request(common_name: str) -> tuple[bytes, bytes]:
    """A new key, and the request to sign it for this name."""
    key = ec.generate_private_key(ec.SECP256R1())
    asked = x509.CertificateSigningRequestBuilder().subject_name(_name(common_name))
    signed = asked.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    form, open_text = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(pem, form, open_text), signed.public_bytes(pem)


def sign(
    asked: bytes, common_name: str, authority: tuple[bytes, bytes], life: dt.timedelta
) -> bytes:
    """A client's certificate for the key of a request, under this name whatever the request says.

    Args:
        asked: the request, PEM.
        common_name: whom the certificate names.
        authority: its key and its certificate, PEM.
        life: how long it is good.

    Raises:
        ValueError: the request is none, or not signed by its own key.
    """
    found = x509.load_pem_x509_csr(asked)
    if not found.is_signature_valid:
        raise ValueError("the signing request is not signed by its own key")
    key = _signing_key(authority[0])
    issuer = x509.load_pem_x509_certificate(authority[1])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(common_name))
        .issuer_name(issuer.subject)
        .public_key(found.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SLACK)
        .not_valid_after(min(now + life, issuer.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


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


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
