"""OpenVEX: which code of vulnerabilities slimmed libraries lack, by symbols and kernels.

The files are read: no manifest and no lock is evidence that code is gone. A name counts only if the
library had it, so that a misspelled one is no good news. What can't be told is left open.
"""

from __future__ import annotations

import functools
import os
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.library import map_slimmed, read_library
from pytest_negativa.gpucode.slimmed import AddressSpace, has_marker
from pytest_negativa.gpucode.source import ByteSource, digest_of
from pytest_negativa.installed.owners import Owners
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.models.vex import (
    OPENVEX,
    Vulnerabilities,
    Vulnerability,
    VulnerableCode,
)
from pytest_negativa.pages.functions import local_functions
from pytest_negativa.pages.note import Note
from pytest_negativa.reporting.units import format_names
from pytest_negativa.settings.globs import LibraryNames, matches_library
from pytest_negativa.slimming.explain import slimmed_in
from pytest_negativa.slimming.spares import note_of, spare_folders
from pytest_negativa.slimming.tree import scan, soname_of
from pytest_negativa.storage.user_files import read_input
from pytest_negativa.storage.yaml_document import decode_yaml

_LACKS = "The file has none of the code that the list names."
_BASIS = (
    "pytest-negativa read the file. It does not tell whether the list names all code of the "
    "vulnerability. Code that a compiler copied into other functions counts only if the list names "
    "these functions."
)
# Of a list of vulnerabilities: bytes, and commas and line breaks.
_MAX_BYTES = 16 << 20
_MAX_ITEMS = 200_000


def load_vulnerabilities(path: Path) -> Vulnerabilities:
    """Read a list of vulnerabilities, in YAML or JSON.

    Raises:
        StoreError: it can't be read, or is no such list.
    """
    return decode_yaml(
        read_input(path, _MAX_BYTES),
        Vulnerabilities,
        origin=path,
        max_items=_MAX_ITEMS,
        what="a list of vulnerabilities",
        remedy="negativa schema vulnerabilities describes one",
    )


class Finding(NamedTuple):
    """A library that a vulnerability is said to be in.

    Attributes:
        path: real path.
        sha256: of the file, in hex.
        reason: why its code may be there; None if the file lacks all of it.
    """

    path: Path
    sha256: str
    reason: str | None


class _Library(NamedTuple):
    path: Path
    names: tuple[LibraryNames, ...]
    original_sha256: str | None

    def matches(self, glob: str) -> bool:
        """Whether one of its hard links does."""
        return any(matches_library(glob, names) for names in self.names)


