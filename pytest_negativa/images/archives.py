"""The files in an archive: a wheel or other ZIP archive, a tar archive, a package.

A ``Member`` is a file that can be read at any time: of a tar archive that is not compressed, or of
a ZIP archive. Files in a compressed tar archive can be read in passing alone.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.files import iter_members
from pytest_negativa.gpucode.source import MAX_IN_MEMORY, ByteSource
from pytest_negativa.images.archive_kinds import (
    HEAD_SIZE,
    WHEEL_SUFFIX,
    ArchiveKind,
    archive_kind,
)
from pytest_negativa.models.archive import Member
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
_STEP = 1 << 20
_BUFFER = 128 << 10
# Bytes. xz -9 takes 65 MiB; a header may ask for 4 GiB.
_MAX_XZ_MEMORY = 256 << 20

# Of a local file header in a ZIP archive: the sizes of name and extra field stand at its end.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCAL_MAGIC = b"PK\3\4"
ENCRYPTED = 1
"""Flag of an encrypted file in a ZIP archive."""
_CONDA_SUFFIX, _CONDA_FILES = ".conda", re.compile(r"(info|pkg)-[^/]*\.tar\.zst")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or a link in an archive; a pipe or a device is an empty file.

    Attributes:
        name: path in the archive, without leading ``/`` and without ``.`` and ``..``.
        size: bytes.
        head: the first bytes of a file.
        target: of a symbolic link; None for a file.
        linked: of a hard link, the path of the file that it is, perhaps with ``..``; else None.
        member: where the file can be read at any time; None if it can be read in passing alone.
        read: reads the whole file; valid until the next entry.
        stream: a stream of the file, likewise; of files in tar archives.
        is_folder: whether it is a folder.
    """

    name: str
    size: int = 0
    head: bytes = b""
    target: str | None = None
    linked: str | None = None
    member: Member | None = None
    read: Callable[[], bytearray] = bytearray
    stream: Callable[[], io.RawIOBase] = io.RawIOBase
    is_folder: bool = False


OnProblem = Callable[[FormatError], None]
"""Called with what is wrong with a single entry."""


def iter_archive(path: Path, on_problem: OnProblem) -> Iterator[Entry]:
    """The files and symbolic links in an archive, in its order; a later one of a name counts.

    Raises:
        FormatError: the archive is damaged, or can't be read.
    """
    with ByteSource(path) as source:
        kind = archive_kind(source.read(0, min(HEAD_SIZE, source.size)))
        if kind is ArchiveKind.DEB:
            yield from _iter_deb(source, on_problem)
            return
        if kind is not ArchiveKind.ZIP and path.suffix != WHEEL_SUFFIX:
            yield from iter_tar(Part(source), source.path, source.path, on_problem)
            return
        entries = _iter_zip(source, on_problem)
        if path.suffix != _CONDA_SUFFIX:
            yield from entries
            return
        for entry in entries:
            if entry.member is not None and _CONDA_FILES.fullmatch(entry.name):
                part = Part(source, entry.member.start, entry.member.packed_size)
                label = f"{source.path}/{entry.name}"
                yield from iter_tar(part, label, source.path, on_problem)


def _iter_deb(source: ByteSource, on_problem: OnProblem) -> Iterator[Entry]:
    for member in iter_members(source):
        if member.name.startswith("data.tar"):
            part = Part(source, member.start, member.size)
            yield from iter_tar(part, f"{source.path}/{member.name}", source.path, on_problem)
            return
    raise FormatError(source.path, None, "a Debian package without data.tar; is it damaged?")


class Part(io.RawIOBase):
    """A stream of a part of a file.

    Args:
        source: the file.
        start: where the part begins.
        size: bytes; None: up to the end of the file.
    """

    def __init__(self, source: ByteSource, start: int = 0, size: int | None = None) -> None:
        self.start = start
        self._source = source
        self._size = source.size - start if size is None else size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = (0, self._position, self._size)[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self._size - self._position))
        buffer[:length] = self._source.read(self.start + self._position, length)
        self._position += length
        return length


class _Tables(io.BufferedReader):
    """A stream for ``zipfile``, which reads tables of any size in one go."""

    def __init__(self, part: Part, label: str) -> None:
        super().__init__(part)
        self._label = label

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MAX_TABLE:
            raise _too_large(self._label, size, _MAX_TABLE)
        return super().read(size)


def _too_large(label: str, size: int, limit: int) -> FormatError:
    problem = f"a table of {format_bytes(size)} in it is over the limit of {format_bytes(limit)}"
    return FormatError(label, None, f"{problem}; damaged")


