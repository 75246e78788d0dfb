"""TLS of servers and clients, by configuration. Host names are always checked."""

from __future__ import annotations

import ssl
from functools import cache
from pathlib import Path

from shared.errors import ConfigError
from shared.services_schema import Tls
from shared.web.access import read_secret


def check_certificate(tls: Tls) -> None:
    """Raise ConfigError for unusable files: missing, malformed, encrypted, not a pair, readable by others."""
    if tls.cert_file is None or tls.key_file is None:
        return
    read_secret(tls.key_file, "services.tls.key_file")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            tls.cert_file, tls.key_file, password=lambda: b""
        )
    except ssl.SSLError as error:
        reason = f"{error.reason or error}".lower().replace("_", " ")
        hint = "give PEM files that belong together; the key must not be encrypted"
        raise ConfigError(f"services.tls: {tls.cert_file} and {tls.key_file} cannot be used: {reason}", hint) from error
    except OSError as error:
        raise ConfigError(f"services.tls.cert_file: {tls.cert_file}: {error.strerror}") from error


@cache
def client_context(ca_file: Path | None) -> ssl.SSLContext:
    """Return a context that trusts the authorities in `ca_file`, or the system's; read once per process.

    Raises ConfigError.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise ConfigError(f"services.tls.ca_file: {ca_file} holds no certificates", "give a PEM file") from error
    except OSError as error:
        raise ConfigError(f"services.tls.ca_file: {ca_file}: {error.strerror}") from error
