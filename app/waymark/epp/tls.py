"""Certificates of the gRPC port: from files that may change, or one made here.

Envoy does not check the certificate of an endpoint picker unless its configuration asks for it. So a self-signed one is
enough to have no plain text on the wire. The picker makes it when it starts, and writes it nowhere.
"""

from __future__ import annotations

import datetime
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from waymark.base.errors import SettingsError
from waymark.base.logs import fields

log = logging.getLogger(__name__)

_YEARS = 10


def self_signed() -> Any:
    """Return server credentials with a key and a certificate made here."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "waymark-epp")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("waymark-epp"), *_own_names()]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return grpc.ssl_server_credentials([(pem, certificate.public_bytes(serialization.Encoding.PEM))])


def _own_names() -> list[Any]:
    from cryptography import x509

    name = socket.gethostname()
    # A host name may have characters that no certificate takes.
    return [x509.DNSName(name)] if name.isascii() and 0 < len(name) < 64 else []


def from_files(cert_file: Path, key_file: Path) -> Any:
    """Return server credentials from PEM files, which are read again for new connections after a change.

    ``SettingsError`` if they cannot be read. A file that cannot be read later leaves the last pair in use.
    """
    try:
        first = _read(cert_file, key_file)
    except OSError as exc:
        raise SettingsError(f"the certificate of WAYMARK_EPP_TLS_FILES cannot be used: {exc}") from None
    return grpc.dynamic_ssl_server_credentials(_configuration(first), _reader(cert_file, key_file, first), False)


def _reader(cert_file: Path, key_file: Path, first: tuple[bytes, bytes]) -> Callable[[], Any]:
    last = first

    def changed() -> Any:
        """Return the new pair, or None if it is unchanged."""
        nonlocal last
        try:
            pair = _read(cert_file, key_file)
        except OSError as exc:
            log.warning("the certificate cannot be read; the previous one stays in use", extra=fields(error=str(exc)))
            return None
        if pair == last:
            return None
        last = pair
        return _configuration(pair)

    return changed


def _read(cert_file: Path, key_file: Path) -> tuple[bytes, bytes]:
    return key_file.read_bytes(), cert_file.read_bytes()


def _configuration(pair: tuple[bytes, bytes]) -> Any:
    return grpc.ssl_server_certificate_configuration([pair])
