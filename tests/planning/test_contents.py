"""Which files of a run are one library, by their content."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pytest_negativa.models.trace import LibraryUsage, TracedLibrary
from pytest_negativa.planning.locate import Content, Contents
from tests.support.faults import PlantedFault
from tests.support.usages import image_use, usage_of

HERE = "/site/lib.so"
SHA = "aa" * 32


def library(path: str = HERE, **changes: Any) -> TracedLibrary:
    """A file; by default, one that did not change since a process had it mapped."""
    return replace(
        TracedLibrary(
            path=path,
            size=1000,
            mtime_ns=1,
            build_id="beef",
            device=1,
            inode=sum(path.encode()),
            ctime_ns=1,
        ),
        **changes,
    )


def used(traced: TracedLibrary, *kernels: str, process: int = 0) -> LibraryUsage:
    """A use of a file: of one image, if kernels are named."""
    images = (replace(image_use(kernels), offset=64),) if kernels else ()
    return LibraryUsage(library=traced, images=images, processes=(process,))


def contents(now: list[TracedLibrary], *uses: LibraryUsage) -> Contents:
    return Contents(usage_of(*uses), now)


def content(now: TracedLibrary, *uses: LibraryUsage) -> Content:
    return contents([now], *uses).of(now)


def kernels(found: Content) -> set[str]:
    return {k for image in found.usage.images for k in image.kernels}


def test_one_content_under_three_paths_is_one_library() -> None:
    paths = (HERE, "/site/hard-link.so", "/tmp/copy.so")
    now = [library(path, sha256=SHA, build_id=None) for path in paths]
    uses = [used(library(paths[0], build_id=None), "a"), used(library(paths[1], build_id=None))]
    uses.append(used(library(paths[2], build_id=None), "c", process=7))
    found = contents(now, *uses)
    for one in now:
        content = found.of(one)
        assert kernels(content) == {"a", "c"} and content.changed is None
        assert content.usage.library.path == one.path and content.usage.processes == (0, 7)
    assert [u.library.sha256 for u in found.usage.libraries] == [SHA] * 3


def test_a_copy_that_is_gone_is_known_by_size_and_build_id() -> None:
    gone = used(library("/tmp/copy.so"), "b")
    found = content(library(sha256=SHA), used(library(), "a"), gone)
    assert kernels(found) == {"a", "b"} and found.changed is None


def test_a_copy_that_was_hashed_before_it_went_needs_no_build_id() -> None:
    now = library(sha256=SHA, build_id=None)
    for sha256, expected in ((SHA, {"a", "b"}), ("bb" * 32, {"a"})):
        gone = used(library("/tmp/copy.so", build_id=None, sha256=sha256), "b")
        found = content(now, used(library(build_id=None), "a"), gone)
        assert kernels(found) == expected and found.changed is None


@pytest.mark.parametrize("changes", [{"build_id": "dead"}, {"size": 999}, {"build_id": None}])
def test_another_library_is_none_of_it(changes: dict[str, Any]) -> None:
    other = used(library("/tmp/other.so", **changes), "b")
    found = content(library(sha256=SHA), used(library(), "a"), other)
    assert kernels(found) == {"a"} and found.changed is None


def test_one_build_id_of_two_contents() -> None:
    now = [library(sha256=SHA), library("/site/patched.so", sha256="bb" * 32)]
    found = contents(now, used(library(), "a"), used(library("/site/patched.so"), "b"))
    for one, expected in zip(now, ("a", "b"), strict=True):
        assert kernels(found.of(one)) == {expected} and found.of(one).changed is None


@pytest.mark.planted_fault(
    "a test copies a library without a build id, uses the copy and removes it",
    says="/tmp/copy.so was written or removed since GPU code was loaded from it",
)
def test_a_nameless_copy_that_is_gone_may_be_any_of_its_size(fault: PlantedFault) -> None:
    now = library(sha256=SHA, build_id=None)
    here = used(library(build_id=None), "a")
    found = content(now, here, used(library("/tmp/copy.so", build_id=None), "b"))
    fault.check(found.changed or "")
    # It was mapped, and no GPU code came from it.
    assert content(now, here, used(library("/tmp/copy.so", build_id=None))).changed is None


@pytest.mark.planted_fault(
    "a library is written in place, with the same size, while a test has it mapped",
    says="/site/lib.so was written or removed since GPU code was loaded from it",
)
def test_a_library_that_is_written_in_place(fault: PlantedFault) -> None:
    found = content(library(sha256=SHA, mtime_ns=2, ctime_ns=2), used(library(), "a"))
    fault.check(found.changed or "")
    assert not kernels(found)


@pytest.mark.planted_fault(
    "a test upgrades a library that an earlier test has used",
    says="two libraries were at /site/lib.so: 1,000 bytes build id dead, and 1,000 bytes build id",
)
def test_two_libraries_at_one_path_are_both_kept(fault: PlantedFault) -> None:
    old = library(build_id="dead", inode=5)
    upgraded = library(sha256="bb" * 32, inode=6)
    copy_of_old = library("/cache/lib.so", build_id="dead", sha256=SHA)
    uses = used(old, "a"), used(upgraded), used(replace(copy_of_old, sha256=None))
    found = contents([upgraded, copy_of_old], *uses)
    fault.check(found.of(upgraded).changed or "")
    assert "two libraries were at /site/lib.so" in (found.of(copy_of_old).changed or "")
    assert kernels(found.of(copy_of_old)) == {"a"}


def test_a_new_installation_of_the_same_file() -> None:
    now = library(sha256=SHA, inode=6, mtime_ns=9, ctime_ns=9)
    found = content(now, used(library(), "a"))
    assert kernels(found) == {"a"} and found.changed is None
    # A new link to the file, or other rights.
    assert content(library(sha256=SHA, ctime_ns=2), used(library(), "a")).changed is None


@pytest.mark.planted_fault(
    "a library without a build id gets another content, size and time of before",
    says="so whether it was this library is unknown",
)
def test_path_size_and_time_say_nothing(fault: PlantedFault) -> None:
    now = library(sha256=SHA, build_id=None, inode=6)
    found = content(now, used(library(build_id=None), "a"))
    fault.check(found.changed or "")
    assert content(now, used(library(build_id=None, sha256=SHA), "a")).changed is None


def test_a_trace_without_inodes_is_compared_by_build_id() -> None:
    old = library(device=None, inode=None, ctime_ns=None)
    assert kernels(content(library(sha256=SHA), used(old, "a"))) == {"a"}
