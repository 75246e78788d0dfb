"""`make audit`: look up known vulnerabilities of all locked dependencies.

First in the project's own file (tools/advisories.json), which needs no network, then in the database of osv.dev. Exit
code 1 if one is not in `ACCEPTED`, else 0. If the database cannot be reached, the output says SKIPPED, and how old the
file is. `--refresh` writes the file anew from the database.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from tools import advisories
from tools.advisories import Advisories
from volley.bootstrap import ENVIRONMENTS, find_uv
from volley.layout import PROJECT

DATABASE = "https://api.osv.dev"
_TRAINER = (
    "transformers' Trainer is not used; there is no torch in the environment rollout, and sglang-jax pins the version"
)
_KERNELS = "no class of a model is loaded, only tokenizers and configurations; the package kernels is not installed"
ACCEPTED: Mapping[str, str] = {"CVE-2026-1839": _TRAINER, "CVE-2026-4372": _KERNELS}
"""Vulnerabilities that do not affect us: reason by id."""
_UNREACHABLE = ("ConnectionError", "ConnectTimeout", "ReadTimeout", "Could not connect")
_TIMEOUT_S = 900.0


class AuditSkipped(Exception):
    """The database cannot be queried; the text is the reason."""


class AuditFailed(Exception):
    """The audit itself failed."""


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(prog="make audit", description=__doc__)
    parser.add_argument("--refresh", action="store_true", help="write tools/advisories.json anew from the database")
    pins = advisories.locked(PROJECT / "uv.lock")
    try:
        if parser.parse_args(arguments).refresh:
            reach(DATABASE)
            advisories.download({name for name, _ in pins}, DATABASE).write()
        known = Advisories.read()
        found = {"uv.lock": known.found(pins, ACCEPTED)}
        found |= _ask_database(known)
    except (AuditSkipped, AuditFailed, OSError) as reason:
        print(f"audit failed: {reason}", file=sys.stderr)
        return 1
    for name, lines in found.items():
        print(f"{name}: {len(lines) or 'no'} known vulnerabilities", *lines, sep="\n  ")
    return 1 if any(found.values()) else 0


def _ask_database(known: Advisories) -> dict[str, list[str]]:
    """Return the database's findings by environment; none if it cannot be reached. Raises AuditFailed."""
    try:
        reach(DATABASE)
        return {name: vulnerabilities(audit(name)) for name in ENVIRONMENTS}
    except AuditSkipped as reason:
        days = (datetime.datetime.now(datetime.UTC).date() - known.date).days
        print(
            f"audit SKIPPED: THE DATABASE WAS NOT ASKED: {reason}\n"
            f"  only the {len(known.known)} advisories of tools/advisories.json were checked; they are {days} days old",
            file=sys.stderr,
        )
        return {}


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
            "--no-emit-workspace",
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
    raise SystemExit(main(sys.argv[1:]))
