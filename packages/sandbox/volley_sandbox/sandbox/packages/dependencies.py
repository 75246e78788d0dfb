"""Dependencies from a file's PEP 723 block, installed for its sandboxes.

Invariants: no code of a package runs here: only wheels are installed, none is built or imported. A folder is complete
before it is renamed into place.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import signal
import stat
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import InputError, TooLarge, Unavailable
from volley_python.installing.uv import find_uv
from volley_sandbox.sandbox.packages.toml import read_toml
from volley_sandbox.sandbox.process import workspace

PYPI = "https://pypi.org/simple"
LOOK_S = 0.25
MAX_SHOWN = 1500
MAX_REQUIREMENT = 300
_OPENING, _CLOSING = re.compile(r"# /// ([a-zA-Z0-9-]+)"), "# ///"
_PASSED_ON = ("SSL_CERT_FILE", "SSL_CERT_DIR", "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY", "https_proxy",
              "http_proxy", "all_proxy", "no_proxy")  # fmt: skip
_NETWORK = ("error sending request", "failed to fetch", "dns error", "connection refused", "timed out", "connect error")


@dataclass(frozen=True, slots=True)
class ScriptMetadata:
    """A PEP 723 block: requirements in PEP 508 format, and the script's Python versions."""

    dependencies: tuple[str, ...] = ()
    requires_python: str = ""


@dataclass(frozen=True, slots=True)
class InstallLimits:
    """Limits of one installation: seconds, MiB and files on disk, number of requirements."""

    timeout_s: float = 180.0
    disk_mb: int = 1024
    files: int = 50_000
    requirements: int = 64


def read_metadata(source: str) -> ScriptMetadata:
    """Read the block of a file, empty if it has none. Raises InputError if it violates PEP 723."""
    blocks = [lines for kind, lines in _blocks(source) if kind == "script"]
    if not blocks:
        return ScriptMetadata()
    if len(blocks) > 1:
        raise InputError("the file has more than one '# /// script' block", "keep one (PEP 723)")
    text = "\n".join(line[2:] if line.startswith("# ") else line[1:] for line in blocks[0])
    found = read_toml(text, "the '# /// script' block is not TOML")
    dependencies, requires = found.get("dependencies", []), found.get("requires-python", "")
    if not isinstance(dependencies, list) or not all(isinstance(one, str) for one in dependencies):
        raise InputError("dependencies in the '# /// script' block must be a list of texts")
    if not isinstance(requires, str):
        raise InputError("requires-python in the '# /// script' block must be a text")
    return ScriptMetadata(tuple(dependencies), requires)


def _blocks(source: str) -> Iterator[tuple[str, list[str]]]:
    """Kind and lines of each block of PEP 723, also with Windows line ends.

    The regular expression in PEP 723 takes quadratic time.
    """
    lines = source.replace("\r\n", "\n").split("\n")
    at = 0
    while at < len(lines):
        opening, at = _OPENING.fullmatch(lines[at]), at + 1
        if opening is None:
            continue
        end = closing = at
        while end < len(lines) and (lines[end] == "#" or lines[end].startswith("# ")):
            if lines[end] == _CLOSING:
                closing = end
            end += 1
        if closing > at:
            yield opening[1], lines[at:closing]
        at = closing + 1 if closing > at else end  # if no line closes this block, none closes a later one in it


def check_python(requires: str, version: tuple[int, int, int] = sys.version_info[:3]) -> None:
    """Raises InputError if a script does not support this version of Python."""
    from packaging.specifiers import SpecifierSet

    try:
        fits = SpecifierSet(requires).contains(".".join(map(str, version)))
    except ValueError:  # InvalidSpecifier, or a number with too many digits
        raise InputError(f"requires-python = {requires[:80]!r} is not a version specifier") from None
    if not fits:
        raise InputError(
            f"the file requires Python {requires[:80]}; sandboxes have {version[0]}.{version[1]}.{version[2]}"
        )


