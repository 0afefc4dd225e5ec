"""Files at URLs. S3 itself: test_s3.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pytest_negativa.errors import OptionError, StoreError
from pytest_negativa.storage.urls import Url, is_url
from tests.support.stores import memory_url


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/a", True),
        ("file:///tmp/a", True),
        ("abfs://container@account.dfs.core.windows.net/a", True),
        ("s3:/bucket", False),
        ("runs/a", False),
        ("C:/a", False),
        ("-", False),
    ],
)
def test_what_is_a_url(text: str, expected: bool) -> None:
    assert is_url(text) is expected


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a?versionId=1",
        "https://host/a?X-Amz-Signature=secret",
        "zip://a::s3://bucket/b.zip",
        "s3://bucket/../a",
        "s3://",
        "s3://bucket/a b",
        "s3://bucket/a\n",
        "file://folder/a",
    ],
)
def test_what_is_no_plain_url_is_refused(text: str) -> None:
    with pytest.raises(OptionError) as error:
        Url(text)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    ["ftp://me:secret@host/a", "s3://KEY:se/secret+/a@bucket/a", "https://secret@host/a"],
)
def test_a_password_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(OptionError, match="a URL with a password is not taken") as error:
        Url(text)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["hdfs://host:9000/user@home/a", "sftp://me@host/a", "s3://bucket/a:b@c"]
)
def test_no_password_is_taken_for_one(text: str) -> None:
    assert str(Url(text)) == text


def test_the_parts_of_a_url() -> None:
    url = Url("s3://bucket/build/shard-1/")
    assert (str(url.parent), str(url / "a")) == (
        "s3://bucket/build",
        "s3://bucket/build/shard-1/a",
    )
    assert str(Url("abfs://c@host/a").parent) == "abfs://c@host"
    with pytest.raises(OptionError, match="names no folder"):
        _ = Url("s3://bucket").parent


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Url:
    return memory_url() if request.param == "memory" else Url(f"file://{tmp_path}/store/a")


def test_a_file_is_written_and_read(url: Url) -> None:
    place = url / "b"
    assert place.size() is None
    place.write(b"first")
    place.write(b"second")
    assert (place.size(), place.read(6)) == (6, b"second")
    with pytest.raises(StoreError, match="larger than 4 bytes"):
        place.read(4)
    with pytest.raises(StoreError, match="cannot be read: not found"):
        (url / "c").read(1)


def test_a_file_is_downloaded(url: Url, tmp_path: Path) -> None:
    url.write(b"abc")
    url.download(tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"abc"
    with pytest.raises(StoreError, match="cannot be read: not found"):
        (url.parent / "c").download(tmp_path / "other")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gs://bucket/a", "gs:// URLs: Please install gcsfs"),
        ("nothing://a/b", "nothing:// URLs: Protocol not known: nothing"),
    ],
)
def test_a_missing_driver_is_named(text: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(OptionError, match=says):
        Url(text).size()


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if it was not installed.
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(OptionError, match=r"need fsspec; .* pip install 'pytest-negativa\[urls\]'"):
        Url("s3://a/b").size()


def test_a_store_that_does_not_tell_sizes() -> None:
    """As a web server that sends a file in pieces."""

    class Sizeless(MemoryFileSystem):  # type: ignore[misc]
        def info(self, path: str, **options: Any) -> dict[str, Any]:
            return {**super().info(path, **options), "size": None}

    fsspec.register_implementation("sizeless", Sizeless, clobber=True)
    url = Url("sizeless://test/a")
    url.write(b"abc")
    assert url.size() is None and url.read(9) == b"abc"
