"""`make audit`: known vulnerabilities in the locked dependencies of all environments, as the database of osv.dev knows
them.

Exit code 1 if there is one without a reason in `ACCEPTED`; 0 if there is none, and also if the database cannot be
reached, which is said: an audit that did not happen looks like none that passed.
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
"""Vulnerabilities that do not reach us, by id, each with the reason why."""
_UNREACHABLE = ("ConnectionError", "ConnectTimeout", "ReadTimeout", "Could not connect")
_TIMEOUT_S = 900.0


class AuditSkipped(Exception):
    """The database cannot be asked; the text says why."""


class AuditFailed(Exception):
    """The audit itself is broken."""


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
    """Raises AuditSkipped. Any answer will do."""
    try:
        urllib.request.urlopen(url, timeout=10).close()  # noqa: S310 - a constant of ours
    except urllib.error.HTTPError:
        return
    except OSError as error:
        raise AuditSkipped(f"{url} cannot be reached ({getattr(error, 'reason', error)})") from error


def audit(environment: str) -> Any:
    """pip-audit's report on what `uv.lock` names for an environment, without tools of development. Raises
    AuditSkipped or AuditFailed.
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
    """A line for each. Raises AuditSkipped if the database knew nothing of any package."""
    packages = report["dependencies"]
    if all("skip_reason" in package for package in packages):
        raise AuditSkipped(packages[0]["skip_reason"] if packages else "there are no packages")
    return [
        f"{package['name']} {package['version']}: {found['id']}, mended in"
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
