"""Use to kernel coverage: which tests ran each kernel of a library. Reads no library bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pytest_negativa.models.coverage import KernelCoverage, LibraryCoverage
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.trace import LibraryUsage, Usage
from pytest_negativa.planning.by_tests import kernel_runs

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
