# /// script
# requires-python = ">=3.12,<3.14"
# dependencies = ["verifiers==0.1.6.post0", "msgpack"]
# ///
"""Serve an environment of the package `verifiers` to Volley, as a separate process.

    uv run --with my-environment FILE.py my_environment --port 8300
    volley's env service: POST /environments {"name": …, "url": "http://127.0.0.1:8300", "protocol": "volley",
                                              "config": {"environment": "my_environment"}}

The package's own rollout and rubric run here, unchanged. Instead of a model's server, the package's client calls
Volley: the messages of a completion request are what the model reads next, and the model's next message is the
completion.
"""

import argparse
import asyncio
import hashlib
import hmac
import importlib
import inspect
import json
import os
import secrets
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import msgpack

IDLE_S, CALL_S, MAX_BODY, MAX_EPISODES = 900.0, 25.0, 8 * 2**20, 1024
SUPPORTED = "0.1.6.post0"
NEEDED = ("dataset", "eval_dataset", "get_dataset", "get_eval_dataset", "init_state", "init_completion", "rubric")
ROLLOUT = ("client", "model", "prompt", "completion", "answer", "state", "task", "info", "example_id")
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"


class Refused(Exception):
    """Error response to the client. `kind` names a class of Volley's errors."""

    def __init__(self, status, kind, detail):
        super().__init__(detail)
        self.status, self.kind = status, kind


class Episode:
    """One rollout of the package, suspended while it waits for a completion."""

    def __init__(self, environment, row):
        self.environment, self.row = environment, row
        self.asked, self.reply = asyncio.Queue(), None
        self.read, self.rollout, self.answers, self.used = [], None, {}, time.monotonic()
        self.lock = asyncio.Lock()

    async def open(self):
        """Start the rollout; return the messages that the model answers first."""
        env, row = self.environment, self.row
        state = await env.init_state(completion=await env.init_completion(), **row)
        create = SimpleNamespace(create=self._completion)
        client = SimpleNamespace(chat=SimpleNamespace(completions=create), base_url="volley")
        call = env.rollout(client, "volley", row["prompt"], state["completion"], row["answer"], state, row["task"],
                           row["info"], row["example_id"])  # fmt: skip
        self.rollout = asyncio.ensure_future(call)
        if not await self._waits():
            raise Refused(500, "VolleyError", "the rollout ended before it asked the model anything")
        return [plain(message) for message in self.read]

    async def step(self, message):
        n_read = len(self.read)
        self.reply.set_result(completion(message, self.row["info"].get("oai_tools")))
        if await self._waits():
            news = [plain(one) for one in self.read[n_read + 1 :]]  # without the model's own message
            return {"messages": news, "reward": 0.0, "terminated": False, "truncated": False, "info": info(0.0, {})}
        message, state = self.rollout.result()
        row = {key: self.row[key] for key in ("prompt", "answer", "task", "info", "example_id")}
        rubric = self.environment.rubric
        score = await rubric.score_rollout(completion=message, state=state, **row)
        weights = dict(zip(rubric.get_reward_func_names(), rubric.get_reward_weights(), strict=False))
        parts = {name: float(value) * weights.get(name, 0.0) for name, value in score.metrics.items()}
        parts = {name: value for name, value in parts.items() if weights.get(name)}
        if abs(sum(parts.values()) - score.reward) > 1e-9:  # a rubric with another way of adding up
            parts = {"reward": float(score.reward)}
        ended = {"messages": [], "reward": float(score.reward), "terminated": True, "truncated": False}
        return {**ended, "info": {**info(score.reward, parts), "metrics": dict(score.metrics)}}

    async def close(self):
        if self.rollout is not None:
            self.rollout.cancel()

    async def _completion(self, messages, **_):
        self.reply = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(list(messages))
        return await self.reply

    async def _waits(self):
        """Wait until the rollout asks the model again (True), or is over (False). Raises what the rollout raises."""
        asks = asyncio.ensure_future(self.asked.get())
        await asyncio.wait({asks, self.rollout}, return_when=asyncio.FIRST_COMPLETED, timeout=CALL_S)
        if asks.done():
            self.read = asks.result()
            return True
        asks.cancel()
        if not self.rollout.done():
            self.rollout.cancel()
            raise Refused(503, "Unavailable", f"the environment took longer than {CALL_S:g} s")
        self.rollout.result()
        return False


