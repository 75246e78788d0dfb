"""Make a checkout, or a wheel's folder, runnable: find Python, get uv, fill `.venvs/{base,rollout,trainer}`.

Standard library only. Runs on Python >= 3.8, so it may not use newer syntax. Writes only to that folder and to the
user's uv cache.
Each environment holds a stamp of its lock, project file and interpreter; if the stamps are current, nothing is started.
Needs a package index, but no root, compiler or Docker.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import html
import io
import os
import re
import select
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import IO, Iterator, Mapping  # noqa: UP035 - runs on Python 3.8

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = {
    "base": ["--all-packages", "--extra", "libraries", "--extra", "tools", "--extra", "traces"],
    "rollout": ["--all-packages", "--extra", "traces", "--extra", "rollout"],
    "trainer": ["--all-packages", "--extra", "gguf", "--extra", "traces", "--extra", "trainer"],
}
OPTIONAL = {"docs": ["--only-group", "docs"]}  # made where named: `bootstrap.py docs`
ACCELERATED = ("rollout", "trainer")
ACCELERATORS = {"cpu": "", "gpu": "-gpu", "tpu": "-tpu"}  # suffix of the extras for each
WHEEL = ".wheel"
"""File that marks the folder of an installed wheel, where the code lies beside the lock and nothing is built."""
OLDEST_PYTHON, FIRST_UNSUPPORTED = (3, 12), (3, 14)
OLDEST_UV = (0, 9)
NETWORK_SIGNS = ("error sending request", "failed to fetch", "failed to lookup address", "dns error", "timed out")
FULL_SIGNS = ("no space left on device", "disk quota exceeded")
NETWORK_SIGNS += ("connection refused", "urlopen error", "no matching distribution")
TICK_S = 0.5
UNTRUSTED = "invalid peer certificate"
OFFLINE = "network connectivity is disabled"


class InstallError(Exception):
    """The machine lacks something; the text says what, and what to do."""


def main() -> int:
    try:
        prepare(ROOT, sys.argv[1:] or list(ENVIRONMENTS))
    except InstallError as missing:
        print(f"volley: {missing}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("volley: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


def prepare(root: Path, wanted: list[str]) -> None:
    """Bring the wanted environments up to date. Raises InstallError."""
    if not sys.platform.startswith("linux"):
        raise InstallError(f"Volley runs on Linux, not on {sys.platform}; on Windows use WSL 2, on macOS a container")
    if not outdated(root, wanted):
        return
    if not os.access(root, os.W_OK):
        raise InstallError(f"the project's folder {root} is not writable for this user")
    try:
        with locked(root / ".venvs" / ".lock"):
            install(root, outdated(root, wanted))
    except OSError as error:
        raise InstallError(unwritten(root, error)) from error


def install(root: Path, names: list[str]) -> None:
    """Make environments anew, or bring them up to date. Raises InstallError."""
    if not names:
        return
    uv = find_uv(root) or install_uv(root)
    python = find_python(root, uv) or download_python(root, uv)
    for i, name in enumerate(names, 1):
        sync(root, uv, python, name, f"{i} of {len(names)}" if len(names) > 1 else "")


def outdated(root: Path, wanted: list[str]) -> list[str]:
    """Names of the wanted environments whose stamp is not current."""
    return [name for name in wanted if not is_current(root, name)]


def is_current(root: Path, name: str) -> bool:
    venv = root / ".venvs" / name
    try:
        stamped = (venv / ".stamp").read_text(encoding="utf-8")
        return stamped == stamp(root, name) and os.access(str(venv / "bin" / "python"), os.X_OK)
    except OSError:
        return False


def stamp(root: Path, name: str) -> str:
    """Digest of an environment's inputs: lock, project file, extras, and the interpreter in its pyvenv.cfg."""
    projects = (root / "pyproject.toml", *sorted(root.glob("packages/*/pyproject.toml")))
    files = (root / "uv.lock", *projects, root / ".venvs" / name / "pyvenv.cfg")
    parts = [*(file.read_bytes() for file in files), " ".join(extras(name)).encode(), str(root).encode()]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def extras(name: str) -> list[str]:
    """Arguments of `uv sync` for an environment's extras on this machine. Raises InstallError."""
    if name not in ACCELERATED:
        return {**ENVIRONMENTS, **OPTIONAL}[name]
    *before, extra = ENVIRONMENTS[name]
    return [*before, extra + ACCELERATORS[accelerator(os.environ, Path("/dev"))]]


