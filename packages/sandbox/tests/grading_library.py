"""Library of a grading process in tests: functions that misbehave as a model's text might make a careless one do."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from shared.errors import InputError

graded: list[str] = []


def prepare(*_arguments: Any) -> None:
    """Nothing is loaded late."""


def echo(*arguments: Any) -> list[Any]:
    return list(arguments)


def refuse(text: str) -> None:
    raise InputError(f"{text} is not right", "write another")


def fail() -> None:
    raise KeyError("a defect")


def environment() -> dict[str, str]:
    return dict(os.environ)


def hang() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def remember(text: str) -> int:
    """How many answers this process has seen."""
    graded.append(text)
    return len(graded)


def attack(path: str, name: str) -> str:
    """Try the attack `name`; return the name of the error that refused it, or 'done'."""
    try:
        getattr(Attacks, name)(path)
    except OSError as error:
        return type(error).__name__
    return "done"


class Attacks:
    """By name; each would be noticed outside if it succeeded."""

    @staticmethod
    def write(path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write("pwned")

    @staticmethod
    def remove(path: str) -> None:
        os.unlink(path)

    @staticmethod
    def connect(path: str) -> None:
        socket.create_connection(("127.0.0.1", 9), 1)

    @staticmethod
    def listen(path: str) -> None:
        socket.socket(socket.AF_UNIX).bind(path)

    @staticmethod
    def fork(path: str) -> None:
        if os.fork() == 0:
            os._exit(0)

    @staticmethod
    def run(path: str) -> None:
        subprocess.run(["/bin/sh", "-c", f"echo pwned > {path}"], check=False)

    @staticmethod
    def kill(path: str) -> None:
        os.kill(os.getppid(), signal.SIGKILL)

    @staticmethod
    def loop(path: str) -> None:
        while True:
            pass

    @staticmethod
    def sleepless(path: str) -> None:
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
        for _ in range(4):
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=Attacks.loop, args=(path,), daemon=True).start()
        Attacks.loop(path)

    @staticmethod
    def memory(path: str) -> None:
        held = []
        while True:
            held.append(bytearray(2**24))

    @staticmethod
    def exit(path: str) -> None:
        sys.exit("bye")

    @staticmethod
    def vanish(path: str) -> None:
        os._exit(0)

    @staticmethod
    def recursion(path: str) -> None:
        Attacks.recursion(path)

    @staticmethod
    def forge(path: str) -> None:
        for descriptor in range(4, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, b'{"value": "forged"}\n')
