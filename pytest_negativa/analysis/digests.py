"""Hashes what a run loaded, for a run that is not planned when it ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pytest_negativa.models.trace import TracedLibrary
from pytest_negativa.storage.digests import save_digests
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.mappings import hash_library
from pytest_negativa.tracing.merge import merge_traces


def hash_libraries(
    run: Run, on_done: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write the digests of the files that GPU code was loaded from, if they did not change since.

    Args:
        run: has traces.
        on_done: told of the bytes that were read, and of all.

    Raises:
        StoreError: the digests can't be written.
    """
    usage = merge_traces(run.trace_files())
    used = [library.library for library in usage.libraries if library.images]
    total = sum(library.size or 0 for library in used)
    hashed: list[TracedLibrary] = []
    with ThreadPoolExecutor() as pool:
        for library in pool.map(hash_library, used):
            hashed.append(library)
            on_done(sum(one.size or 0 for one in hashed), total)
    save_digests(run.trace_dir, hashed)
