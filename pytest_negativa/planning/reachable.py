"""Code of a cubin that a set of kernels can reach: call graph, dynamic parallelism. No I/O.

The pieces of code that can be told apart are the ``.text`` sections. nvcc gives each kernel one,
and if code is linked on the device, each device function too. Otherwise nvcc copies the device
functions into the section of every kernel that needs them. There they are symbols inside the
kernel's range.

Between sections, code is reached through the call graph of the cubin (``.nv.callgraph``):
by calls, and by addresses. The graph lists every function whose address is taken in code, in a
table, in a vtable or for a launch from the device. It does so even if nothing seems to use the
address (tests/fixtures/src/pointers.cu has each case). Such an address may end up in global
memory, in another module or on the host. So all of these functions stay, with what they reach.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from pytest_negativa.models.library import Cubin, Function, NameIndex
from pytest_negativa.models.spans import Span


@dataclass(frozen=True, slots=True)
class Reach:
    """The part of a cubin's code that can be reached.

    Attributes:
        kept: functions that can be, and those that share their code section.
        unused: the code of all others; sorted and disjoint.
        code_size: bytes of all functions.
    """

    kept: frozenset[NameIndex]
    unused: tuple[Span, ...]
    code_size: int


def reachable_code(cubin: Cubin, roots: Iterable[NameIndex]) -> Reach | str:
    """The code that ``roots`` (functions by name) can reach, or why that can't be told."""
    if cubin.relocatable:
        return "relocatable code"
    pieces = _pieces(cubin)
    if isinstance(pieces, str):
        return pieces
    if problem := _graph_problem(cubin, pieces):
        return problem
    # Whatever has its address taken may be reached, see above.
    taken = (function for function, _prototype in cubin.address_taken)
    reached = _called(cubin, [*roots, *taken])
    if reached - {f.name for piece in pieces for f in piece} - {*cubin.externals}:
        return "calls of functions that are not in its tables"
    kept: set[NameIndex] = set()
    unused: list[Span] = []
    code_size = 0
    for piece in pieces:
        code = _range(piece)
        code_size += code.size
        if any(function.name in reached for function in piece):
            kept.update(function.name for function in piece)
        elif code.size:
            unused.append(code)
    return Reach(frozenset(kept), tuple(unused), code_size)


def launchable_kernels(cubin: Cubin, kernel: NameIndex) -> set[NameIndex]:
    """Other kernels that code of ``kernel`` may launch on the device (dynamic parallelism).

    No driver call names them, and CUPTI shows no launch of them.
    """
    others = {k.name for k in cubin.kernels} - {kernel}
    if not any(callee in others for _caller, callee in cubin.references):
        return set()
    return others & _called(cubin, [kernel])


def _pieces(cubin: Cubin) -> list[list[Function]] | str:
    """Functions by what can only stay or go together: those whose ranges overlap."""
    pieces: list[list[Function]] = []
    end = 0
    for function in sorted(cubin.functions, key=lambda f: (f.offset_in_cubin, -f.code_size)):
        if pieces and function.offset_in_cubin < end:
            pieces[-1].append(function)
        elif function.code_size:
            pieces.append([function])
        else:
            return "a function of unknown size"
        end = max(end, function.offset_in_cubin + function.code_size)
    return pieces


def _range(piece: list[Function]) -> Span:
    return Span(piece[0].offset_in_cubin, max(f.offset_in_cubin + f.code_size for f in piece))


def _graph_problem(cubin: Cubin, pieces: list[list[Function]]) -> str | None:
    """The reason that the call graph can't be complete.

    A linker drops device functions that nothing calls. One that is there, in a section of
    its own, and in no edge, must have a caller that the graph doesn't know. So must a function of
    the driver: one of them launches kernels. Linked cubins of toolkits up to CUDA 10.0 have no
    graph at all.
    """
    kernels = {kernel.name for kernel in cubin.kernels}
    known = {callee for _caller, callee in (*cubin.calls, *cubin.references)}
    known.update(function for function, _prototype in cubin.address_taken)
    if not known.issuperset(cubin.externals):
        return "a function of the driver that nothing calls: the call graph is not complete"
    for piece in pieces:
        names = {function.name for function in piece}
        if not names & kernels and not names & known:
            return "a device function that nothing calls: the call graph is not complete"
    return None


def _called(cubin: Cubin, waiting: list[NameIndex]) -> set[NameIndex]:
    callees: defaultdict[NameIndex, list[NameIndex]] = defaultdict(list)
    for caller, callee in (*cubin.calls, *cubin.references):
        callees[caller].append(callee)
    reached: set[NameIndex] = set()
    while waiting:
        function = waiting.pop()
        if function not in reached:
            reached.add(function)
            waiting.extend(callees[function])
    return reached
