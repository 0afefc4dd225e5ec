"""Use to kernel coverage: which tests ran each kernel of a library. Reads no library bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from pytest_negativa.models.coverage import KernelCoverage, KernelRun, LibraryCoverage
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.trace import LibraryUsage, Usage

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

    If launches were counted, a kernel ran in the tests that launched it. The injected tracer of
    child processes counts no launches, so the first look-up in a child counts, too.

    Args:
        plan: of the library.
        used: the uses of its content.
        usage: of the run.
        demangle: turns a mangled name into a C++ signature.
        limit: the least percentage of kernels that must run.
        places: source file and line by mangled name, if the library tells.
    """
    launches: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for launch in usage.launches:
        launches[launch.name][usage.contexts[launch.context].place] += launch.count
    uncounted = uncounted_kernels(used, usage)
    first = {kernel.name: kernel.first for kernel in plan.used_kernels}
    kernels = []
    for name in sorted((*first, *plan.unused_kernels)):
        runs = []
        if name in first:
            runs = [KernelRun(test, count) for test, count in sorted(launches[name].items())]
            if not runs and (name in uncounted or not usage.launches):
                runs = [KernelRun(first[name].place, None)]
        scope, template = split_signature(demangle(name))
        file, line = (places or {}).get(name, (None, None))
        kernels.append(
            KernelCoverage(
                name=name,
                scope=scope,
                template=template,
                file=file,
                line=line,
                runs=tuple(runs),
            )
        )
    return LibraryCoverage(
        path=plan.library.path,
        kernels=tuple(kernels),
        counted=bool(usage.launches),
        limit=limit,
    )


def uncounted_kernels(used: LibraryUsage, usage: Usage) -> frozenset[str]:
    """Kernels that a process looked up which counts no launches."""
    blind = {i for i, process in enumerate(usage.processes) if not process.counts_launches}
    images = [i.use for i in used.images] + [i.use for i in usage.memory_images]
    return frozenset(
        kernel.name
        for image in images
        if blind.intersection(image.processes)
        for kernel in image.kernels
    )


def split_signature(signature: str) -> tuple[str, str]:
    """Namespace and name of a kernel, without template arguments, parameters and return type."""
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
