"""Addresses and token files of a run's services, from `processes.json` or else the run's configuration.

`processes.json` never holds the tokens themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from shared.errors import ConfigError
from shared.files.reading import read_file
from shared.run import trust
from shared.run.folder import RunFolder
from shared.services import SERVICES
from shared.services_schema import ServicesSection, TokenFiles
from volley.runs.run_file import read_record, write_json

_MAX_RECORD = 2**20


class Addresses(BaseModel):
    """Base addresses by process name; `external` names the processes that `volley train` did not start."""

    urls: dict[str, str]
    token_files: TokenFiles
    ca_file: Path | None
    external: tuple[str, ...] = ()

    def url(self, name: str) -> str:
        """Return the address of a process. Raises ConfigError if the run has no such service."""
        if name not in self.urls:
            raise ConfigError(f"the run has no service {name}", f"its services are {', '.join(sorted(self.urls))}")
        return self.urls[name]


def write(folder: RunFolder, urls: Mapping[str, str], external: Mapping[str, str], services: ServicesSection) -> None:
    """Write processes.json with absolute paths. Raises StorageFull."""
    files = _absolute(services.token_files, Path.cwd())
    tree = {"urls": {**urls, **external}, "external": list(external), "token_files": files.model_dump(mode="json")}
    write_json(folder.processes, {**tree, "ca_file": services.tls.ca_file and services.tls.ca_file.absolute()})
    trust.mark(folder)


def read(folder: RunFolder) -> Addresses:
    """Read a run's addresses from processes.json, or from its configuration.

    Raises ConfigError, also for an untrusted folder: callers send a token from a file that it names to an address that
    it names.
    """
    recorded = _recorded(folder)
    if recorded is None and not folder.config.is_file():
        raise ConfigError(
            f"{folder.path} is not the folder of a run started here", "give RUN_DIR or the services' addresses"
        )
    trust.check(folder)
    record = read_record(folder)
    base = Path(record.cwd) if record is not None else Path.cwd()
    found = _configured(folder) if recorded is None else recorded
    ca_file = found.ca_file and base / found.ca_file
    return found.model_copy(update={"token_files": _absolute(found.token_files, base), "ca_file": ca_file})


def followed(services: ServicesSection) -> dict[str, str]:
    """Configured addresses by service, without rollout servers, which the orchestrator knows."""
    return {name: services.base_url(name) for name in sorted(SERVICES) if not SERVICES[name].replicated}


def newest_run() -> RunFolder:
    """The run in runs/ that was started last. Raises ConfigError if there is none."""
    found = sorted(Path("runs").glob("*/processes.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError("there is no run in runs/", "give RUN_DIR or the services' addresses")
    return RunFolder(found[-1].parent.absolute())


def ports_before(folder: RunFolder) -> dict[str, int]:
    """Ports of the run's last session by process name, of processes started here."""
    ports: dict[str, int] = {}
    recorded = _recorded(folder)
    for name, url in (recorded.urls if recorded else {}).items():
        with suppress(ValueError):
            port = urlsplit(url).port
            if port and recorded and name not in recorded.external:
                ports[name] = port
    return ports


def _recorded(folder: RunFolder) -> Addresses | None:
    with suppress(OSError, ValidationError):
        return Addresses.model_validate_json(read_file(folder.processes, _MAX_RECORD))
    return None


def _configured(folder: RunFolder) -> Addresses:
    try:
        from shared import config
    except ModuleNotFoundError as error:  # the client alone may lack the libraries of configurations
        missing = f"{folder.processes} is missing, and {folder.config} cannot be read without {error.name}"
        raise ConfigError(missing, "pip install 'volley-rl-client[full]'") from error

    services = config.load([folder.config]).config.services
    urls = followed(services)
    for name in SERVICES:
        urls |= services.urls_of(name)
    return Addresses(urls=urls, token_files=services.token_files, ca_file=services.tls.ca_file, external=tuple(urls))


def _absolute(files: TokenFiles, base: Path) -> TokenFiles:
    paths = {role: getattr(files, role) for role in TokenFiles.model_fields}
    return files.model_copy(update={role: path and base / path for role, path in paths.items()})
