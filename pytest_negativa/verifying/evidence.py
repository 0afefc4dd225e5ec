"""What rounds have left behind, as evidence: who loaded what, and which tests used the GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from pytest_negativa.models.trace import Phase, Usage
from pytest_negativa.processes.redirect import read_logs, why_not_redirected
from pytest_negativa.tracing.files import SUFFIX
from pytest_negativa.verifying.judge import Evidence
from pytest_negativa.verifying.rounds import MAX_ROUNDS, RoundResult

REDIRECT_LOGS = "redirect"
"""The folder of a round for the redirect's logs."""

# What begins in these is no test's doing.
_OUTSIDE_TESTS = (Phase.IMPORT, Phase.COLLECTION, Phase.SESSION)
# Exit statuses that a shell gives for signals start here; Python gives negative ones.
_SIGNALS = 128


def trace_files(rounds: Sequence[RoundResult]) -> list[Path]:
    return [path for r in rounds for path in sorted((r.folder / "trace").glob(f"*{SUFFIX}"))]


def first_uses(usage: Usage) -> dict[str, set[str]]:
    """By node id: the libraries of which the test was the first to use something."""
    used: dict[str, set[str]] = defaultdict(set)
    for library in usage.libraries:
        for image in library.images:
            firsts = [image.use.first, *(k.first for k in image.use.kernels)]
            for first in firsts:
                nodeid = usage.contexts[first.context].nodeid
                if nodeid is not None:
                    used[nodeid].add(library.library.path)
    return used


def count_gpu_tests(usage: Usage) -> int:
    """How many contexts of tests were the first to load an image or to look up a kernel.

    Fixtures, and children that no test is known to have started, count too.
    """
    if usage.replay is not None:
        return 0
    contexts = set()
    for use in usage.iter_images():
        contexts.add(use.first.context)
        contexts.update(k.first.context for k in use.kernels)
    found = [usage.contexts[i] for i in contexts]
    return len({(c.nodeid, c.detail) for c in found if c.phase not in _OUTSIDE_TESTS})


def problems_of(rounds: Sequence[RoundResult]) -> Iterator[str]:
    """What speaks against a run of the tests besides their outcomes."""
    for result in rounds:
        for error in result.session.collection_errors:
            yield f"not collected: {error}"
        if not result.session.tests and result.died:
            how = f"signal {-result.status}" if result.status < 0 else f"status {result.status}"
            how = "no test began in time" if result.silent else how
            yield f"the session ended before its first test ({how})"
        elif not result.died and not 0 <= result.status < _SIGNALS:
            yield f"the session's process was killed after its last test (status {result.status})"
    if len(rounds) == MAX_ROUNDS and rounds[-1].goes_on:
        yield f"{MAX_ROUNDS} sessions in a row died or lost their CUDA context; no more were run"


def gather(
    rounds: Sequence[RoundResult],
    usage: Usage,
    copied: Collection[str],
    unsubstituted: Mapping[str, str],
) -> Evidence:
    """What logs and traces of the rounds say of copies and originals.

    Args:
        usage: what the rounds' own traces add up to.
        copied: real paths of the originals that have a copy.
        unsubstituted: see ``Evidence``.
    """
    copies: dict[str, set[object]] = defaultdict(set)
    originals: dict[str, str] = {}
    incomplete: str | None = None
    logged: set[int] = set()
    for result in rounds:
        logs = result.folder / REDIRECT_LOGS
        # Not there where nothing can be redirected.
        for process in read_logs(logs) if logs.is_dir() else ():
            who = f"process {process.pid} ({process.executable})"
            logged.add(process.pid)
            logged.update(load.pid for load in process.loads)
            for load in process.loads:
                for path in load.copies:
                    copies[path].add((process.log, load.pid))
            for path, opened in sorted(process.originals):
                originals.setdefault(path, f"{who} opened the original, as {opened}")
            problems = [*process.problems, *(f"{p} can't be told" for p in process.unknown)]
            if problems and incomplete is None:
                incomplete = f"{who}: {problems[0]}"
    _add_traced(usage, copied, originals)
    return Evidence(
        copies=copies,
        originals=originals,
        unsubstituted=unsubstituted,
        incomplete=incomplete or _why_not_logged(usage, logged),
    )


def _why_not_logged(usage: Usage, logged: Collection[int]) -> str | None:
    """Why a traced process could not be redirected, if one could not."""
    for process in usage.processes:
        header = process.header
        if header.pid not in logged and (why := why_not_redirected(header.executable)):
            return f"process {header.pid} ({header.executable}) was not redirected: {why}"
    return None


def _add_traced(usage: Usage, copied: Collection[str], originals: dict[str, str]) -> None:
    """Originals that traced processes had mapped, whatever the redirect knows of them."""
    for library in usage.libraries:
        path = library.library.path
        if path in copied and library.processes:
            process = usage.processes[library.processes[0]].header
            originals.setdefault(
                path, f"process {process.pid} ({process.executable}) had the original mapped"
            )