@contextlib.contextmanager
def damage(label: str) -> Iterator[None]:
    """Make a ``FormatError`` of what the readers raise for damaged bytes."""
    try:
        yield
    except (
        EOFError,
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
        problem = f"{e or type(e).__name__}; is the archive damaged?"
        raise FormatError(label, None, problem) from e


def open_zip(source: ByteSource) -> zipfile.ZipFile:
    """Open a ZIP archive, and read its list of files, within a limit.

    Raises:
        FormatError: it is damaged, or none.
    """
    with damage(source.path):
        return zipfile.ZipFile(_Tables(Part(source), source.path))


def _iter_zip(source: ByteSource, on_problem: OnProblem) -> Iterator[Entry]:
    archive = open_zip(source)
    if sum(info.compress_size for info in archive.infolist()) > source.size:
        raise FormatError(source.path, None, "files in it overlap; crafted or damaged")
    # A name may be there twice; the last one counts.
    for info in {info.filename: info for info in archive.infolist()}.values():
        if info.is_dir():
            continue
        try:
            if (name := clean_name(info.filename)) is None:
                raise _bad_name(source.path, info.header_offset, info.filename)
            member = _zip_member(source, info, name)
            head = _head(source, member)
        except FormatError as e:
            on_problem(e)
            continue
        yield Entry(name, info.file_size, head, member=member)


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
        problem = f"has {info.compress_size:,} bytes, the archive says {info.file_size:,}; damaged"
        raise FormatError(label, info.header_offset, problem)
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
    problem = f"{shown!r} leads out of the archive, or is longer than {_MAX_NAME:,} characters"
    return FormatError(label, offset, problem)


class _TarStream:
    """Stream for ``tarfile``, which goes back no further than a byte.

    Args:
        stream: the tar archive, unpacked, open for reading.
        label: for messages.
        seekable: whether any part of the stream can be read at any time.
    """

    def __init__(self, stream: Any, label: str, *, seekable: bool) -> None:
        self.block = b""
        self._stream = stream
        self._label = label
        self._seekable = seekable
        self._position = 0
        self._last = b""
        self._pending = b""

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        if self._seekable:
            self._stream.seek(position)
            self._position = position
            return position
        # tarfile tests whether a file is all there by reading its last byte again.
        if position == self._position - 1 and self._last:
            self._pending, self._position = self._last, position
        while self._position < position and self._take(min(_STEP, position - self._position)):
            pass
        return self._position

    def read(self, size: int) -> bytes:
        """Read a table, such as a header."""
        if size > _MAX_TAR_TABLE:
            raise _too_large(self._label, size, _MAX_TAR_TABLE)
        data = self.block = self.read_all(size)
        if _DIGITS.search(data):
            problem = "a header has 256 digits in a row; crafted or damaged"
            raise FormatError(self._label, None, problem)
        return data

    def read_all(self, size: int) -> bytes:
        """Read so many bytes, or up to the end."""
        parts = []
        while size > 0 and (part := self._take(min(size, _STEP))):
            parts.append(part)
            size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take(self, size: int) -> bytes:
        if self._pending:
            part, self._pending = self._pending, b""
        else:
            part = self._stream.read(size)
        self._position += len(part)
        self._last = part[-1:]
        if self._position > MAX_UNPACKED:
            raise FormatError(
                self._label,
                None,
                f"unpacks to more than the limit of {format_bytes(MAX_UNPACKED)}; unpack it "
                "yourself and name the folder",
            )
        return part


def iter_tar(
    part: io.RawIOBase,
    label: str,
    archive: str | None,
    on_problem: OnProblem,
    *,
    folders: bool = False,
) -> Iterator[Entry]:
    """The files and symbolic links in a tar archive, which may be compressed.

    Args:
        part: the tar archive.
        label: its path, for messages.
        archive: the file that ``part`` is a ``Part`` of; None if it is compressed itself.
        on_problem: told of files that can't be read.
        folders: yield folders, too.

    Raises:
        FormatError: the archive is damaged, or can't be read.
    """
    buffered = io.BufferedReader(part, _BUFFER)
    head = buffered.peek(HEAD_SIZE)[:HEAD_SIZE]
    # Zeros end an archive, and are all of a layer in which nothing changed.
    kind = ArchiveKind.TAR if head and not head.strip(b"\0") else archive_kind(head)
    in_place = kind is ArchiveKind.TAR and archive is not None and isinstance(part, Part)
    with damage(label):
        stream = _TarStream(_unpacked(buffered, kind, label), label, seekable=in_place)
        try:
            tar = tarfile.open(fileobj=stream, mode="r:")  # type: ignore[call-overload]  # noqa: SIM115
        except tarfile.ReadError as e:
            if kind is ArchiveKind.TAR:
                raise
            problem = f"holds no tar archive ({e}); unpack it, and name what it holds"
            raise FormatError(label, None, problem) from e
    count = names = 0
    while True:
        with damage(label):
            info: tarfile.TarInfo | None = tar.next()
        # Otherwise all of them stay in memory.
        tar.members.clear()
        if info is None:
            break
        count += 1
        names += len(info.name) + len(info.linkname)
        if count > _MAX_ENTRIES or info.size < 0:
            raise FormatError(label, None, f"has more than {_MAX_ENTRIES:,} files, or is damaged")
        if names > MAX_NAMES or len(tar.pax_headers) > _MAX_GLOBAL_HEADERS:
            raise FormatError(
                label,
                info.offset,
                f"names of more than {format_bytes(MAX_NAMES)}, or more than "
                f"{_MAX_GLOBAL_HEADERS:,} headers for all files; crafted or damaged",
            )
        if folders and info.isdir() and (name := clean_name(info.name)):
            yield Entry(name, is_folder=True)
        if not (info.isreg() or info.issym() or info.islnk() or info.isdev()):
            continue
        if (name := clean_name(info.name)) is None:
            on_problem(_bad_name(label, info.offset, info.name))
        elif info.issym():
            # Linux has no longer ones.
            yield Entry(name, target=info.linkname[:_MAX_NAME])
        elif info.issparse():
            if ".so" in name:
                problem = "is stored as a sparse file; unpack the archive and name the folder"
                on_problem(FormatError(f"{label}/{name}", None, problem))
        elif info.islnk():
            linked = info.linkname[:_MAX_NAME]
            yield Entry(name, linked=clean_name(linked) or linked)
        elif info.isdev():
            yield Entry(name)
        else:
            with damage(f"{label}/{name}"):
                entry = _tar_file(stream, info, name, label, part, archive if in_place else None)
            yield entry
    if stream.block.strip(b"\0"):
        raise FormatError(label, tar.offset, "no tar header here; is the archive damaged?")


def _tar_file(
    stream: _TarStream,
    info: tarfile.TarInfo,
    name: str,
    label: str,
    part: io.RawIOBase,
    archive: str | None,
) -> Entry:
    member = None
    if archive is not None and isinstance(part, Part):
        start = part.start + info.offset_data
        member = Member(
            archive=archive, name=name, size=info.size, start=start, packed_size=info.size
        )
    stream.seek(info.offset_data)
    head = stream.read_all(min(HEAD_SIZE, info.size))

    def read() -> bytearray:
        if info.size > MAX_IN_MEMORY:
            raise FormatError(
                f"{label}/{name}",
                None,
                f"would take {format_bytes(info.size)} of memory, the limit is "
                f"{format_bytes(MAX_IN_MEMORY)}; unpack the archive and name the folder",
            )
        # Filled in place: parts that are joined later would take the memory twice.
        data = bytearray(info.size)
        data[: len(head)] = head
        done = len(head)
        with damage(f"{label}/{name}"):
            stream.seek(info.offset_data + done)
            while done < info.size and (part := stream.read_all(min(_STEP, info.size - done))):
                data[done : done + len(part)] = part
                done += len(part)
        if done < info.size:
            raise FormatError(
                f"{label}/{name}", None, f"{done:,} of {info.size:,} bytes; truncated"
            )
        return data

    def rest() -> io.RawIOBase:
        stream.seek(info.offset_data + len(head))
        return _Rest(stream, head, info.size)

    return Entry(name, info.size, head, member=member, read=read, stream=rest)


class _Rest(io.RawIOBase):
    """A stream of a file in a tar archive whose head was read."""

    def __init__(self, stream: _TarStream, head: bytes, size: int) -> None:
        self._stream = stream
        self._head = head
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._left)
        if self._head:
            part, self._head = self._head[:length], self._head[length:]
        else:
            part = self._stream.read_all(length)
        buffer[: len(part)] = part
        self._left -= len(part)
        return len(part)