def accelerator(environ: Mapping[str, str], devices: Path) -> str:
    """Accelerator for JAX: VOLLEY_ACCELERATOR, else gpu if there is an NVIDIA one, else cpu. Raises InstallError."""
    given = environ.get("VOLLEY_ACCELERATOR") or ("gpu" if (devices / "nvidia0").exists() else "cpu")
    if given not in ACCELERATORS:
        raise InstallError(f"VOLLEY_ACCELERATOR is {given}, none of {', '.join(ACCELERATORS)}")
    return given


# --- Python ---------------------------------------------------------------------------------------------------------


def find_python(root: Path, uv: Path | None) -> Path | None:
    """The first interpreter of a supported version that runs."""
    for candidate in python_candidates(root, uv):
        version = python_version(candidate)
        if version is not None and OLDEST_PYTHON <= version < FIRST_UNSUPPORTED:
            return candidate
    return None


def python_candidates(root: Path, uv: Path | None) -> Iterator[Path]:
    """Candidates, cheapest first: the environments' own, this one, PATH, the usual folders, pyenv, uv's search."""
    for name in ENVIRONMENTS:
        with contextlib.suppress(OSError):
            settings = (root / ".venvs" / name / "pyvenv.cfg").read_text(encoding="utf-8")
            yield from (Path(home) / "python3" for home in re.findall(r"^home = (.+)$", settings, re.M))
    yield Path(sys.executable)
    folders = os.environ.get("PATH", "").split(os.pathsep) + ["/usr/bin", "/usr/local/bin"]
    for name in ("python3.12", "python3.13", "python3", "python"):
        for folder in folders:
            path = Path(folder) / name
            if folder and os.access(str(path), os.X_OK):
                yield path
    pyenv = Path(os.environ.get("PYENV_ROOT") or str(Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob("versions/3.1[23].*/bin/python3"))
    if uv is not None:
        wanted = ">={}.{},<{}.{}".format(*(OLDEST_PYTHON + FIRST_UNSUPPORTED))
        command = [str(uv), "python", "find", "--no-python-downloads", "--no-project", wanted]
        answer = run_quietly(command, uv_environment(root))
        if answer:
            yield Path(answer)


def python_version(path: Path) -> tuple[int, int] | None:
    """(major, minor), or None if it does not run, such as a dead pyenv shim."""
    answer = run_quietly([str(path), "-c", "import sys; print(sys.version_info[0], sys.version_info[1])"])
    numbers = (answer or "").split()
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 and all(n.isdigit() for n in numbers) else None


def download_python(root: Path, uv: Path) -> Path:
    say("no Python 3.12 or 3.13 on this machine: downloading one with uv into .tools/python")
    folder = root / ".tools" / "python"
    variables = {"UV_PYTHON_INSTALL_DIR": str(folder), "UV_PYTHON_DOWNLOADS": "manual"}
    command = [str(uv), "python", "install", "--no-bin", "3.12"]
    code, output = run_loudly(command, {**uv_environment(root), **variables})
    found = sorted(folder.glob("cpython-3.12*/bin/python3"))
    if code == 0 and found:
        return found[0]
    cause = " (no network)" if lacks_network(output) else ""
    raise InstallError(
        "Python 3.12 or 3.13 is missing: none on PATH, among pyenv's versions or in /usr/bin, and uv could not download"
        f" one{cause}; install it (e.g. `pyenv install 3.12`, `apt install python3.12`, `brew install python@3.12`) and"
        " run this again"
    )


# --- uv -------------------------------------------------------------------------------------------------------------


def find_uv(root: Path) -> Path | None:
    """uv from PATH or an earlier installation, if new enough for the lock file."""
    on_path = shutil.which("uv")
    beside = [Path(sys.executable).parent / "uv"] if (root / WHEEL).exists() else []  # a requirement of the wheel
    for path in ([Path(on_path)] if on_path else []) + beside + [own_uv(root), Path.home() / ".local" / "bin" / "uv"]:
        found = re.match(r"uv (\d+)\.(\d+)", run_quietly([str(path), "--version"]) or "")
        if found and (int(found.group(1)), int(found.group(2))) >= OLDEST_UV:
            return path
    return None


def own_uv(root: Path) -> Path:
    return root / ".tools" / "uv" / "bin" / "uv"


def install_uv(root: Path) -> Path:
    """Install uv into `.tools/uv` with pip, with a virtual environment's pip, or else directly from the index."""
    say("installing uv into .tools")
    target = own_uv(root).parents[1]
    venv, output = root / ".tools" / "uv-venv", ""
    pip = ["-m", "pip", "install", "--retries", "1", "--target", str(target), "uv"]
    for python in [sys.executable, *map(str, filter(None, [find_python(root, None)]))]:
        through_venv = [[python, "-m", "venv", "--clear", str(venv)], [str(venv / "bin" / "python"), *pip]]
        for commands in ([[python, *pip]], through_venv):  # a Python may have ensurepip and no pip
            shutil.rmtree(str(target), ignore_errors=True)
            for command in commands:
                done = subprocess.run(
                    command, stdout=PIPE, stderr=STDOUT, encoding="utf-8", errors="replace", check=False
                )
                output += done.stdout
                if done.returncode != 0:
                    break
            if find_uv(root):
                return own_uv(root)
    try:
        unpack_uv(target)
    except (OSError, KeyError, ValueError, StopIteration) as error:
        cause = last_line(output) or str(error)
        if lacks_network(output + str(error)):
            cause = "the package index cannot be reached"
        raise InstallError(
            f"uv is missing and could not be installed: {cause}; check the network (or PIP_INDEX_URL), or put uv on"
            " PATH (https://docs.astral.sh/uv), and run this again"
        ) from error
    return own_uv(root)


def locked_index() -> str:
    """The package index that uv.lock was made from."""
    found = re.search(r'registry = "([^"]+)"', (ROOT / "uv.lock").read_text(encoding="utf-8"))
    if found is None:
        raise ValueError("uv.lock names no package index")
    return found[1]


def unpack_uv(target: Path) -> None:
    """Extract uv from its newest wheel for this platform, without pip. Reads the index as HTML (PEP 503)."""
    page = (os.environ.get("PIP_INDEX_URL") or os.environ.get("UV_INDEX_URL") or locked_index()).rstrip("/") + "/uv/"
    with urllib.request.urlopen(page, timeout=60) as answer:  # the package index
        links = re.findall(r'href="([^"#]+)#sha256=([0-9a-f]{64})"[^>]*>\s*([^<\s]+)', answer.read().decode())
    wheel_tag = rf"manylinux_?[0-9_]*.*{re.escape(os.uname().machine)}.*\.whl$"
    fitting = [(url, digest, name) for url, digest, name in links if re.search(wheel_tag, name)]
    url, digest, name = max(fitting, key=lambda link: [int(n) for n in re.findall(r"\d+", link[2].split("-")[1])])
    with urllib.request.urlopen(urllib.parse.urljoin(page, html.unescape(url)), timeout=300) as answer:
        wheel = answer.read()
    if hashlib.sha256(wheel).hexdigest() != digest:
        raise ValueError(f"{name} does not have the digest {digest}")
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        member = next(name for name in archive.namelist() if name.endswith("/scripts/uv"))
        program = target / "bin" / "uv"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_bytes(archive.read(member))
    program.chmod(0o755)


def uv_environment(root: Path) -> dict[str, str]:
    """The caller's environment variables, with uv's cache in the project if the user's cannot be written."""
    others = ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "PYTHONPATH", "PYTHONHOME")
    environment = {k: v for k, v in os.environ.items() if k not in others}
    if "UV_CACHE_DIR" not in environment and not os.access(str(existing(user_cache())), os.W_OK):
        environment["UV_CACHE_DIR"] = str(root / ".cache" / "uv")
    return environment


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")) / "uv"


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing ancestor."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def sync(root: Path, uv: Path, python: Path, name: str, which: str) -> None:
    """Install one environment as locked."""
    began = time.monotonic()
    say(f"installing environment {name} (Python {'.'.join(map(str, python_version(python) or ()))}) {which}".rstrip())
    venv = root / ".venvs" / name
    environment = {**uv_environment(root), "UV_PROJECT_ENVIRONMENT": str(venv)}
    command = [str(uv), "sync", "--locked", "--no-python-downloads", "--python", str(python), "--project", str(root)]
    command += extras(name)
    installed = (root / WHEEL).exists()
    command += ["--no-dev", "--no-install-workspace"] if installed else []
    code, output = run_loudly(command, environment)
    if code != 0 and UNTRUSTED in output:
        say("uv does not trust the certificate of the package index: trying the system's certificates")
        code, output = run_loudly(command, {**environment, "UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"})
    if code != 0:
        folders = [venv, Path(environment.get("UV_CACHE_DIR") or str(user_cache()))]
        raise InstallError(f"environment {name} could not be installed: {reason(output, folders)}")
    if installed:
        add_code(root, venv)
    (venv / ".stamp").write_text(stamp(root, name), encoding="utf-8")
    found = re.search(r"Installed (\d+ packages?)", output)
    seconds = time.monotonic() - began
    say(f"environment {name} is ready after {seconds:.0f} s" + (f", {found.group(1)} installed" if found else ""))


