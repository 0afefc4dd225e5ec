"""Gates for those who build wheels: code for each deployed GPU, and little or none for others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from pytest_negativa.arch import ComputeCapability, ElementKind, SmArch
from pytest_negativa.gpucode.mapping import MappedLibrary
from pytest_negativa.gpucode.summary import FRAME, loadable_code, loaded_sections
from pytest_negativa.installed.libraries import LibrarySet
from pytest_negativa.models.file_kinds import FileKind
from pytest_negativa.models.library import LibraryMap, Section
from pytest_negativa.models.summary import LibrarySummary, LoadableCode

Inspected = tuple[LibrarySet, tuple[MappedLibrary, ...]]
"""The files that an argument names, and the results of reading them."""


def what_devices_load(
    library_map: LibraryMap, devices: Sequence[ComputeCapability]
) -> tuple[LoadableCode, ...]:
    """Code that each device could load; empty for a library without GPU code."""
    if not library_map.sections:
        return ()
    return tuple(loadable_code(library_map, device) for device in devices)


def is_checked(libraries: LibrarySet, mapped: MappedLibrary) -> bool:
    """Whether a file must have code for each deployed device.

    In a folder these are libraries. The other files are for one arch each, or for linkers alone.
    """
    return libraries.explicit or (
        mapped.summary is not None and mapped.summary.file_kind is FileKind.LIBRARY
    )


def missing_archs(
    inspected: Sequence[Inspected], devices: Sequence[ComputeCapability]
) -> Iterator[str]:
    """Libraries that can't run on the devices, a sentence for each library and device."""
    for libraries, mapped_libraries in inspected:
        with_code = [
            m
            for m in mapped_libraries
            if m.summary is not None and m.summary.sections and is_checked(libraries, m)
        ]
        if not with_code and _loads_nothing(mapped_libraries):
            yield f"{libraries.label}: no GPU code that devices load, so none for {_names(devices)}"
        for mapped in with_code:
            assert mapped.library_map is not None
            for device in devices:
                if loadable_code(mapped.library_map, device).is_missing:
                    yield (
                        f"{mapped.path}: no code that {_names([device])} can load; it has "
                        f"{_archs_of(mapped.library_map, device)}"
                    )


def too_much_dead(inspected: Sequence[Inspected], limit: float) -> Iterator[str]:
    """Distributions with more code for other GPUs than a limit in percent; arguments without code.

    The GPUs are those of the summaries. The distribution with the most such code is first.
    """
    # importlib.metadata takes 20 ms to import.
    from pytest_negativa.installed.sites import Places

    yield from _unchecked(inspected, "--max-dead")
    places = Places()
    groups: dict[str | None, dict[str, LibrarySummary]] = defaultdict(dict)
    for libraries, mapped in inspected:
        for summary in _loaded(mapped):
            name = libraries.distribution
            if name is None and (place := places.of(summary.path)).distribution:
                name = f"{place.distribution} {place.version}"
            groups[name][summary.path] = summary
    sizes = {
        name: (sum(s.dead_bytes for s in group.values()), sum(s.code_bytes for s in group.values()))
        for name, group in groups.items()
    }
    for name, (dead, code) in sorted(sizes.items(), key=lambda item: -item[1][0]):
        if code and (share := 100 * dead / code) > limit:
            yield (
                f"{name or 'libraries of no distribution'}: {share:.1f}% of the "
                f"GPU code is for other GPUs, more than {limit:g}%"
            )


def other_code(
    inspected: Sequence[Inspected], devices: Sequence[ComputeCapability]
) -> Iterator[str]:
    """Libraries with more than machine code for the devices: other archs, PTX, LTO-IR."""
    yield from _unchecked(inspected, "--only-arch")
    for _libraries, mapped_libraries in inspected:
        for summary in _loaded(mapped_libraries):
            others = [
                f"{row.kind} {row.arch}"
                for row in summary.code
                if row.kind not in (ElementKind.CUBIN.value, FRAME)
                or ComputeCapability.parse(row.arch) not in devices
            ]
            if summary.problems:
                others.append("places that are not understood")
            if others:
                yield (
                    f"{summary.path}: code beside machine code for "
                    f"{_names(devices)}: {', '.join(others)}"
                )


def too_much_code(inspected: Sequence[Inspected], limit: int) -> Iterator[str]:
    """Arguments whose GPU code is larger than a limit in bytes."""
    yield from _unchecked(inspected, "--max-size")
    for libraries, mapped_libraries in inspected:
        size = sum(summary.code_bytes for summary in _loaded(mapped_libraries))
        if size > limit:
            yield (
                f"{libraries.label}: there are {size:,} bytes of GPU code, the limit is {limit:,} "
                "(--max-size)"
            )


def _unchecked(inspected: Sequence[Inspected], gate: str) -> Iterator[str]:
    for libraries, mapped_libraries in inspected:
        if _loads_nothing(mapped_libraries):
            yield f"{libraries.label}: no GPU code that devices load, so {gate} checks nothing"


def _loaded(mapped_libraries: Sequence[MappedLibrary]) -> list[LibrarySummary]:
    """Those with GPU code that are not for linkers alone."""
    return [
        m.summary
        for m in mapped_libraries
        if m.summary is not None and m.summary.sections and not m.summary.file_kind.is_link_time
    ]


def _loads_nothing(found: Sequence[MappedLibrary]) -> bool:
    """Whether devices load no file of these: a gate that checks nothing must not pass."""
    return not _loaded(found) and not any(m.error for m in found)


def _archs_of(library_map: LibraryMap, device: ComputeCapability) -> str:
    """The code that a device could load, and apart from it what only a linker reads."""
    loaded = _distinct(loaded_sections(library_map, device))
    others = [name for name in _distinct(library_map.sections) if name not in loaded]
    texts = [", ".join(loaded), f"for a linker alone {', '.join(others)}" if others else ""]
    return ", and ".join(filter(None, texts))


def _distinct(sections: Sequence[Section]) -> list[str]:
    blocks = [block for section in sections for block in section.iter_code()]
    found = sorted({(block.arch, block.kind.value) for block in blocks})
    return [f"{kind} {arch}" for arch, kind in found]


def _names(devices: Sequence[ComputeCapability]) -> str:
    return ", ".join(str(SmArch(device.major, device.minor)) for device in devices)
