"""Plans by use, by archs alone (``--arch``), of nothing; the order of reasons; trimmed cubins.

Missing data means keep: the plan calls code unused only if it is known to be unused. The labels
"for other GPUs" and "no used kernel" come from ``_Planner._decide``.

A plan from a map alone needs no trace: code that a device of given archs could load stays. The
driver chooses among the elements of the regions in ``.nv_fatbin`` (``arch.choose_elements``). A
library may read regions in other sections, and bare frames, by rules of its own. There all machine
code that runs on one of the devices stays, and the PTX and LTO-IR nearest to it. Relocatable code
(``__nv_relfatbin``) counts as such: code that is linked for a device stays. So does a linked region
that the driver links it anew for. All other code that can be read is "for other GPUs".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from pytest_negativa.arch import (
    ComputeCapability,
    ElementKind,
    SmArch,
    may_be_loaded,
)
from pytest_negativa.models.library import (
    LINKED,
    Content,
    Cubin,
    Element,
    LibraryMap,
    Ptx,
    Region,
)
from pytest_negativa.models.plan import (
    Decision,
    KeepReason,
    KernelUse,
    LibraryPlan,
    LocatedLibrary,
    TrimmedCubin,
    UnusedReason,
    UseMark,
    earliest,
)
from pytest_negativa.models.spans import PAGE_SIZE, around, intersection, minus, size, union
from pytest_negativa.models.trace import FirstUse
from pytest_negativa.models.verdict import Need
from pytest_negativa.planning.keep_needed import keep_needed
from pytest_negativa.planning.reachable import launchable_kernels, reachable_code
from pytest_negativa.settings.globs import GlobSet

# Kept for what the run used of it; all other reasons keep every kernel.
_TRIMMED = frozenset(
    reason.value for reason in (KeepReason.LOADED, KeepReason.MEMORY_IMAGE, KeepReason.ARCH_POLICY)
)

KeepElement = Callable[[LibraryMap, Element], str | None]
"""A plugin's veto: why an element must be kept, or None."""


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """Code that a project keeps even if its run didn't use it.

    Attributes:
        whole_library: why all of the library is kept, e.g. the glob that names it; None if not.
        kernels: globs on mangled or demangled names; notes which of them matched.
        devices: further compute capabilities; code for them is kept if the run's is.
        ptx: ``off``, ``newest`` (per region) or ``all``, in regions that the run loaded.
        demangle: turns a mangled name into that which people write.
        vetoes: asked for each element that would be unused, or lose a part of its code.
        granularity: ``element``, or ``kernel``: in cubins that the run loaded, too, the code of
            kernels that it never looked up is unused.
        healed: what healing of the run gave back: the code that a test failed without.
    """

    whole_library: str | None = None
    kernels: GlobSet = field(default_factory=lambda: GlobSet(()))
    devices: tuple[ComputeCapability, ...] = ()
    ptx: str = "off"
    demangle: Callable[[str], str] = str
    vetoes: tuple[KeepElement, ...] = ()
    granularity: str = "element"
    healed: tuple[Need, ...] = ()


def plan_library(
    located: LocatedLibrary,
    devices: Sequence[ComputeCapability],
    policy: KeepPolicy,
    incomplete: str | None = None,
) -> LibraryPlan:
    """Decide about every element and frame of a library.

    Args:
        located: the library with its use.
        devices: the devices that the run was traced on; none known means keep.
        policy: what to keep besides.
        incomplete: why the run may have used more than is known, or None.
    """
    planner = _Planner(located, devices, policy, incomplete)
    kernels, used = planner.loadable_kernels(), planner.used_kernels()
    decisions = tuple(sorted(planner.decisions(), key=attrgetter("start")))
    trimmed = tuple(planner.trimmed(decisions)) if policy.granularity == "kernel" else ()
    plan = LibraryPlan(
        library=located.library_map.library,
        devices=tuple(map(str, devices)),
        decisions=decisions,
        used_kernels=tuple(
            KernelUse(name, located.usage.context_of(used[name]))
            for name in sorted(kernels & used.keys())
        ),
        unused_kernels=tuple(sorted(kernels - used.keys())),
        notes=tuple(planner.notes()),
        trimmed=tuple(sorted(trimmed, key=attrgetter("start"))),
        granularity=policy.granularity,
    )
    return keep_needed(plan, policy.healed)


