"""Upload of a run to a tracker, by a process in the tracker's own environment."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

from shared.errors import Unavailable
from shared.run.folder import RunFolder
from volley_dashboard import helper_process
from volley_dashboard.tracking import environments
from volley_dashboard.tracking.feed import FLUSH, Feed

_POLL_S = 1.0
_RETRY_S, _MOST_RETRY_S = 1.0, 60.0
_ATTEMPTS = 3
_CLOSE_S = 60.0
"""Time for a tracker to send what it still holds when it is closed, in seconds."""


class Reporter:
    """The process that writes to a tracker."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._to: IO[str] = process.stdin
        self._answers: IO[str] = process.stdout

    @classmethod
    @contextmanager
    def running(cls, python: Path) -> Iterator[Self]:
        """Start the process; at the end it has `_CLOSE_S` to close the tracker. Raises Unavailable."""
        program = Path(__file__).with_name("tracker_program.py")
        try:
            started = subprocess.Popen(
                [str(python), "-P", str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
            )
        except OSError as error:
            raise Unavailable(f"{python} could not be started: {error.strerror}") from error
        try:
            yield cls(started)
        finally:
            helper_process.end(started, _CLOSE_S)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message and wait until the tracker has taken it. Raises Unavailable."""
        try:
            self._to.write(json.dumps(message) + "\n")
            self._to.flush()
            answer = self._answers.readline()
        except OSError as error:
            raise Unavailable(f"the tracker's process has ended: {error.strerror}") from error
        if not answer:
            raise Unavailable(f"the tracker's process has ended with code {self._process.wait()}")
        if (detail := json.loads(answer).get("error")) is not None:
            raise Unavailable(detail)


def upload(
    folder: RunFolder, tracker: str, ended: threading.Event, say: Callable[[str], None], *, follow: bool
) -> None:
    """Send what a tracker has not got yet; with `follow`, go on until `ended` is set.

    It repeats after a failure of the tracker for as long as it follows. Otherwise raises Unavailable after `_ATTEMPTS`
    failures. Raises ConfigError if the folder is not that of a run, or its position is damaged.
    """
    failures, before = 0, ""
    while True:
        try:
            with Reporter.running(environments.python_of(tracker)) as reporter:
                feed = Feed(folder, tracker)
                reporter.send(feed.opening())
                while True:
                    is_last = not follow or ended.is_set()
                    _pass(reporter, feed, is_last=is_last)
                    if feed.unsaved is not None and str(feed.unsaved) != before:
                        before = str(feed.unsaved)
                        say(f"{tracker}: {before}; if this process ends before, lines are sent again")
                    if is_last:
                        return
                    failures = 0
                    ended.wait(_POLL_S)
        except Unavailable as error:
            failures += 1
            is_last = not follow or ended.is_set()
            if is_last and failures >= _ATTEMPTS:
                raise
            if str(error) != before:
                say(f"{tracker}: {error}; trying again")
            before = str(error)
            wait_s = min(_RETRY_S * 2 ** min(failures, 10), _MOST_RETRY_S)
            threading.Event().wait(_RETRY_S) if is_last else ended.wait(wait_s)


def _pass(reporter: Reporter, feed: Feed, *, is_last: bool) -> None:
    """Send what is new, at the end with the run's facts. Raises Unavailable."""
    for message in feed.unsent():
        reporter.send(message)
    if is_last:
        reporter.send(feed.facts())
        reporter.send(FLUSH)
