"""``negativa.lock``: libraries, kept GPU code, unused pages, left out ones, proofs, the seal."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Annotated

import msgspec

from pytest_negativa.arch import SmArch
from pytest_negativa.models.base import NonNegative, Record, Versioned
from pytest_negativa.models.plan import KeepReason
from pytest_negativa.models.spans import (
    PAGE_SIZE,
    Span,
    intersection,
    pages_in_words,
    round_up,
    spans_of_pages,
)

Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
"""A digest in hex. The pattern is Python's, which checks it."""


class KeptCode(Record, frozen=True, kw_only=True, omit_defaults=True):
    """An element or frame that stays.

    Attributes:
        offset: file offset of its payload, or of the frame.
        arch: what it was built for.
        reason: why it stays.
        region: file offset of the region that holds it; none for a frame.
        detail: more of the reason, for people: the test that needed it; of a file that is GPU code,
            its path below the site.
        functions: at kernel granularity, mangled names of the functions of the cubin that stay,
            sorted; without it, all of them do.
    """

    offset: NonNegative
    arch: SmArch
    reason: KeepReason
    region: NonNegative | None = None
    detail: str | None = None
    functions: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.functions is not None and list(self.functions) != sorted(set(self.functions)):
            raise ValueError("functions: not sorted, or one is there twice")


class Place(Record, frozen=True, omit_defaults=True):
    """Place to which a library belongs.

    Attributes:
        path: below ``site-packages`` or the folder in which it was locked, with ``/``; absolute for
            a library that is elsewhere.
        distribution, version: what installed it, if a distribution did.
    """

    path: str
    distribution: str | None = None
    version: str | None = None


class LockedLibrary(Place, frozen=True, kw_only=True, omit_defaults=True):
    """A library, what of its GPU code is kept, and which of its pages are unused.

    Attributes:
        path, distribution, version: see ``Place``.
        others: its other paths, as ``path`` is.
        soname, build_id: of the library, if it has them.
        sha256, size: of the file. Offsets are valid for exactly this content.
        devices: compute capabilities that the run was traced on.
        elements, kept_elements: how many elements and frames it has, and how many of them stay.
        code_bytes, unused_bytes: size of their payloads, and of those that are unused.
        trimmed_bytes: unused code within those that stay, unpacked.
        code_sha256: digest of where they all are, see ``code_digest`` in ``planning.lock``. A
            release that finds other elements in the file than the one that made the lock must not
            take them for unused. None: the lock knows nothing of its GPU code, so all of it stays.
        not_proved: why its GPU code is here although it was not proved.
        kept: by offset; all else of its GPU code is unused.
        pages: pages of CPU code and data that no process touched, which may leave for a
            spare: numbers of pages of 4 KiB, such as ``12-40 57``.
        loaded: False: no test loaded it. ``pages`` are those that may leave all the same, as they
            did not come back when others did.
    """

    others: tuple[str, ...] = ()
    soname: str | None = None
    build_id: str | None = None
    sha256: Sha256
    size: NonNegative
    devices: tuple[str, ...] = ()
    elements: NonNegative = 0
    kept_elements: NonNegative = 0
    code_bytes: NonNegative = 0
    unused_bytes: NonNegative = 0
    trimmed_bytes: NonNegative = 0
    code_sha256: Sha256 | None = None
    not_proved: str | None = None
    kept: tuple[KeptCode, ...] = ()
    pages: str = ""
    loaded: bool = True

    def __post_init__(self) -> None:
        offsets = [code.offset for code in self.kept]
        if offsets != sorted(set(offsets)):
            raise ValueError("kept: not sorted by offset, or an offset is there twice")
        if len(offsets) > self.elements:
            raise ValueError(f"kept: {len(offsets)} of {self.elements} elements")
        if offsets and offsets[-1] >= self.size:
            raise ValueError(f"kept: offset {offsets[-1]:#x} is behind the end of the file")
        pages = intersection(self.spans, [(0, round_up(self.size, PAGE_SIZE))])
        if pages_in_words(pages) != self.pages:
            raise ValueError("pages: not ascending, or one is behind the end of the file")

    @property
    def spans(self) -> tuple[Span, ...]:
        """``pages``, as file offsets."""
        return spans_of_pages(self.pages)

    @property
    def name(self) -> str:
        """For people."""
        return self.path.rpartition("/")[2]


