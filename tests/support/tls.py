"""A certificate authority of our own, for tests."""

from __future__ import annotations

from pathlib import Path

import trustme

from shared.services_schema import Tls


def make_tls(folder: Path, *names: str) -> Tls:
    """Files of a server called `names` (default: this host's loopback address), and of the authority that vouches for
    it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    issued = authority.issue_cert(*(names or ("127.0.0.1", "localhost")))
    cert, key, ca = (folder / name for name in ("cert.pem", "key.pem", "ca.pem"))
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    key.chmod(0o600)
    ca.write_bytes(authority.cert_pem.bytes())
    return Tls(cert_file=cert, key_file=key, ca_file=ca)
