"""Real Dask clusters on the loopback interface: a scheduler, and workers that can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_negativa.gpucode.cache import MapCache
from pytest_negativa.gpucode.workers import DaskCluster, Workers, open_workers
from tests.support.libraries import ROOT
from tests.support.modules import require_modules
from tests.support.sessions import unmeasured_environ

_DEADLINE_S = 300


class Cluster:
    """A scheduler and its workers, each a process.

    Args:
        folder: for the processes' own files.
        around: begins each command line: another network namespace, for instance.
        host: address of the scheduler.
        settings: of Dask, by their environment variables.
    """

    def __init__(
        self,
        folder: Path,
        around: Sequence[str] = (),
        host: str = "127.0.0.1",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        require_modules("distributed", extra="dask")
        self._folder = folder
        self._environ = {**unmeasured_environ(), "PYTHONPATH": str(ROOT), **(settings or {})}
        self._about = folder / "scheduler.json"
        options = ["--host", host, "--port", "0", "--scheduler-file", str(self._about)]
        self.scheduler = self._start("scheduler", [*options, "--no-dashboard"], around)
        self.processes = [self.scheduler]

    @property
    def url(self) -> str:
        """What ``--executor`` takes."""
        deadline = time.monotonic() + _DEADLINE_S
        # The scheduler writes the file in place.
        while not (self._about.exists() and self._about.read_text().endswith("}")):
            assert self.scheduler.poll() is None, self._log("scheduler").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return str(json.loads(self._about.read_text())["address"]).replace("tcp://", "dask://")

    def add_worker(
        self,
        around: Sequence[str] = (),
        *,
        host: str = "127.0.0.1",
        cwd: Path | None = None,
        **environ: str,
    ) -> subprocess.Popen[bytes]:
        """Start a worker that does one task at a time."""
        options = [self.url.replace("dask://", "tcp://"), "--nthreads=1", "--no-nanny"]
        options += ["--no-dashboard", "--memory-limit=0", "--host", host, "--death-timeout=300"]
        process = self._start(f"worker{len(self.processes)}", options, around, cwd, environ)
        self.processes.append(process)
        return process

    def wait_for(self, workers: int) -> None:
        """Wait until so many workers are there."""
        from distributed import Client

        with Client(self.url.replace("dask://", "tcp://"), set_as_default=False) as client:
            client.wait_for_workers(workers, timeout=_DEADLINE_S)

    def _start(
        self,
        name: str,
        options: Sequence[str],
        around: Sequence[str],
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        command = [*around, sys.executable, "-m", "dask", name.rstrip("0123456789"), *options]
        with self._log(name).open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=cwd or self._folder,
                env={**self._environ, **(environ or {})},
                stdout=log,
                stderr=log,
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def close(self) -> None:
        """Kill all of it."""
        for process in reversed(self.processes):
            process.kill()
        for process in self.processes:
            process.wait()


@contextmanager
def cluster_of(folder: Path, workers: int, **settings: str) -> Iterator[Cluster]:
    """A cluster with so many workers."""
    cluster = Cluster(folder, settings=settings)
    try:
        for _ in range(workers):
            cluster.add_worker()
        cluster.wait_for(workers)
        yield cluster
    finally:
        cluster.close()


@contextmanager
def two_hosts() -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """What begins the command lines of processes on two hosts, 10.77.0.1 and 10.77.0.2.

    They are network namespaces with a cable between them. The second has a host name of its own.
    """
    names = [f"negativa{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        end, other_end = (("eth0", "netns", name) for name in names)
        _ip("link", "add", *end, "type", "veth", "peer", *other_end)
        for number, name in enumerate(names, 1):
            _ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        first, second = (("ip", "netns", "exec", name) for name in names)
        rename = ("unshare", "--uts", "--mount", "sh", "-c", 'hostname other; exec "$@"', "sh")
        yield first, (*second, *rename)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"this system has no network namespaces for tests: {e}")


@contextmanager
def workers_of(cluster: Cluster) -> Iterator[Workers]:
    """The workers as a command has them."""
    with open_workers(cluster.url, warn=lambda text: None) as workers:
        assert isinstance(workers, DaskCluster)
        yield workers


class KillsWorkers(MapCache):
    """A cache that kills the process that uses it, as often as it is told to.

    Args:
        folder: of the cache.
        times: how many processes it kills.
    """

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__(folder, 1 << 30)
        self._kills = folder / "kills"
        self._times = times
        self._owner = os.getpid()
        self._kills.mkdir(parents=True)

    @property
    def killed(self) -> int:
        """How many processes it killed."""
        return len(list(self._kills.iterdir()))

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Kill the process when a library is read, and nothing of it is passed on yet."""
        if os.getpid() != self._owner and self.killed < self._times:
            (self._kills / str(os.getpid())).touch()
            os.kill(os.getpid(), 9)
        super().save(*args, **kwargs)