def _unpacked(stream: Any, kind: ArchiveKind | None, label: str) -> Any:
    if kind is ArchiveKind.TAR:
        return stream
    if kind is ArchiveKind.GZIP:
        return gzip.GzipFile(fileobj=stream)
    if kind is ArchiveKind.BZIP2:
        return bz2.BZ2File(stream)
    if kind is ArchiveKind.ZSTD:
        unpacker = zstandard.ZstdDecompressor()
        return unpacker.stream_reader(stream, read_across_frames=True)
    if kind is ArchiveKind.XZ:
        return _Xz(stream)
    found = "not a tar archive" if kind is None else f"a {kind.value} file"
    raise FormatError(
        label, None, f"{found}; expected a tar archive, plain or as gzip, bzip2, xz, zstd"
    )


class _Xz(io.RawIOBase):
    """Content of an xz file, within a limit of memory, which ``lzma.LZMAFile`` has not."""

    def __init__(self, packed: Any) -> None:
        self._packed = packed
        self._unpacker = _new_unpacker()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            packed = b""
            if self._unpacker.eof:
                # Another stream may follow, behind zeros.
                packed = self._unpacker.unused_data.lstrip(b"\0") or self._next().lstrip(b"\0")
                if not packed:
                    return 0
                self._unpacker = _new_unpacker()
            elif self._unpacker.needs_input and not (packed := self._next()):
                raise EOFError("it ends in the middle of the packed data")
            data = self._unpacker.decompress(packed, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _next(self) -> bytes:
        packed: bytes = self._packed.read(_BUFFER)
        return packed


def _new_unpacker() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_XZ_MEMORY)
