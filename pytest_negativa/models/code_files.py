"""Files of distributions that are GPU code themselves: which were opened, and which are unused."""

from __future__ import annotations

import hashlib

from pytest_negativa.models.base import NonNegative, Record

CODE_FILES_VERSION = 1
"""Of ``opened.json`` and ``files.json``. History: 1 is the first."""

NOT_SELECTED = "not looked at, by libraries.include or libraries.exclude"
"""The reason to keep a file that the settings leave out."""


class CodeFile(Record, frozen=True, kw_only=True):
    """A file as RECORD has it: the digest field and the size in bytes."""

    digest: str
    size: NonNegative


class WatchedFiles(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What a run's watch saw of the files of a distribution. Paths are below the site.

    Attributes:
        distribution, version: what installed them.
        site: real path of the folder of the distribution.
        digest: of all their rows in RECORD, see ``installed.code_files``.
        files: those that were there.
        opened: those that some process opened.
        unseen: why others may have been opened, too; None if not.
    """

    distribution: str
    version: str
    site: str
    digest: str
    files: dict[str, CodeFile]
    opened: tuple[str, ...]
    unseen: str | None = None


class OpenedFiles(Record, frozen=True, kw_only=True):
    """The file ``opened.json``, by distribution."""

    format_version: int
    distributions: tuple[WatchedFiles, ...]


class FilesPlan(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What is decided about the files of a distribution. Paths are below the site.

    Attributes:
        distribution, version, site, digest: see ``WatchedFiles``.
        kept: the reason by path.
        kept_bytes: size of those that stay.
        unused: the size in bytes by path.
        reason: why all of them stay; None if some may go.
    """

    distribution: str
    version: str
    site: str
    digest: str
    kept: dict[str, str]
    kept_bytes: NonNegative
    unused: dict[str, NonNegative]
    reason: str | None = None

    @property
    def is_selected(self) -> bool:
        """Whether the settings ask for any of them."""
        return bool(self.unused) or any(reason != NOT_SELECTED for reason in self.kept.values())

    @property
    def unused_bytes(self) -> int:
        """Size of those that may go."""
        return sum(self.unused.values())

    @property
    def unused_sha256(self) -> str:
        """Of the distribution's files in RECORD, and of which of them may go."""
        text = "\n".join((self.distribution, self.version, self.digest, *sorted(self.unused)))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def paths(self) -> dict[str, str]:
        """By absolute path: the unused files."""
        return {f"{self.site}/{name}": name for name in self.unused}


class FilesPlans(Record, frozen=True, kw_only=True):
    """The file ``files.json``, by distribution."""

    format_version: int
    distributions: tuple[FilesPlan, ...]
