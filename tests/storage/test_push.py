"""Folders at URLs: their files by content, and the manifest that names them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_negativa.errors import StoreError
from pytest_negativa.storage.push import fetch, load_manifest, publish
from pytest_negativa.storage.urls import Url
from tests.support.faults import PlantedFault
from tests.support.stores import memory_url

MAX = 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Three files, two of one content, as a folder has them."""
    found = {}
    for name, text in (("a", "one"), ("b/c", "two"), ("b/d", "one")):
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        found[name] = path
    return found


def fetched(url: Url, target: Path, **options: Any) -> dict[str, str]:
    fetch(url, load_manifest(url), target, max_bytes=MAX, **options)
    return {
        str(path.relative_to(target)): path.read_text()
        for path in target.rglob("*")
        if path.is_file()
    }


def blob(url: Url, path: str) -> Url:
    [found] = [file for file in load_manifest(url).files if file.path == path]
    return url.parent / "cas" / "sha256" / found.sha256


def test_a_folder_comes_back(files: dict[str, Path], tmp_path: Path) -> None:
    url = memory_url()
    publish("name", files, url)
    assert load_manifest(url).name == "name"
    assert fetched(url, tmp_path / "a") == {"a": "one", "b/c": "two", "b/d": "one"}
    assert fetched(url, tmp_path / "b", wanted=lambda path: path == "a") == {"a": "one"}


def test_what_is_there_is_not_sent_again(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = memory_url()
    assert sum(publish("first", files, first)) == 9
    files["e"] = files["a"].with_name("e")
    files["e"].write_text("more")
    # Of another folder in the same place.
    assert publish("second", files, first.parent / "second") == (4, 9)
    url = first.parent / "third"
    written: list[Url] = []
    monkeypatch.setattr(Url, "write", lambda self, data: written.append(self))
    assert publish("third", files, url) == (0, 13)
    assert written == [url / "manifest.json"]


def test_fetched_files_get_the_mode_that_the_umask_allows(
    files: dict[str, Path], tmp_path: Path
) -> None:
    url = Url(f"file://{tmp_path}/store/name")
    os.umask(0o027)
    publish("name", files, url)
    fetched(url, tmp_path / "a")
    for path in (tmp_path / "a" / "b" / "c", tmp_path / "store" / "cas" / "sha256"):
        for file in [path] if path.is_file() else path.iterdir():
            assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.planted_fault(
    "a file of a run at a URL has other bytes", says="damaged; delete it there"
)
def test_a_damaged_blob(files: dict[str, Path], tmp_path: Path, fault: PlantedFault) -> None:
    url = memory_url()
    publish("name", files, url)
    blob(url, "b/c").write(b"TWO")
    with pytest.raises(StoreError) as error:
        fetched(url, tmp_path / "a")
    fault.check(str(error.value))
    assert str(error.value).startswith(f"{url}: b/c: {blob(url, 'b/c')}: ")


def test_half_a_blob_is_sent_again(files: dict[str, Path], tmp_path: Path) -> None:
    """A store may name a file that its writer did not finish."""
    url = memory_url()
    publish("name", files, url)
    blob(url, "b/c").write(b"t")
    assert publish("name", files, url) == (3, 6)
    assert fetched(url, tmp_path / "a")["b/c"] == "two"


def test_without_a_manifest_there_is_nothing(files: dict[str, Path], tmp_path: Path) -> None:
    url = memory_url()
    files["f"] = tmp_path / "gone"
    with pytest.raises(StoreError, match="gone: cannot be read: No such file"):
        publish("name", files, url)
    with pytest.raises(StoreError, match=r"folder: there is no manifest\.json; check the URL"):
        load_manifest(url)


@pytest.mark.parametrize("path", ["../a", "/a", "a//b", "a/../../b", "", "a\0"])
def test_a_manifest_that_leads_out_is_refused(path: str, tmp_path: Path) -> None:
    url = memory_url()
    file = {"path": path, "size": 1, "sha256": "0" * 64}
    manifest = {"format": 1, "name": "name", "files": [file]}
    (url / "manifest.json").write(msgspec.json.encode(manifest))
    with pytest.raises(StoreError, match="which is not below its folder"):
        fetched(url, tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["a/b", "x" * 300])
def test_names_that_cannot_be_written(name: str, files: dict[str, Path], tmp_path: Path) -> None:
    """A file has the name of a folder, or the name is too long."""
    url = memory_url()
    publish("name", {"a": files["a"], name: files["a"]}, url)
    (tmp_path / "target").mkdir()
    with pytest.raises(StoreError, match="cannot be written: "):
        fetched(url, tmp_path / "target")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "not the manifest of a published folder"),
        (b'{"format": 2}', "format 2, this release reads 1; push it again with this release"),
        (b'{"format_version": 1}', "format none, this release reads 1; push it again"),
        (
            b'{"format":1,"name":"n","files":[{"path":"a","size":1,"sha256":"../x"}]}',
            "not the manifest",
        ),
    ],
)
def test_a_damaged_manifest_is_refused(data: bytes, says: str) -> None:
    url = memory_url()
    (url / "manifest.json").write(data)
    with pytest.raises(StoreError, match=says):
        load_manifest(url)


def test_too_much_is_not_fetched(files: dict[str, Path], tmp_path: Path) -> None:
    url = memory_url()
    publish("name", files, url)
    with pytest.raises(StoreError, match="9 bytes, and at most 8 are fetched"):
        fetch(url, load_manifest(url), tmp_path, max_bytes=8)