def check_requirement(text: str) -> str:
    """Normalize a requirement of name, extras, versions and marker. Raises InputError for any other form."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    if len(text) > MAX_REQUIREMENT:
        raise InputError(f"a requirement has {len(text)} characters", f"the limit is {MAX_REQUIREMENT}")
    try:
        parsed = Requirement(text)
    except InvalidRequirement:
        raise InputError(
            f"{text!r} is not a requirement",
            "write a name and versions, like numpy>=2, without options or paths",
        ) from None
    if parsed.url is not None:
        raise InputError(
            f"{text!r} names an address", "write a name and versions; packages come from the service's index only"
        )
    extras = f"[{','.join(sorted(parsed.extras))}]" if parsed.extras else ""
    marker = f" ; {parsed.marker}" if parsed.marker else ""
    return f"{canonicalize_name(parsed.name)}{extras}{parsed.specifier}{marker}"


class DependencyStore:
    """Installed dependencies, by their digest.

    Args:
        folder: storage folder, which nothing else writes to.
        index: the only package index, PEP 503.
        limits: limits of one installation.
        python: interpreter for which they are installed; None is the service's own.
    """

    def __init__(
        self, folder: Path, index: str = PYPI, limits: InstallLimits | None = None, python: Path | None = None
    ) -> None:
        self._folder, self._index = folder, index
        self._limits = limits or InstallLimits()
        self._python = python or Path(sys.executable).resolve()
        self._turn = asyncio.Lock()

    async def install(self, requirements: Sequence[str]) -> tuple[Path, ...]:
        """Install requirements, one set at a time, and return the folders to import from.

        Raises InputError (a requirement cannot be installed, with the reason), TooLarge, Unavailable (no index, no uv,
        or a timeout).
        """
        if len(requirements) > self._limits.requirements:
            raise InputError(f"there are {len(requirements)} requirements", f"the limit is {self._limits.requirements}")
        wanted = sorted({check_requirement(text) for text in requirements})
        if not wanted:
            return ()
        place = self._folder / self._digest(wanted)
        async with self._turn:
            if not await asyncio.to_thread(place.is_dir):
                await self._install(wanted, place)
        return (place,)

    def _digest(self, wanted: Sequence[str]) -> str:
        text = "\n".join([str(self._python), self._index, *wanted])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    async def _install(self, wanted: Sequence[str], place: Path) -> None:
        work = self._folder / f".new-{uuid.uuid4().hex}"
        await asyncio.to_thread(work.mkdir, parents=True)
        try:
            await self._run_uv(wanted, work)
            await asyncio.to_thread(_finish, work / "packages")
            used, files = await asyncio.to_thread(workspace.usage, work / "packages", self._limits.files)
            if used > self._limits.disk_mb * 2**20 or files >= self._limits.files:
                raise self._too_large()
            await asyncio.to_thread((work / "packages").rename, place)
        finally:
            await asyncio.shield(asyncio.to_thread(workspace.remove, work))

    async def _run_uv(self, wanted: Sequence[str], work: Path) -> None:
        uv = find_uv()
        options = ["--only-binary", ":all:", "--no-config", "--no-sources", "--no-python-downloads"]
        options += ["--default-index", self._index, "--keyring-provider", "disabled", "--link-mode", "copy"]
        options += ["--compile-bytecode"]  # each episode imports them in a new process that cannot write the bytecode
        options += [
            "--python",
            str(self._python),
            "--target",
            str(work / "packages"),
            "--cache-dir",
            str(work / "cache"),
        ]
        kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        with (work / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                str(uv),
                *("pip", "install", "--quiet", "--color", "never", *options, "--", *wanted),
                env={"PATH": os.defpath, "HOME": str(work), **kept},
                cwd=work,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await self._wait_for(process, work)
        except TimeoutError:
            raise Unavailable(
                f"installing {', '.join(wanted)} took longer than {self._limits.timeout_s:g} s",
                "try again, or declare fewer dependencies",
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode != 0:
            raise _refusal(wanted, await asyncio.to_thread(_tail, work / "log"))

    async def _wait_for(self, process: Any, work: Path) -> None:
        """Wait until the process has ended. Raises TooLarge."""
        most = 2 * self._limits.files  # the packages and uv's cache of them
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await process.wait()
                    return
            except TimeoutError:
                used, files = await asyncio.to_thread(workspace.usage, work, most)
            if used > 2 * self._limits.disk_mb * 2**20 or files >= most:
                raise self._too_large()

    def _too_large(self) -> TooLarge:
        return TooLarge(
            f"the dependencies take more than {self._limits.disk_mb} MiB or {self._limits.files} files",
            "declare smaller dependencies, or raise the service's limit",
        )


def _finish(folder: Path) -> None:
    """Make everything readable, because sandboxes may run as another user. Removes programs and links."""
    folder.mkdir(exist_ok=True)
    if (folder / "bin").is_dir():
        shutil.rmtree(folder / "bin")
    for at, folders, files in os.walk(folder):
        os.chmod(at, 0o755)  # noqa: S103
        for name in [*folders, *files]:
            path = Path(at, name)
            if path.is_symlink():
                path.unlink()
            elif stat.S_ISREG(path.stat().st_mode):
                path.chmod(0o644)


def _refusal(wanted: Sequence[str], output: str) -> InputError | Unavailable:
    if any(sign in output.lower() for sign in _NETWORK):
        return Unavailable(f"the package index cannot be reached: {output}", "try again later", 30.0)
    return InputError(
        f"{', '.join(wanted)[:MAX_SHOWN]} cannot be installed: {output}",
        "dependencies must have wheels for this Python and platform in the service's index; none are built",
    )


def _tail(path: Path) -> str:
    return path.read_text("utf-8", "replace")[-MAX_SHOWN:].strip()
