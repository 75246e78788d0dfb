"""Wire schemas of the answers of this package's routes, from which the OpenAPI page is made."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from services.env.api.answers import OfferedEnvironment
from volley_sandbox.submissions.record import Report, SubmittedVersion


class ToolShown(BaseModel):
    """`parameters` is the JSON schema of the arguments."""

    name: str
    description: str
    parameters: dict[str, Any]


class ToolsListed(BaseModel):
    """`tool_use` holds the limits of calls."""

    tools: list[ToolShown]
    tool_use: dict[str, Any]


class ToolAnswered(BaseModel):
    """`text` is the answer that a model reads; `ok` says that the call was carried out."""

    text: str
    ok: bool


class SubmittedShown(OfferedEnvironment):
    """One version of a submitted environment, in full.

    `failures` has a row for each turn at which its live episodes failed: how many reached the turn, and how many failed
    there.
    """

    splits: dict[str, int]
    protocol: str
    entry: str | None
    digest: str
    size: int
    submitted_at: float
    history: list[dict[str, Any]]
    report: Report | None
    failures: list[dict[str, Any]] = []


class VersionsShown(BaseModel):
    name: str
    versions: list[SubmittedShown]


class LogShown(BaseModel):
    name: str
    log: str


def submitted(version: SubmittedVersion) -> dict[str, Any]:
    """One version as `SubmittedShown`."""
    fields = version.model_dump(
        mode="json", include={"splits", "protocol", "entry", "digest", "size", "history", "report"}
    )
    return {**version.describe(), **fields, "submitted_at": version.history[0].at}