class LeftOut(Place, frozen=True, kw_only=True, omit_defaults=True):
    """A library with GPU code that the run loaded and that is not in the lock.

    Attributes:
        path, distribution, version: see ``Place``.
        soname: ``DT_SONAME``, if it has one.
        reason: why it is not in the lock.
    """

    soname: str | None = None
    reason: str


class ProvingDevice(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU on which the tests ran.

    Attributes:
        name: as the driver names it.
        compute_capability: for example ``9.0``.
        driver: version of the kernel module, if known.
    """

    name: str
    compute_capability: str
    driver: str | None = None


class Proof(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Evidence on which the lock rests.

    Attributes:
        proved: whether the tests ran on copies without the unused code, and ended the same.
        not_proved: the reasons if not.
        run: id of the traced run.
        date: when it was verified, UTC, as ISO 8601 has it.
        granularity: ``element`` or ``kernel``.
        copies: what the tests ran on: ``overwritten`` or ``compacted``.
        fill: the byte that unused code was overwritten with.
        tests: how many ended how, on the copies.
        devices: the GPUs.
        versions: what the tests ran with, by name.
        incomplete: why the run may have loaded libraries that the lock doesn't name.
        parts: ids of the runs that were proved, if ``run`` unites several.
        processors: models of the CPUs on which CPU code was traced; none if it was not, or not all
            of it, so that the lock has no ``pages``.
        pages_not_proved: why it is not proved that the tests touch no other page.
        notes: which tests may need more pages: those that failed, or were not chosen.
        failed: a test failed, and may not have opened all libraries that it needs.
    """

    proved: bool
    not_proved: tuple[str, ...] = ()
    run: str
    date: str | None = None
    granularity: str
    copies: str | None = None
    fill: Annotated[int, msgspec.Meta(ge=0, le=255)]
    tests: dict[str, NonNegative]
    devices: tuple[ProvingDevice, ...]
    versions: dict[str, str]
    incomplete: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()
    pages_not_proved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    failed: bool = False


class Lock(Versioned, Record, frozen=True, kw_only=True):
    """The lock file.

    Attributes:
        digest: of all other fields, see ``digest_of``.
        proof: what the lock rests on.
        libraries: what stays of each library that the run loaded, by path.
        left_out: the other libraries with GPU code that the run loaded, by path.
        include: ``libraries.include`` of the project. Libraries that these globs don't name keep
            their code, even if the run did not load them.
        exclude: ``libraries.exclude`` and ``keep.libraries``. Libraries that these globs name keep
            their code, too.
        files: all files of a distribution that are GPU code themselves as one library, see
            ``models.code_files``; its ``sha256`` is that of their rows in RECORD.
    """

    digest: Sha256
    proof: Proof
    libraries: tuple[LockedLibrary, ...]
    left_out: tuple[LeftOut, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    files: tuple[LockedLibrary, ...] = ()

    def __post_init__(self) -> None:
        counts = Counter(library.sha256 for library in self.libraries)
        twice = next((digest for digest, count in counts.items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"libraries: two have the digest {twice}")

    @property
    def has_pages(self) -> bool:
        """Whether it knows CPU code."""
        return bool(self.proof.processors)

    @property
    def gpu_libraries(self) -> tuple[LockedLibrary, ...]:
        """Those whose GPU code it knows."""
        return tuple(one for one in self.libraries if one.code_sha256 is not None)


def digest_of(lock: Lock) -> str:
    """The digest that a lock should have: SHA-256 of its JSON with sorted keys and no spaces.

    The digest itself is not in the JSON. It detects a line that was lost, added or changed. It is
    no signature.
    """
    plain = msgspec.to_builtins(lock, enc_hook=str)
    del plain["digest"]
    return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()


def seal(lock: Lock) -> Lock:
    """The lock with its libraries and files by path, and the right digest."""
    libraries, files = (
        tuple(sorted(rows, key=lambda row: row.path)) for rows in (lock.libraries, lock.files)
    )
    lock = msgspec.structs.replace(lock, libraries=libraries, files=files)
    return msgspec.structs.replace(lock, digest=digest_of(lock))
