"""Pages of CPU code in a lock: from a trace, widened by another run, in its file."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pytest_negativa.errors import StoreError
from pytest_negativa.models.lock import Lock, LockedLibrary, Place, seal
from pytest_negativa.models.pages import HostLibrary, HostUsage
from pytest_negativa.models.spans import (
    PAGE_SIZE,
    Span,
    pages_in_words,
    spans_of_pages,
    union,
    within,
)
from pytest_negativa.models.verdict import Verdict
from pytest_negativa.planning.lock import make_lock
from pytest_negativa.storage.lockfile import decode_lock, encode_lock
from pytest_negativa.verifying.page_proof import judge_pages
from tests.support.faults import PlantedFault
from tests.support.sites import verdict_of, with_pages

CPU = "a CPU"
EMPTY = make_lock("run", [], None, Place, unproved=True)
ONE, TWO = "1" * 64, "2" * 64


def pages(*numbers: int) -> tuple[Span, ...]:
    return union((n * PAGE_SIZE, (n + 1) * PAGE_SIZE) for n in numbers)


def library(path: str = "/one.so", sha256: str = ONE, **changed: Any) -> HostLibrary:
    """Of ten pages of code and two of constants; processes touched pages 0 and 5, and read 11."""
    row = HostLibrary(
        sha256=sha256,
        size=12 * PAGE_SIZE - 1,
        build_id=None,
        paths=(path,),
        watched=pages(*range(10)),
        touched=pages(0, 5),
        unread=pages(10),
    )
    return replace(row, **changed)


def usage(*libraries: HostLibrary, **changed: Any) -> HostUsage:
    found = HostUsage(processors=(CPU,), processes={"run": 1}, libraries=libraries, incomplete=())
    return replace(found, **changed)


def locked(lock: Lock, sha256: str = ONE) -> LockedLibrary:
    [row] = [row for row in lock.libraries if row.sha256 == sha256]
    return row


def test_what_no_process_touched_may_leave() -> None:
    lock = with_pages(usage(library("/b.so"), library("/a.so", TWO)))
    assert [row.path for row in lock.libraries] == ["/a.so", "/b.so"]
    row = locked(lock)
    assert (row.pages, row.loaded, row.code_sha256) == ("1-4 6-10", True, None)
    assert lock.has_pages and lock.proof.processors == ("a CPU",)
    assert lock.gpu_libraries == ()


def test_a_library_with_gpu_code_has_one_row_and_all_its_paths() -> None:
    known = LockedLibrary(path="/z.so", sha256=ONE, size=12 * PAGE_SIZE - 1, code_sha256="0" * 64)
    lock = replace(EMPTY, libraries=(known,))
    paths = ("/a.so", "/b.so", "/z.so")
    row = locked(with_pages(usage(library(paths=paths)), lock))
    assert row == replace(known, others=("/a.so", "/b.so"), pages="1-4 6-10")


def test_a_library_that_was_not_watched_is_known_and_keeps_all() -> None:
    row = locked(with_pages(usage(library(unwatched="relocated"))))
    assert row.pages == ""


def test_another_run_widens_and_never_takes_more() -> None:
    lock = with_pages(usage(library()))
    other = library(touched=pages(0, 1, 2), unread=pages(11))
    wider = with_pages(usage(other, library("/new.so", TWO)), lock)
    # Page 5 stays though that run did not touch it, and so does all of what the first never saw.
    assert locked(wider).pages == "3-4 6-9"
    assert (locked(wider, TWO).pages, locked(wider, TWO).loaded) == ("", True)
    assert wider.proof == lock.proof and wider == seal(wider) != lock
    unwatched = with_pages(usage(library(unwatched="relocated")), lock)
    assert locked(unwatched).pages == ""
    came_back = replace(locked(lock), loaded=False)
    lock = replace(lock, libraries=(came_back,))
    used = locked(with_pages(usage(library()), lock))
    assert (used.pages, used.loaded) == ("", True)


def proof(*rows: HostLibrary, found: HostLibrary | None, reasons: tuple[str, ...] = ()) -> Verdict:
    again = usage(*filter(None, [found]), incomplete=reasons)
    other = library("/other.so", "3" * 64)
    again = replace(again, libraries=(*again.libraries, other))
    return judge_pages(verdict_of(), usage(*rows, other), again, ())


@pytest.mark.planted_fault(
    "a library that only one of the two runs loaded is not proved",
    says="/one.so: one of the two runs alone loaded it",
)
def test_what_is_not_proved(fault: PlantedFault) -> None:
    def not_proved(made: Verdict | None, *libraries: HostLibrary) -> tuple[str, ...]:
        lock = make_lock("run", [], made, Place, touched=usage(*libraries), unproved=True)
        return lock.proof.pages_not_proved

    one = library()
    assert not_proved(None, one) == not_proved(verdict_of(), one) == ("it was not verified",)
    assert not_proved(proof(one, found=one), one) == ()
    assert not_proved(proof(one, found=one, reasons=("a test differs",)), one) == (
        "a test differs",
    )
    assert proof(one, found=None).libraries[0].pages is None
    [told] = not_proved(proof(one, found=None), one)
    fault.check(told)
    # The proof alone loaded it.
    assert not_proved(proof(found=None), one) == (told,)
    # Nothing of it leaves.
    assert not_proved(proof(one, found=None), library(watched=(), unread=())) == ()


def test_a_sealed_lock_has_its_libraries_by_path() -> None:
    lock = with_pages(usage(library("/b.so"), library("/a.so", TWO)))
    assert seal(replace(lock, libraries=lock.libraries[::-1])) == lock


def test_notes_of_tests() -> None:
    lock = with_pages(usage(failed=("R: 1 test failed",), chosen=("R: -k a",)))
    assert lock.proof.failed
    assert lock.proof.notes == (
        "R: 1 test failed; CPU code that only such tests need comes from the spare",
        "R: -k a; CPU code that only other tests need comes from the spare",
    )


class TestFile:
    LOCK = with_pages(usage(library(), library("/two.so", TWO)))

    def test_it_comes_back(self) -> None:
        text = encode_lock(self.LOCK)
        assert b"\n  pages: 1-4 6-10\n" in text and b"kept" not in text
        assert decode_lock(text, "a lock") == self.LOCK
        one = replace(locked(self.LOCK), pages="7")
        lock = seal(replace(self.LOCK, libraries=(one,)))
        assert decode_lock(encode_lock(lock), "a lock") == lock

    @pytest.mark.parametrize(
        "words", ["4-1", "1 0", "1-3 2", "1-2 3", "1,2", "-1", "1-", "0x1", "1  3", "12", "²", "a"]
    )
    def test_other_pages_are_refused(self, words: str) -> None:
        text = encode_lock(self.LOCK).decode()
        changed = text.replace("pages: 1-4 6-10", f"pages: '{words}'", 1)
        with pytest.raises(StoreError, match="a lock:"):
            decode_lock(changed.encode(), "a lock")

    @pytest.mark.planted_fault(
        "a page was removed from a lock by hand", says="don't match their digest"
    )
    def test_a_lost_page(self, fault: PlantedFault) -> None:
        text = encode_lock(self.LOCK).decode().replace("1-4 6-10", "1-4 6-9", 1)
        with pytest.raises(StoreError) as caught:
            decode_lock(text.encode(), "a lock")
        fault.check(str(caught.value))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12))
def test_words_name_the_whole_pages(spans: list[tuple[int, int]]) -> None:
    found = union((start * 512, end * 512) for start, end in spans)
    assert spans_of_pages(pages_in_words(found)) == union(within(found, PAGE_SIZE))
