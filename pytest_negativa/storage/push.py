"""The files behind ``negativa push`` and ``fetch``: manifest last, by SHA-256, 8 threads.

A manifest, ``URL/manifest.json``, names the files. Their contents lie beside the folder, by their
digests, as ``cas/sha256/DIGEST``: folders with equal files share them. The manifest is written
last, so a reader finds all that it names. What is there is not sent again, and a writer that was
killed can go on. Two writers send equal blobs; the manifest of the later one counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from pytest_negativa.errors import NotFoundError, StoreError, refusing
from pytest_negativa.models.published import Published, PublishedFile
from pytest_negativa.storage.records import decode_versioned
from pytest_negativa.storage.system import hash_steps
from pytest_negativa.storage.urls import Url

_MANIFEST = "manifest.json"
# Bytes: 100,000 files with long names.
_MAX_MANIFEST = 64 << 20
# A request takes most of its time to wait.
_THREADS = 8
# Of files of more bytes than this, one at a time is in memory.
_LARGE = 16 << 20
_large = threading.Lock()


def publish(name: str, files: Mapping[str, Path], url: Url) -> tuple[int, int]:
    """Send files, then the manifest that names them.

    Args:
        name: of the folder.
        files: by path below the folder.
        url: of the folder.

    Returns:
        Bytes of files that were sent, and of files that were there.

    Raises:
        StoreError: a file can't be read or sent.
        OptionError: the URL can't be used.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        done = list(pool.map(partial(_publish_file, url), sorted(files.items())))
    manifest = Published(name=name, files=tuple(file for file, _ in done))
    with _telling(url, _MANIFEST):
        (url / _MANIFEST).write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    total = sum(file.size for file, _ in done)
    sent = sum(file.size for file, is_new in done if is_new)
    return sent, total - sent


def _publish_file(url: Url, item: tuple[str, Path]) -> tuple[PublishedFile, bool]:
    """Send a file that is not there; whether it was sent."""
    name, path = item
    with refusing(path, "read"):
        turn = _large if path.stat().st_size > _LARGE else contextlib.nullcontext()
        with turn, _telling(url, name):
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            found = PublishedFile(path=name, size=len(data), sha256=digest)
            blob = _blobs(url) / found.sha256
            is_new = blob.size() != found.size
            if is_new:
                blob.write(data)
    return found, is_new


def load_manifest(url: Url) -> Published:
    """Read the manifest of a published folder.

    Raises:
        StoreError: there is none, it can't be read, or names a file outside of its folder.
        OptionError: the URL can't be used.
    """
    place = url / _MANIFEST
    try:
        data = place.read(_MAX_MANIFEST)
    except NotFoundError as e:
        problem = f"there is no {_MANIFEST}; check the URL, and whether the push ended"
        raise NotFoundError(problem, url) from e
    manifest = decode_versioned(
        data,
        Published,
        origin=str(place),
        what="the manifest of a published folder",
        remedy="push it again with this release",
    )
    for path in (manifest.name, *(file.path for file in manifest.files)):
        if not {"", ".", ".."}.isdisjoint(path.split("/")) or "\0" in path:
            raise StoreError(f"{place}: names {path!r}, which is not below its folder")
    return manifest


def fetch(
    url: Url,
    manifest: Published,
    target: Path,
    *,
    max_bytes: int,
    wanted: Callable[[str], bool] = lambda path: True,
) -> None:
    """Fetch files of a published folder.

    Args:
        url: of the folder.
        manifest: what it holds.
        target: the folder here, new or empty.
        max_bytes: that the files may have together.
        wanted: whether to fetch the file of a path.

    Raises:
        StoreError: a file can't be fetched, is damaged, or all are too large.
    """
    files = [file for file in manifest.files if wanted(file.path)]
    if (total := sum(file.size for file in files)) > max_bytes:
        raise StoreError(f"{total:,} bytes, and at most {max_bytes:,} are fetched", url)
    blobs = _blobs(url)

    def fetch_file(file: PublishedFile) -> None:
        path, blob = target / file.path, blobs / file.sha256
        with refusing(path, "written"):
            # Such as a name that is too long, or that is a file's and a folder's.
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        with _telling(url, file.path):
            blob.download(path)
            if not is_there(path, file):
                raise StoreError("damaged; delete it there, and push again", blob)

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(fetch_file, files))


def _blobs(url: Url) -> Url:
    """URL of the contents of a folder's files."""
    return url.parent / "cas" / "sha256"


@contextlib.contextmanager
def _telling(url: Url, name: str) -> Iterator[None]:
    """Make errors begin with the folder's URL and the file's name, which its user knows."""
    try:
        yield
    except StoreError as e:
        raise type(e)(f"{name}: {e}", url) from e


def is_there(path: Path, file: PublishedFile) -> bool:
    """Whether a file here has the content of a published one."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    with path.open("rb") as source:
        return hash_steps(lambda _offset, length: source.read(length), file.size) == file.sha256
