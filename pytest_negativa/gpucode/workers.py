"""Workers that read libraries: processes (--jobs) or a Dask cluster (--executor); lost ones.

Both do their tasks through ``concurrent.futures.Executor``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from pytest_negativa.errors import OptionError, WorkerError, describe_fault
from pytest_negativa.storage.system import available_cores

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from distributed import Client

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

Warn = Callable[[str], None]
"""Prints a warning."""

# How many tasks are handed out at a time: their results wait in memory.
_MOST_PENDING = 256
_NAME = "pytest-negativa"
_SCHEMES = {"dask": "tcp", "dask+tls": "tls"}
# Parameters of mallopt(3) and what they get, in bytes. Most code unpacks to less than 32 MiB, which
# is the most that glibc allows.
_MALLOPT = {-3: 32 << 20, -1: 64 << 20}  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


Workers: TypeAlias = "LocalProcesses | DaskCluster"
"""Workers for tasks: processes of this machine, or machines of a Dask cluster.

Remote workers may have other files at the same paths. ``count`` gives the number of workers for so
many tasks; ``open`` starts their executor, which stops tasks that run if it is left by an
exception; ``why_lost`` gives the reason for the loss of a task that raised an error, and None if
the error is the task's own.
"""


class Lost(str):
    """Reason for a task without a result: the process that did it died."""


def run_tasks(
    workers: Workers, function: Callable[[_Task], _Result], tasks: Iterable[_Task], count: int
) -> Iterator[tuple[_Task, _Result | Lost]]:
    """Do tasks, and yield each with its result when it is done, in no particular order.

    Args:
        function: can be pickled, and so can the tasks.
        count: how many tasks there are.

    Raises:
        WorkerError: the workers can't be reached, or one is not fit for the task.
    """
    # It takes 10 ms to import, which a single library does not need.
    import concurrent.futures

    left = iter(tasks)
    with workers.open(count) as executor:
        pending: dict[concurrent.futures.Future[_Result], _Task] = {}
        while True:
            while len(pending) < _MOST_PENDING and (task := next(left, None)) is not None:
                pending[executor.submit(function, task)] = task
            if not pending:
                return
            done, _ = concurrent.futures.wait(
                pending, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                task = pending.pop(future)
                try:
                    result: _Result | Lost = future.result()
                except (Exception, concurrent.futures.CancelledError) as e:
                    if (lost := workers.why_lost(e)) is None:
                        raise
                    result = Lost(lost)
                yield task, result


@dataclass(frozen=True, slots=True)
class LocalProcesses:
    """Processes of this machine.

    Attributes:
        jobs: how many; None: one for each processor that this process may use.
    """

    jobs: int | None = None
    are_remote = False

    def count(self, tasks: int) -> int:
        """See ``Workers``."""
        return min(self.jobs or available_cores(), tasks)

    @contextlib.contextmanager
    def open(self, tasks: int) -> Iterator[Executor]:
        """See ``Workers``."""
        # These take 20 ms to import.
        import concurrent.futures
        import multiprocessing

        # fork would copy the locks that threads of the calling program hold.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pytest_negativa.gpucode.mapping"])
        others = set(multiprocessing.active_children())
        pool = concurrent.futures.ProcessPoolExecutor(
            max(1, self.count(tasks)), mp_context=context, initializer=_begin_worker
        )
        try:
            yield pool
        except BaseException:
            # A user who interrupts should not wait for large libraries.
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def why_lost(self, error: BaseException) -> str | None:
        """See ``Workers``."""
        from concurrent.futures.process import BrokenProcessPool

        # The pool does not tell which task the dead process was doing.
        if isinstance(error, BrokenProcessPool):
            return "a process died (out of memory?); try --jobs 1"
        return None


def _keep_freed_memory() -> None:
    """Let this process unpack code where it unpacked other code before.

    By itself, glibc gives the memory back to the system each time, and faults its pages in again.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # musl has none
        for parameter, value in _MALLOPT.items():
            libc.mallopt(parameter, value)


