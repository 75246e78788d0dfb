"""Ask a judge until its answer can be used, a bounded number of times.

An answer that cannot be read is asked for again as another question, so that a restart repeats the same sequence from
stored answers. Volley's own servers say which weights answered: a judge whose weights change is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable
from typing import Any

import orjson

from shared.errors import Busy, RewardFailed, RewardRefused
from shared.process import telemetry
from shared.types import WeightVersion
from volley_judges.prompts import SYSTEM, UnreadableError
from volley_judges.section import GroupJudge
from volley_sandbox.rewards.judge import MAX_TOKENS, completion
from volley_sandbox.rewards.servers import Answer, AskedServer, Question
from volley_sandbox.rewards.store import RewardStore

_BACKOFF_S, _BACKOFF_CAP_S = 0.2, 5.0
_MOST_TOLD = 200
_log = telemetry.Log("judges")


class Asking:
    """Questions of one judge about one group.

    Args:
        attempts: most times that one question is asked.
    """

    def __init__(self, name: str, judge: GroupJudge, server: AskedServer, store: RewardStore, attempts: int) -> None:
        self._name, self._judge, self._server, self._store, self._attempts = name, judge, server, store, attempts
        self._answers: dict[bytes, str] = {}
        self._fingerprints: set[str] = set()

    async def ask[T](self, prompt: str, read: Callable[[str], T]) -> T:
        """Return what `read` makes of the answer; it raises UnreadableError for an answer that must not be used.

        Raises RewardFailed, RewardRefused, StorageUnavailable.
        """
        for attempt in range(self._attempts):
            try:
                return await self._asked(prompt, read, attempt)
            except RewardFailed as error:
                if attempt + 1 == self._attempts:
                    raise
                _log.warning("a judge gave no usable answer", judge=self._name, attempt=attempt, error=str(error))
            await asyncio.sleep(min(_BACKOFF_CAP_S, _BACKOFF_S * 2**attempt) * random.uniform(0.5, 1.0))
        raise AssertionError("attempts must be positive")

    async def _asked[T](self, prompt: str, read: Callable[[str], T], attempt: int) -> T:
        question = self._question(prompt, attempt)
        key = question.key(self._server.name)
        stored = orjson.loads(await self._answered(question))
        text = str(stored["text"])
        self._answers[key] = text
        await self._check_weights(stored["fingerprint"])
        try:
            return read(text)
        except UnreadableError as error:
            raise RewardFailed(
                f"the judge {self._name} gave no verdict: {error}: …{text[-_MOST_TOLD:]}",
                "check that its model follows the form that is asked for",
            ) from error

    async def _answered(self, question: Question) -> str:
        while True:
            try:
                return await self._server.ask(question)
            except Busy as error:
                await asyncio.sleep(error.retry_after_s)

    def _question(self, prompt: str, attempt: int) -> Question:
        judge = self._judge
        body: dict[str, Any] = {
            "model": judge.model,
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            **judge.request,
        }
        body = {key: value for key, value in body.items() if value is not None}
        version = f"{judge.version}#{attempt}" if attempt else judge.version
        return Question("/chat/completions", body, _with_fingerprint, version)

    async def _check_weights(self, fingerprint: str) -> None:
        """Raise RewardRefused if a Volley server answered with other weights than its first answer of this run."""
        self._fingerprints |= {fingerprint} - {""}
        if WeightVersion.of_name(fingerprint) is None:
            return
        name = self._server.name
        key = hashlib.blake2b(f"weights of {name}".encode(), digest_size=32).digest()
        first = await asyncio.to_thread(self._store.keep, key, name, fingerprint, 0)
        if first != fingerprint:
            raise RewardRefused(
                f"the judge {self._name} answered with weights {first} before, and with {fingerprint} now",
                "a judge must not change during a run: serve a fixed model with volley serve",
            )

    def model(self) -> str:
        """Return the judge's model, with the fingerprints that its server gave."""
        return "@".join([self._judge.model, *([",".join(sorted(self._fingerprints))] if self._fingerprints else [])])

    def digests(self) -> tuple[str, str]:
        """Return digests of all questions and of all answers, unusable ones included."""
        keys = sorted(self._answers)
        questions, answers = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
        for key in keys:
            questions.update(key)
            answers.update(hashlib.blake2b(self._answers[key].encode()).digest())
        return questions.hexdigest(), answers.hexdigest()


def _with_fingerprint(answer: Any) -> Answer:
    """Read a chat completion. Raises ValueError."""
    made = completion(answer)
    given = answer.get("system_fingerprint")
    fingerprint = given[:_MOST_TOLD] if isinstance(given, str) else ""
    text = made.judgement.encode("utf-8", "replace").decode()
    return made._replace(judgement=orjson.dumps({"text": text, "fingerprint": fingerprint}).decode())
