"""Roles: who may call which route of which service, and how token files are read."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from services.env.api import environments
from services.env.api import routes as env
from services.orchestrator import routes as orchestrator
from services.rollout.api import generate
from services.rollout.api import routes as rollout
from services.trainer import routes as trainer
from services.trainer.publishing import routes as publishing
from shared import config
from shared.errors import ConfigError
from shared.services_schema import Limits, TokenFiles
from shared.web.access import AccessTokens, Role, RoleTable, read_secret, read_tokens, token_for
from shared.web.http import COMMON_ROLES, create_app
from shared.web.routes import added_routes
from tests.support.tokens import write_private, write_tokens
from volley_dashboard import docs_page
from volley_serving.sglang import control
from volley_tinker.server import records as tinker_records
from volley_tinker.server import routes as tinker

SERVICES = {
    "env": (
        [environments.router, env.router],
        {**environments.ROLES, **env.ROLES},
    ),
    "orchestrator": ([orchestrator.router], orchestrator.ROLES),
    "rollout": (
        [rollout.router, generate.router],
        {**rollout.ROLES, **generate.ROLES},
    ),
    "tinker": ([tinker.router, tinker_records.router], {**tinker.ROLES, **tinker_records.ROLES}),
    "trainer": ([trainer.router, publishing.router], {**trainer.ROLES, **publishing.ROLES}),
}

EXPECTED = """
common        anyone  GET /health
common        anyone  GET /ready
common        viewer  GET /metrics
common        anyone  GET /docs
common        anyone  GET /docs/favicon.png
common        anyone  GET /docs/start.js
common        anyone  GET /docs/swagger-ui-bundle.js
common        anyone  GET /docs/swagger-ui.css
common        anyone  GET /openapi.json
env           viewer  GET /environments
env           admin   POST /environments
env           viewer  GET /environments/{name}
env           admin   PUT /environments/{name}
env           viewer  GET /environments/{name}/logs
env           admin   POST /environments/{name}/activate
env           admin   POST /environments/{name}/retire
env           service GET /tools
env           service POST /tools/{name}/call
env           anyone  GET /openenv/{env}/health
env           viewer  GET /openenv/{env}/metadata
env           viewer  GET /openenv/{env}/schema
env           service WS /openenv/{env}/ws
env           service POST /episodes
env           service POST /episodes/{episode_id}/step
env           service POST /episodes/{episode_id}/finish
env           service POST /episodes/{episode_id}/run
env           service GET /episodes/{episode_id}/run
env           service DELETE /episodes/{episode_id}
env           service GET /{env}/splits
env           service GET /{env}/num_tasks
env           service POST /{env}/num_tasks
env           service GET /{env}/task
env           service POST /{env}/task
env           service POST /{env}/demonstration
env           service POST /{env}/demonstrations
orchestrator  viewer  GET /runs
orchestrator  viewer  GET /runs/{name}
orchestrator  admin   PATCH /runs/{name}
orchestrator  admin   POST /runs/{name}/pause
orchestrator  admin   POST /runs/{name}/resume
rollout       service POST /generate
rollout       service POST /abort_request
rollout       service POST /v1/completions
rollout       service POST /v1/chat/completions
rollout       viewer  GET /v1/models
rollout       viewer  GET /v1/models/{name}
rollout       service POST /v1/responses
rollout       service POST /v1/messages
rollout       service POST /v1/messages/count_tokens
rollout       viewer  GET /weights
rollout       service GET /weights/chunks/{digest}
rollout       service GET /weights/holdings/{digest}
rollout       anyone  GET /health_generate
rollout       viewer  GET /get_weight_version
rollout       viewer  GET /model_info
rollout       viewer  GET /get_model_info
rollout       viewer  GET /server_info
rollout       viewer  GET /get_server_info
rollout       viewer  GET /v1/loads
rollout       viewer  GET /get_load
rollout       admin   POST /weights/stage
rollout       admin   POST /weights/commit
rollout       service POST /weights/hold
rollout       admin   POST /update_weights
rollout       admin   POST /update_weights_from_disk
rollout       admin   POST /pause_generation
rollout       admin   POST /continue_generation
rollout       admin   GET /flush_cache
rollout       admin   POST /flush_cache
rollout       admin   GET /resume_memory_occupation
rollout       admin   POST /resume_memory_occupation
trainer       viewer  GET /status
trainer       service GET /weights/newest
trainer       service GET /weights/chunks/{digest}
trainer       admin   POST /checkpoint
trainer       admin   POST /pause
trainer       admin   POST /resume
tinker        anyone  GET /api/v1/healthz
tinker        service GET /api/v1/get_server_capabilities
tinker        service POST /api/v1/client/config
tinker        service POST /api/v1/client/dynamic_config
tinker        service POST /api/v1/create_session
tinker        service POST /api/v1/session_heartbeat
tinker        service POST /api/v1/sessions/{session}/finish
tinker        service POST /api/v1/create_model
tinker        service POST /api/v1/get_info
tinker        service POST /api/v1/forward
tinker        service POST /api/v1/forward_backward
tinker        service POST /api/v1/optim_step
tinker        service POST /api/v1/save_weights
tinker        service POST /api/v1/load_weights
tinker        service POST /api/v1/save_weights_for_sampler
tinker        service POST /api/v1/save_weights_external
tinker        service POST /api/v1/create_sampling_session
tinker        service POST /api/v1/join_sampling_session
tinker        service POST /api/v1/asample
tinker        service POST /api/v1/retrieve_future
tinker        service POST /api/v1/cancel_future
tinker        service POST /api/v1/telemetry
tinker        service GET /api/v1/auth/token
tinker        service GET /api/v1/create_custom_loss
tinker        service GET /api/v1/retrieve_futures
tinker        service GET /api/v1/copy_weights
tinker        service GET /api/v1/billing/usage/events
tinker        service GET /api/v1/billing/usage/checkpoints/current
tinker        service GET /api/v1/audit_log
tinker        service GET /api/v1/sessions/search
tinker        service POST /api/v1/auth/token
tinker        service POST /api/v1/create_custom_loss
tinker        service POST /api/v1/retrieve_futures
tinker        service POST /api/v1/copy_weights
tinker        service POST /api/v1/billing/usage/events
tinker        service POST /api/v1/billing/usage/checkpoints/current
tinker        service POST /api/v1/audit_log
tinker        service POST /api/v1/sessions/search
tinker        service GET /api/v1/sessions
tinker        service GET /api/v1/sessions/{session}
tinker        service GET /api/v1/samplers/{sampler}
tinker        service GET /api/v1/training_runs
tinker        service GET /api/v1/training_runs/{model}
tinker        service GET /api/v1/training_runs/{model}/checkpoints
tinker        service GET /api/v1/checkpoints
tinker        service GET /api/v1/whoami
tinker        service POST /api/v1/weights_info
tinker        service GET /api/v1/training_runs/{model}/checkpoints/{kind}/{name}/external_weights_urls
tinker        anyone  GET /api/v1/external_weights/{signature}/{expires}/{folder}/{file}
tinker        service DELETE /api/v1/training_runs/{model}/checkpoints/{kind}/{name}
tinker        service POST /api/v1/training_runs/{model}/checkpoints/{kind}/{name}/publish
tinker        service DELETE /api/v1/training_runs/{model}/checkpoints/{kind}/{name}/publish
tinker        service PUT /api/v1/training_runs/{model}/checkpoints/{kind}/{name}/ttl
"""
TABLE = [
    (service, Role[role.upper()], route)
    for service, role, route in (line.split(None, 2) for line in EXPECTED.split("\n") if line)
]
TABLE += [("rollout", Role.ADMIN, f"{method} {path}") for path in control.REFUSED for method in ("GET", "POST")]
TOKENS = AccessTokens({Role.VIEWER: "viewer", Role.SERVICE: "service", Role.ADMIN: "admin"})


def make_app(service: str) -> FastAPI:
    routers, roles = SERVICES[service]
    app = create_app(service, limits=Limits(), tokens=TOKENS, ready=lambda: None, roles=roles)
    for router in routers:
        app.include_router(router)
    return app


def routes_of(app: FastAPI, routers: Sequence[APIRouter]) -> set[str]:
    """Documented routes as "METHOD /path", and those that are in no documentation."""
    documented = {f"{method.upper()} {path}" for path, methods in app.openapi()["paths"].items() for method in methods}
    there = [route for routes in (app.routes, *(router.routes for router in routers)) for route in routes]
    others = {(method, route.path) for route in there for method in getattr(route, "methods", None) or ()}
    return documented | {f"{method} {path}" for method, path in others if method != "HEAD"}


@pytest.mark.parametrize("service", SERVICES)
def test_every_route_has_the_role_of_the_table(service: str) -> None:
    expected = {route: role for name, role, route in TABLE if name in ("common", service)}
    added, (routers, roles) = [*added_routes(service)], SERVICES[service]
    assert routes_of(make_app(service), [*routers, *(one.router for one in added)]) == {
        route for route in expected if not route.startswith("WS ")
    }
    declared = {**COMMON_ROLES, **docs_page.ROLES, **roles}
    assert {**declared, **{key: role for one in added for key, role in one.roles.items()}} == expected


@pytest.mark.parametrize(
    ("service", "role", "route"),
    [row for row in TABLE if row[0] != "common" and row[1] is not Role.ANYONE and not row[2].startswith("WS ")],
)
async def test_a_route_is_closed_to_all_below_its_role(service: str, role: Role, route: str) -> None:
    method, _, path = route.partition(" ")
    path = path.replace("{", "").replace("}", "")
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(make_app(service), raise_app_exceptions=False), base_url="http://x"
    ) as client:
        for given in (None, "wrong", *(known for known in Role if known > Role.ANYONE)):
            answer = await client.request(method, path, headers={"Authorization": f"Bearer {given}"} if given else {})
            refused = 401 if given in (None, "wrong") else 403 if given < role else None
            assert answer.status_code == refused if refused else answer.status_code not in (401, 403)


async def test_a_route_without_a_role_is_the_admins() -> None:
    app = create_app("demo", limits=Limits(), tokens=TOKENS, ready=lambda: None)
    app.get("/forgotten")(lambda: 1)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        statuses = [
            (await client.get("/forgotten", headers={"Authorization": f"Bearer {role}"})).status_code
            for role in ("service", "admin")
        ]
    assert statuses == [403, 200]


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("token", [None, "wrong", "viewer", "service", "admin"])
async def test_what_there_is_not_is_told_to_everybody(service: str, token: str | None) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    transport = httpx.ASGITransport(make_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
        for method in ("GET", "POST", "DELETE", "HEAD", "OPTIONS"):
            for path in ("/nowhere", "/", "/health/", "/a/b/c/d", "//health", "/docs/../health/x"):
                assert (await client.request(method, path)).status_code == 404, (method, path)
        wrong = await client.put("/health")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
        assert wrong.json()["type"] == "urn:volley:WrongMethod"
        assert (await client.options("/health")).headers["allow"] == "GET, HEAD, OPTIONS"


@pytest.mark.parametrize(("service", "role", "route"), [row for row in TABLE if row[2].startswith("GET ")])
async def test_head_is_get_without_the_content(service: str, role: Role, route: str) -> None:
    """With the role of GET, and the same answer to whoever has not got it."""
    path = route.removeprefix("GET ").replace("{", "").replace("}", "")
    app = make_app("env" if service == "common" else service)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://x"
    ) as client:
        for token in (None, *(known for known in Role if known > Role.ANYONE)):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            head, get = await client.head(path, headers=headers), await client.get(path, headers=headers)
            assert head.status_code == get.status_code
            assert head.headers.get("content-type") == get.headers.get("content-type")
            assert not head.content
            refused = (token is None and role > Role.ANYONE) or (token is not None and token < role)
            assert (get.status_code in (401, 403)) == refused


async def test_a_path_with_several_routes_tells_the_methods_of_all() -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app("env")), base_url="http://x") as client:
        assert (await client.put("/environments")).headers["allow"] == "GET, HEAD, OPTIONS, POST"
        assert (await client.get("/episodes/x/step")).headers["allow"] == "OPTIONS, POST"


def test_the_strictest_of_several_fitting_declarations_counts() -> None:
    table = RoleTable(
        {"GET /{x}/a": Role.ADMIN, "GET /b/a": Role.VIEWER, "GET /{x}/c": Role.VIEWER, "GET /d/{y}": Role.SERVICE}
    )
    assert table.role_for("GET", "/b/a") is Role.ADMIN
    assert table.role_for("GET", "/d/c") is Role.SERVICE
    assert table.role_for("POST", "/d/c") is None
    assert table.role_for("GET", "/e/c/") is None


def test_a_token_stands_for_its_role_and_no_other() -> None:
    assert [TOKENS.role_of(f"Bearer {role}".encode()) for role in ("viewer", "service", "admin")] == [
        Role.VIEWER,
        Role.SERVICE,
        Role.ADMIN,
    ]
    wrong = (
        b"",
        b"Bearer ",
        b"Bearer",
        b"admin",
        b"Beareradmin",
        b"Basic admin",
        b"Bearer admin ",
        b"Bearer adm",
        b"Bearer Admin",
        b"\xff",
    )
    assert [given for given in wrong if TOKENS.role_of(given) is not None] == []


@pytest.mark.parametrize("authorization", [b"bearer admin", b"BEARER admin", b"bEaReR  admin"])
def test_the_scheme_of_a_token_may_be_written_in_any_case(authorization: bytes) -> None:
    assert TOKENS.role_of(authorization) is Role.ADMIN
    assert "admin" not in repr(AccessTokens({Role.SERVICE: "admin"}))


def test_others_are_called_with_the_least_powerful_token_that_is_enough() -> None:
    two = AccessTokens({Role.SERVICE: "service", Role.ADMIN: "admin"})
    assert [two.of(role) for role in (Role.VIEWER, Role.SERVICE, Role.ADMIN)] == ["service", "service", "admin"]


def test_token_files(tmp_path) -> None:
    files = write_tokens(tmp_path)
    tokens = read_tokens(files)
    assert tokens is not None
    assert tokens.of(Role.ADMIN) == "admin-token-of-a-test" == token_for(files, Role.ADMIN)
    assert read_tokens(TokenFiles()) is None is token_for(TokenFiles(), Role.VIEWER)
    assert token_for(TokenFiles(service=files.service, admin=files.admin), Role.VIEWER) == "service-token-of-a-test"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("short", "16 or more"),
        ("", "16 or more"),
        ("a blank within this one", "blank"),
        ("service-token-of-a-test", "same token"),
    ],
)
def test_a_bad_token_is_refused_and_not_shown(tmp_path, text: str, reason: str) -> None:
    files = write_tokens(tmp_path)
    write_private(files.admin, text)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_tokens(files)
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660])
def test_a_secret_of_ours_that_others_have_access_to_is_refused(tmp_path, mode: int) -> None:
    path = write_private(tmp_path / "secret", "the password")
    assert read_secret(path, "key") == "the password"
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode 0{mode:o}.*chmod 600") as caught:
        read_secret(path, "key")
    assert "the password" not in str(caught.value)


def test_of_a_file_that_holds_no_single_secret_no_rights_are_taken(tmp_path) -> None:
    path = tmp_path / "passwd"
    path.write_text("root:x:0:0\ndaemon:x:1:1\n", encoding="utf-8")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="name a file that holds only the secret") as caught:
        read_secret(path, "--token-file")
    assert "chmod" not in str(caught.value)


def test_a_missing_or_binary_secret_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(tmp_path / "none", "key")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(ConfigError, match="is not text"):
        read_secret(tmp_path / "binary", "key")


@pytest.mark.parametrize("given", ["viewer", "service", "admin"])
def test_one_role_alone_is_no_configuration(given: str) -> None:
    tree = {"model": {"path": "x"}, "data": {"env": "e"}, "services": {"token_files": {given: "/a"}}}
    with pytest.raises(ConfigError, match="needs service and admin"):
        config.validate(tree)
