"""The audit of dependencies: what is found fails, what could not be asked is said."""

from __future__ import annotations

import pytest

from shared.process.ports import free_port
from tools import audit
from tools.audit import AuditSkipped, reach, vulnerabilities

KNOWN = {
    "name": "a",
    "version": "1",
    "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}, {"id": "CVE-2", "fix_versions": []}],
}
CLEAN = {"name": "b", "version": "1", "vulns": []}
UNKNOWN = {"name": "c", "skip_reason": "not found"}


def test_every_vulnerability_is_a_line():
    assert vulnerabilities({"dependencies": [CLEAN, UNKNOWN]}) == []
    assert vulnerabilities({"dependencies": [KNOWN]}) == ["a 1: CVE-1, fixed in 2", "a 1: CVE-2, fixed in no version"]


@pytest.mark.parametrize("packages", [[], [UNKNOWN]])
def test_an_audit_that_knew_nothing_did_not_pass(packages: list[dict[str, str]]):
    with pytest.raises(AuditSkipped):
        vulnerabilities({"dependencies": packages})


def test_a_database_that_cannot_be_reached_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(audit, "DATABASE", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(AuditSkipped, match="cannot be reached"):
        reach(audit.DATABASE)
    assert audit.main() == 0
    assert "SKIPPED, nothing was checked" in capsys.readouterr().out


def test_what_is_accepted_has_a_reason():
    assert all(reason.strip() for reason in audit.ACCEPTED.values())
