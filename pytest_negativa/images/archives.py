"""Files in archives: wheel, ZIP, tar, .conda, .deb; limits: 256 GiB, 5,000,000 entries.

Formats: APPNOTE.TXT of PKWARE (ZIP), tar(5) (the module ``tarfile`` reads them), and "Package
specification" of conda's documentation: a ``.conda`` file is a ZIP archive that holds the files as
``pkg-NAME.tar.zst``, and those below ``info/`` as ``info-NAME.tar.zst``. deb(5): a Debian package
is an archive of ``ar`` whose member ``data.tar`` holds the files.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import zstandard

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.files import iter_members
from pytest_negativa.gpucode.source import ByteSource, open_source, unpack_stream
from pytest_negativa.images.archive_kinds import (
    CONDA_SUFFIX,
    WHEEL_SUFFIX,
    ArchiveKind,
    archive_kind,
)
from pytest_negativa.images.overlay import HardLink, Link
from pytest_negativa.models.archive_member import Member
from pytest_negativa.models.file_kinds import HEAD_SIZE
from pytest_negativa.models.sizes import format_bytes

MAX_UNPACKED = 256 << 30
"""Bytes: zeros compress 1,000 times and more, so a small archive could take days."""

# Tables of an archive are read in one go. The central directory of a wheel with 16,000 files has
# 2 MB. Long names in a tar archive have 4 kB; tarfile keeps hundreds, one behind the other.
_MAX_TABLE = 32 << 20
_MAX_TAR_TABLE = 1 << 20
# Characters: PATH_MAX of Linux.
_MAX_NAME = 4096
# A system image has 300,000 files, and their names have 30 MB.
_MAX_ENTRIES = 5_000_000
MAX_NAMES = 512 << 20
"""Bytes of all names of a tar archive, which are in memory at once."""
# Headers of pax for the whole archive: git writes one, tarfile copies all of them for each file.
_MAX_GLOBAL_HEADERS = 1000
# No name has more digits in a row. tarfile takes hours for a million of them (CVE-2024-6232).
_DIGITS = re.compile(rb"\d{256}")
_BUFFER = 128 << 10

_OPENERS: Mapping[ArchiveKind | None, Callable[[Any], Any]] = {
    ArchiveKind.GZIP: gzip.open,
    ArchiveKind.BZIP2: bz2.open,
    ArchiveKind.XZ: lzma.open,
}

# Of a local file header in a ZIP archive: the sizes of name and extra field stand at its end.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCAL_MAGIC = b"PK\3\4"
ENCRYPTED = 1
"""Flag of an encrypted file in a ZIP archive."""
CONDA_FILES = re.compile(r"(info|pkg)-[^/]*\.tar\.zst")
"""Names of the two archives in a ``.conda`` file that hold its files."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a tree; a pipe or a device is an empty one.

    Attributes:
        size: bytes.
        head: the first bytes.
        place: where it can be read at any time; None if it can be read in passing alone.
        stream: the file in passing, until the next entry is taken.
    """

    size: int = 0
    head: bytes = b""
    place: Path | Member | None = None
    stream: BinaryIO | None = None

    def open(self, path: str) -> ByteSource:
        """Open the file. One that can be read in passing alone is unpacked.

        Args:
            path: for messages.

        Raises:
            FormatError: it is damaged, too large, or can't be read.
        """
        if self.place is not None:
            return open_source(self.place)
        with damage(path):
            return unpack_stream(path, self.stream or io.BytesIO(), self.size)


Entry = tuple[str, File | Link | HardLink | None]
"""A path below the root, without ``.`` and ``..``, and what is there; None is a folder."""

OnProblem = Callable[[FormatError], None]
"""Called with what is wrong with a single entry."""


def iter_archive(path: Path, on_problem: OnProblem) -> Iterator[Entry]:
    """The entries of an archive, in its order; a later one of a name counts.

    Raises:
        FormatError: the archive is damaged, or can't be read.
    """
    with ByteSource(path) as source:
        kind = archive_kind(source.read(0, min(HEAD_SIZE, source.size)))
        is_zip = kind is ArchiveKind.ZIP or path.suffix == WHEEL_SUFFIX
        if is_zip and path.suffix != CONDA_SUFFIX:
            for head, member in _iter_zip(source, on_problem):
                yield member.name, File(member.size, head, member)
            return
        parts: Iterable[tuple[str, int, int]] = [("", 0, source.size)]
        if is_zip:
            found = (m for _, m in _iter_zip(source, on_problem) if CONDA_FILES.fullmatch(m.name))
            parts = ((m.name, m.start, m.packed_size) for m in found)
        elif kind is ArchiveKind.DEB:
            data = next((m for m in iter_members(source) if m.name.startswith("data.tar")), None)
            if data is None:
                raise FormatError(
                    source.path, None, "a Debian package without data.tar; is it damaged?"
                )
            parts = [(data.name, data.start, data.size)]
        for name, start, size in parts:
            part = SourceStream(source.window(start, size))
            yield from iter_tar(part, str(Path(source.path, name)), on_problem)


class SourceStream(io.RawIOBase):
    """A stream of a file, or of a window of one."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self._position = 0

    def member(self, name: str, start: int, size: int) -> Member:
        """A file that lies as it is in this part, from ``start`` on."""
        path, at = self.source.path, self.source.start + start
        return Member(archive=path, name=name, size=size, start=at, packed_size=size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = (0, self._position, self.source.size)[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self.source.size - self._position))
        buffer[:length] = self.source.read(self._position, length)
        self._position += length
        return length


