"""An environment for Harbor's trials without containers: a folder, in which commands run as processes of the machine.

Runs in Harbor's Python, in the worker of the env service. It fails as containers do: an image `absent` cannot be
pulled, and nothing answers once the file `gone` exists in the working folder.
"""

import asyncio
import os
import re
import shutil
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

PLACES = re.compile(r"(?<![\w.-])/(app|tests|logs|solution)\b")
STARTING: set[int] = set()


def note(line: str) -> None:
    with Path(os.environ["LOCAL_LOG"]).open("a", encoding="utf-8") as log:
        log.write(line)


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


class LocalEnvironment(BaseEnvironment):
    @staticmethod
    def type() -> str:
        return "local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        STARTING.add(id(self))
        note(f"{len(STARTING)}\n")
        await asyncio.sleep(0.05)
        STARTING.discard(id(self))
        dockerfile = (self.environment_dir / "Dockerfile").read_text("utf-8")
        if "FROM absent" in dockerfile:
            raise RuntimeError("pull access denied for absent, repository does not exist")
        self.root = Path(tempfile.mkdtemp(prefix="volley-local-"))
        for name in ("app", "logs/agent", "logs/verifier", "logs/artifacts"):
            (self.root / name).mkdir(parents=True)
        shutil.copytree(self.environment_dir, self.root / "app" / "data")

    async def stop(self, delete: bool) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root, ignore_errors=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None) -> ExecResult:
        if not hasattr(self, "root") or self._is_gone():
            return ExecResult(stdout="Cannot connect to the engine", return_code=1)
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", self._moved(command)),
            cwd=self.root / "app",
            env={"PATH": os.environ["PATH"], **(self._merge_env(env) or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(timeout_sec):
            output, _ = await process.communicate()
        return ExecResult(stdout=output.decode(errors="replace"), return_code=process.returncode or 0)

    async def upload_file(self, source_path, target_path) -> None:
        self._put(Path(source_path), self._place(target_path))

    async def upload_dir(self, source_dir, target_dir) -> None:
        for path in files_of(Path(source_dir)):
            self._put(path, self._place(target_dir) / path.relative_to(source_dir))

    async def download_file(self, source_path, target_path) -> None:
        shutil.copy(self._place(source_path), target_path)

    async def download_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(self._place(source_dir), target_dir, dirs_exist_ok=True)

    def _is_gone(self) -> bool:
        return (self.root / "app" / "gone").exists()

    def _place(self, path) -> Path:
        return Path(self._moved(str(path)))

    def _put(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self._moved(source.read_text("utf-8")), "utf-8")
        target.chmod(0o755)

    def _moved(self, text: str) -> str:
        return PLACES.sub(lambda found: f"{self.root}{found[0]}", text)