def add_code(root: Path, venv: Path) -> None:
    """Make the code in `root` importable in an environment, and give it the command."""
    for site in venv.glob("lib/python3*/site-packages"):
        (site / "volley.pth").write_text(f"{root}\n", encoding="utf-8")
    command = venv / "bin" / "volley"
    command.write_text(f'#!/bin/sh\nexec "{venv}/bin/python" -P -m volley "$@"\n', encoding="utf-8")
    command.chmod(0o755)


# --- processes ------------------------------------------------------------------------------------------------------


def run_quietly(command: list[str], environment: dict[str, str] | None = None) -> str | None:
    """Stripped standard output of a command; None if it fails or does not run."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, encoding="utf-8", errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def run_loudly(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run a command, show its output as it comes, and return exit code and output.

    On a terminal the output is one line, redrawn with the elapsed seconds, and shown completely only on failure.
    """
    live = sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
    began, output = time.monotonic(), []
    with subprocess.Popen(command, env=environment, stdout=PIPE, stderr=STDOUT) as process:
        assert process.stdout is not None
        try:
            for line in lines_of(process.stdout):
                if line is not None:
                    output.append(line)
                if live:
                    draw(f"  {time.monotonic() - began:.0f} s  {happening(output)}")
                elif line is not None:
                    show(line)
        finally:
            if live:
                draw("")
    if live and process.returncode != 0:
        for line in output:
            show(line)
    return process.returncode, "\n".join(output)


