"""Processes that the native library traces, on the stand-in for the driver and CUPTI."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_negativa.models.settings import TraceLevel
from pytest_negativa.models.trace import Usage
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.children import Children
from pytest_negativa.tracing.merge import merge_traces
from pytest_negativa.tracing.start import child_environment
from tests.support.libraries import MULTIARCH, ROOT, SUPPORT
from tests.support.sessions import unmeasured_environ

CHILD = SUPPORT / "standin" / "gpu_child.py"


class Injected:
    """Starts processes that are traced into the folder of a run.

    Args:
        driver: the stand-in, compiled.
        injection: the native library.
        level: what to record of each kernel.
    """

    def __init__(
        self,
        folder: Path,
        driver: Path,
        injection: Path,
        *,
        level: TraceLevel = TraceLevel.LOOKUP,
    ) -> None:
        self.run = Run(folder / "run-1")
        self.run.trace_dir.mkdir(parents=True, exist_ok=True)
        self.children = Children()
        self.environ = {
            **unmeasured_environ(),
            **child_environment(
                {},
                run=self.run,
                root=folder,
                injection=injection,
                cupti=str(driver),
                lacks=self.children.name,
                level=level,
            ),
            "STANDIN_DRIVER": str(driver),
            "PYTHONPATH": str(ROOT),
        }

    def command(self, statements: str, library: Path = MULTIARCH) -> list[str]:
        return [sys.executable, str(CHILD), str(library), statements]

    def play(
        self, statements: str, *before: str, status: int = 0, library: Path = MULTIARCH
    ) -> str:
        """Run a process; ``before`` is a command that starts it. Returns what it printed."""
        done = subprocess.run(
            [*before, *self.command(statements, library)],
            check=False,
            capture_output=True,
            text=True,
            env=self.environ,
        )
        assert done.returncode == status, done.stderr
        assert not done.stderr
        return done.stdout

    @contextlib.contextmanager
    def running(self, statements: str) -> Iterator[None]:
        """A process that has played, and waits until the body has ended."""
        command = self.command(f"{statements}\nprint(flush=True)\ninput()")
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=self.environ, stdin=pipe, stdout=pipe) as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield
            process.communicate(b"\n")

    def usage(self) -> Usage:
        return merge_traces(self.run.trace_files())

    def untraced(self) -> Sequence[str]:
        return tuple(self.children.untraced())

    def close(self) -> None:
        self.children.close()


def kernels(usage: Usage) -> dict[str, list[str]]:
    """Names of the used kernels, by the name of their library."""
    return {
        Path(library.library.path).name: sorted(
            kernel for image in library.images for kernel in image.kernels
        )
        for library in usage.libraries
        if library.images
    }
