"""Errors for users (``NegativaError``), exit statuses, "did you mean", refusals of the system.

A message says where (file, offset or key), what was found, what was expected and
what to do. A bug of ours is not one of these: it stays a ``ValueError`` or the like.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import signal
from collections.abc import Iterable, Iterator, Sequence

SYSTEM_REFUSALS = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EXDEV,
        errno.EINVAL,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    }
)
"""Numbers of an OSError that is no fault of ours: the disk is full, the user may not, no such path.

EINVAL is of names and attributes that a file system does not take.
"""


class ExitStatus(enum.IntEnum):
    """The exit statuses of ``negativa`` beside 0; the help of a command says what it means by them.

    A command that runs a program ends with its status, and one that signal N ended with 128 + N.
    """

    FAILED = 1
    """A file could not be read or written, or the answer is no."""
    USAGE = 2
    """Wrong usage; click's own, too."""
    PYTEST_USAGE = 4
    """Wrong usage of pytest, whose own it is, too."""
    NO_COMMAND = 127
    """The program to run does not exist; shells give it, too."""


class NegativaError(Exception):
    """Base of every error that a user can cause or mend.

    Attributes:
        problem: what is wrong, and with ``path`` alone what it is about.
        path: the file or URL that it is about; None if ``problem`` names it.
        remedy: what to do; None if ``problem`` says it.
        exit_status: of a command that it ends.
    """

    exit_status = ExitStatus.FAILED

    def __init__(self, problem: str, path: object = None, remedy: str | None = None) -> None:
        self.problem = problem
        self.path = None if path is None else str(path)
        self.remedy = remedy
        super().__init__(problem, self.path, remedy)

    def __str__(self) -> str:
        return self.beside(None)

    def beside(self, path: object) -> str:
        """The message, without the path if that stands beside it."""
        where = "" if self.path is None or self.path == str(path) else f"{self.path}: "
        return f"{where}{self.problem}" + ("" if self.remedy is None else f"; {self.remedy}")


class OptionError(NegativaError):
    """An option, argument or setting has a value that cannot be used."""

    exit_status = ExitStatus.USAGE


class UnknownArch(OptionError):
    """An arch of no GPU that this release knows."""


class FormatError(NegativaError):
    """Bytes that are not what their format says.

    Attributes:
        path: the file the bytes come from.
        offset: file offset of the bytes in question, or None for the file as a whole.
        problem: what was found and what was expected.
    """

    path: str

    def __init__(self, path: str | os.PathLike[str], offset: int | None, problem: str) -> None:
        super().__init__(problem, os.fspath(path))
        self.offset = offset
        self.args = self.path, offset, problem

    def __str__(self) -> str:
        where = "" if self.offset is None else f" at offset {self.offset:#x}:"
        return f"{self.path}:{where} {self.problem}"


class NotElfError(FormatError):
    """A file is no ELF file, as libraries and programs are."""


class ReconstructError(NegativaError):
    """A copy of a library can't be made: its plan doesn't fit, or it can't be written."""


class StaleLibraryError(ReconstructError):
    """A library is not, or no longer, the file that was analyzed."""


class StoreError(NegativaError):
    """A file of our own cannot be read or written."""


class WorkerError(NegativaError):
    """A cluster can't be reached, or one of its workers can't do its part."""


class NotFoundError(StoreError):
    """A URL has no file."""


class Stopped(KeyboardInterrupt):
    """A signal asked the process to end. No handler of errors catches it.

    Attributes:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"interrupted ({signal.Signals(number).name}): nothing is proved")


def no_such_file(path: object, remedy: str | None = None) -> OptionError:
    """The error of a path that a user names and that is not there."""
    return OptionError("no such file or folder", path, remedy)


@contextlib.contextmanager
def refusing(path: object, done: str, kind: type[NegativaError] = StoreError) -> Iterator[None]:
    """Make an error of the system within a ``with`` block one of ours.

    Args:
        path: what the error is about.
        done: what can't be done: ``read``, ``written``.
        kind: the error's type.
    """
    try:
        yield
    except OSError as e:
        raise kind(f"cannot be {done}: {e.strerror}", path) from e


def describe_fault(error: BaseException) -> str:
    """An unexpected error in one line: its type and its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def nearest(word: str, known: Iterable[str], *, at_least: float = 0.6) -> str | None:
    """The known word that is most like ``word``; None if none is alike (``difflib``'s ratio)."""
    import difflib  # only a mistake needs it

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=at_least)), None)


def one_of(words: Sequence[str]) -> str:
    """The words, with commas and an "or"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def did_you_mean(word: str, known: Iterable[str], *, at_least: float = 0.6) -> str:
    """The end of a message: the known word that is most like ``word``, or nothing."""
    near = nearest(word, known, at_least=at_least)
    return f"; did you mean {near}?" if near else ""
