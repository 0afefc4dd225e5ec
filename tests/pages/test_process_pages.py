"""Which pages of its spares a running process has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.errors import FormatError, StoreError
from pytest_negativa.pages.page_logs import encode_misses, read_misses
from pytest_negativa.pages.process_pages import pages_of_process
from pytest_negativa.rewriting.compact.records import Cut
from tests.support.cutting import build_kit, needs_stub

pytestmark = needs_stub

# Uses one page of the library, and waits.
WAITS = """
import ctypes, sys
print(ctypes.CDLL(sys.argv[1]).sum(100, 101), flush=True)
sys.stdin.readline()
"""


def look(cut: Cut) -> tuple[subprocess.Popen[str], int]:
    words = [sys.executable, "-I", "-c", WAITS, str(cut.library)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "107\n"
    return process, process.pid


def test_pages_around_what_was_touched(tmp_path: Path) -> None:
    kit = build_kit(tmp_path)
    cut = kit.cut(tmp_path / "cut")
    process, pid = look(cut)
    with process:
        [found] = pages_of_process(pid)
        (tmp_path / "one.pages").write_bytes(encode_misses(pid, [found]))
        cut.spare.unlink()
        with pytest.raises(FormatError, match="was deleted, so its library is unknown"):
            pages_of_process(pid)
        process.communicate("")
    assert (found.name, found.original.hex()) == (cut.library.name, cut.original_sha256)
    assert found.original_size == cut.size_before
    [again] = read_misses([tmp_path / "one.pages"])
    assert again == found and 1 <= len(found.pages) < kit.pages
    # What it touched stays now: the function and the page that calls it.
    kept = kit.cut(tmp_path / "kept", found.ranges())
    process, pid = look(kept)
    with process:
        assert not any(set(misses.pages) & set(found.pages) for misses in pages_of_process(pid))
        process.communicate("")


def test_a_process_that_is_gone() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(StoreError, match=rf"process {process.pid}: its pages cannot be read"):
        pages_of_process(process.pid)
