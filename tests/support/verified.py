"""Projects whose sessions are traced and verified with the stand-in for a GPU."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

from tests.support.libraries import QUICKSTART_LIBRARY, SUPPORT
from tests.support.sessions import Project, import_path

STANDIN = SUPPORT / "standin"

HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
import pytest
from standin_gpu import ROUND, USED, load, need, use

LIB = Path(__file__).parent / "lib.so"
# What goes wrong, and in which kind of rounds.
FAULT, _, WHEN = os.environ.get("FAULT", "").partition("@")
FAULT = FAULT if ROUND == (WHEN or "verify") else ""
"""


class VerifiedProject(Project):
    """A project with ``lib.so``, a copy of libquickstart.so.

    Several libraries have a build id each, for copies of one content would be one library.
    """

    def __init__(self, folder: Path, suite: str, *libraries: str) -> None:
        super().__init__(folder, folder.parent / "cache")
        folder.mkdir(parents=True, exist_ok=True)
        self.write("pytest.ini", "[pytest]\n")
        self.write("test_a.py", HEAD + suite)
        original = QUICKSTART_LIBRARY.read_bytes()
        build_id = original.index(b"GNU\0") + 4
        for number, name in enumerate(libraries or ("lib.so",)):
            changed = bytearray(original)
            changed[build_id] ^= number
            (folder / name).write_bytes(changed)
        self.environ["PYTHONPATH"] = import_path(STANDIN)
        self.environ["PYTEST_ADDOPTS"] += " -p standin_gpu"

    def trace(self, *arguments: str) -> VerifiedProject:
        """A traced session, which must pass."""
        self.pytest("-q", "--negativa", *arguments)
        return self

    def verify(self, *arguments: str, status: int = 0, **environ: str) -> str:
        """A verified session's output; its verdict is ``verdict``."""
        done = self.pytest("-q", "--negativa-verify", *arguments, status=status, **environ)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    def heal(self, *arguments: str, status: int = 0, **environ: str) -> str:
        """The same for a session that heals."""
        done = self.pytest("-q", "--negativa-heal", *arguments, status=status, **environ)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    @property
    def run_folder(self) -> Path:
        return (self.results / "latest").resolve()

    @property
    def verdict(self) -> Any:
        return json.loads((self.run_folder / "verdict.json").read_text())

    def needs(self, *, kept: bool | None = None) -> list[Any]:
        """Needs that the verdict names a test for; or all that are kept, or are not."""
        return [
            need
            for need in self.verdict["needs"]
            if (need["test"] if kept is None else need["kept"] is kept)
        ]

    def differing(self) -> dict[str, tuple[str | None, str | None]]:
        """Tests that end otherwise on the copies, without the file's name."""
        return {
            t["nodeid"].partition("::")[2]: (t["before"], t["after"])
            for t in self.verdict["tests"]
            if t["before"] != t["after"]
        }

    def statuses(self) -> dict[str, tuple[str, str | None]]:
        """What became of the libraries, by file name."""
        return {
            Path(row["path"]).name: (row["status"], row["detail"])
            for row in self.verdict["libraries"]
        }

    def processes(self, words: bytes = b"") -> list[int]:
        """Processes of this project's rounds that run, with these words in their command."""
        mark = f"NEGATIVA_ROUND={self.results}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                # It may end meanwhile.
                with contextlib.suppress(OSError):
                    environ, command = (entry / name for name in ("environ", "cmdline"))
                    if mark in environ.read_bytes() and words in command.read_bytes():
                        found.append(int(entry.name))
        return found


def spawn(project: Project, *command: str, **environ: str) -> subprocess.Popen[str]:
    """A session in a process group of its own, as a shell starts it."""
    return subprocess.Popen(
        command,
        cwd=project.folder,
        env={**project.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
