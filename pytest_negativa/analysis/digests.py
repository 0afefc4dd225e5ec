"""Hashes what a run loaded, for a run that is not planned when it ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from pytest_negativa.storage.digests import save_digests
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.mappings import hash_library
from pytest_negativa.tracing.merge import merge_traces


def hash_libraries(run: Run) -> None:
    """Write the digests of the files that GPU code was loaded from, if they did not change since.

    Raises:
        StoreError: the digests can't be written.
    """
    usage = merge_traces(run.trace_files())
    used = [library.library for library in usage.libraries if library.images]
    with ThreadPoolExecutor() as pool:
        save_digests(run.trace_dir, pool.map(hash_library, used))
