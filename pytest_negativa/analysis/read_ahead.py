"""Libraries are read while the tests run that load them: their maps, ahead of the report."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from pytest_negativa.analysis.analyze import map_loaded
from pytest_negativa.errors import NegativaError
from pytest_negativa.gpucode.workers import start_server
from pytest_negativa.models.settings import Settings
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.merge import merge_traces

# Between two looks at the traces: seconds, and at least so many times what a look takes.
_PAUSE, _SHARE = 1.0, 20
# The tests come first (setpriority(2)).
_LOWEST = 19


@contextlib.contextmanager
def reading_ahead(run: Run, settings: Settings) -> Iterator[None]:
    """Read the libraries that the processes of a run load; the report finds them in the cache."""
    over = threading.Event()
    thread = threading.Thread(target=_read, args=(run, settings, over))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _read(run: Run, settings: Settings, over: threading.Event) -> None:
    known: set[str] = set()
    took = 0.0
    # What can't be read now, the report names.
    with contextlib.suppress(NegativaError, OSError):
        while not over.wait(max(_PAUSE, _SHARE * took)):
            begin = time.monotonic()
            usage = merge_traces(run.trace_files())
            took = time.monotonic() - begin
            if not usage.devices:
                continue
            if not known:
                # The report has workers of this server, too.
                start_server()
                # On Linux, of this thread alone, and of its workers.
                os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
            paths = {used.library.path for used in usage.libraries} - known
            known |= paths
            for _ in map_loaded(usage, settings, paths):
                if over.is_set():
                    break