def lines_of(stream: IO[bytes]) -> Iterator[str | None]:
    """Yield the lines of a pipe as they come, and None after every `TICK_S` seconds without output."""
    begun = b""
    while True:
        if not select.select([stream], [], [], TICK_S)[0]:
            yield None
            continue
        data = os.read(stream.fileno(), 65536)
        *whole, begun = (begun + data).split(b"\n")
        for line in whole + ([begun] if begun and not data else []):
            yield line.decode(errors="replace")
        if not data:
            return


def happening(output: list[str]) -> str:
    """Current activity of uv, from its output: its unfinished large downloads, or its last line."""
    ended = {line.split()[1] for line in output if line.startswith(" Downloaded ")}
    downloads = [line.split(None, 1)[1] for line in output if line.startswith("Downloading ")]
    going = [one for one in downloads if one.split()[0] not in ended]
    return f"downloading {', '.join(going)}" if going else last_line("\n".join(output))


def draw(text: str) -> None:
    """Redraw the current line of the terminal, cut at its width."""
    columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
    sys.stderr.write("\r\x1b[K" + text[: columns - 1])
    sys.stderr.flush()


def show(line: str) -> None:
    if not line.startswith(" + "):  # uv lists every package it installs
        print("  " + line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Exclude other installations: a second one waits, then finds everything done. Some file systems have no locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that installs into {path.parent}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def lacks_network(output: str) -> bool:
    return any(sign in output.lower() for sign in NETWORK_SIGNS)


def reason(output: str, folders: list[Path]) -> str:
    """Reason why uv failed, and what to do. Args: folders: those that uv writes into."""
    if UNTRUSTED in output:
        return "the certificate of the package index is not trusted; set SSL_CERT_FILE to its authority's certificate"
    if any(sign in output.lower() for sign in FULL_SIGNS):
        return full(min(folders, key=free_bytes))
    if OFFLINE in output.lower():
        return "uv may not use the network, and its cache lacks packages; unset UV_OFFLINE, or copy a full UV_CACHE_DIR"
    if lacks_network(output):
        return "the package index cannot be reached; check the network or UV_INDEX_URL"
    return last_line(re.split(r"(?m)^\s*hint:", output)[0]) or last_line(output)


def unwritten(folder: Path, error: OSError) -> str:
    """Say why files could not be written, and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return full(folder)
    return (
        f"{error.filename or folder} cannot be written: {error.strerror}; VOLLEY_CACHE names another folder for wheels"
    )


def full(folder: Path) -> str:
    """Say which disk is full, how much is needed, and what to do."""
    return (
        f"the disk of {folder} is full ({free_bytes(folder) / 1e9:.1f} GB free). Three environments need 4 GB, and uv's"
        " cache as much: free it, or name folders on another disk (VOLLEY_CACHE for a wheel, UV_CACHE_DIR for uv's"
        " cache), and run this again"
    )


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(str(existing(folder))).free


def last_line(output: str) -> str:
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


def say(text: str) -> None:
    print(f"volley: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
