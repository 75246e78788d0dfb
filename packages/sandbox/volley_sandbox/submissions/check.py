"""`python -m volley_sandbox.submissions.check CACHE ASKED < FILE`: validate a file without a service.

ASKED is a JSON object with the file's `name`, `archive` (true for a zip file), `entry` and `config`, and `section`,
settings of `services.env`. Each check is printed as one line of JSON as it ends, and the report as the last
line. The exit code is 0 if the environment passes, 1 if not, 2 if
it cannot be tried on this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections import deque
from pathlib import Path

from shared.errors import VolleyError
from shared.services_schema import EnvEndpoint
from shared.visible import visible
from volley_sandbox.backends.sandboxed import LOG_LINES
from volley_sandbox.backends.submitted import EnvironmentDescription, SubmittedBackend
from volley_sandbox.harbor.containers import Containers, HarborSettings
from volley_sandbox.sandbox.limits import SandboxLimits
from volley_sandbox.sandbox.packages.dependencies import PYPI
from volley_sandbox.sandbox.process.containers import ContainerSettings
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.submissions.offers import local_backend
from volley_sandbox.submissions.programs import AgentPrograms
from volley_sandbox.submissions.record import Check
from volley_sandbox.submissions.store import SubmissionStore
from volley_sandbox.submissions.submission import MIN_TIER, Submission, described, numbered
from volley_sandbox.submissions.validation import Validated, validate

_DEADLINE_S = 30.0
_INDEX = "UV_DEFAULT_INDEX"
_PROCESSES = (
    "note  a submitted environment runs in processes, here and in a run: services.env.sandbox.kind=container is for "
    "programs that models write\n"
)


async def checked(wanted: Submission, section: EnvEndpoint, cache: Path, kept: Path) -> Validated:
    """Validate a submission.

    Args:
        section: settings of the service. Without a type of containers, task folders are tried in Docker.
        cache: folder for unpacked archives and installed dependencies.
        kept: folder for the submitted files.

    Raises InputError (a service would refuse it at once), Unavailable (no sandbox can be started).
    """
    store = SubmissionStore(kept)
    # the machine and the tasks are the caller's own
    harbor = section.harbor.model_copy(update={"environment": section.harbor.environment or "docker"})
    containers = Containers(HarborSettings(harbor, wanted.name, kept / "trials", cache))
    index = section.package_index if "package_index" in section.model_fields_set else os.environ.get(_INDEX, PYPI)
    programs, limits = (
        AgentPrograms(store, cache, index, containers),
        SandboxLimits(memory_mb=section.sandbox_memory_mb),
    )
    in_containers = None
    if section.sandbox.kind == "container":
        sys.stderr.write(_PROCESSES)
        in_containers = ContainerSettings(section.sandbox, wanted.name, kept / "sandboxes")
    async with Sandboxes(containers=in_containers) as sandboxes, containers.running():
        tier = await sandboxes.probe()
        if tier.level < MIN_TIER:
            sys.stderr.write(visible(f"note  this machine cannot confine the code: {'; '.join(tier.missing)}") + "\n")
        source = await programs.check(wanted)
        version = numbered(wanted, 1, source.protocol)
        await asyncio.to_thread(store.add, version, source.files)
        log: deque[str] = deque(maxlen=LOG_LINES)

        def open_backend(known: EnvironmentDescription | None) -> SubmittedBackend:
            return local_backend(described(version, known), programs, sandboxes, limits, _DEADLINE_S, log)

        return await validate(open_backend, _print_check)


def _print_check(check: Check) -> None:
    sys.stdout.write(check.model_dump_json() + "\n")
    sys.stdout.flush()


def main() -> None:
    cache, asked = Path(sys.argv[1]), json.loads(sys.argv[2])
    content = sys.stdin.buffer.read()
    wanted = Submission(asked["name"], content, asked["entry"], asked["config"], 0.0, asked["archive"])
    try:
        with tempfile.TemporaryDirectory() as kept:
            section = EnvEndpoint.model_validate(asked["section"])
            found = asyncio.run(checked(wanted, section, cache, Path(kept)))
    except (VolleyError, OSError) as error:
        sys.stderr.write(visible(f"volley: {error}") + "\n")
        raise SystemExit(2) from None
    sys.stdout.write(found.report.model_dump_json() + "\n")
    raise SystemExit(0 if found.report.passed else 1)


if __name__ == "__main__":
    main()