class _Tables(io.BufferedReader):
    """A stream for ``zipfile``, which reads tables of any size in one go."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MAX_TABLE:
            raise _too_large(cast("SourceStream", self.raw).source.path, size, _MAX_TABLE)
        return super().read(size)


def _too_large(label: str, size: int, limit: int) -> FormatError:
    return FormatError(
        label,
        None,
        f"a table of {format_bytes(size)} in it is over the limit of {format_bytes(limit)}; "
        "damaged",
    )


@contextlib.contextmanager
def damage(label: str) -> Iterator[None]:
    """Make a ``FormatError`` of what the readers raise for damaged bytes."""
    try:
        yield
    except (
        EOFError,
        MemoryError,
        NotImplementedError,
        OSError,
        OverflowError,
        RecursionError,
        UnicodeDecodeError,
        ValueError,
        lzma.LZMAError,
        struct.error,
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        zstandard.ZstdError,
    ) as e:
        raise FormatError(label, None, f"{e or type(e).__name__}; is the archive damaged?") from e


def open_zip(source: ByteSource) -> zipfile.ZipFile:
    """Open a ZIP archive, and read its list of files, within a limit.

    Raises:
        FormatError: it is damaged, or none.
    """
    with damage(source.path):
        return zipfile.ZipFile(_Tables(SourceStream(source)))


def _iter_zip(source: ByteSource, on_problem: OnProblem) -> Iterator[tuple[bytes, Member]]:
    """The first bytes of each file, and the file."""
    archive = open_zip(source)
    if sum(info.compress_size for info in archive.infolist()) > source.size:
        raise FormatError(source.path, None, "files in it overlap; crafted or damaged")
    # A name may be there twice; the last one counts.
    infos = {info.filename: info for info in archive.infolist() if not info.is_dir()}
    for info in infos.values():
        try:
            if (name := clean_name(info.filename)) is None:
                raise _bad_name(source.path, info.header_offset, info.filename)
            member = _zip_member(source, info, name)
            head = _head(source, member)
        except FormatError as e:
            on_problem(e)
        else:
            yield head, member


def _zip_member(source: ByteSource, info: zipfile.ZipInfo, name: str) -> Member:
    label = f"{source.path}/{name}"
    if info.flag_bits & ENCRYPTED:
        raise FormatError(label, None, "is encrypted; unpack the archive and name the folder")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise FormatError(
            label,
            None,
            f"is packed by method {info.compress_type} of ZIP archives, which is not read; unpack "
            "the archive and name the folder",
        )
    if info.compress_type == zipfile.ZIP_STORED and info.file_size != info.compress_size:
        raise FormatError(
            label,
            info.header_offset,
            f"has {info.compress_size:,} bytes, the archive says {info.file_size:,}; damaged",
        )
    magic, *lengths = _LOCAL_HEADER.unpack(source.read(info.header_offset, _LOCAL_HEADER.size))
    if magic != _LOCAL_MAGIC:
        raise FormatError(
            label, info.header_offset, f"no file header here, but {magic.hex()}; damaged"
        )
    return Member(
        archive=source.path,
        name=name,
        size=info.file_size,
        start=info.header_offset + _LOCAL_HEADER.size + sum(lengths),
        packed_size=info.compress_size,
        crc=None if info.compress_type == zipfile.ZIP_STORED else info.CRC,
    )


def _head(source: ByteSource, member: Member) -> bytes:
    packed = source.read(member.start, min(HEAD_SIZE, member.packed_size))
    if member.crc is None:
        return packed
    with damage(str(member.path)):
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, HEAD_SIZE)


def clean_name(name: str) -> str | None:
    """A name without ``.`` and leading ``/``; None for one that no file can have below a folder."""
    if len(name) > _MAX_NAME:
        return None
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return "/".join(parts) if parts and ".." not in parts and "\0" not in name else None


def _bad_name(label: str, offset: int, name: str) -> FormatError:
    shown = name if len(name) < 100 else f"{name[:100]}..."
    return FormatError(
        label,
        offset,
        f"{shown!r} leads out of the archive, or is longer than {_MAX_NAME:,} characters",
    )


class _TarStream:
    """Stream for ``tarfile``, which may go forward alone.

    Args:
        stream: the tar archive, unpacked, open for reading.
        label: for messages.

    Attributes:
        header: the last header.
        reads_headers: whether headers are read, and not files.
    """

    def __init__(self, stream: Any, label: str) -> None:
        self.header = b""
        self.reads_headers = True
        self.tell = stream.tell
        self._stream = stream
        self._label = label

    def seekable(self) -> bool:
        return True

    def seek(self, position: int) -> None:
        # tarfile goes to the end of each file.
        if position > MAX_UNPACKED:
            raise FormatError(
                self._label,
                None,
                f"unpacks to more than the limit of {format_bytes(MAX_UNPACKED)}; unpack it "
                "yourself and name the folder",
            )
        self._stream.seek(position)

    def read(self, size: int) -> bytes:
        if not self.reads_headers:
            data: bytes = self._stream.read(size)
            return data
        if size > _MAX_TAR_TABLE:
            raise _too_large(self._label, size, _MAX_TAR_TABLE)
        self.header = self._stream.read(size)
        if _DIGITS.search(self.header):
            raise FormatError(
                self._label, None, "a header has 256 digits in a row; crafted or damaged"
            )
        return self.header


def iter_tar(part: BinaryIO | SourceStream, label: str, on_problem: OnProblem) -> Iterator[Entry]:
    """The entries of a tar archive, which may be compressed.

    Args:
        part: the tar archive.
        label: its path, for messages.
        on_problem: told of files that can't be read.

    Raises:
        FormatError: the archive is damaged, or can't be read.
    """
    tar, stream, kind = _open_tar(part, label)
    in_place = part if kind is ArchiveKind.TAR and isinstance(part, SourceStream) else None
    for info in _iter_infos(tar, stream, label):
        if (name := clean_name(info.name)) is None:
            # The root is a folder, too.
            if not info.isdir():
                on_problem(_bad_name(label, info.offset, info.name))
        elif info.isdir():
            yield name, None
        elif info.issym():
            # Linux has no longer ones.
            yield name, Link(info.linkname[:_MAX_NAME])
        elif info.islnk():
            linked = info.linkname[:_MAX_NAME]
            yield name, HardLink(clean_name(linked) or linked)
        elif info.isdev():
            yield name, File()
        elif info.isreg():
            with damage(f"{label}/{name}"):
                file = tar.extractfile(info)
                head = file.peek(HEAD_SIZE)[:HEAD_SIZE]
            place = None
            if in_place is not None and not info.issparse():
                place = in_place.member(name, info.offset_data, info.size)
            yield name, File(info.size, head, place, file)


def _open_tar(
    part: IO[bytes] | SourceStream, label: str
) -> tuple[Any, _TarStream, ArchiveKind | None]:
    """A tar archive as ``tarfile`` reads it, its stream, and its kind."""
    buffered = io.BufferedReader(cast("io.RawIOBase", part), _BUFFER)
    head = buffered.peek(HEAD_SIZE)[:HEAD_SIZE]
    # Zeros end an archive, and are all of a layer in which nothing changed.
    kind = ArchiveKind.TAR if head and not head.strip(b"\0") else archive_kind(head)
    with damage(label):
        stream = _TarStream(_unpacked(buffered, kind, label), label)
        try:
            tar = tarfile.open(fileobj=stream, mode="r:")  # type: ignore[call-overload]  # noqa: SIM115
        except tarfile.ReadError as e:
            if kind is ArchiveKind.TAR:
                raise
            raise FormatError(
                label, None, f"holds no tar archive ({e}); unpack it, and name what it holds"
            ) from e
    return tar, stream, kind


def iter_headers(part: IO[bytes] | SourceStream, label: str) -> Iterator[tarfile.TarInfo]:
    """The headers of a tar archive, see ``iter_tar``."""
    tar, stream, _ = _open_tar(part, label)
    return _iter_infos(tar, stream, label)


def _iter_infos(tar: tarfile.TarFile, stream: _TarStream, label: str) -> Iterator[tarfile.TarInfo]:
    """The headers of a tar archive, within limits."""
    count = names = 0
    while True:
        stream.reads_headers = True
        with damage(label):
            info = tar.next()
        stream.reads_headers = False
        # Otherwise all of them stay in memory.
        tar.members.clear()  # type: ignore[attr-defined]
        if info is None:
            break
        count += 1
        names += len(info.name) + len(info.linkname)
        # Holes take no room in the archive. Where other files end, the stream has a limit.
        most = MAX_UNPACKED if info.issparse() else info.size
        if count > _MAX_ENTRIES or not 0 <= info.size <= most:
            problem = f"has more than {_MAX_ENTRIES:,} files, or {info.name[:100]!r} is too large"
            raise FormatError(label, info.offset, f"{problem}; crafted or damaged")
        if names > MAX_NAMES or len(tar.pax_headers) > _MAX_GLOBAL_HEADERS:
            raise FormatError(
                label,
                info.offset,
                f"names of more than {format_bytes(MAX_NAMES)}, or more than "
                f"{_MAX_GLOBAL_HEADERS:,} headers for all files; crafted or damaged",
            )
        yield info
    # Two blocks of zeros end it.
    if stream.header != bytes(tarfile.BLOCKSIZE):
        raise FormatError(label, tar.offset, "no tar header here; is the archive damaged?")


def _unpacked(stream: Any, kind: ArchiveKind | None, label: str) -> Any:
    if kind is ArchiveKind.TAR:
        return stream
    if kind is ArchiveKind.ZSTD:
        return zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
    if kind in _OPENERS:
        return _OPENERS[kind](stream)
    found = "not a tar archive" if kind is None else f"a {kind.value} file"
    raise FormatError(
        label, None, f"{found}; expected a tar archive, plain or as gzip, bzip2, xz, zstd"
    )