_FIRST_MAJOR_WITH_CAPSULES = 10

_Rule = Callable[[Element], str | None]
"""The reason that a block is kept, in words; None: the rule doesn't keep it."""


def _decide(
    block: Element, rules: Sequence[tuple[KeepReason, _Rule]], unused: UnusedReason
) -> Decision:
    """The decision of the first rule that keeps a block; without one, the block is unused."""
    for reason, rule in rules:
        if (detail := rule(block)) is not None:
            return Decision(*block.payload, True, reason.value, detail)
    return Decision(*block.payload, False, unused.value)


def _why_plain(block: Element) -> str | None:
    """The reason to keep an unpacked cubin in a library's data, used or not; None for others."""
    return "the library may read its headers and tables itself" if block.is_plain else None


def _why_unreadable(block: Element) -> str | None:
    if block.unreadable is None and block.kind.is_opaque:
        return f"no rule tells which devices load {block.kind.value}"
    return block.unreadable


def _why_capsules(cubin: Cubin) -> str | None:
    """The reason that a cubin with capsules stays whole.

    From sm_100 on, each function has one, ``.nv.capmerc.text.NAME``: the index of its code section,
    then what it takes to make code for other devices of the family from that section (15% to 50%
    of its size in CUDA 13's libraries). nvlink 13.0 reads both. It crashes if a capsule is
    overwritten with one byte, or the code of a function that calls others is. cuobjdump sees
    nothing amiss. No such GPU was tried, and a driver may read as nvlink does.
    """
    if cubin.arch.major < _FIRST_MAJOR_WITH_CAPSULES:
        return None
    return f"NVIDIA's linker crashes on overwritten {cubin.arch} code and capsules (.nv.capmerc)"


