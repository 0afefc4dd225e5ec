"""RECORD files: only the lines that must change do."""

from __future__ import annotations

import csv
import hashlib
import os
import random
from pathlib import Path

import pytest

from pytest_negativa.errors import StoreError
from pytest_negativa.installed.record import (
    RecordLine,
    record_digest,
    update_rows,
)
from pytest_negativa.installed.sites import Installed, Site
from tests.support.sites import digest_field

NEW = RecordLine("sha256=new", "7")


@pytest.fixture
def record(tmp_path: Path) -> Path:
    (tmp_path / "a-1.dist-info").mkdir()
    return tmp_path / "a-1.dist-info" / "RECORD"


def installed(record: Path) -> Installed:
    return Installed("a", "1", record, {})


def update(record: Path, text: bytes, *names: str) -> bytes:
    record.write_bytes(text)
    site = record.parents[1]
    changes = {os.path.normpath(site / name): NEW for name in names}
    installed(record).update(changes)
    return record.read_bytes()


def test_digest_is_as_the_specification_has_it() -> None:
    data = b"some library"
    assert record_digest(hashlib.sha256(data).hexdigest()) == digest_field(data)
    assert not record_digest("ff" * 32).endswith("=")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"x.so,sha256=old,5\n", b"x.so,sha256=new,7\n"),
        (b"y.so,a,1\r\nx.so,sha256=old,5\r\nz.so,b,2\r\n", None),
        (b"y.so,a,1\nx.so,,", b"y.so,a,1\nx.so,sha256=new,7"),
        (b"./x.so,sha256=old,5\n", b"./x.so,sha256=new,7\n"),
        (b"sub/../x.so,sha256=old,5\n", b"sub/../x.so,sha256=new,7\n"),
        (b"\n\nx.so,sha256=old,5\n\n", b"\n\nx.so,sha256=new,7\n\n"),
        (b"x.so\n", b"x.so,sha256=new,7\n"),
        (b'"x.so","sha256=old","5"\n', b"x.so,sha256=new,7\n"),
        (b"x.so,sha256=new,7\n", b"x.so,sha256=new,7\n"),
        (b"other.so,a,1\n", b"other.so,a,1\n"),
        (b"", b""),
        (b'"a\nb.so",a,1\nx.so,o,5\n"c\n\n.so",q,1\n', None),
    ],
)
def test_lines(record: Path, before: bytes, after: bytes | None) -> None:
    if after is None:
        after = before.replace(b"x.so,sha256=old,5", b"x.so,sha256=new,7")
        after = after.replace(b"x.so,o,5", b"x.so,sha256=new,7")
    assert update(record, before, "x.so") == after


def test_names_with_commas_quotes_and_other_letters(record: Path) -> None:
    text = '"a,b.so",o,5\n"say ""x"".so",o,5\nü.so,o,5\nz.so,o,5\n'.encode()
    after = update(record, text, "a,b.so", 'say "x".so', "ü.so")
    expected = '"a,b.so",sha256=new,7\n"say ""x"".so",sha256=new,7\nü.so,sha256=new,7\nz.so,o,5\n'
    assert after == expected.encode()


def test_no_record(record: Path) -> None:
    installed(record).update({str(record.parents[1] / "x.so"): NEW})
    assert not record.exists()


def test_not_utf8(record: Path) -> None:
    record.write_bytes(b"x.so,o,5\n\xff.so,o,5\n")
    with pytest.raises(StoreError, match=r"damaged: .* byte 0xff in position 9"):
        installed(record).update({str(record.parents[1] / "x.so"): NEW})


def test_field_that_no_path_is_as_long_as(record: Path) -> None:
    """Python's reader refuses it; a path has 4,096 bytes at most (PATH_MAX of linux/limits.h)."""
    record.write_text("n" * (csv.field_size_limit() + 1) + ",o,5\n")
    with pytest.raises(StoreError, match="damaged: field larger than field limit"):
        installed(record).update({str(record.parents[1] / "x.so"): NEW})
    (record.parent / "METADATA").write_text("Metadata-Version: 2.1\nName: a\nVersion: 1\n")
    [found] = Site(record.parents[1]).installed
    assert found.libraries == {}


def test_other_rows_keep_their_text(tmp_path: Path) -> None:
    rng = random.Random(17)
    for _ in range(20_000):
        text = "".join(
            rng.choices('",\n\rab ', weights=(5, 5, 2, 1, 4, 1, 1), k=rng.randint(0, 14))
        )
        assert update_rows(text, tmp_path, {str(tmp_path / "x.so"): NEW}) == text