def _begin_worker() -> None:
    """Let the program alone decide when a worker ends; without it, a worker would stay."""
    _keep_freed_memory()
    # Ctrl-C goes to the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    from multiprocessing import parent_process

    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


class DaskCluster:
    """The workers of a dask.distributed cluster that exists.

    Args:
        url: ``dask://HOST:PORT`` or ``dask+tls://HOST:PORT`` of the scheduler. The certificates
            for TLS are those of Dask's configuration.
        warn: called if there is no worker yet.

    Raises:
        OptionError: the URL has another form, or dask.distributed is not installed.
    """

    are_remote = True

    def __init__(self, url: str, warn: Warn) -> None:
        import importlib.util

        scheme, _, place = url.partition("://")
        host, _, port = place.rpartition(":")
        if scheme not in _SCHEMES or not host or not port.isdecimal():
            raise OptionError(f"{url}: expected dask://HOST:PORT or dask+tls://HOST:PORT")
        if importlib.util.find_spec("distributed") is None:
            raise OptionError(f"{url} needs dask.distributed: pip install 'pytest-negativa[dask]'")
        self._url = url
        self._address = f"{_SCHEMES[scheme]}://{place}"
        self._warn = warn
        self._client: Client | None = None

    def count(self, tasks: int) -> int:
        """See ``Workers``; a cluster may grow while it works."""
        return tasks

    @contextlib.contextmanager
    def open(self, tasks: int) -> Iterator[Executor]:
        """See ``Workers``."""
        executor = self._connect().get_executor(pure=False)
        try:
            yield executor
        finally:
            executor.shutdown(wait=False)

    def _connect(self) -> Client:
        if self._client is None:
            from importlib.metadata import version

            from distributed import Client

            # Dask's decoder can raise anything for another program's answer, even MemoryError.
            try:
                self._client = Client(self._address, set_as_default=False)
            except Exception as e:
                raise WorkerError(
                    f"{self._url}: no Dask scheduler answers: {describe_fault(e)}"
                ) from e
            # A function of Python's: a worker that can't import ours would end.
            wanted = version(_NAME)
            found = self._client.run(version, _NAME, on_error="return")
            for worker, there in found.items():
                if there != wanted:
                    has = f"{_NAME} {there}" if isinstance(there, str) else f"none ({there})"
                    raise WorkerError(
                        f"worker {worker} has {has}; install {_NAME} {wanted}, as on the machine "
                        "of the command"
                    )
            if not found:
                self._warn(f"{self._url}: no worker yet; waiting for the first")
        return self._client

    def why_lost(self, error: BaseException) -> str | None:
        """See ``Workers``.

        Raises:
            WorkerError: the cluster went away.
        """
        from concurrent.futures import CancelledError

        from distributed import KilledWorker

        if isinstance(error, KilledWorker):
            return "each worker of the cluster that began it died (out of memory?)"
        if isinstance(error, CancelledError):
            raise WorkerError(
                f"{self._url}: the scheduler went away; run the command again, which finds what "
                "was read in the cache"
            ) from error
        return None

    def close(self) -> None:
        """Leave the cluster."""
        if self._client is not None:
            self._client.close()


@contextlib.contextmanager
def open_workers(url: str | None, jobs: int | None = None, *, warn: Warn) -> Iterator[Workers]:
    """Open the readers of libraries for a command, this process among them.

    Args:
        url: of a Dask cluster; None: processes of this machine.
        jobs: how many processes; None: one for each processor.
        warn: called with what a user should know.

    Raises:
        OptionError: see ``DaskCluster``.
    """
    _keep_freed_memory()
    if url is None:
        yield LocalProcesses(jobs)
        return
    with contextlib.closing(DaskCluster(url, warn)) as cluster:
        yield cluster
