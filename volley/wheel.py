"""Run from an installed wheel: its code and its locked environments in a folder of the user's cache.

The folder, `~/.cache/volley/VERSION-DIGEST` (`VOLLEY_CACHE` replaces `~/.cache/volley`), is laid out as a clone is. The
digest is of the wheel's files: two versions, or two builds of one, never share a folder. It is copied under another
name and renamed, so that it is there completely or not at all. Its environments are those of a clone, made by
`volley.bootstrap` from the lock in the wheel, each when it is first needed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import Distribution, PackagePath, distribution
from pathlib import Path

from volley import bootstrap

DISTRIBUTION = "volley-rl"
MARK = bootstrap.WHEEL
_CODE = Path(__file__).resolve().parents[1]
_PROJECT = "volley/project/"
_OF_INSTALLERS = ("INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json")
_WITHOUT_ENVIRONMENT = ("-h", "--help", "--version", "upgrade", "completion")
_WITH_ALL = ("quickstart", "train", "up", "compare", "eval")


def is_installed() -> bool:
    """True if this code lies where pip or uv put a wheel, not in a clone or in its own folder."""
    return not (_CODE / "uv.lock").exists()


def is_managed() -> bool:
    """True if this code runs from a wheel: its environments are made when needed."""
    return is_installed() or (_CODE / MARK).exists()


@cache
def project() -> Path:
    """Return the folder of a clone, or of an installed wheel. Raises InstallError if it cannot be made."""
    return _unpacked() if is_installed() else _CODE


def folder() -> Path:
    """Return the folder with one subfolder for each wheel that was used."""
    if given := os.environ.get("VOLLEY_CACHE"):
        return Path(given).absolute()
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "volley"


def enter(argv: Sequence[str]) -> None:
    """Replace this process by the same command in the locked environment `base`, if it runs from an installed wheel.

    Help and the version need no environment. Raises InstallError.
    """
    called = argv[0] if argv else "--help"
    if not is_installed() or called in _WITHOUT_ENVIRONMENT or {"-h", "--help"} & set(argv):
        return
    venvs = os.environ.get("VOLLEY_VENVS")
    if not venvs:
        bootstrap.prepare(project(), list(bootstrap.ENVIRONMENTS) if called in _WITH_ALL else ["base"])
    python = Path(venvs or project() / ".venvs") / "base" / "bin" / "python"
    os.execve(python, [str(python), "-P", "-m", "volley", *argv], _without_this_code(os.environ))  # noqa: S606


def _without_this_code(variables: Mapping[str, str]) -> dict[str, str]:
    """Take the wheel's own place out of PYTHONPATH, which would hide the code in the cache."""
    kept = [one for one in variables.get("PYTHONPATH", "").split(os.pathsep) if one and Path(one).resolve() != _CODE]
    return {
        **{k: v for k, v in variables.items() if k != "PYTHONPATH"},
        **({"PYTHONPATH": os.pathsep.join(kept)} if kept else {}),
    }


def _unpacked() -> Path:
    about = distribution(DISTRIBUTION)
    files = {str(file): file for file in about.files or () if _belongs(file)}
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        if not name.endswith("RECORD"):
            digest.update(f"{name} {file.hash.value if file.hash else ''}\n".encode())
    target = folder() / f"{about.version}-{digest.hexdigest()[:12]}"
    try:
        if not (target / MARK).exists():
            with bootstrap.locked(target.with_name(f".{target.name}.lock")):
                if not (target / MARK).exists():
                    _copy(about, list(files), target)
    except OSError as error:
        raise bootstrap.InstallError(bootstrap.unwritten(target, error)) from error
    return target


def _belongs(file: PackagePath) -> bool:
    """True for files of the wheel, not for what its installer added."""
    return ".." not in file.parts and file.suffix != ".pyc" and file.name not in _OF_INSTALLERS


def _copy(about: Distribution, names: Sequence[str], target: Path) -> None:
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        for name in names:
            to = part / name.removeprefix(_PROJECT)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(about.locate_file(name)), to)
        (part / MARK).write_text(f"{about.version}\n", encoding="utf-8")
        part.rename(target)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        raise
