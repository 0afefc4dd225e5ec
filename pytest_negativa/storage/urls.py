"""URLs of object stores by fsspec: their form, refused credentials, errors.

URLs are ``s3://``, ``gs://``, ``memory://`` and the like. fsspec and the driver of a store, such as
s3fs, are optional, and are imported when a URL is first used. Drivers take credentials from the
environment or from their own configuration files, and repeat what fails for the moment. So a URL
never holds credentials, and no file of ours does.

Every pytest session imports this module: nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_negativa.errors import (
    NegativaError,
    NotFoundError,
    OptionError,
    StoreError,
    describe_fault,
)
from pytest_negativa.storage.atomic import write_atomically

# Not compiled before they are needed: every command imports them.
_URL = r"[A-Za-z][A-Za-z0-9+.-]+://"
_FORM = r"[A-Za-z][A-Za-z0-9+.-]+:/{2,3}[^/?#\s][^?#\s]*"
# A password may hold slashes, as those of S3 do; a port is none. A user of HTTP is a token.
_CREDENTIALS = r"//[^/@]*:(?!\d+/)[^@]*@|(?i:^https?)://[^/]*@"


def is_url(text: str | os.PathLike[str]) -> bool:
    """Whether a text that may be a path is a URL."""
    return isinstance(text, str) and re.match(_URL, text) is not None


@dataclass(frozen=True, slots=True)
class Url:
    """The URL of a file, or of a folder if a store has such."""

    text: str

    def __post_init__(self) -> None:
        """Refuse what is no plain URL.

        Raises:
            OptionError: it has a password, a query, a second URL, or no (absolute) path.
        """
        if re.search(_CREDENTIALS, self.text):
            # The message must not have it either.
            raise OptionError(
                f"{self.text.partition('://')[0]}://...: a URL with a password is not taken, for "
                "it would get into files and logs; set credentials in the environment, or in the "
                "configuration files of the store's tools"
            )
        if not re.fullmatch(_FORM, self.text) or "::" in self.text or "/../" in f"{self.text}/":
            raise OptionError(
                f"{self.text.partition('?')[0]}: expected a URL such as s3://bucket/folder/name, "
                "without a query"
            )
        if re.match(r"(?i:file)://(?!/)", self.text):
            # By RFC 8089 it would be a host; fsspec takes it for a path in the current folder.
            raise OptionError(f"{self.text}: expected an absolute path: file:///folder/name")

    def __str__(self) -> str:
        return self.text

    @property
    def parent(self) -> Url:
        """The URL without the last part of its path.

        Raises:
            OptionError: nothing is left then.
        """
        above = self.text.rstrip("/").rpartition("/")[0]
        if not re.fullmatch(_FORM, above):
            raise OptionError(f"{self}: names no folder; expected a URL such as {self}/name")
        return Url(above)

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self.text.rstrip('/')}/{name}")

    @contextlib.contextmanager
    def _opened(self, done: str) -> Iterator[tuple[Any, str]]:
        """The file system and the path; each driver's errors become ours.

        Args:
            done: what can't be done if there is an error.
        """
        # What is missing, all URLs of this kind need.
        kind = f"{self.text.partition('://')[0]}:// URLs"
        try:
            from fsspec.core import url_to_fs
        except ImportError as e:
            raise OptionError(
                f"{kind} need fsspec; install it with: pip install 'pytest-negativa[urls]'"
            ) from e
        try:
            file_system, path = url_to_fs(self.text)
        except (ImportError, ValueError) as e:
            # Both messages of fsspec say what to install, or that the protocol is unknown.
            raise OptionError(f"{kind}: {e}") from e
        try:
            yield file_system, path
        except NegativaError:
            raise
        except FileNotFoundError as e:
            raise NotFoundError(f"{self}: cannot be {done}: not found ({e})") from e
        except PermissionError as e:
            raise StoreError(
                f"{self}: cannot be {done}: the store refuses it ({e}); check the credentials in "
                "the environment, and what they may do"
            ) from e
        except Exception as e:
            # Drivers have errors of their own.
            raise StoreError(f"{self}: cannot be {done}: {describe_fault(e)}") from e

    def size(self) -> int | None:
        """Bytes of the file; None if there is no file, or the store does not tell.

        Raises:
            StoreError: the store doesn't answer, or refuses to.
        """
        with self._opened("read") as (file_system, path):
            try:
                size: int | None = file_system.info(path)["size"]
            except FileNotFoundError:
                return None
            return size

    def read(self, limit: int) -> bytes:
        """The content of the file.

        Args:
            limit: bytes that it may have.

        Raises:
            NotFoundError: there is no such file.
            StoreError: it can't be read, or is larger.
        """
        with self._opened("read") as (file_system, path), file_system.open(path, "rb") as file:
            data: bytes = file.read(limit + 1)
        if len(data) > limit:
            raise StoreError(f"larger than {limit:,} bytes", self)
        return data

    def download(self, target: Path) -> None:
        """Write the content to a file, whose folder must exist.

        Raises:
            StoreError: it can't be read or written; a part may be there.
        """
        with self._opened("read") as (file_system, path):
            file_system.get_file(path, str(target))

    def write(self, data: bytes) -> None:
        """Write a file. A reader sees the old content or the new one.

        Raises:
            StoreError: it can't be written.
        """
        with self._opened("written") as (file_system, path):
            if "file" in file_system.protocol:
                # fsspec does not write it atomically.
                write_atomically(Path(path), data)
            else:
                file_system.pipe_file(path, data)


def place_of(text: str) -> Path | Url:
    """The place that a text names.

    Raises:
        OptionError: it is a URL that can't be used.
    """
    return Url(text) if is_url(text) else Path(text)