class SearchedLibraries:
    """The libraries in folders.

    Args:
        paths: folders or libraries.
        originals: folders or files to look for originals in.

    Raises:
        NegativaError: a folder or manifest can't be read.
    """

    def __init__(self, paths: Sequence[Path], originals: Sequence[Path]) -> None:
        folders = (path if path.is_dir() else path.parent for path in paths)
        known = {one.path: one.entry for one in slimmed_in(folders)}
        owners = Owners()
        self._libraries: list[_Library] = []
        kept = (entry.original for entry in known.values() if entry is not None)
        self._originals = (*originals, *(Path(path) for path in kept if path is not None))
        self._paths = paths
        # Large libraries take seconds to read, and many vulnerabilities may name one.
        self._digest_of = functools.cache(_digest)
        self._left_in = functools.cache(_kernels_left)
        self._original = functools.cache(self._search)
        self._names_in = functools.cache(_names_in)
        for tree in scan(paths):
            for group in filter(tree.is_library, tree.groups):
                path = tree.root / group.name
                soname = soname_of(path)
                names = tuple(
                    LibraryNames(str(link), soname, owners.of(str(link)).distribution)
                    for link in (tree.root / name for name in group.names)
                )
                entry = known.get(str(path))
                digest = None if entry is None else entry.original_sha256
                self._libraries.append(_Library(path, names, digest))

    def find(self, vulnerability: Vulnerability) -> Iterator[Finding]:
        """A finding on each library that a vulnerability is said to be in.

        Raises:
            FormatError: a library can't be read.
        """
        for library in self._libraries:
            code = [c for c in vulnerability.code if library.matches(c.library)]
            if code:
                path = library.path
                reasons = list(self._reasons(path, library, code))
                yield Finding(path, self._digest_of(path), "; ".join(reasons) or None)

    def missing(self, vulnerability: Vulnerability) -> list[str]:
        """Those globs of a vulnerability that no library has."""
        return [
            code.library
            for code in vulnerability.code
            if not any(one.matches(code.library) for one in self._libraries)
        ]

    def _reasons(
        self, path: Path, library: _Library, code: Iterable[VulnerableCode]
    ) -> Iterator[str]:
        """Reasons that code may be there."""
        functions = {name for one in code for name in one.functions}
        kernels = {name for one in code for name in one.kernels}
        with ByteSource(path) as source:
            if not has_marker(source):
                yield "it is not slimmed"
                return
            note = note_of(path)
            sha256 = library.original_sha256 if note is None else note.original.hex()
            if note is not None and (spare := self._why_in_reach(path, note)):
                yield spare
                return
            original = self._original(sha256, path.name)
            try:
                if functions and note is None:
                    yield "it has no spare, and slim --spare alone removes CPU code"
                elif functions:
                    yield from _functions_left(source, original, functions)
                    if original is not None and (twins := functions & self._names_in(original)):
                        # The function on the CPU that launches a kernel has the kernel's name.
                        found = format_names(sorted(twins))
                        yield f"its GPU code has {found}, too: list it among the kernels"
                if kernels and note is not None:
                    yield "slim --spare leaves parts of GPU code on pages that stay"
                elif kernels:
                    yield from self._kernels_left(source, original, kernels)
            except FormatError as e:
                yield f"it can't be read: {e.problem}"

    def _why_in_reach(self, path: Path, note: Note) -> str | None:
        """The reason against a library whose spare is in reach, or may be."""
        places = [Path(folder, note.spare_name) for folder in spare_folders(path, note)]
        if (elsewhere := self._spares.get(note.spare_name)) is not None:
            places.append(elsewhere)
        for place in places:
            try:
                place.lstat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as e:
                return f"{place}: nothing tells whether its spare is there: {e.strerror}"
            return f"its spare {place.name} is in reach, and gives the code back"
        return None

    @functools.cached_property
    def _spares(self) -> dict[str, Path]:
        """Spares by name.

        In the tree of an image, they do not lie where the libraries will find them. And each
        program may set its own folder.
        """
        return {
            name: Path(folder, name)
            for place in self._paths
            for folder, _, names in os.walk(place)
            for name in names
            if name.endswith(".spare")
        }

    def _search(self, sha256: str | None, name: str) -> Path | None:
        for place in self._originals if sha256 is not None else ():
            for path in place.rglob("*") if place.is_dir() else (place,):
                alike = path.name.startswith(name) or not place.is_dir()
                if alike and path.is_file() and digest_of(path) == sha256:
                    return path
        return None

    def _kernels_left(
        self, source: ByteSource, original: Path | None, kernels: set[str]
    ) -> Iterator[str]:
        """Reasons that kernels may be in a library without a spare."""
        names, problem = self._left_in(source.path)
        if there := kernels & names:
            yield f"it has {format_names(sorted(there))}"
        if problem is not None:
            yield problem
        if unproved := kernels - names - self._known_kernels(source, original, kernels):
            named = format_names(sorted(unproved))
            yield f"nothing shows that it ever had {named} (are the names right?)"

    def _known_kernels(
        self, source: ByteSource, original: Path | None, kernels: set[str]
    ) -> set[str]:
        """The kernels that the original has, or that the library registers by name with CUDA."""
        if original is not None:
            return kernels & self._names_in(original)
        # Names elsewhere are those of symbols, such as CPU functions.
        texts = [
            b"\0" + source.read(s.offset, s.size)
            for s in read_host_elf(source).sections
            if s.name.startswith(".rodata")
        ]
        return {k for k in kernels if any(b"\0" + k.encode() + b"\0" in text for text in texts)}


def _digest(path: Path) -> str:
    with ByteSource(path) as source:
        return source.sha256()


def _names_in(original: Path) -> frozenset[str]:
    """The names in an original's GPU code."""
    return frozenset(read_library(original, Scope()).names)


