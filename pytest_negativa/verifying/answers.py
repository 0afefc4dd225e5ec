"""The answers of a search's probes, in a file by which an interrupted search goes on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pytest_negativa.errors import refusing
from pytest_negativa.models.base import UNDECODABLE
from pytest_negativa.planning.keep_needed import Part
from pytest_negativa.storage.atomic import write_atomically
from pytest_negativa.storage.system import read_regular


class Answer(msgspec.Struct, frozen=True):
    """One answer.

    Attributes:
        kept: digest of the parts that were given back.
        failing: a test that failed, or None.
    """

    kept: str
    failing: str | None


class Answers:
    """The answers to one question, in a file."""

    def __init__(self, path: Path, known: dict[str, Answer]) -> None:
        self._path = path
        self._known = known

    @classmethod
    def open(cls, path: Path, asked: Sequence[str]) -> Answers:
        """Read the file, and drop the answers to another question from it.

        Args:
            asked: everything that the answers depend on.

        Raises:
            StoreError: the file can't be read or written.
        """
        known: dict[str, Answer] = {}
        question = _digest(asked).encode()
        with refusing(path, "read"):
            lines = read_regular(path, follow=False).splitlines() if path.exists() else []
        kept = [question]
        for line in lines[1:] if lines[:1] == kept else ():
            # The last line may be cut off; the next one must not begin behind it.
            try:
                answer = msgspec.json.decode(line, type=Answer)
            except UNDECODABLE:
                continue
            known[answer.kept] = answer
            kept.append(line)
        write_atomically(path, b"".join(line + b"\n" for line in kept))
        return cls(path, known)

    def get(self, kept: frozenset[Part]) -> Answer | None:
        return self._known.get(_digest(sorted(map(repr, kept))))

    def add(self, kept: frozenset[Part], failing: str | None) -> None:
        """Append an answer to the file.

        Raises:
            StoreError: the file can't be written.
        """
        answer = Answer(_digest(sorted(map(repr, kept))), failing)
        self._known[answer.kept] = answer
        with refusing(self._path, "written"), self._path.open("ab") as file:
            file.write(msgspec.json.encode(answer) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()