class Server:
    """Server of requests from Volley's env service, for one environment."""

    def __init__(self, name, environment):
        self.name, self.environment = name, environment
        self.splits = {"train": environment.get_dataset()} if environment.dataset is not None else {}
        if environment.eval_dataset is not None:
            self.splits["eval"] = environment.get_eval_dataset()
        self.episodes, self.by_request = {}, {}

    async def answer(self, method, path, body):
        """Answer a request with (status, body). Raises Refused."""
        parts = path.strip("/").split("/")
        if parts[0] == "episodes":
            return await self._episodes(method, parts[1:], body)
        if parts in (["health"], ["ready"]):
            return 200, {"status": "ok"}
        if parts[0] != self.name or len(parts) != 2:
            raise Refused(404, "NotFound", f"there is no environment {parts[0][:80]!r}; this is {self.name}")
        if parts[1] == "splits":
            return 200, list(self.splits)
        if parts[1] == "num_tasks":
            return 200, {"num_tasks": len(self._split(body))}
        if parts[1] == "task":
            return 200, {"task": self._task(body)[0]}
        raise Refused(404, "NotFound", f"{self.name} has no {parts[1][:80]}")

    async def _episodes(self, method, parts, body):
        if not parts and method == "POST":
            return 201, await self._created(body)
        if len(parts) == 1 and method == "DELETE":
            if (episode := self.episodes.pop(parts[0], None)) is not None:
                await episode.close()
            return 204, None
        episode = self.episodes.get(parts[0]) if len(parts) == 2 and parts[1] == "step" else None
        if episode is None:
            raise Refused(404, "NotFound", "there is no such episode; it ended, or was idle for too long")
        episode.used = time.monotonic()
        async with episode.lock:
            if (request := str(body.get("request_id"))) not in episode.answers:
                if episode.rollout.done():
                    raise Refused(409, "Conflict", "the episode is over")
                episode.answers[request] = await episode.step(body["message"])
            return 200, episode.answers[request]

    async def _created(self, body):
        request = str(body.get("request_id"))
        if (known := self.by_request.get(request)) and known["episode_id"] in self.episodes:
            return known
        await self._forget_idle()
        task, row = self._task(body)
        episode = Episode(self.environment, row)
        opening = await episode.open()
        episode_id = secrets.token_hex(8)
        self.episodes[episode_id] = episode
        tools = list(row["info"].get("oai_tools") or ())
        made = {"episode_id": episode_id, "task": task, "messages": opening, "tools": tools, "ttl_s": IDLE_S}
        self.by_request[request] = made
        return made

    async def _forget_idle(self):
        old = [one for one, episode in self.episodes.items() if time.monotonic() - episode.used > IDLE_S]
        for one in old:
            await self.episodes.pop(one).close()
        self.by_request = {key: made for key, made in self.by_request.items() if made["episode_id"] in self.episodes}
        if len(self.episodes) >= MAX_EPISODES:
            raise Refused(429, "RateLimited", f"{MAX_EPISODES} episodes are open")

    def _split(self, body):
        if (split := body.get("split")) not in self.splits:
            raise Refused(
                404, "NotFound", f"there is no split {str(split)[:80]!r}; there are: {', '.join(self.splits)}"
            )
        return self.splits[split]

    def _task(self, body):
        """Readable id of a task, and its row as `generate` prepares it."""
        rows, index = self._split(body), body.get("index")
        if type(index) is not int or not 0 <= index < len(rows):
            raise Refused(404, "NotFound", f"{body['split']} has no task {index}; indices run to {len(rows) - 1}")
        row = rows[index]
        given = row.get("info") or {}
        given = json.loads(given) if isinstance(given, str) else dict(given)
        if (tools := getattr(self.environment, "oai_tools", None)) and "oai_tools" not in given:
            given["oai_tools"] = tools
        prompt = [plain(message) for message in row["prompt"]]
        digest = hashlib.blake2b(json.dumps(prompt).encode(), digest_size=6).hexdigest()
        kept = {"prompt": prompt, "answer": row.get("answer") or "", "task": row.get("task") or "default"}
        return f"{body['split']}/{index}@{digest}", {**kept, "info": given, "example_id": row.get("example_id", index)}


def plain(message):
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part["text"] for part in content if part.get("type") == "text")
    return {"role": message["role"], "content": content}


