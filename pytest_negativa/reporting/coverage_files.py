"""Kernel coverage as LCOV and Cobertura: a kernel is a line of its source, or of an index.

A kernel counts as one line: the first of its code. A kernel without line information is a line of
an index, a text file in the run's folder that names the kernels of a library.

Sources: geninfo(1), section FILES; htdocs/xml/coverage-04.dtd of the Cobertura project.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.models.coverage import KernelCoverage, LibraryCoverage
from pytest_negativa.reporting.text import path_for_people, printable


class SourceFile(NamedTuple):
    """A source file, or an index, with the kernels of one library in it.

    Attributes:
        library: file name of the library.
        path: of the source file, printable.
        kernels: line from 1, demangled and printable name, and how many tests used it; by line.
        index_file: where to write ``index_text``; None if this is no index.
    """

    library: str
    path: str
    kernels: tuple[tuple[int, str, int], ...]
    index_file: Path | None = None

    @property
    def index_text(self) -> str:
        """The content of an index."""
        return "".join(f"{name}\n" for _line, name, _tests in self.kernels)

    @property
    def lines(self) -> dict[int, int]:
        """Number of tests by line of a used kernel; instantiations of a template share a line."""
        found: dict[int, int] = {}
        for line, _name, tests in self.kernels:
            found[line] = max(found.get(line, 0), tests)
        return found


def group_by_file(coverage: Sequence[LibraryCoverage], folder: Path) -> tuple[SourceFile, ...]:
    """The kernels of all libraries by source file.

    Args:
        coverage: the rows.
        folder: of the run, for indices.
    """
    files: list[SourceFile] = []
    for number, library in enumerate(coverage):
        name = printable(Path(library.path).name)
        by_file: defaultdict[str | None, list[KernelCoverage]] = defaultdict(list)
        for kernel in library.kernels:
            by_file[kernel.file if kernel.line else None].append(kernel)
        for path, kernels in sorted(by_file.items(), key=lambda item: item[0] or ""):
            # Two libraries may share a name.
            index = folder / f"kernels.{Path(library.path).name}{number or ''}.txt"
            lines = sorted(
                (
                    row if path is None else kernel.line or 0,
                    printable(demangle(kernel.name)),
                    len(kernel.runs),
                )
                for row, kernel in enumerate(kernels, start=1)
            )
            shown = path_for_people(index) if path is None else path
            files.append(
                SourceFile(name, printable(shown), tuple(lines), index if path is None else None)
            )
    return tuple(files)


def render_lcov(files: Sequence[SourceFile]) -> str:
    """An LCOV tracefile: a function for each kernel, the number of tests as its hits."""
    out = []
    for file in files:
        lines = file.lines
        out += ["TN:", f"SF:{file.path}"]
        out += [f"FN:{line},{name}" for line, name, _tests in file.kernels]
        out += [f"FNDA:{tests},{name}" for _line, name, tests in file.kernels]
        out += [f"FNF:{len(file.kernels)}", f"FNH:{sum(tests > 0 for *_, tests in file.kernels)}"]
        out += [f"DA:{line},{tests}" for line, tests in lines.items()]
        out += [f"LF:{len(lines)}", f"LH:{sum(tests > 0 for tests in lines.values())}"]
        out.append("end_of_record")
    return "".join(f"{line}\n" for line in out)


def render_cobertura(files: Sequence[SourceFile], timestamp_ms: int) -> bytes:
    """A Cobertura XML report: a package for each library, a class for each source file.

    Args:
        files: with their kernels.
        timestamp_ms: of the report, milliseconds since the epoch.
    """
    covered, valid = _covered(files)
    root = ET.Element(
        "coverage",
        {
            **_rates(files),
            "lines-covered": str(covered),
            "lines-valid": str(valid),
            "branches-covered": "0",
            "branches-valid": "0",
            "complexity": "0",
            "version": "1",
            "timestamp": str(timestamp_ms),
        },
    )
    ET.SubElement(ET.SubElement(root, "sources"), "source").text = "."
    packages = ET.SubElement(root, "packages")
    by_library: defaultdict[str, list[SourceFile]] = defaultdict(list)
    for file in files:
        by_library[file.library].append(file)
    for library, group in by_library.items():
        attributes = {"name": library, **_rates(group), "complexity": "0"}
        classes = ET.SubElement(ET.SubElement(packages, "package", attributes), "classes")
        for file in group:
            _add_class(classes, file)
    ET.indent(root)
    text: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _add_class(classes: ET.Element, file: SourceFile) -> None:
    names = {"name": Path(file.path).name, "filename": file.path}
    element = ET.SubElement(classes, "class", {**names, **_rates([file]), "complexity": "0"})
    methods = ET.SubElement(element, "methods")
    for line, name, tests in file.kernels:
        rate = "1" if tests else "0"
        attributes = {"name": name, "signature": "", "line-rate": rate, "branch-rate": "1"}
        _add_lines(ET.SubElement(methods, "method", attributes), {line: tests})
    _add_lines(element, file.lines)


def _add_lines(parent: ET.Element, lines: dict[int, int]) -> None:
    element = ET.SubElement(parent, "lines")
    for number, tests in lines.items():
        attributes = {"number": str(number), "hits": str(tests), "branch": "false"}
        ET.SubElement(element, "line", attributes)


def _rates(files: Sequence[SourceFile]) -> dict[str, str]:
    covered, valid = _covered(files)
    return {"line-rate": f"{covered / valid if valid else 1:.4g}", "branch-rate": "1"}


def _covered(files: Sequence[SourceFile]) -> tuple[int, int]:
    """Number of lines that a test used, and of all lines."""
    hits = [tests for file in files for tests in file.lines.values()]
    return sum(tests > 0 for tests in hits), len(hits)
