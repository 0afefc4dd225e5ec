"""What of a plan stays for tests that ran again on the originals."""

from __future__ import annotations

import shutil
from dataclasses import replace as with_changed
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.spans import PAGE_SIZE, Span
from pytest_negativa.models.trace import UNENDED, UsageWarning
from pytest_negativa.models.verdict import Witness
from pytest_negativa.planning.keep_needed import keep_needed
from pytest_negativa.verifying.used_again import used_again, why_unknown
from tests.support.analyses import settings, used
from tests.support.libraries import QUICKSTART_LIBRARY
from tests.support.standin.standin_gpu import USED
from tests.support.usages import TEST, usage_of


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return Path(shutil.copy(QUICKSTART_LIBRARY, tmp_path))


def planned_of(library: Path, granularity: str = "element") -> AnalyzedLibrary:
    """The plan of a run that used the first region."""
    options = settings(library.parent, f"granularity: {granularity}\n")
    [planned] = analyze(used(library, regions=(0,)), options).libraries
    return planned


def test_a_region_that_is_used_stays(library: Path) -> None:
    planned = planned_of(library)
    assert used_again([planned], used(library, regions=(0,)), "off") == []
    [work] = used_again([planned], used(library, regions=(0, 1)), "off")
    assert (work.witness, work.library, work.image) == (
        Witness.USED_AGAIN,
        str(library),
        hex(USED[1]),
    )
    assert work.kernel is not None and (work.test, work.nodeid) == (str(TEST), TEST.nodeid)
    [span] = work.spans
    assert work.kept and span.start == USED[1]
    assert work.reason == f"used on the originals by {TEST.nodeid}, which ran again there"
    kept = with_changed(planned, plan=keep_needed(planned.plan, [work]))
    assert used_again([kept], used(library, regions=(0, 1)), "off") == []


def test_a_page_that_is_read_stays(library: Path) -> None:
    planned = planned_of(library)
    usage = used(library)
    page = USED[3] // PAGE_SIZE * PAGE_SIZE
    [use] = usage.libraries
    read = replace(usage, libraries=(replace(use, touched=(Span(page, page + PAGE_SIZE),)),))
    found = used_again([planned], read, "off")
    assert hex(USED[3]) in [work.image for work in found]
    assert {(work.kernel, work.nodeid) for work in found} == {(None, None)}
    assert all("by a process," in work.reason for work in found)


def test_a_cubin_that_lost_another_function_stays_whole(library: Path) -> None:
    planned = planned_of(library, "kernel")
    blocks = {block.payload.start: block for block in planned.library_map.iter_code()}
    kernels = {k.name for k in planned.library_map.kernels_of(blocks[USED[0]].content)}
    [kept] = (cubin.kept for cubin in planned.plan.trimmed if cubin.start == USED[0])
    usage = used(library, regions=(0,))
    assert used_again([planned], usage, "off") == []
    [use] = usage.libraries
    [image] = use.images
    lost = min(kernels.difference(kept))
    asks = replace(image, kernels=dict.fromkeys([lost], image.first))
    again = replace(usage, libraries=(replace(use, images=(asks,)),))
    [work] = used_again([planned], again, "off")
    assert (work.image, work.kernel) == (hex(USED[0]), lost)


def test_a_library_is_known_by_its_content_under_another_path(library: Path) -> None:
    planned = planned_of(library)
    [use] = used(library, regions=(1,)).libraries
    for changes, stays in (
        ({"sha256": None}, True),
        ({"sha256": None, "build_id": "00"}, False),
        ({"sha256": "00"}, False),
    ):
        other = replace(use, library=replace(use.library, path="/elsewhere.so", **changes))
        assert bool(used_again([planned], usage_of(other), "off")) == stays


def test_lacks_of_the_rerun_count_if_the_trace_had_none_of_the_kind() -> None:
    gap, killed = (UsageWarning(code=code, text=code, process=None) for code in ("gap", UNENDED))
    assert why_unknown(usage_of(incomplete=(killed,)), usage_of()) is None
    assert why_unknown(usage_of(incomplete=(killed, gap)), usage_of()) == "gap"
    assert why_unknown(usage_of(incomplete=(gap,)), usage_of(incomplete=(gap,))) is None


def test_a_lack_of_another_process_kept_no_code_of_this_library(library: Path) -> None:
    usage = used(library)
    gap = UsageWarning(code="gap", text="gap", process=0)
    elsewhere = replace(gap, process=1)
    again = replace(usage, incomplete=(gap,))
    assert why_unknown(again, replace(usage, incomplete=(gap,))) is None
    assert why_unknown(again, replace(usage, incomplete=(elsewhere,))) == "gap"
