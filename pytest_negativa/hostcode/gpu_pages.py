"""Pages of GPU code that processes of a traced run touched.

A page that no process touched is a witness only if each process that had the library mapped
watched it, to its end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from msgspec.structs import replace

from pytest_negativa.hostcode.page_logs import count_lost, read_page_logs
from pytest_negativa.models.spans import PAGE_SIZE, Span, minus, union
from pytest_negativa.models.trace import LibraryUsage, Usage
from pytest_negativa.storage.results import load_usage
from pytest_negativa.storage.runs import Run


def with_pages(usage: Usage, run: Run) -> Usage:
    """The usage, with the pages of GPU code that were touched, and that were watched in vain.

    Args:
        run: that of the usage, which may have no logs of pages.

    Raises:
        NegativaError: a log is damaged.
        StoreError: a log can't be read.
    """
    if (logs := run.gpu_page_logs) is None:
        return usage
    watched: dict[tuple[object, ...], list[set[Span]]] = defaultdict(list)
    touched: dict[tuple[object, ...], list[Span]] = defaultdict(list)
    processes: Counter[tuple[object, int]] = Counter()
    for process in read_page_logs(logs):
        for one in process.gpu_code:
            touched[one.file] += (Span(page, page + PAGE_SIZE) for page in one.pages)
            watched[one.file].append({Span(*r) for r in one.ranges} if one.watched else set())
            processes[one.file, process.pid] += 1
    is_complete = not count_lost(logs)

    def add(used: LibraryUsage) -> LibraryUsage:
        key = used.library.path, *used.library.state[:4]
        expected = Counter(usage.processes[number].header.pid for number in used.processes)
        seen = is_complete and all(processes[key, pid] >= n for pid, n in expected.items())
        in_all = set.intersection(*watched[key]) if seen and watched[key] else ()
        pages = union(touched[key])
        return replace(used, touched=pages, untouched=tuple(minus(union(in_all), pages)))

    return replace(usage, libraries=tuple(map(add, usage.libraries)))


def with_pages_of(usage: Usage, parts: Iterable[Run]) -> Usage:
    """The usage of combined runs, with the pages that any of them touched, known by content.

    Raises:
        StoreError: the usage of a run can't be read.
    """
    touched: dict[str | None, list[Span]] = defaultdict(list)
    for part in parts:
        found = load_usage(part)
        for used in () if found is None else found.libraries:
            touched[used.library.sha256] += used.touched
    touched.pop(None, None)
    return replace(
        usage,
        libraries=tuple(
            replace(used, touched=union(touched.get(used.library.sha256, ())) or used.touched)
            for used in usage.libraries
        ),
    )
