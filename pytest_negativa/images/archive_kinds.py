"""Kinds of archives and saved images, by first bytes and name; none is opened here."""

from __future__ import annotations

import enum
import os
import re
from pathlib import Path

from pytest_negativa.storage.system import head_of

WHEEL_SUFFIX = ".whl"
CONDA_SUFFIX, OLD_CONDA_SUFFIX = ".conda", ".tar.bz2"
DOCKER_LIST, OCI_INDEX = "manifest.json", "index.json"
_SKIPPABLE = b"\x2a\x4d\x18"  # after a byte 0x50 to 0x5F
_NAMED_AS_ARCHIVE = re.compile(r".*\.(whl|conda|deb|tar(\.\w+)?)")
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257


class ArchiveKind(enum.Enum):
    """Kind of an archive, by its first bytes."""

    ZIP = "ZIP"
    TAR = "tar"
    GZIP = "gzip"
    ZSTD = "zstd"
    BZIP2 = "bzip2"
    XZ = "xz"
    DEB = "Debian"


_MAGICS = {
    b"PK\3\4": ArchiveKind.ZIP,
    b"PK\5\6": ArchiveKind.ZIP,  # An empty one.
    b"\x1f\x8b\x08": ArchiveKind.GZIP,
    b"\x28\xb5\x2f\xfd": ArchiveKind.ZSTD,
    b"BZh": ArchiveKind.BZIP2,
    b"\xfd7zXZ\0": ArchiveKind.XZ,
    # deb(5): the first member of the archive of ar has this name.
    b"!<arch>\ndebian-binary": ArchiveKind.DEB,
}


def archive_kind(head: bytes) -> ArchiveKind | None:
    """Kind of the archive that begins with these bytes; None if they begin none."""
    # pzstd puts a skippable frame with a size before each frame (RFC 8878, section 3.1.2).
    if head[1:4] == _SKIPPABLE and head[0] >> 4 == 5:
        return ArchiveKind.ZSTD
    found = (kind for magic, kind in _MAGICS.items() if head.startswith(magic))
    is_tar = head.startswith(_TAR_MAGIC, _TAR_MAGIC_AT)
    return next(found, ArchiveKind.TAR if is_tar else None)


def kind_at(path: Path) -> ArchiveKind | None:
    """Kind of an archive by its first bytes, or as a wheel; None for others, and if unreadable."""
    # Opening a named pipe would wait for a writer.
    if path.suffix == WHEEL_SUFFIX or not path.is_file():
        return ArchiveKind.ZIP if path.is_file() else None
    return archive_kind(head_of(path))


def is_wheel(path: Path) -> bool:
    """Whether a path has the name of a wheel."""
    return path.suffix == WHEEL_SUFFIX


def count_archives(folder: Path) -> int:
    """Number of files below a folder with names of wheels, packages or tar archives."""
    return sum(
        _NAMED_AS_ARCHIVE.fullmatch(name) is not None
        for _, _, names in os.walk(folder)
        for name in names
    )
