"""Transfer of a workspace's files to and from an interpreter's folder."""

from __future__ import annotations

import base64

from volley_sandbox.sandbox.answers import CellResult
from volley_sandbox.tools.base import ToolFault
from volley_sandbox.tools.workspace import Workspace

MAX_NAMED = 3


def changes_to_send(workspace: Workspace | None, *, all_of_them: bool) -> tuple[dict[str, str], list[str]]:
    """Changes that the folder lacks: contents (base64) by path, and removed paths."""
    if workspace is None:
        return {}, []
    paths = set(workspace.content) if all_of_them else workspace.changed
    there = {path: base64.b64encode(workspace.content[path]).decode() for path in paths if path in workspace.content}
    gone = [] if all_of_them else sorted(path for path in paths if path not in workspace.content)
    workspace.changed = set()
    return there, gone


def store_changes(workspace: Workspace, found: CellResult) -> list[str]:
    """Store a text's changes to the files; return notes for the model about files that were not stored."""
    left_out = [f"{path[:80]!r} is too large to be kept" for path in found.left_out]
    for path in found.removed:
        workspace.content.pop(path, None)
    for path, data in sorted(found.files.items()):
        try:
            workspace.write(path, data)
        except ToolFault as fault:
            left_out.append(f"{path[:80]!r} is not kept in the workspace: {fault}")
    workspace.changed = set()
    more = [f"and {len(left_out) - MAX_NAMED} files more"] if len(left_out) > MAX_NAMED else []
    return left_out[:MAX_NAMED] + more
