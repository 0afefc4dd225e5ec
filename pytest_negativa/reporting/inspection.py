"""``negativa inspect`` as text: tables of libraries, archs, elements, kernels, loadable code."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from pytest_negativa.arch import NO_ARCH, ComputeCapability, SmArch
from pytest_negativa.errors import one_of
from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.gpucode.summary import FRAME
from pytest_negativa.models.file_kinds import FileKind
from pytest_negativa.models.library import LibraryMap, Ptx, Removed
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.models.summary import CodeRow, LibrarySummary, LoadableCode
from pytest_negativa.planning.difference import short_names
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import (
    and_more,
    format_count,
    format_foreign,
    format_items,
    format_share,
)
from pytest_negativa.settings.globs import GlobSet

# A library with a thousand damaged elements has one cause; the JSON output has them all.
_MAX_PROBLEMS = 10


def library_report(summary: LibrarySummary, removed: Removed | None = None) -> str:
    """One library: a headline, its sections, its code by arch and kind.

    ``removed`` is of a slimmed library.
    """
    kind = summary.file_kind
    remarks = _problem_lines(summary)
    if removed is not None:
        remarks.append(_removed_line([removed]))
    if not summary.sections:
        what = "" if kind is FileKind.LIBRARY else f"{kind.described}, "
        found = "no NVIDIA GPU code" + (" that is understood" if summary.problems else "")
        headline = f"{printable(summary.path)}: {what}{format_bytes(summary.size)}, {found}"
        return "\n".join([headline + format_foreign(summary.foreign), *remarks])
    code = f"GPU code {format_bytes(summary.code_bytes)}"
    counts = (
        (kind is not FileKind.LIBRARY, kind.described),
        (True, format_bytes(summary.size)),
        (
            True,
            f"{code} ({format_share(summary.code_bytes, summary.size)})"
            if removed is None
            else f"{code} ({format_bytes(removed.stored_bytes)} in the file)",
        ),
        (summary.regions or kind.is_host, format_items(summary.regions, "region", "regions")),
        (True, format_items(summary.elements, "element", "elements")),
        (summary.frames, format_items(summary.frames, "bare frame", "bare frames")),
        (summary.kernels is not None, format_items(summary.kernels or 0, "kernel", "kernels")),
    )
    sections = format_table(
        "lrrrr",
        ["section", "regions", "elements", "bare frames", "GPU code"],
        [
            [
                section.name,
                f"{section.regions:,}",
                f"{section.elements:,}",
                f"{section.frames:,}",
                format_bytes(section.code_bytes),
            ]
            for section in summary.sections
        ],
        drop=(3, 1, 2),
    )
    headline = ", ".join(text for is_told, text in counts if is_told)
    headline += format_foreign(summary.foreign)
    parts = [f"{printable(summary.path)}: {headline}"]
    parts += [sections, code_table([summary])] if kind.is_host else [code_table([summary])]
    if kind.is_link_time:
        parts.append("A linker reads this file, and no program loads it as it is.")
    if summary.loaded_bytes is not None:
        parts.append(_device_line(summary.devices, summary.loaded_bytes, summary.code_bytes))
    return "\n\n".join([*parts, *remarks])


def set_report(
    label: str,
    summaries: Sequence[LibrarySummary],
    removed: Sequence[Removed],
) -> str:
    """A folder or distribution: its files with GPU code, totals, code by arch.

    A library has a row. Files that are GPU code themselves share one for each folder. Files that
    only a linker reads have a table of their own.

    Args:
        label: of the folder or distribution.
        summaries: of its files.
        removed: of the slimmed libraries among them.
    """
    libraries = [s for s in summaries if s.file_kind is FileKind.LIBRARY]
    with_code = [s for s in summaries if s.sections and not s.file_kind.is_link_time]
    link_time = [s for s in summaries if s.sections and s.file_kind.is_link_time]
    found, parts = [], []
    if count := sum(bool(s.sections) for s in libraries):
        found.append(
            f"{format_items(count, 'library', 'libraries')} with GPU code, "
            f"{len(libraries) - count:,} without"
        )
    elif libraries or not with_code:
        found.append(f"{format_items(len(libraries), 'library', 'libraries')}, no NVIDIA GPU code")
    if with_code:
        parts += [_file_table("library", with_code), code_table(with_code)]
        if devices := with_code[0].devices:
            loaded = sum(s.loaded_bytes or 0 for s in with_code)
            parts.append(_device_line(devices, loaded, sum(s.code_bytes for s in with_code)))
    if bare := len([s for s in with_code if s.file_kind is not FileKind.LIBRARY]):
        found.append(format_items(bare, "file that is GPU code", "files that are GPU code"))
    if link_time:
        count = len(link_time)
        found.append(format_items(count, "file for linkers alone", "files for linkers alone"))
        parts += [
            "For linkers alone; no program loads these files as they are:",
            _file_table("file", link_time),
        ]
    problems = [line for summary in summaries for line in _problem_lines(summary)]
    if removed:
        who = format_items(len(removed), "of these libraries was", "of these libraries were")
        problems.append(_removed_line(removed, f"{who} slimmed"))
    headline = ", ".join(found) + format_foreign(code for s in summaries for code in s.foreign)
    return "\n\n".join([f"{printable(label)}: {headline}", *parts, *problems])


def _file_table(title: str, summaries: Sequence[LibrarySummary]) -> str:
    """A row for each library, and for all files of a folder that are GPU code of one kind."""
    groups: dict[tuple[str, FileKind], list[LibrarySummary]] = defaultdict(list)
    for s in summaries:
        folder = s.path if s.file_kind.is_host else os.path.dirname(s.path)  # noqa: PTH120
        groups[folder, s.file_kind].append(s)
    paths = [s.path for s in summaries]
    names = dict(zip(paths, short_names(paths), strict=True))
    common = os.path.commonpath([folder for folder, _ in groups])
    rows = []
    for (folder, kind), group in sorted(
        groups.items(), key=lambda item: -sum(s.code_bytes for s in item[1])
    ):
        name = names[group[0].path]
        if len(group) > 1:
            where = os.path.relpath(folder, common)
            name = f"{len(group):,} {kind.value} files" + ("" if where == "." else f" in {where}")
        rows.append([name, *_figures(group)])
    return format_table(
        "lrrrrrrrrr",
        (
            title,
            "size",
            "GPU code",
            "share",
            "regions",
            "elements",
            "frames",
            "kernels",
            *_device_headers(summaries[0].devices),
        ),
        rows,
        total=["total", *_figures(summaries)],
        drop=(6, 4, 5, 3, 7, 1),
    )


def _figures(summaries: Sequence[LibrarySummary]) -> list[str]:
    size = sum(s.size for s in summaries)
    code = sum(s.code_bytes for s in summaries)
    # Names that two libraries share count twice in the total: they are two kernels.
    kernels = [s.kernels for s in summaries if s.kernels is not None]
    loaded = sum(s.loaded_bytes or 0 for s in summaries)
    return [
        format_bytes(size),
        format_bytes(code),
        format_share(code, size),
        f"{sum(s.regions for s in summaries):,}",
        f"{sum(s.elements for s in summaries):,}",
        f"{sum(s.frames for s in summaries):,}",
        format_count(sum(kernels) if kernels else None),
        format_bytes(loaded),
        format_share(code - loaded, code),
    ]


def code_table(summaries: Sequence[LibrarySummary]) -> str:
    """GPU code by arch and kind, added up over libraries."""
    groups: dict[tuple[SmArch, str], list[CodeRow]] = defaultdict(list)
    for summary in summaries:
        for code in summary.code:
            groups[SmArch.parse(code.arch), code.kind].append(code)
    rows = []
    for (arch, kind), group in sorted(groups.items()):
        stored = sum(r.stored_bytes for r in group)
        kernels = [r.kernels for r in group if r.kernels is not None]
        loaded = sum(r.loaded_bytes or 0 for r in group)
        row = [
            _arch_text(arch),
            "bare cubin frame" if kind == FRAME else kind,
            f"{sum(r.elements for r in group):,}",
            format_bytes(stored),
            format_bytes(sum(r.unpacked_bytes for r in group)),
            format_count(sum(kernels) if kernels else None),
            format_bytes(loaded),
            format_bytes(stored - loaded),
        ]
        rows.append(row)
    headers = ("arch", "kind", "elements", "on disk", "unpacked", "kernels")
    return format_table(
        "llrrrrrr", (*headers, *_device_headers(summaries[0].devices)), rows, drop=(4, 2, 5)
    )


def element_table(
    library_map: LibraryMap, devices: Sequence[ComputeCapability], *, slimmed: bool = False
) -> str:
    """Every element and frame of a library, by file offset; of a slimmed one, by address."""
    headers = (
        "address" if slimmed else "offset", "region", "kind", "arch", "packed", "on disk",
        "unpacked", "kernels", "loaded" if devices else None, "note",
    )  # fmt: skip
    loaded = library_map.loaded_starts(devices)
    rows = []
    for block in sorted(library_map.iter_code(), key=lambda block: block.header_offset):
        # A device may load it: the sums count it as loaded.
        unknown = "?" if block.kind.is_opaque else ""
        row = [
            f"{block.header_offset:#x}",
            "-" if block.region is None else f"{block.region:#x}",
            "bare cubin frame" if block.is_frame else block.kind.value,
            _arch_text(block.arch),
            block.compression.value,
            f"{block.stored_size:,}",
            f"{block.unpacked_size:,}",
            "-" if block.content is None else f"{len(library_map.kernels_of(block.content)):,}",
            "yes" if block.payload.start in loaded else unknown,
            block.unreadable or block.identifier or "",
        ]
        rows.append(row)
    return format_table("rrlllrrrll", headers, rows, drop=(1, 6, 4, 7, 9, 2), names=())


def kernel_lines(library_map: LibraryMap, globs: Sequence[str] = ()) -> Iterator[str]:
    """The kernels that were read, sorted by mangled name, with their archs and code sizes.

    Several regions may have a kernel of one name (a template compiled twice): each size is told.

    Args:
        library_map: of the library.
        globs: of which one must match the mangled or demangled name; empty for all.
    """
    wanted = GlobSet(globs)
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for block in library_map.iter_code():
        where = f"{block.arch} ptx" if isinstance(block.content, Ptx) else str(block.arch)
        for kernel in library_map.kernels_of(block.content):
            size = "" if kernel.code_size is None else f" {kernel.code_size:,} B"
            found[kernel.name][where + size] = None
    names = sorted(name for name in found if not globs or wanted.match(name, demangle(name)))
    if globs and not names:
        yield f"0 of {len(found):,} kernels match"
    for name in names:
        yield f"{printable(name)}  [{', '.join(found[name])}]"


def _arch_text(arch: SmArch) -> str:
    return "-" if arch == NO_ARCH else str(arch)


def _device_headers(devices: Sequence[str]) -> Sequence[str | None]:
    """Headers of what devices load; these columns are left out if none are asked for."""
    return (f"loaded on {', '.join(devices)}", "for other GPUs") if devices else (None, None)


def _device_line(devices: Sequence[str], loaded: int, code: int) -> str:
    return (
        f"A device of compute capability {one_of(devices)} loads at most {format_bytes(loaded)} "
        f"({format_share(loaded, code)}) of this; {format_bytes(code - loaded)} "
        f"({format_share(code - loaded, code)}) is for other GPUs."
    )


def _removed_line(removed: Sequence[Removed], who: str = "Slimmed") -> str:
    """Code that slim took out of libraries, all together."""
    sizes = [one.size_before for one in removed]
    before = f" from {format_bytes(sum(size or 0 for size in sizes))}" if all(sizes) else ""
    spares = [one.spare for one in removed if one.spare is not None]
    where = f"are no longer in the file{'s' if len(removed) > 1 else ''}"
    if spares and len(removed) > 1:
        where += f"; with a spare: {len(spares):,}"
    elif spares:
        where = f"lie in its spare {printable(spares[0])}, and come back when a program uses them"
    gone = sum(one.gone_bytes for one in removed)
    lost = f" {format_bytes(gone)} of sections with GPU code {where}." if gone else ""
    return f"{who} by negativa slim{before}; listed is what is left.{lost}"


def _problem_lines(summary: LibrarySummary) -> list[str]:
    lines = [printable(f"{summary.path}: {text}") for text in summary.problems[:_MAX_PROBLEMS]]
    lines += and_more(len(summary.problems), _MAX_PROBLEMS, "... and {} more (see --json)")
    return ["\n".join(lines)] if lines else []


def render_loadable(loadable: Mapping[str, Sequence[LoadableCode]]) -> Iterator[str]:
    """Code of each library that each device could load; libraries without GPU code go out."""
    shown = sorted(path for path, rows in loadable.items() if rows)
    if not shown:
        return
    yield "Regions by what a device loads of them:"
    yield format_table(
        "llrrrlr",
        ("library", "device", "machine code", "compiled (JIT)", "bytes", "from", "nothing"),
        [
            [
                name,
                row.device,
                f"{row.machine:,}",
                f"{row.compiled:,}",
                format_bytes(row.compiled_bytes) if row.compiled else "-",
                ", ".join(row.compiled_from) or "-",
                "ALL" if row.is_missing else f"{row.nothing:,}",
            ]
            for path, name in zip(shown, short_names(shown), strict=True)
            for row in loadable[path]
        ],
        drop=(4, 5, 3, 2),
    )
