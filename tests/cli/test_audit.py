"""The audit of dependencies: what is found fails, what could not be asked is said."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shared.process.ports import free_port
from tools import advisories, audit
from tools.advisories import Advisories
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
    said = capsys.readouterr().err
    assert "SKIPPED: THE DATABASE WAS NOT ASKED" in said
    assert re.search(r"tools/advisories.json were checked; they are \d+ days old", said)


LOCK = """[[package]]
name = "starlette"
version = "{}"
source = {{ registry = "https://pypi.org/simple" }}
"""


@pytest.mark.parametrize(("version", "code"), [("0.48.0", 1), ("0.38.0", 1), ("1.3.1", 0)])
def test_a_vulnerable_pin_is_found_without_a_network(tmp_path, monkeypatch, capsys, version: str, code: int):
    (tmp_path / "uv.lock").write_text(LOCK.format(version), encoding="utf-8")
    monkeypatch.setattr(audit, "PROJECT", tmp_path)
    monkeypatch.setattr(audit, "DATABASE", f"http://127.0.0.1:{free_port()}")
    assert audit.main() == code
    assert ("GHSA-7f5h-v6xp-fcq8, fixed in 0.49.1" in capsys.readouterr().out) == (version == "0.48.0")


def test_the_file_is_renewed_from_the_database(tmp_path):
    def vulnerability(id: str, *events: dict[str, str], **others: object) -> dict[str, object]:
        ranges = [{"type": "GIT", "events": [{"introduced": "0"}]}, {"type": "ECOSYSTEM", "events": [*events]}]
        return {"id": id, "affected": [{"package": {"name": "a"}, "ranges": ranges}], **others}

    pages = {
        "": {
            "vulns": [
                vulnerability("X-1", {"introduced": "0"}, {"fixed": "2"}, {"introduced": "3"}, aliases=["CVE-1"])
            ],
            "next_page_token": "more",
        },
        "more": {
            "vulns": [
                vulnerability("X-2", {"introduced": "1"}),
                vulnerability("X-3", {"introduced": "0"}, withdrawn=""),
                vulnerability("X-4", {"introduced": "1"}, {"last_affected": "2"}, {"introduced": "4"}, {"fixed": "5"}),
                {"id": "X-5", "affected": [{"package": {"name": "a"}, "versions": ["2", "4", "not one"]}]},
            ]
        },
    }

    class Database(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (self.path, asked["package"]) == ("/v1/query", {"name": "a", "ecosystem": "PyPI"})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(pages[asked.get("page_token", "")]).encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Database) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        advisories.download(["a"], f"http://127.0.0.1:{server.server_port}").write(tmp_path / "known.json")
        server.shutdown()
    known = Advisories.read(tmp_path / "known.json")
    affected = {
        v: [line.split()[2][:-1] for line in known.found([("a", v), ("b", v)], {})]
        for v in ["0", "1", "2", "2.1", "4", "5"]
    }
    assert affected == {
        "0": ["X-1"],
        "1": ["X-1", "X-2", "X-4"],
        "2": ["X-2", "X-4", "X-5"],
        "2.1": ["X-2"],
        "4": ["X-1", "X-2", "X-4", "X-5"],
        "5": ["X-1", "X-2"],
    }
    assert len(known.found([("a", "1")], {"CVE-1": "reason"})) == 2


def test_what_is_accepted_has_a_reason():
    assert all(reason.strip() for reason in audit.ACCEPTED.values())
