"""`make audit`: look up known vulnerabilities of all locked dependencies in the database of osv.dev.

Exit code 1 if one is not in `ACCEPTED`, else 0. If the database cannot be reached, the exit code is 0 too, and the
output says SKIPPED.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from tools.bootstrap import ENVIRONMENTS, find_uv
from volley.layout import PROJECT

DATABASE = "https://api.osv.dev"
ACCEPTED: Mapping[str, str] = {}
"""Vulnerabilities that do not affect us: reason by id."""
_UNREACHABLE = ("ConnectionError", "ConnectTimeout", "ReadTimeout", "Could not connect")
_TIMEOUT_S = 900.0


class AuditSkipped(Exception):
    """The database cannot be queried; the text is the reason."""


class AuditFailed(Exception):
    """The audit itself failed."""


def main() -> int:
    try:
        reach(DATABASE)
        found = {name: vulnerabilities(audit(name)) for name in ENVIRONMENTS}
    except AuditSkipped as reason:
        print(f"audit SKIPPED, nothing was checked: {reason}")
        return 0
    except AuditFailed as reason:
        print(f"audit failed: {reason}", file=sys.stderr)
        return 1
    for name, lines in found.items():
        print(f"{name}: {len(lines) or 'no'} known vulnerabilities", *lines, sep="\n  ")
    return 1 if any(found.values()) else 0


def reach(url: str) -> None:
    """Raises AuditSkipped if the server sends no answer at all."""
    try:
        urllib.request.urlopen(url, timeout=10).close()  # noqa: S310 - a constant of ours
    except urllib.error.HTTPError:
        return
    except OSError as error:
        raise AuditSkipped(f"{url} cannot be reached ({getattr(error, 'reason', error)})") from error


def audit(environment: str) -> Any:
    """Report of pip-audit on an environment's locked packages, without development tools.

    Raises AuditSkipped or AuditFailed.
    """
    uv = find_uv(PROJECT)
    if uv is None:
        raise AuditFailed("uv is missing; run `make install`")
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "requirements.txt"
        what = [
            "--locked",
            "--no-dev",
            "--no-emit-project",
            "--no-hashes",
            "--python",
            sys.executable,
            *ENVIRONMENTS[environment],
        ]
        _run([str(uv), "export", "--quiet", *what, "--output-file", str(pins)])
        options = [
            "--no-deps",
            "--disable-pip",
            "--vulnerability-service",
            "osv",
            "--format",
            "json",
            "--progress-spinner",
            "off",
        ]
        ignored = [part for id in ACCEPTED for part in ("--ignore-vuln", id)]
        done = _run([sys.executable, "-m", "pip_audit", "--requirement", str(pins), *options, *ignored], codes=(0, 1))
    try:
        return orjson.loads(done.stdout)
    except orjson.JSONDecodeError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise (AuditSkipped if any(sign in done.stderr for sign in _UNREACHABLE) else AuditFailed)(last) from None


def vulnerabilities(report: Any) -> list[str]:
    """One line per vulnerability. Raises AuditSkipped if the database has none of the packages."""
    packages = report["dependencies"]
    if all("skip_reason" in package for package in packages):
        raise AuditSkipped(packages[0]["skip_reason"] if packages else "there are no packages")
    return [
        f"{package['name']} {package['version']}: {found['id']}, fixed in"
        f" {', '.join(found['fix_versions']) or 'no version'}"
        for package in packages
        for found in package.get("vulns", ())
    ]


def _run(command: list[str], codes: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=PROJECT, capture_output=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT_S, check=False
    )
    if done.returncode not in codes:
        raise AuditFailed(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done


if __name__ == "__main__":
    raise SystemExit(main())