def _kernels_left(path: str) -> tuple[frozenset[str], str | None]:
    """Names in the GPU code of a slimmed library, and why there may be more kernels."""
    with ByteSource(path) as source:
        left, _ = map_slimmed(source, read_host_elf(source), Scope())
    return frozenset(left.names), _why_unknown(left)


def _why_unknown(left: LibraryMap) -> str | None:
    """The reason that a map may lack names of kernels."""
    if left.problems:
        return f"a part of its GPU code can't be read: {left.problems[0]}"
    for block in left.iter_code():
        if block.unreadable is not None:
            return f"a part of its GPU code can't be read: {block.unreadable}"
        if block.content is None:
            return f"it has {block.kind.value}, which doesn't tell its kernels"
    return None


def _functions_left(source: ByteSource, original: Path | None, names: set[str]) -> Iterator[str]:
    """Reasons that CPU functions may be in a library whose spare is gone.

    Compilers split functions into parts, whose names go on with a dot: ``f.cold``, ``f.part.0``.
    """
    if original is None:
        yield "its original is needed to find CPU functions (--original)"
        return
    found = defaultdict(list)
    with ByteSource(original) as whole:
        functions = local_functions(whole)
        if functions is None:
            yield "its original has no symbol table, so parts of CPU functions can't be found"
            return
        for address, (size, mangled) in functions:
            name = mangled.decode(errors="replace")
            for wanted in {name, name.partition(".")[0]} & names:
                found[wanted].append((address, address + size))
    space = AddressSpace(source, read_host_elf(source).segments)
    if unknown := names - found.keys():
        yield f"its original has no {format_names(sorted(unknown))} (are the names right?)"
    if there := {
        name for name, spans in found.items() if any(space.stored_size(*s) for s in spans)
    }:
        yield f"it has {format_names(sorted(there))}, or a part"


def make_document(
    findings: Sequence[tuple[Vulnerability, Sequence[Finding], bool]],
    *,
    author: str,
    timestamp: str,
    product: str | None = None,
) -> dict[str, object]:
    """State what was found, as OpenVEX. The same findings make the same document.

    Args:
        findings: by vulnerability, and whether all of its libraries were found.
        author: who states it.
        timestamp: the time in RFC 3339.
        product: IRI of what the libraries are part of; None: each library is a product.
    """
    facts = {
        "author": author,
        "timestamp": timestamp,
        "version": 1,
        "tooling": f"pytest-negativa {version('pytest-negativa')}",
        "statements": [
            statement
            for vulnerability, found, is_complete in findings
            for statement in _statements(vulnerability, found, product, is_complete)
        ],
    }
    data = msgspec.json.encode({"@context": OPENVEX, **facts}).decode()
    return {"@context": OPENVEX, "@id": uuid.uuid5(uuid.NAMESPACE_URL, data).urn, **facts}


def _statements(
    vulnerability: Vulnerability,
    findings: Iterable[Finding],
    product: str | None,
    is_complete: bool,
) -> Iterator[dict[str, object]]:
    by_reason: defaultdict[str | None, set[tuple[str, str]]] = defaultdict(set)
    for finding in findings:
        by_reason[finding.reason].add((finding.path.name, finding.sha256))
    # Readers of OpenVEX may ask for the product alone, whatever its subcomponents. So it is not
    # affected only if all of the libraries are not; else each such library stands for itself.
    is_whole = is_complete and by_reason.keys() == {None}
    for reason, files in sorted(by_reason.items(), key=lambda item: item[0] or ""):
        components = [
            {
                "@id": f"pkg:generic/{quote(name, safe='')}?checksum=sha256:{digest}",
                "hashes": {"sha-256": digest},
            }
            for name, digest in sorted(files)
        ]
        is_alone = product is None or (reason is None and not is_whole)
        found = _LACKS if reason is None else f"Its code may be there: {reason}."
        statement: dict[str, object] = {
            "vulnerability": {"name": vulnerability.name},
            "products": components if is_alone else [{"@id": product, "subcomponents": components}],
            "status": "under_investigation" if reason else "not_affected",
            "status_notes": f"{found} {_BASIS}",
        }
        if reason is None:
            statement["justification"] = "vulnerable_code_not_present"
        yield statement
