"""TLS between ROSE's processes, as cert-manager and Kubernetes lay certificates out.

A server gets a folder with ``tls.crt`` and ``tls.key`` (``--tls-dir``) and looks at it again at
every handshake, so a renewed certificate needs no restart. A client dials ``tls://host:port``; who
it then believes is the file that ``ROSE_TLS_CA`` names, or the system's authorities. The address
carries the scheme because the operator hands addresses to nodes: what it says is how they dial.

Callers still prove themselves by the installation's bearer token (``rpc``); without TLS that token
would travel in the clear. A listener given its clients' authority (``--tls-client-ca``) also
demands a certificate of every caller; a caller's own is in the folder that ``ROSE_TLS_IDENTITY``
names, and ``rpc.peer`` says who it is.
"""

from __future__ import annotations

import argparse
import errno
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import grpc

SCHEME = "tls://"
TRUST = "ROSE_TLS_CA"
# The same as text instead of a file, for pods that mount nothing: authorities are no secret.
TRUST_TEXT = "ROSE_TLS_CA_PEM"
IDENTITY = "ROSE_TLS_IDENTITY"
CERTIFICATE, KEY, BUNDLE = "tls.crt", "tls.key", "ca.crt"


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Give a process that listens its flag ``--tls-dir``."""
    parser.add_argument(
        "--tls-dir",
        type=Path,
        help=f"folder with {CERTIFICATE} and {KEY}; without it the gRPC port is plain text",
    )


def add_clients_flag(parser: argparse.ArgumentParser) -> None:
    """Give a process that listens its flag ``--tls-client-ca``."""
    parser.add_argument(
        "--tls-client-ca",
        type=Path,
        help="authority of the callers' certificates; with it every caller must have one",
    )


def server_credentials(
    folder: Path | None, clients: Path | None = None, *more: Path
) -> grpc.ServerCredentials | None:
    """Credentials of a listener, None without a folder.

    Args:
        folder: the listener's own certificate.
        clients: file with the authority of callers, who then must have a certificate.
        more: authorities that are as good, where there are ``clients``.

    Raises:
        OSError: a certificate or the key cannot be read.
        ValueError: callers shall have certificates, but the listener has none.
    """
    if folder is None:
        if clients is not None:
            raise ValueError(
                "--tls-client-ca needs --tls-dir: the listener must have a certificate"
            )
        return None
    first = _read(folder)
    check_pair(folder)
    files = () if clients is None else (clients, *more)
    if clients is not None:
        check_authority(clients)
    roots = _roots(files)
    return grpc.dynamic_ssl_server_credentials(
        _configuration(first, roots),
        _renewals(folder, files, (first, roots)),
        require_client_authentication=roots is not None,
    )


def check_pair(folder: Path) -> None:
    """Refuse a folder whose certificate and key do not go together; gRPC would not say why.

    Raises:
        OSError: says which file and what it should hold.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password="")
    except ssl.SSLError as error:
        reason = f"holds no certificate in PEM that {KEY} beside it is the key of"
        raise OSError(errno.EINVAL, reason, str(folder / CERTIFICATE)) from error


def check_authority(file: Path) -> None:
    """Refuse a file without an authority's certificate.

    Raises:
        OSError: it cannot be read, or holds none.
    """
    text = file.read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text.decode())
    except (ssl.SSLError, ValueError) as error:
        raise OSError(errno.EINVAL, "holds no certificate in PEM", str(file)) from error


def client_credentials(
    trust: Path | bytes | None = None, identity: Path | None = None
) -> grpc.ChannelCredentials:
    """Credentials of a caller.

    Args:
        trust: the authorities it believes, PEM, or a file with them; None = the system's.
        identity: folder with its own certificate; None = it has none.

    Raises:
        OSError: a file cannot be read.
    """
    key, certificate = _read(identity) if identity is not None else (None, None)
    roots = trust.read_bytes() if isinstance(trust, Path) else trust
    return grpc.ssl_channel_credentials(roots, key, certificate)


def dial(address: str) -> tuple[str, grpc.ChannelCredentials | None]:
    """An address as gRPC takes it, and the credentials its scheme asks for.

    Raises:
        OSError: the files that ``ROSE_TLS_CA`` and ``ROSE_TLS_IDENTITY`` name cannot be read.
    """
    if not address.startswith(SCHEME):
        return address, None
    return address.removeprefix(SCHEME), client_credentials(trusted(), own_identity())


def trusted() -> Path | bytes | None:
    """Whom the environment says to believe; None: the system's authorities."""
    file, text = os.environ.get(TRUST), os.environ.get(TRUST_TEXT)
    return Path(file) if file else text.encode() if text else None


def own_identity() -> Path | None:
    """The folder with this process's own certificate, where the environment names one."""
    found = os.environ.get(IDENTITY)
    return Path(found) if found else None


def bundle_of(folder: Path) -> bytes:
    """Of an authority's folder, what is to be believed: its successor as well, if there is one.

    A ``ca.crt`` that lacks the authority's own certificate says who signed it, as cert-manager's
    does, and not who is believed besides.

    Raises:
        OSError: the certificate cannot be read.
    """
    folder = folder.resolve()  # both files of one generation
    certificate = (folder / CERTIFICATE).read_bytes()
    try:
        bundle = (folder / BUNDLE).read_bytes()
    except FileNotFoundError:
        return certificate
    return bundle if certificate.strip() in bundle else certificate


def _read(folder: Path) -> tuple[bytes, bytes]:
    folder = folder.resolve()  # it may be a link that is turned to a newer pair meanwhile
    return (folder / KEY).read_bytes(), (folder / CERTIFICATE).read_bytes()


def _configuration(
    pair: tuple[bytes, bytes], clients: bytes | None
) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=clients)


def _roots(files: tuple[Path, ...]) -> bytes | None:
    return b"\n".join(file.read_bytes() for file in files) if files else None


def _renewals(
    folder: Path, files: tuple[Path, ...], first: tuple[tuple[bytes, bytes], bytes | None]
) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """What gRPC asks at each handshake; None keeps what it has."""
    last = first

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal last
        try:
            found = _read(folder), _roots(files)
        except OSError:  # the folder is being replaced; the next handshake looks again
            return None
        if found == last:
            return None
        last = found
        return _configuration(*found)

    return fetch
