"""Waiting for a server, for tests that start real processes."""

import time
import urllib.error
import urllib.request

import httpx

HTTP = httpx.Client(trust_env=False, verify=False)
"""One for all: to make one with certificates takes 60 ms of CPU."""


def wait_http(url: str, timeout_s: float = 60.0) -> None:
    """Returns once `url` answers 200. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise TimeoutError(f"{url} did not answer within {timeout_s} s")