def completion(message, tools):
    """Make the completion of a model's server. Tool calls may be in the text, as Hermes models write them."""
    from openai.types.chat import ChatCompletion

    text, calls = message.get("content") or "", list(message.get("tool_calls") or ())
    for part in text.split(TOOL_CALL)[1:] if tools and not calls else ():
        found, closing, _ = part.partition(END_TOOL_CALL)
        if not closing:
            continue
        try:
            call = json.loads(found)
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments") or {})}
        except (ValueError, KeyError, TypeError):
            continue
        calls.append({"id": secrets.token_hex(8), "type": "function", "function": function})
    message = {"role": "assistant", "content": text, "tool_calls": calls or None}
    choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "message": message}
    whole = {"id": secrets.token_hex(8), "object": "chat.completion", "created": int(time.time()), "model": "volley"}
    return ChatCompletion.model_validate({**whole, "choices": [choice]})


def info(reward, parts):
    return {"reward_components": parts, "success": float(reward) >= 1.0, "error": None}


class Handler(BaseHTTPRequestHandler):
    server_version, protocol_version = "VerifiersBridge", "HTTP/1.1"
    bridge, loop, token = None, None, None

    def log_message(self, *_):
        pass

    def _serve(self):
        status, answer = 500, None
        try:
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            length = int(self.headers.get("Content-Length") or 0)
            if not 0 <= length <= MAX_BODY:
                self.close_connection = True
                raise Refused(413, "TooLarge", f"the body has {length} bytes; the limit is {MAX_BODY}")
            raw = self.rfile.read(length)
            if self.token is not None and not hmac.compare_digest(given.encode(), self.token):
                raise Refused(401, "Unauthorized", "the token is missing or wrong")
            packed = "msgpack" in self.headers.get("Content-Type", "")
            body = (msgpack.unpackb(raw) if packed else json.loads(raw)) if raw else {}
            if not isinstance(body, dict):
                raise Refused(422, "InputError", "the body is not an object")
            call = self.bridge.answer(self.command, self.path.partition("?")[0], body)
            status, answer = asyncio.run_coroutine_threadsafe(call, self.loop).result(2 * CALL_S)
        except Refused as error:
            status, answer = error.status, problem(error.status, error.kind, str(error))
        except (ValueError, KeyError) as error:
            status, answer = 422, problem(422, "InputError", f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - an exception of the environment fails that episode only
            answer = problem(500, "VolleyError", f"{type(error).__name__}: {error}"[:1500])
        data = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if status < 400 else "application/problem+json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _serve


def problem(status, kind, detail):
    return {"type": f"urn:volley:{kind}", "title": kind, "status": status, "detail": detail}


def loaded(module, arguments):
    """Load the environment of a module. Exits with a message if it cannot be served."""
    try:
        version = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        refuse("the package verifiers is not installed")
    try:
        environment = importlib.import_module(module.replace("-", "_")).load_environment(**json.loads(arguments))
    except ValueError as error:
        refuse(f"--arguments, or {module}: {type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - the module may raise anything
        refuse(f"{module} cannot be loaded with verifiers {version}: {type(error).__name__}: {error}")
    missing = [name for name in NEEDED if not hasattr(environment, name)]
    if missing:
        refuse(f"verifiers {version}: the environment of {module} has no {', '.join(missing)}")
    takes = tuple(inspect.signature(environment.rollout).parameters)[: len(ROLLOUT)]
    if takes != ROLLOUT:
        refuse(f"verifiers {version}: rollout takes ({', '.join(takes)}), not ({', '.join(ROLLOUT)})")
    return environment


def refuse(why):
    print(
        f"{why}\nThis server works with verifiers {SUPPORTED}: uv pip install verifiers=={SUPPORTED}\n"
        "For verifiers 0.4 (verifiers.v1) use the worker of docs/bridges.md",
        file=sys.stderr,
    )
    raise SystemExit(2)


def main():
    sys.path[0] = os.getcwd()  # import modules from the working folder, not from this file's folder
    parser = argparse.ArgumentParser(description="Serves an environment of `verifiers` to Volley.")
    parser.add_argument("module", help="module of the environment, with a function load_environment")
    parser.add_argument("--arguments", default="{}", help="arguments of load_environment, as JSON")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--token-file", type=Path, help="file with the token that Volley must send")
    given = parser.parse_args()
    environment = loaded(given.module, given.arguments)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    Handler.bridge, Handler.loop = Server(given.module, environment), loop
    Handler.token = given.token_file.read_text(encoding="utf-8").strip().encode() if given.token_file else None
    served = ThreadingHTTPServer((given.host, given.port), Handler)
    sizes = {split: len(rows) for split, rows in Handler.bridge.splits.items()}
    print(f"{given.module} {sizes} at http://{given.host}:{served.server_port}", flush=True)
    served.serve_forever()


if __name__ == "__main__":
    main()