class _Planner:
    """The decisions for one library."""

    def __init__(
        self,
        located: LocatedLibrary,
        devices: Sequence[ComputeCapability],
        policy: KeepPolicy,
        incomplete: str | None,
    ) -> None:
        self._located = located
        self._map = located.library_map
        self._devices = devices
        self._policy = policy
        self._whole = self._reason_for_all(incomplete)
        self._fitting = self._map.loaded_starts(devices)
        self._fitting_policy = self._map.loaded_starts(policy.devices)
        self._used_anywhere = earliest(mark.kernels for mark in located.uses.values())
        self._blocks = tuple(self._map.iter_code())
        self._any_frame_used = any(f.span.start in located.uses for f in self._map.iter_frames())
        self._linked_anew = {
            region.span.start
            for device in {*devices, *policy.devices}
            for region in self._map.linked_anew(device)
        }
        # By offset of the region; only regions that the run loaded are in them.
        self._unexplained: dict[int, str] = {}
        self._relocatable: dict[int, str] = {}
        self._newest_ptx: dict[int, SmArch] = {}
        for region in self._map.iter_regions():
            if (use := located.uses.get(region.span.start)) is not None:
                self._look_at(region, use)
        self._touched = frozenset(self._touched_blocks() if located.touched else ())
        # Bytes of unused code in each cubin that stays whole, by the reason.
        self._left_whole: defaultdict[str, list[int]] = defaultdict(list)
        # In the order of the rows: the first rule that keeps a block gives the reason. A rule
        # without data keeps no block and is left out: a library may have 200,000 of them.
        rules: tuple[tuple[KeepReason, object, _Rule], ...] = (
            (KeepReason.UNMATCHED, self._unexplained, self._unmatched),
            (KeepReason.UNREADABLE, True, _why_unreadable),
            (KeepReason.LOADED, located.uses, self._loaded),
            (KeepReason.MEMORY_IMAGE, self._any_frame_used or located.suspects, self._memory_image),
            (KeepReason.TOUCHED, self._touched, self._was_touched),
            (KeepReason.PLAIN_CUBIN, True, _why_plain),
            (KeepReason.RELOCATABLE, self._relocatable, self._needed_relocatable),
            (KeepReason.ARCH_POLICY, policy.devices, self._wanted_arch),
            (KeepReason.PTX_POLICY, self._newest_ptx, self._wanted_ptx),
            (KeepReason.KERNEL_POLICY, policy.kernels.globs, self._wanted_kernel),
            (KeepReason.HOOK, policy.vetoes, self._veto),
        )
        self._rules = [(reason, rule) for reason, data, rule in rules if data]

    def decisions(self) -> Iterator[Decision]:
        for block in self._blocks:
            if self._whole is not None:
                yield Decision(*block.payload, True, self._whole[0].value)
            else:
                fits = block.payload.start in self._fitting
                unused = UnusedReason.NO_USED_KERNEL if fits else UnusedReason.WRONG_ARCH
                yield _decide(block, self._rules, unused)

    def _unmatched(self, block: Element) -> str | None:
        return self._unexplained.get(block.anchor)

    def _loaded(self, block: Element) -> str | None:
        if block.is_frame or block.payload.start not in self._fitting:
            return None
        use = self._located.use_of(block)
        return None if use is None else self._where(use.first)

    def _memory_image(self, block: Element) -> str | None:
        use = self._located.use_of(block) if block.is_frame else None
        image = use or self._located.suspects.get(block.header_offset)
        return None if image is None else self._where(image.first)

    def _was_touched(self, block: Element) -> str | None:
        return "a process read it past the driver" if block.payload.start in self._touched else None

    def _touched_blocks(self) -> Iterator[int]:
        """Starts of the blocks on touched pages that hold nothing that the driver read.

        It reads the headers of a region that it loads, and the payload that it chooses.
        """
        used = [block for block in self._blocks if self._located.use_of(block) is not None]
        anchors = {b.region for b in used}
        regions = {r.span for r in self._map.iter_regions() if r.span.start in anchors}
        others = union(b.payload for b in used if b.payload.start not in self._fitting)
        read = [*minus(regions, others), *(b.payload for b in used if b.region is None)]
        pages = tuple(minus(self._located.touched, around(read, PAGE_SIZE)))
        for block in self._blocks:
            if any(intersection([block.payload], pages)):
                yield block.payload.start

    def _needed_relocatable(self, block: Element) -> str | None:
        return self._relocatable.get(block.anchor) if self._is_wanted(block) else None

    def _wanted_arch(self, block: Element) -> str | None:
        if block.payload.start not in self._fitting_policy:
            return None
        # Nothing ties a frame to those of other archs with the same code: all are kept.
        used = self._any_frame_used if block.region is None else self._located.use_of(block)
        return str(block.arch) if used else None

    def _wanted_ptx(self, block: Element) -> str | None:
        newest = self._newest_ptx.get(block.anchor)
        if newest is None or block.kind is not ElementKind.PTX:
            return None
        return self._policy.ptx if self._policy.ptx == "all" or block.arch == newest else None

    def _wanted_kernel(self, block: Element) -> str | None:
        """The first kernel of ``block`` that a glob of the policy names."""
        if not self._is_wanted(block):
            return None
        for name in self._kernels(block.content):
            if glob := self._kernel_glob(name):
                return f"{glob} matches {name}"
        return None

    def _veto(self, block: Element) -> str | None:
        reasons = (veto(self._map, block) for veto in self._policy.vetoes)
        return next(filter(None, reasons), None)

    def _is_wanted(self, block: Element) -> bool:
        """Whether a traced device, or one that the policy names, would load the block."""
        return block.payload.start in self._fitting or block.payload.start in self._fitting_policy

    def _where(self, first: FirstUse) -> str:
        return str(self._located.usage.context_of(first))

    def trimmed(self, decisions: Sequence[Decision]) -> Iterator[TrimmedCubin]:
        """The unused code inside cubins that are kept because the run loaded them."""
        kept = {d.start for d in decisions if d.kept and d.reason in _TRIMMED}
        for block in self._blocks:
            use = self._located.use_of(block)
            if block.is_plain or use is None:
                continue
            if block.payload.start in kept and block.anchor not in self._relocatable:
                yield from self._trim(block, use)

    def _trim(self, block: Element, use: UseMark) -> Iterator[TrimmedCubin]:
        """The unused code of a cubin, if there is any; a note if that is unknown."""
        content = block.content
        # Of a single kernel nothing can go.
        if not isinstance(content, Cubin) or len(content.kernels) < 2:
            return
        wanted = self._roots(block, content, use)
        found = wanted if isinstance(wanted, str) else reachable_code(content, wanted)
        if isinstance(found, str):
            self._left_whole[found].append(0)
        elif found.unused and (doubt := self._veto(block) or _why_capsules(content)):
            self._left_whole[doubt].append(size(found.unused))
        elif found.unused:
            yield TrimmedCubin(
                start=block.payload.start,
                kept=tuple(sorted(self._map.names[index] for index in found.kept)),
                code_size=found.code_size,
                unused=found.unused,
            )

    def _roots(self, block: Element, cubin: Cubin, use: UseMark) -> set[int] | str:
        """The functions of a cubin that are used or wanted, by name; or why all of it stays."""
        if use.whole:
            return "it can't be told which of their kernels were used"
        if block.header_offset in self._located.suspects:
            return "the library may have unpacked and loaded them in another way, too"
        names = self._map.names
        kernels = {names[kernel.name]: kernel.name for kernel in cubin.kernels}
        functions = {names[f.name]: f.name for f in cubin.device_functions}
        # In the cubin for another arch, or in one of several that the driver takes together, a
        # kernel may be made up of others.
        if not use.kernels.keys() <= kernels.keys() or not use.functions <= functions.keys():
            return "a kernel that was used is not in them"
        wanted = {index for name, index in kernels.items() if self._kernel_glob(name)}
        # Each translation unit has its own copy of a template's kernel, e.g. CUB's EmptyKernel. A
        # program asks for the copy that came first, which depends on the order of the tests.
        wanted |= {kernels[name] for name in self._used_anywhere.keys() & kernels.keys()}
        return wanted | {functions[n] for n in use.functions}

    def loadable_kernels(self) -> frozenset[str]:
        """Names of all kernels that a traced device could load."""
        return frozenset(
            name
            for block in self._blocks
            if block.payload.start in self._fitting
            for name in self._kernels(block.content)
        )

    def used_kernels(self) -> dict[str, FirstUse]:
        """The kernels that the run used: looked up, launched by them, or in a whole image."""
        whole = earliest(
            dict.fromkeys(self._kernels(block.content), use.first)
            for block in self._blocks
            if (use := self._located.use_of(block)) is not None
            and use.whole
            and (block.region is None or block.payload.start in self._fitting)
        )
        return earliest([whole, *self._launched()]) | self._used_anywhere

    def _launched(self) -> Iterator[dict[str, FirstUse]]:
        """The kernels that code of looked-up kernels may launch on the device."""
        names = self._map.names
        for block in self._blocks:
            use = self._located.use_of(block)
            if use is None or block.payload.start not in self._fitting:
                continue
            if isinstance(content := block.content, Cubin) and content.references:
                for kernel in content.kernels:
                    if (first := use.kernels.get(names[kernel.name])) is not None:
                        launched = launchable_kernels(content, kernel.name)
                        yield {names[index]: first for index in launched}

    def notes(self) -> Iterator[str]:
        if self._whole is not None:
            reason, detail = self._whole
            yield f"all of it is kept ({reason.value}): {detail}"
        if self._map.problems:
            yield (
                f"{len(self._map.problems):,} places are not understood and kept, the first "
                f"{self._map.problems[0]}"
            )
        for doubt, sizes in self._left_whole.items():
            one, many = "1 loaded element stays", f"{len(sizes):,} loaded elements stay"
            elements = one if len(sizes) == 1 else many
            code = f" ({unused:,} bytes of code)" if (unused := sum(sizes)) else ""
            yield f"{elements} whole, unused kernels too{code}: {doubt}"

    def _reason_for_all(self, incomplete: str | None) -> tuple[KeepReason, str] | None:
        reasons = (
            (KeepReason.INCOMPLETE, incomplete),
            (KeepReason.INCOMPLETE, None if self._devices else "the trace names no device"),
            (KeepReason.CHANGED, self._located.changed),
            (KeepReason.UNMATCHED, "; ".join(self._located.unmatched) or None),
            (KeepReason.LIBRARY_POLICY, self._policy.whole_library),
        )
        return next(((reason, why) for reason, why in reasons if why is not None), None)

    def _look_at(self, region: Region, use: UseMark) -> None:
        """Note what the use of a region says of it and of other regions."""
        unexplained = self._why_unexplained(region, use)
        if unexplained is not None:
            self._unexplained[region.span.start] = unexplained
        ptx = [e.arch for e in region.elements if e.kind is ElementKind.PTX]
        if ptx and self._policy.ptx != "off":
            self._newest_ptx[region.span.start] = max(ptx)
        # If a linked cubin fits, the driver has no need to link them.
        if use.prelinked and region.span.start in self._linked_anew:
            self._relocatable.update(dict.fromkeys(use.prelinked, self._where(use.first)))

    def _why_unexplained(self, region: Region, use: UseMark) -> str | None:
        """The contradiction of a region's use to the choice rule, if there is one."""
        contents = [e.content for e in region.elements if e.payload.start in self._fitting]
        if not contents:
            return "loaded, though nothing in it fits a traced device"
        if not all(isinstance(content, Cubin | Ptx) for content in contents):
            return None  # LTO-IR: which kernels it has isn't known
        known = {name for content in contents for name in self._kernels(content)}
        missing = sorted(use.kernels.keys() - known)
        if missing:
            return f"kernel {missing[0]} was used and is in no element that a device would load"
        return None

    def _kernel_glob(self, name: str) -> str | None:
        """The glob of the policy that names a kernel."""
        if not self._policy.kernels.globs:
            return None
        return self._policy.kernels.match(name, self._policy.demangle(name))

    def _kernels(self, content: Content | None) -> list[str]:
        if isinstance(content, Cubin):
            return [self._map.names[kernel.name] for kernel in content.kernels]
        return [kernel.name for kernel in self._map.kernels_of(content)]


