"""Services in the run's configuration: addresses, limits, tokens, TLS."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shared.reward_schema import RewardServer
from shared.section import Section
from shared.server_schema import TeacherServer
from shared.services import SERVICES


def _without_password(url: str) -> str:
    """Reject passwords: addresses are written to logs, to the run's folder and to other services."""
    user, at, _ = url.partition("://")[2].rpartition("@")
    if (at and ":" in user) or "password=" in url:
        raise ValueError("holds a password; put it into a file of its own (for Redis: services.redis_password_file)")
    return url


Url = Annotated[str, AfterValidator(_without_password)]


type Port = Annotated[int, Field(ge=0, le=65535)]


class Endpoint(Section):
    """Address of a service.

    The service listens on `host` and `port`; others reach it at `url` (default: derived from host and port, see
    `ServicesSection.base_url`). Each service has its own class, so that setting one key keeps the defaults of the
    others.
    """

    host: str = "127.0.0.1"
    port: Port = 0
    url: Url | None = None

    @property
    def n_local(self) -> int:
        """Processes of the service that one host runs."""
        return 1


class HarborSection(Section):
    """Containers of Harbor's task folders.

    `environment` is the type of Harbor's environments that runs them (docker, podman, singularity, gke, daytona, …), or
    MODULE:CLASS; without one the service takes no task folders. `options` are its keyword arguments, `variables` names
    of this service's environment variables that it gets. `network: declared` gives a network only to tasks that ask
    for it, `public` also to those that say nothing, as Harbor does. At most `max_starting` containers start at once and
    `max_judging` are judged (by default two for each processor with docker and podman, and without a limit elsewhere),
    and one that is older than `max_lifetime_s` is removed. `package` is installed for them, unless `python` is an
    interpreter that has it.
    """

    environment: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,100}$")] | None = None
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    variables: tuple[str, ...] = ()
    network: Literal["declared", "public"] = "declared"
    max_starting: PositiveInt = 4
    max_judging: PositiveInt | None = None
    max_lifetime_s: PositiveFloat = 7200.0
    package: str = "harbor>=0.25,<0.27"
    python: Path | None = None


class ProcessSandbox(Section):
    """Programs that a model writes run in processes that the kernel confines, see docs/sandbox.md."""

    kind: Literal["process"] = "process"


class ContainerSandbox(Section):
    """Programs that a model writes run in containers of `image`, which has Python as `python3` (3.10 or newer).

    `engine` is the command that starts them: docker, podman, or another one with the same arguments. They have no
    network, unless `network` names one, and `options` are further arguments of `ENGINE run`. `warm` containers are kept
    started in advance for each set of limits. At most `max_starting` start at once, and one that is used for longer
    than `max_lifetime_s` is removed.
    """

    kind: Literal["container"]
    image: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")]
    engine: Annotated[str, Field(min_length=1)] = "docker"
    network: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]*$")] = "none"
    options: tuple[str, ...] = ()
    warm: Annotated[int, Field(ge=0, le=64)] = 0
    max_starting: PositiveInt = 4
    max_lifetime_s: PositiveFloat = 7200.0


class EnvEndpoint(Endpoint):
    """The environment service.

    `folder` keeps submitted environments (default: in the run's folder). `unsandboxed` names the environments that may
    be submitted on a machine that cannot confine their code; `python` there allows the tool of that name.
    `sandbox` is where programs run that a model writes; `sandbox_memory_mb` is the memory limit of one episode's
    process of submitted code. `processes` run the episodes of built-in
    environments, each with its own threads (0: threads of the service). `allow_changed_code` plays submitted
    environments whose files have changed since the run started: `volley reverify` sets it, a training run refuses them.
    `package_index` is the only source of their dependencies. `remote_tokens_file` is a secret file with a line `URL
    TOKEN` for each server of remote environments that needs a token. `reward_servers` are the judges and reward
    services that `data.rewards` names. `harbor` are the containers of task folders.
    """

    port: Port = SERVICES["env"].port
    folder: Path | None = None
    unsandboxed: tuple[str, ...] = ()
    sandbox: Annotated[ProcessSandbox | ContainerSandbox, Field(discriminator="kind")] = ProcessSandbox()
    sandbox_memory_mb: PositiveInt = 512
    processes: Annotated[int, Field(ge=0, le=256)] = 0
    allow_changed_code: bool = False
    package_index: Url = "https://pypi.org/simple"
    remote_tokens_file: Path | None = None
    reward_servers: dict[str, RewardServer] = Field(default_factory=dict)
    harbor: HarborSection = HarborSection()


class RolloutEndpoint(Endpoint):
    port: Port = SERVICES["rollout"].port


class OrchestratorEndpoint(Endpoint):
    """`teacher` is the server to ask if `algorithm.teacher_kl_coef` is above 0.

    `teachers` are those of some environments by name, each with a budget of its own; `teacher` is that of the others.
    """

    port: Port = SERVICES["orchestrator"].port
    teacher: TeacherServer | None = None
    teachers: dict[str, TeacherServer] = Field(default_factory=dict[str, TeacherServer])

    def all_teachers(self) -> dict[str, TeacherServer]:
        """Return the servers by key of the configuration."""
        one = {} if self.teacher is None else {"services.orchestrator.teacher": self.teacher}
        return one | {f"services.orchestrator.teachers.{env}": server for env, server in self.teachers.items()}

    def foreign_teachers(self) -> dict[str, TeacherServer]:
        """Return those of `all_teachers` that are other servers than the run's."""
        return {key: server for key, server in self.all_teachers().items() if not server.is_self}

    def teacher_of(self, env: str) -> str | None:
        """Return the key of the environment's teacher; None if it has none. A name may be NAME@DIGEST."""
        for name in (env, env.partition("@")[0]):
            if name in self.teachers:
                return f"services.orchestrator.teachers.{name}"
        return None if self.teacher is None else "services.orchestrator.teacher"

    def missing_teacher(self, played: Sequence[str], coef: float) -> str | None:
        """Explain which environment lacks a teacher though `coef` needs one, or which teacher has no environment."""
        names = {*played, *(env.partition("@")[0] for env in played)}
        if idle := [name for name in self.teachers if name not in names]:
            return f"services.orchestrator.teachers.{idle[0]}: the run has no such environment, only {list(played)}"
        untaught = [env for env in played if self.teacher_of(env) is None]
        if not coef or not untaught:
            return None
        of = f" of {untaught[0]}" if self.teachers else ""
        return f"algorithm.teacher_kl_coef={coef:g} needs a teacher{of}: set services.orchestrator.teacher.url"


