"""Use by tests: kernels of a test, coverage, -m and -k, similarity, a template's one name.

A trace at level ``launch`` tells all tests of a kernel, one at level ``lookup`` the first alone.
Recorded tests are selected as pytest's ``-m``, ``-k`` and node ids would.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from pytest_negativa.errors import OptionError
from pytest_negativa.models.coverage import KernelCoverage, KernelRun, LibraryCoverage
from pytest_negativa.models.listing import SimilarPair
from pytest_negativa.models.outcomes import TestResult
from pytest_negativa.models.plan import LibraryPlan, earliest
from pytest_negativa.models.trace import (
    ImageUse,
    LibraryUsage,
    Usage,
)
from pytest_negativa.settings.globs import matches


def kernel_runs(usage: Usage, images: Iterable[ImageUse]) -> dict[str, tuple[KernelRun, ...]]:
    """Runs of each looked-up kernel of some images, by mangled name.

    A kernel that was looked up and never launched has no runs. What a process looked up that
    counted no launches counts as run.
    """
    blind = {i for i, process in enumerate(usage.processes) if not process.counts_launches}
    launches: defaultdict[str, dict[str, KernelRun]] = defaultdict(dict)
    for name, row in usage.iter_launches():
        test = usage.contexts[row.context].place
        before = launches[name].get(test, KernelRun(test, 0, 0))
        launches[name][test] = before.add(row.count, row.gpu_ns)
    images = tuple(images)
    first = earliest(image.kernels for image in images)
    uncounted: set[str] = set()
    for image in images:
        if not usage.launches or blind.intersection(image.processes):
            uncounted.update(image.kernels)
    runs: dict[str, tuple[KernelRun, ...]] = {}
    for name in sorted(first):
        runs[name] = tuple(run for _, run in sorted(launches[name].items()))
        if not runs[name] and name in uncounted:
            runs[name] = (KernelRun(usage.context_of(first[name]).place, None),)
    return runs


def launches_by_range(usage: Usage) -> dict[str, dict[tuple[str, ...], dict[str, KernelRun]]]:
    """Runs of each test: kernels by NVTX range, by mangled name.

    Kernels that a library launched without a look-up are in it, too. For what ``kernel_runs`` knows
    by a look-up alone, no launches and no range are known.
    """
    found: defaultdict[str, defaultdict[tuple[str, ...], dict[str, KernelRun]]]
    found = defaultdict(lambda: defaultdict(dict))
    for name, row in usage.iter_launches():
        test = usage.contexts[row.context].place
        kernels = found[test][usage.ranges_of(row)]
        before = kernels.get(name, KernelRun(test, 0, 0))
        kernels[name] = before.add(row.count, row.gpu_ns)
    for name, runs in kernel_runs(usage, usage.iter_images()).items():
        for run in runs:
            if run.launches is None:
                found[run.test][()][name] = run
    return {test: dict(ranges) for test, ranges in found.items()}


def kernels_of_tests(usage: Usage, glob: str) -> dict[str, KernelRun]:
    """The kernels that tests ran whose node ids match, with their launches of each."""
    found: dict[str, KernelRun] = {}
    for name, runs in kernel_runs(usage, usage.iter_images()).items():
        for run in (run for run in runs if matches(glob, run.test)):
            before = found.get(name)
            found[name] = before.add(run.launches or 0, run.gpu_ns) if before else run
    return found


def usage_of_tests(usage: Usage, tests: Collection[str]) -> Usage:
    """The use of some tests alone, out of a trace that counts launches.

    What belongs to no test counts for every test: the launches of fixtures and imports, images that
    a program enumerates or reads variables of, and kernels that were looked up but never launched.
    So does all that a process used which counts no launches.

    Args:
        usage: of all tests.
        tests: node ids.
    """
    blind = {i for i, process in enumerate(usage.processes) if not process.counts_launches}
    chosen = {
        index
        for index, context in enumerate(usage.contexts)
        if context.test is None or context.test in tests
    }
    context_of: dict[str, int] = {}
    for name, row in usage.iter_launches():
        if row.context in chosen:
            context_of.setdefault(name, row.context)

    def of_use(use: ImageUse) -> ImageUse | None:
        if use.whole or use.data or use.functions or blind.intersection(use.processes):
            return use
        kernels = {}
        for name, first in use.kernels.items():
            if name not in usage.launches or first.context in chosen:
                kernels[name] = first
            elif name in context_of:
                kernels[name] = replace(first, context=context_of[name])
        if not kernels:
            # Loaded outside of tests, it must stay loadable.
            return replace(use, kernels={}) if use.first.context in chosen else None
        first = use.first if use.first.context in chosen else next(iter(kernels.values()))
        return replace(use, kernels=kernels, first=first)

    def of_images(images: Iterable[ImageUse]) -> tuple[ImageUse, ...]:
        return tuple(filter(None, map(of_use, images)))

    return replace(
        usage,
        libraries=tuple(
            replace(library, images=of_images(library.images)) for library in usage.libraries
        ),
        memory_images=of_images(usage.memory_images),
        compiled=of_images(usage.compiled),
        launches={
            name: rows
            for name, found in usage.launches.items()
            if (rows := tuple(row for row in found if row.context in chosen))
        },
    )


def compare_groups(groups: Mapping[str, Collection[Hashable]]) -> list[SimilarPair]:
    """Compare each two groups, the most alike first.

    Args:
        groups: what each group ran, by the group's name; without anything, it is left out.
    """
    sets = sorted((name, frozenset(ran)) for name, ran in groups.items())
    found = []
    for (left, of_left), (right, of_right) in itertools.combinations(sets, 2):
        if of_left and of_right:
            shared, either = len(of_left & of_right), len(of_left | of_right)
            found.append(SimilarPair(left, right, shared, either, shared / either))
    return sorted(found, key=lambda one: (-one.similarity, one.left, one.right))


_ANONYMOUS = "(anonymous namespace)"


def cover_library(
    plan: LibraryPlan,
    used: LibraryUsage,
    usage: Usage,
    demangle: Callable[[str], str] = str,
    places: Mapping[str, tuple[str, int]] | None = None,
    *,
    limit: float | None = None,
) -> LibraryCoverage:
    """Tell for each kernel of a library which tests ran it.

    See ``kernel_runs`` for what counts.

    Args:
        plan: of the library.
        used: the uses of its content.
        usage: of the run.
        demangle: turns a mangled name into a C++ signature.
        limit: the least percentage of kernels that must run.
        places: source file and line by mangled name, if the library tells.
    """
    known = kernel_runs(usage, (*used.images, *usage.memory_images))
    used_names = {kernel.name for kernel in plan.used_kernels}
    kernels = []
    for name in sorted((*used_names, *plan.unused_kernels)):
        scope, template = split_signature(demangle(name))
        file, line = (places or {}).get(name, (None, None))
        kernels.append(
            KernelCoverage(
                name=name,
                scope=scope,
                template=template,
                file=file,
                line=line,
                runs=known.get(name, ()) if name in used_names else (),
            )
        )
    return LibraryCoverage(
        path=plan.library.path,
        kernels=tuple(kernels),
        counted=bool(usage.launches),
        limit=limit,
    )


def split_signature(signature: str) -> tuple[str, str]:
    """Namespace and name of a kernel, without template arguments, parameters and return type.

    The HTML report has another answer: ``templateOf`` of ``reporting/html/data.js``.
    """
    depth = 0
    flat = ""
    for char in signature.replace(_ANONYMOUS, "{anonymous}"):
        if char == "(" and depth == 0:
            break
        if char in "<[":
            depth += 1
        elif char in ">]":
            depth -= 1
        elif depth == 0:
            flat += char
    # A name such as operator< has no closing bracket.
    scope, _, name = flat.strip().rpartition(" ")[2].rpartition("::") if not depth else ("", "", "")
    return scope.replace("{anonymous}", _ANONYMOUS), name or signature


def select_tests(
    tests: Sequence[TestResult],
    *,
    markers: str | None = None,
    keywords: str | None = None,
    nodeids: Collection[str] = (),
) -> tuple[TestResult, ...]:
    """The tests that match all that is given, in their order.

    Args:
        tests: as recorded.
        markers: a marker expression, without arguments of markers.
        keywords: a keyword expression.
        nodeids: of tests, or of classes, files or folders that hold them.

    Raises:
        OptionError: an expression can't be parsed, or nothing matches.
    """
    # Every test has its own name among them.
    if keywords is not None and tests and not any(test.keywords for test in tests):
        raise OptionError(
            "-k: the run has no keywords of its tests, because this release can't read them with "
            "its version of pytest; select by node id or -m"
        )
    found = tuple(
        test
        for test in tests
        if (not nodeids or any(_is_in(test.nodeid, nodeid) for nodeid in nodeids))
        and (markers is None or _matches("-m", markers, test.markers, exact=True))
        and (keywords is None or _matches("-k", keywords, test.keywords, exact=False))
    )
    lost = [n for n in nodeids if not any(_is_in(test.nodeid, n) for test in tests)]
    if lost:
        raise OptionError(f"{lost[0]}: no test of the run has this node id")
    if not found:
        known = sorted({marker for test in tests for marker in test.markers})
        hint = f"; the run's markers: {', '.join(known) or 'none'}" if markers is not None else ""
        raise OptionError(f"none of the run's {len(tests):,} tests matches{hint}")
    return found


def _is_in(nodeid: str, wanted: str) -> bool:
    wanted = wanted.rstrip("/")
    rest = nodeid.removeprefix(wanted)
    return nodeid == wanted or (rest != nodeid and rest.startswith(("::", "/", "[")))


def _matches(flag: str, expression: str, names: Collection[str], *, exact: bool) -> bool:
    # pytest has no public function for it. A second grammar would differ one day.
    from _pytest.mark import expression as grammar

    # As KeywordMatcher and MarkMatcher of _pytest/mark/__init__.py.
    lowered = [name.lower() for name in names]

    def has(name: str, /, **arguments: object) -> bool:
        if arguments:
            raise OptionError(f"{flag} {expression!r}: the arguments of markers are not recorded")
        return name in names if exact else any(name.lower() in known for known in lowered)

    try:
        return bool(grammar.Expression.compile(expression).evaluate(has))
    # ParseError before pytest 9.
    except (SyntaxError, getattr(grammar, "ParseError", SyntaxError)) as e:
        raise OptionError(f"{flag} {expression!r}: {e}") from e