def plan_for_devices(
    library_map: LibraryMap, devices: Sequence[ComputeCapability], *, keep_ptx: bool
) -> LibraryPlan:
    """Keep the code that ``devices`` can load; with ``keep_ptx`` all PTX, too."""
    loaded = set(library_map.needed_starts(devices))
    for section in library_map.sections:
        if section.name != LINKED:
            for region in section.regions:
                if any(element.payload.start not in loaded for element in region.elements):
                    for device in devices:
                        indices = may_be_loaded(region.elements, device)
                        loaded.update(region.elements[i].payload.start for i in indices)

    def why_loaded(block: Element) -> str | None:
        return str(block.arch) if block.payload.start in loaded else None

    def why_wanted(block: Element) -> str | None:
        return "all" if keep_ptx and block.kind is ElementKind.PTX else None

    rules = (
        (KeepReason.UNREADABLE, _why_unreadable),
        (KeepReason.PLAIN_CUBIN, _why_plain),
        (KeepReason.ARCH_POLICY, why_loaded),
        (KeepReason.PTX_POLICY, why_wanted),
    )
    return _plan(library_map, devices, rules, UnusedReason.WRONG_ARCH)


def plan_for_none(library_map: LibraryMap) -> LibraryPlan:
    """Keep nothing, readable or not: no program loads the library."""
    return _plan(library_map, (), (), UnusedReason.NO_USED_KERNEL)


def _plan(
    library_map: LibraryMap,
    devices: Sequence[ComputeCapability],
    rules: Sequence[tuple[KeepReason, _Rule]],
    unused: UnusedReason,
) -> LibraryPlan:
    decisions = [_decide(block, rules, unused) for block in library_map.iter_code()]
    return LibraryPlan(
        library=library_map.library,
        devices=tuple(map(str, devices)),
        decisions=tuple(sorted(decisions, key=lambda d: d.start)),
        used_kernels=(),
        unused_kernels=(),
    )
