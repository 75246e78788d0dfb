"""The page /docs: whole without any other host, with a scheme to authorize by, roles as they are, and examples that
routes take.
"""

import re
from pathlib import Path

import httpx
import pytest

from shared.services_schema import Limits
from shared.web.access import Role
from shared.web.http import COMMON_ROLES, create_app
from shared.web.routes import added_routes
from tests.fuzz.stack import OPENERS, RUN, TOKEN, open_stack, run_config
from tests.shared.test_access import SERVICES, TOKENS, make_app
from volley_dashboard import docs_page

TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".png": "image/png"}


def client_of(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")


async def test_a_browser_gets_the_whole_page_without_a_token_and_from_here():
    async with client_of(make_app("env")) as client:
        page = await client.get("/docs")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "script-src 'self';" in page.headers["content-security-policy"]
        assert not re.search(r"<script(?! src)|\son\w+=|https?://|//[a-z]", page.text), "inline code, or another host"
        named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert len(named) == 4
        for path in named:
            assert path.startswith("docs/"), "relative, for a page below a prefix"
            asset = await client.get(f"/{path}")
            assert (asset.status_code, asset.headers["content-type"]) == (200, TYPES[Path(path).suffix])
            assert asset.headers["x-content-type-options"] == "nosniff"
            assert len(asset.content) > 500
        assert (await client.get("/openapi.json")).status_code == 200
        assert (await client.get("/docs/redoc.standalone.js")).status_code in (401, 404)


def test_nothing_of_ours_loads_from_another_host():
    folder = Path(docs_page.__file__).parent
    for path in (folder / "page.html", folder / "start.js"):
        assert "://" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("service", SERVICES)
def test_every_operation_says_which_role_it_asks_for(service):
    document = make_app(service).openapi()
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    added = {key: role for one in added_routes(service) for key, role in one.roles.items()}
    roles = {**COMMON_ROLES, **docs_page.ROLES, **SERVICES[service][1], **added}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            role = roles[f"{method.upper()} {path}"]
            assert operation["x-role"] == str(role)
            assert operation.get("security", []) == ([] if role is Role.ANYONE else [{"bearer": []}])
            assert operation["description"].endswith(f"Role: **{role}**")


def test_a_service_without_tokens_asks_for_none():
    document = create_app("demo", limits=Limits(), tokens=None, ready=lambda: None).openapi()
    assert "securitySchemes" not in document.get("components", {})
    assert all(
        "security" not in operation for operations in document["paths"].values() for operation in operations.values()
    )
    assert TOKENS is not None


def example_of(parameter):
    return parameter["example"] if "example" in parameter else next(iter(parameter["examples"].values()))["value"]


async def test_every_body_has_an_example_that_its_route_takes(tmp_path, redis_server):
    """Sent as it stands; a route may find that there is no such checkpoint or episode, not that the
    request is wrong.
    """
    async with (
        open_stack(run_config(tmp_path, redis_server.url)) as urls,
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
    ):
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        for service in OPENERS:
            document = (await client.get(f"{urls[service]}/openapi.json")).json()
            known = {"name": RUN, "episode_id": "1", "id": "1"}
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    what = f"{method.upper()} {path} of {service}"
                    given = {
                        p["name"]: example_of(p) for p in operation.get("parameters", []) if p["name"] not in known
                    }
                    query = {p["name"]: given[p["name"]] for p in operation.get("parameters", []) if p["in"] == "query"}
                    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
                    if body is None and not query:
                        continue
                    url = urls[service] + path.format(
                        **known, **{name: value for name, value in given.items() if name not in query}
                    )
                    answer = await client.request(method, url, params=query, json=body and body["example"])
                    kind = answer.json().get("type", "") if answer.status_code >= 400 else ""
                    if service == "orchestrator" and answer.status_code == 401:
                        continue  # the key of a session is needed
                    assert kind in ("", "urn:volley:NotFound", "urn:volley:WeightsError", "urn:volley:Conflict"), (
                        what,
                        answer.text,
                    )
                    if path == "/pause_generation":
                        await client.post(urls[service] + "/continue_generation")
                    told = answer.json() if answer.headers.get("content-type", "").endswith("json") else {}
                    if "episode_id" in told:
                        known["episode_id"] = told["episode_id"]
