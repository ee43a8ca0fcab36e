"""Users, passwords from files, and certificates for connections to Redis.

A password file is read for every new connection, so a changed password takes effect without a restart. Every file is
checked when the process starts; an error names the setting.
"""

from __future__ import annotations

import shlex
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from waymark.base.errors import SettingsError
from waymark.base.record import record
from waymark.store.redis.address import Address


class RedisCliCall(NamedTuple):
    """The beginning of a ``redis-cli`` command, without passwords, and comments for the shell."""

    words: Sequence[str]
    notes: Sequence[str] = ()


@record(frozen=True, slots=True)
class Credentials:
    """The settings about users, passwords and certificates."""

    username: str | None = None
    password_file: Path | None = None
    sentinel_username: str | None = None
    sentinel_password_file: Path | None = None
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_verify: str = "full"
    """What is checked of a certificate: ``full`` (its CA and the host name), ``ca`` (only its CA) or ``none``."""

    def check(self, address: Address, variable: str) -> None:
        """Check that the files can be read and that the settings fit ``address``. Raises SettingsError."""
        for name, path in (
            ("WAYMARK_REDIS_PASSWORD_FILE", self.password_file),
            ("WAYMARK_REDIS_SENTINEL password_file", self.sentinel_password_file),
        ):
            if path is not None:
                try:
                    read_secret(path, name)
                except SecretUnreadable as exc:
                    raise SettingsError(str(exc)) from None
        if address.password is not None and self.password_file is not None:
            raise SettingsError(
                f"{variable} has a password, and WAYMARK_REDIS_PASSWORD_FILE names another one: keep one of them"
            )
        if address.username is not None and self.username is not None:
            raise SettingsError(f"{variable} has a user, and so has WAYMARK_REDIS_USERNAME: keep one of them")
        if address.is_tls:
            self._check_tls()

    def _check_tls(self) -> None:
        names = f"WAYMARK_REDIS_TLS ca={self.tls_ca_file}"
        try:
            context = ssl.create_default_context(cafile=self.tls_ca_file)
            if self.tls_cert_file is not None:
                names = f"WAYMARK_REDIS_TLS cert={self.tls_cert_file} and key={self.tls_key_file}"
                context.load_cert_chain(self.tls_cert_file, self.tls_key_file)
        except OSError as exc:  # this includes ssl.SSLError
            raise SettingsError(f"{names} cannot be used: {exc.strerror or exc}; give PEM files") from None

    def redis_cli(self, address: Address) -> RedisCliCall:
        """Return the beginning of each ``redis-cli`` command for Redis. The defaults of redis-cli are left out."""
        words, notes = ["redis-cli", *_cli_options(address)], []
        if address.is_tls and self.tls_ca_file is not None:
            words += ["--cacert", str(self.tls_ca_file)]
        if username := self.username or address.username:
            words += ["--user", username]
        if self.password_file is not None or address.password is not None:
            notes.append("# the password goes into the environment, as REDISCLI_AUTH")
        if address.kind == "sentinel":
            host, port = address.endpoints[0]
            asked = shlex.join(["redis-cli", "-h", host, "-p", str(port), "SENTINEL", "GET-MASTER-ADDR-BY-NAME"])
            notes.append(f"# on the primary, with -h and -p of what this answers: {asked} {address.name}")
        return RedisCliCall(words, notes)

    def secret(self, address: Address) -> tuple[str, ...]:
        """Return the arguments of AUTH, read at each call; empty if AUTH is not needed. Raise SecretUnreadable if the
        file cannot be read.
        """
        username = address.username or self.username
        if self.password_file is not None:
            password = read_secret(self.password_file, "WAYMARK_REDIS_PASSWORD_FILE")
        elif username or address.password:
            password = address.password or ""
        else:
            return ()
        return (username, password) if username else (password,)

    def context(self, address: Address) -> ssl.SSLContext | None:
        """Return the TLS context of a connection to Redis, or None without TLS. Raise OSError if a file cannot be
        used.
        """
        if not address.is_tls:
            return None
        context = ssl.create_default_context()
        context.check_hostname = self.tls_verify == "full"
        context.verify_mode = ssl.CERT_NONE if self.tls_verify == "none" else ssl.CERT_REQUIRED
        if self.tls_ca_file is not None:
            context.load_verify_locations(self.tls_ca_file)
        if self.tls_cert_file is not None:
            context.load_cert_chain(self.tls_cert_file, self.tls_key_file)
        return context


class SecretUnreadable(Exception):
    """A password file cannot be read."""


def read_secret(path: Path, variable: str) -> str:
    """Return the password in a file. Raise SecretUnreadable."""
    try:
        secret = path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is no UTF-8"
        raise SecretUnreadable(f"{variable} {path} cannot be read: {reason}") from None
    if not secret:
        raise SecretUnreadable(f"{variable} {path} is empty: put the password in it")
    return secret


def _cli_options(address: Address) -> list[str]:
    options = ["-s", address.path] if address.kind == "socket" else []
    if address.kind in ("server", "cluster"):
        host, port = address.endpoints[0]
        options += ["-h", host] if host not in ("localhost", "127.0.0.1") else []
        options += ["-p", str(port)] if port != 6379 else []
    options += ["-c"] if address.kind == "cluster" else []
    options += ["--tls"] if address.is_tls else []
    return options + (["-n", str(address.db)] if address.db else [])