class TrainerEndpoint(Endpoint):
    """A trainer of `num_processes` processes, usually one per host.

    `process_id` is the number of this process: 0 is the service; the others compute with it and reach it at
    `coordinator_address`, HOST:PORT on the host of process 0. `volley train` starts all processes on this machine; with
    a `coordinator_address` only process 0.
    """

    port: Port = SERVICES["trainer"].port
    num_processes: PositiveInt = 1
    process_id: NonNegativeInt = 0
    coordinator_address: str | None = None

    @property
    def n_local(self) -> int:
        return self.num_processes if self.coordinator_address is None else 1

    @model_validator(mode="after")
    def _one_of_them(self) -> TrainerEndpoint:
        if self.process_id >= self.num_processes:
            raise ValueError(f"process_id={self.process_id} must be less than num_processes={self.num_processes}")
        host, _, port = (self.coordinator_address or "127.0.0.1:1").rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise ValueError(f"coordinator_address={self.coordinator_address} is not HOST:PORT")
        return self


class Limits(Section):
    """Limits that each client of a service is held to.

    `body_timeout_s` is the longest time for a request body to arrive, and for an answer to be read. `admin_per_s` is
    how many requests of role admin one address may make per second, with bursts of ten times as many. `grace_s` is how
    long running requests may take after SIGTERM.
    """

    max_body_bytes: PositiveInt = 8 * 2**20
    max_connections: PositiveInt = 4096
    header_timeout_s: PositiveFloat = 10.0
    body_timeout_s: PositiveFloat = 30.0
    admin_per_s: PositiveFloat = 20.0
    grace_s: PositiveFloat = 10.0


class TokenFiles(Section):
    """Files with the bearer token of each role: viewer reads state, service does work, admin changes shared state.

    admin includes service, which includes viewer. Without files, no token is required.
    """

    viewer: Path | None = None
    service: Path | None = None
    admin: Path | None = None

    @model_validator(mode="after")
    def _whole(self) -> TokenFiles:
        if any((self.viewer, self.service, self.admin)) and not (self.service and self.admin):
            raise ValueError(
                "token_files needs service and admin: services call each other with the service token, the "
                "trainer sets weights with the admin token"
            )
        return self


class Tls(Section):
    """TLS files in PEM format.

    Services present `cert_file` (with its chain); clients trust `ca_file` (default: the system's), also for rediss://.
    """

    cert_file: Path | None = None
    key_file: Path | None = None
    ca_file: Path | None = None

    @model_validator(mode="after")
    def _pair(self) -> Tls:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("tls needs cert_file and key_file together")
        return self


class ServicesSection(Section):
    """`redis_url: null` starts the embedded server.

    Rollout servers register themselves; `rollout_urls` adds fixed ones.

    `volley train` starts the other services: no env service if `env.url` is set, no rollout server if `rollout_urls`
    is.
    """

    redis_url: Url | None = None
    redis_password_file: Path | None = None
    token_files: TokenFiles = TokenFiles()
    tls: Tls = Tls()
    env: EnvEndpoint = EnvEndpoint()
    rollout: RolloutEndpoint = RolloutEndpoint()
    orchestrator: OrchestratorEndpoint = OrchestratorEndpoint()
    trainer: TrainerEndpoint = TrainerEndpoint()
    rollout_urls: tuple[Url, ...] = ()
    rollout_replicas: PositiveInt = 1
    limits: Limits = Limits()

    def urls_of(self, name: str) -> dict[str, str]:
        """Return base addresses of the processes of service `name` that were started elsewhere, by process name."""
        info, endpoint = SERVICES[name], getattr(self, name)
        if info.replicated:
            urls: tuple[str, ...] = getattr(self, f"{name}_urls")
            return {info.process(i): url.rstrip("/") for i, url in enumerate(urls)}
        return {name: self.base_url(name)} if info.shared and endpoint.url is not None else {}

    def n_local(self, name: str) -> int:
        """Return how many processes of the service `name` this host starts."""
        if self.urls_of(name):
            return 0
        return getattr(self, f"{name}_replicas") if SERVICES[name].replicated else getattr(self, name).n_local

    def base_url(self, name: str) -> str:
        """Return the address at which others reach the service `name`."""
        endpoint: Endpoint = getattr(self, name)
        return (endpoint.url or self.local_url(name, endpoint.port)).rstrip("/")

    def local_url(self, name: str, port: int, host: str | None = None) -> str:
        """Return the address of the service `name` on this host, or on `host`, when it listens on `port`."""
        host = host or str(getattr(self, name).host)
        host = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104 - compared, not bound
        return f"{'https' if self.tls.cert_file else 'http'}://{host}:{port}"
