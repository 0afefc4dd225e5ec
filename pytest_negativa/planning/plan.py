"""Located libraries to plans: what stays, what is unused, and why. Reads no library bytes.

Missing data means keep: what is not known to be unused is never planned as unused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pytest_negativa.arch import (
    ComputeCapability,
    ElementKind,
    choose_elements,
    cubin_runs_on,
)
from pytest_negativa.models.library import Content, Cubin, Element, Frame, LibraryMap, Ptx
from pytest_negativa.models.located import (
    LocatedFrame,
    LocatedLibrary,
    LocatedRegion,
    UseMark,
)
from pytest_negativa.models.plan import (
    PLAN_VERSION,
    Decision,
    KeepReason,
    LibraryPlan,
    TrimmedCubin,
    UnusedReason,
)
from pytest_negativa.planning.reachable import Reach, reach
from pytest_negativa.settings.globs import GlobSet

# Kept for what the run used of it; all other reasons keep every kernel.
_TRIMMED = frozenset(
    reason.value for reason in (KeepReason.LOADED, KeepReason.MEMORY_IMAGE, KeepReason.ARCH_POLICY)
)

KeepElement = Callable[[LibraryMap, Element | Frame], str | None]
"""A plugin's veto: why an element must be kept, or None."""


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """What a project keeps though its run didn't use it.

    Attributes:
        whole_library: why all of the library is kept, e.g. the glob that names it; None if not.
        kernels: globs on mangled or demangled names; notes which of them matched.
        devices: further compute capabilities whose code is kept wherever the run's is.
        ptx: ``off``, ``newest`` (per region) or ``all``, in regions that the run loaded.
        relocatable: ``keep``, ``drop``, or ``auto``: drop where a linked cubin fits.
        demangle: turns a mangled name into that which people write.
        vetoes: asked for each element that would be unused, or lose a part of its code.
        granularity: ``element``, or ``kernel``: in cubins that the run loaded, too, the code of
            kernels that it never looked up is unused.
    """

    whole_library: str | None = None
    kernels: GlobSet = field(default_factory=lambda: GlobSet(()))
    devices: tuple[ComputeCapability, ...] = ()
    ptx: str = "off"
    relocatable: str = "auto"
    demangle: Callable[[str], str] = str
    vetoes: tuple[KeepElement, ...] = ()
    granularity: str = "element"


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
    decisions = tuple(sorted(planner.decisions(), key=lambda d: d.start))
    trimmed = tuple(planner.trimmed(decisions)) if policy.granularity == "kernel" else ()
    return LibraryPlan(
        format_version=PLAN_VERSION,
        library=located.library_map.library,
        devices=tuple(map(str, devices)),
        decisions=decisions,
        used_kernels=tuple(sorted(kernels & used)),
        unused_kernels=tuple(sorted(kernels - used)),
        notes=tuple(planner.notes()),
        trimmed=tuple(sorted(trimmed, key=lambda t: t.start)),
        granularity=policy.granularity,
    )


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
        self._relocatable = self._needed_relocatable_regions()
        self._left_whole: Counter[str] = Counter()
        self._used_anywhere = located.used_kernels
        # By offset of the region; choosing is half of the work for 30,000 regions.
        self._chosen = {
            r.region.span.start: _choose(r.region.elements, devices) for r in located.regions
        }

    def decisions(self) -> Iterator[Decision]:
        for region in self._located.regions:
            yield from self._decide_region(region)
        for frame in self._located.frames:
            span = frame.frame.span
            yield Decision(span.start, span.end, *self._decide_frame(frame))

    def trimmed(self, decisions: Sequence[Decision]) -> Iterator[TrimmedCubin]:
        """The unused code inside cubins that are kept because the run loaded them."""
        kept = {d.start: d.reason for d in decisions if d.kept}
        for region in self._located.regions:
            if region.use is None or region.region.span.start in self._relocatable:
                continue
            for element in region.region.elements:
                if kept.get(element.payload.start) in _TRIMMED:
                    yield from self._trim(element, element.payload.start, region.use)
        for frame in self._located.frames:
            start = frame.frame.span.start
            if frame.use is not None and kept.get(start) in _TRIMMED:
                yield from self._trim(frame.frame, start, frame.use)

    def _trim(self, holder: Element | Frame, start: int, use: UseMark) -> Iterator[TrimmedCubin]:
        """What is unused of a cubin, if anything is; a note where that can't be told."""
        content = holder.content
        # Of a single kernel nothing can go.
        if not isinstance(content, Cubin) or len(content.kernels) < 2:
            return
        wanted = self._roots(holder, content, use)
        found = wanted if isinstance(wanted, str) else reach(content, wanted)
        if isinstance(found, Reach) and found.unused:
            found = self._veto(holder) or found
        if isinstance(found, str):
            self._left_whole[found] += 1
        elif found.unused:
            yield TrimmedCubin(
                start=start,
                kept=tuple(sorted(self._map.names[index] for index in found.kept)),
                code_size=found.code_size,
                unused=found.unused,
            )

    def _roots(self, holder: Element | Frame, cubin: Cubin, use: UseMark) -> set[int] | str:
        """The functions of a cubin that are used or wanted, by name; or why all of it stays."""
        if use.whole:
            return "it can't be told which of their kernels were used"
        if isinstance(holder, Element) and holder.header_offset in self._located.suspects:
            return "the library may have unpacked and loaded them in another way, too"
        names = self._map.names
        kernels = {names[kernel.name]: kernel.name for kernel in cubin.kernels}
        functions = {names[f.name]: f.name for f in cubin.device_functions}
        # In the cubin for another arch, or in one of several that the driver takes together, a
        # kernel may be made up of others.
        if not use.kernels <= kernels.keys() or not use.functions <= functions.keys():
            return "a kernel that was used is not in them"
        wanted = {index for name, index in kernels.items() if self._kernel_glob(name)}
        # Of templates each translation unit has its own; which one a program asks for depends on
        # which came first, and so on the order of the tests: CUB asks one EmptyKernel for all.
        wanted |= {kernels[name] for name in self._used_anywhere & kernels.keys()}
        return wanted | {kernels[n] for n in use.kernels} | {functions[n] for n in use.functions}

    def loadable_kernels(self) -> frozenset[str]:
        """Names of all kernels that a traced device could load."""
        found: set[str] = set()
        for region in self._located.regions:
            for index in self._chosen[region.region.span.start]:
                found.update(self._kernels(region.region.elements[index].content))
        for frame in self._located.frames:
            if self._fits(frame, self._devices):
                found.update(self._kernels(frame.frame.content))
        return frozenset(found)

    def used_kernels(self) -> frozenset[str]:
        """Names of the kernels that the run used: looked up, or in an image used as a whole."""
        found = set(self._located.used_kernels)
        for region in self._located.regions:
            if region.use is not None and region.use.whole:
                for index in self._chosen[region.region.span.start]:
                    found.update(self._kernels(region.region.elements[index].content))
        for frame in self._located.frames:
            if frame.use is not None and frame.use.whole:
                found.update(self._kernels(frame.frame.content))
        return frozenset(found)

    def notes(self) -> Iterator[str]:
        if self._whole is not None:
            reason, why = self._whole
            yield f"all of it is kept ({reason.value}): {why}"
        if self._map.problems:
            yield (
                f"{len(self._map.problems):,} places are not understood and kept, the first at "
                f"offset {self._map.problems[0].offset:#x}: {self._map.problems[0].text}"
            )
        for why, count in self._left_whole.items():
            elements = "1 loaded element stays" if count == 1 else f"{count:,} loaded elements stay"
            yield f"{elements} whole, unused kernels too: {why}"

    def _reason_for_all(self, incomplete: str | None) -> tuple[KeepReason, str] | None:
        if incomplete is not None:
            return KeepReason.INCOMPLETE, incomplete
        if not self._devices:
            return KeepReason.INCOMPLETE, "the trace names no device"
        if self._located.changed is not None:
            return KeepReason.CHANGED, self._located.changed
        if self._located.unmatched:
            return KeepReason.UNMATCHED, "; ".join(self._located.unmatched)
        if self._policy.whole_library is not None:
            return KeepReason.LIBRARY_POLICY, self._policy.whole_library
        return None

    def _decide_region(self, located: LocatedRegion) -> Iterator[Decision]:
        elements = located.region.elements
        chosen = self._chosen[located.region.span.start]
        unexplained = self._unexplained(located, chosen)
        kept_ptx = self._kept_ptx(located)
        extra = _choose(elements, self._policy.devices)
        for index, element in enumerate(elements):
            start, end = element.payload.start, element.payload.end
            if self._whole is not None:
                yield Decision(start, end, True, self._whole[0].value)
                continue
            keep: tuple[KeepReason, str] | None = None
            use = located.use
            # Asked also where something else keeps the element: a glob that names used
            # kernels matches, too.
            wanted = self._wanted_kernel(element.content) if index in (chosen | extra) else None
            if element.unreadable is not None:
                keep = KeepReason.UNREADABLE, element.unreadable
            elif unexplained is not None:
                keep = KeepReason.UNMATCHED, unexplained
            elif use is not None and index in chosen:
                keep = KeepReason.LOADED, use.first_use
            elif element.header_offset in self._located.suspects:
                keep = KeepReason.MEMORY_IMAGE, self._located.suspects[element.header_offset]
            elif located.region.span.start in self._relocatable and index in (chosen | extra):
                keep = KeepReason.RELOCATABLE, self._relocatable[located.region.span.start]
            elif use is not None and index in extra:
                keep = KeepReason.ARCH_POLICY, str(element.arch)
            elif index in kept_ptx:
                keep = KeepReason.PTX_POLICY, self._policy.ptx
            elif wanted is not None:
                keep = KeepReason.KERNEL_POLICY, wanted
            elif (veto := self._veto(element)) is not None:
                keep = KeepReason.HOOK, veto
            if keep is not None:
                yield Decision(start, end, True, keep[0].value, keep[1])
            else:
                reason = UnusedReason.NO_USED_KERNEL if index in chosen else UnusedReason.WRONG_ARCH
                yield Decision(start, end, False, reason.value)

    def _decide_frame(self, located: LocatedFrame) -> tuple[bool, str, str | None]:
        frame = located.frame
        if self._whole is not None:
            return True, self._whole[0].value, None
        if frame.unreadable is not None:
            return True, KeepReason.UNREADABLE.value, frame.unreadable
        if located.use is not None:
            return True, KeepReason.MEMORY_IMAGE.value, located.use.first_use
        # Nothing ties a frame to those of other archs with the same code: all are kept.
        if self._fits(located, self._policy.devices) and self._any_frame_used():
            return True, KeepReason.ARCH_POLICY.value, str(frame.arch)
        if name := self._wanted_kernel(frame.content):
            return True, KeepReason.KERNEL_POLICY.value, name
        if veto := self._veto(frame):
            return True, KeepReason.HOOK.value, veto
        fits = self._fits(located, self._devices)
        reason = UnusedReason.NO_USED_KERNEL if fits else UnusedReason.WRONG_ARCH
        return False, reason.value, None

    def _unexplained(self, located: LocatedRegion, chosen: frozenset[int]) -> str | None:
        """Why what the run did with a region contradicts the choice rule, if it does."""
        if located.use is None:
            return None
        if not chosen:
            return "loaded, though nothing in it fits a traced device"
        contents = [located.region.elements[i] for i in chosen]
        if not all(isinstance(e.content, Cubin | Ptx) for e in contents):
            return None  # LTO-IR: which kernels it has isn't known
        known = {name for e in contents for name in self._kernels(e.content)}
        missing = sorted(located.use.kernels - known)
        if missing:
            return f"kernel {missing[0]} was used and is in no element that a device would load"
        return None

    def _needed_relocatable_regions(self) -> dict[int, str]:
        """Offsets of the regions that the driver may link, with the reason.

        The driver links relocatable code anew only where the linked region, which names it,
        has no cubin for the device. Seen with NCCL 2.28 on an H200: of 16 images that it loaded
        none lay in ``__nv_relfatbin``, though one of them named all 127 regions there.
        """
        needed: dict[int, str] = {}
        if self._policy.relocatable == "drop":
            return needed
        for located in self._located.regions:
            if located.use is None or not located.use.prelinked:
                continue
            linked = self._policy.relocatable == "auto" and all(
                any(
                    e.kind is ElementKind.CUBIN and cubin_runs_on(e.arch, device)
                    for e in located.region.elements
                )
                for device in (*self._devices, *self._policy.devices)
            )
            if not linked:
                for offset in located.use.prelinked:
                    needed[offset] = located.use.first_use
        return needed

    def _kept_ptx(self, located: LocatedRegion) -> frozenset[int]:
        if located.use is None or self._policy.ptx == "off":
            return frozenset()
        elements = located.region.elements
        ptx = [i for i, e in enumerate(elements) if e.kind is ElementKind.PTX]
        if self._policy.ptx == "newest" and ptx:
            newest = max(elements[i].arch for i in ptx)
            ptx = [i for i in ptx if elements[i].arch == newest]
        return frozenset(ptx)

    def _wanted_kernel(self, content: Content | None) -> str | None:
        """The first kernel of ``content`` that a glob of the policy names."""
        for name in self._kernels(content) if self._policy.kernels.globs else ():
            if glob := self._kernel_glob(name):
                return f"{glob} matches {name}"
        return None

    def _kernel_glob(self, name: str) -> str | None:
        """The glob of the policy that names a kernel."""
        if not self._policy.kernels.globs:
            return None
        return self._policy.kernels.match(name, self._policy.demangle(name))

    def _veto(self, element: Element | Frame) -> str | None:
        for veto in self._policy.vetoes:
            if why := veto(self._map, element):
                return why
        return None

    def _kernels(self, content: Content | None) -> Iterator[str]:
        for kernel in self._map.kernels_of(content):
            yield kernel.name

    def _fits(self, located: LocatedFrame, devices: Sequence[ComputeCapability]) -> bool:
        return any(cubin_runs_on(located.frame.arch, device) for device in devices)

    def _any_frame_used(self) -> bool:
        return any(frame.use is not None for frame in self._located.frames)


def _choose(elements: Sequence[Element], devices: Sequence[ComputeCapability]) -> frozenset[int]:
    return frozenset(i for device in devices for i in choose_elements(elements, device))
