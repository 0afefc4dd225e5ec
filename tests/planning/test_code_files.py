"""Which files that are GPU code themselves may go, by what was opened of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pytest_negativa.analysis.combine import combine_opened
from pytest_negativa.installed.owners import Owners
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.code_files import WatchedFiles
from pytest_negativa.models.lock import LockedLibrary
from pytest_negativa.models.settings import Settings
from pytest_negativa.models.verdict import LibraryStatus
from pytest_negativa.planning.code_files import plan_files, unite
from pytest_negativa.planning.lock import make_lock
from pytest_negativa.processes.open_watch import Opens
from pytest_negativa.storage.results import load_opened, save_opened
from pytest_negativa.storage.runs import Run
from pytest_negativa.verifying.used_originals import judge_files, unused_paths
from tests.support.defaults import DEFAULTS
from tests.support.sites import verdict_of
from tests.support.usages import usage_of

WATCHED = WatchedFiles(
    distribution="Some.Kernels",
    version="1.0",
    site="/site",
    digest="d" * 64,
    files={f"k/{name}.cubin": (f"sha256={name}", 10) for name in "abc"},
    opened=("k/a.cubin",),
)


def planned(
    *watched: WatchedFiles,
    settings: Settings = DEFAULTS,
    incomplete: str | None = None,
    memory: str = "other",
) -> list[AnalyzedLibrary]:
    watched = watched or (WATCHED,)
    found = plan_files(watched, usage_of(), settings, incomplete, {f"sha256={memory}"})
    plans = [*found]
    for one in plans:
        assert {d.detail for d in one.plan.decisions} == WATCHED.files.keys()
        assert one.plan.code_bytes == one.plan.library.size == 30
    return plans


def unused(*watched: WatchedFiles, **options: Any) -> set[str | None]:
    [one] = planned(*watched, **options)
    return {d.detail for d in one.plan.decisions if not d.kept}


def kept(files: LockedLibrary) -> list[str | None]:
    return [code.detail for code in files.kept]


def test_a_file_that_nothing_opened_is_unused() -> None:
    [one] = planned()
    assert [d.reason for d in one.plan.decisions] == ["loaded", "not-opened", "not-opened"]
    paths = unused_paths(one.plan)
    assert paths == {"/site/k/b.cubin": (10, 20), "/site/k/c.cubin": (20, 30)}


def test_content_that_was_loaded_from_memory_is_used() -> None:
    assert unused(memory="b") == {"k/c.cubin"}


def test_missing_data_keeps_all() -> None:
    for [one] in (
        planned(incomplete="a worker was lost"),
        planned(replace(WATCHED, unseen="no watches are left")),
    ):
        assert not one.plan.unused_bytes and one.plan.notes
        assert [d.reason for d in one.plan.decisions] == ["loaded", "incomplete", "incomplete"]


def test_settings_keep_files() -> None:
    keep, libraries = DEFAULTS.keep, DEFAULTS.libraries
    kept = replace(DEFAULTS, keep=replace(keep, libraries=("dist:some-kernels",)))
    assert not unused(settings=kept)
    one = replace(DEFAULTS, keep=replace(keep, libraries=("b.cubin",)))
    assert unused(settings=one) == {"k/c.cubin"}
    out = replace(DEFAULTS, libraries=replace(libraries, exclude=("*/c.cubin",)))
    assert unused(settings=out) == {"k/b.cubin"}
    out = replace(DEFAULTS, libraries=replace(libraries, exclude=("dist:some-kernels",)))
    assert planned(settings=out) == []


def test_runs_together_use_what_any_of_them_opened() -> None:
    other = replace(WATCHED, opened=("k/b.cubin",), site="/elsewhere")
    [both] = unite([[WATCHED], [other]])
    assert both.opened == ("k/a.cubin", "k/b.cubin") and both.unseen is None
    [unseen] = unite([[WATCHED], [replace(other, unseen="lost")]])
    assert unseen.unseen == "lost"
    # A run that did not watch the same files may need any of them.
    assert unite([[WATCHED], [replace(other, version="2.0")]]) == ()
    assert unite([[WATCHED], []]) == ()


def test_a_run_may_have_the_files_in_two_folders() -> None:
    other = replace(WATCHED, opened=("k/b.cubin",), site="/elsewhere")
    for both in unite([[WATCHED, other]]), unite([[WATCHED], [WATCHED, other]]):
        assert {one.opened for one in both} == {("k/a.cubin", "k/b.cubin")}


def test_the_gpus_of_other_machines_may_need_any_file() -> None:
    other = replace(DEFAULTS, keep=replace(DEFAULTS.keep, archs=("sm_80",)))
    assert not unused(settings=other)


def lock_of(
    plans: Sequence[AnalyzedLibrary], judged: Sequence[AnalyzedLibrary], *rounds: Opens
) -> tuple[LockedLibrary, ...]:
    installed = {(one.plan.library.path, "d" * 64) for one in plans}
    rows = tuple(judge_files([one.plan for one in judged], rounds, installed))
    verdict = replace(verdict_of(), libraries=rows)
    assert make_lock("run", plans, None, Owners().of, unproved=True).libraries == ()
    return make_lock("run", plans, verdict, Owners().of).files


def test_the_lock_keeps_what_a_round_opened() -> None:
    [files] = lock_of(planned(), planned(), Opens({"/site/k/b.cubin": 1}))
    assert kept(files) == ["k/a.cubin", "k/b.cubin"]
    assert (files.elements, files.kept_elements, files.size, files.unused_bytes) == (3, 2, 30, 10)


def test_a_lock_without_a_proof_keeps_what_a_round_opened() -> None:
    plans = planned()
    rows = judge_files([plans[0].plan], [Opens({"/site/k/b.cubin": 1})], ())
    verdict = replace(verdict_of(status=LibraryStatus.NOT_PROVED), libraries=tuple(rows))
    [files] = make_lock("run", plans, verdict, Owners().of, unproved=True).files
    assert kept(files) == ["k/a.cubin", "k/b.cubin"]
    assert files.not_proved is not None


def test_one_of_two_folders_with_the_same_files_may_need_more() -> None:
    """A lock finds them by RECORD, which is the same."""
    plans = planned(WATCHED, replace(WATCHED, opened=("k/b.cubin",), site="/elsewhere"))
    [files] = lock_of(plans, plans)
    assert kept(files) == ["k/a.cubin", "k/b.cubin"]
    plans = planned(WATCHED, replace(WATCHED, site="/elsewhere"))
    [files] = lock_of(plans, plans, Opens({"/elsewhere/k/b.cubin": 1}))
    assert kept(files) == ["k/a.cubin", "k/b.cubin"]


def test_only_what_was_proved_is_locked() -> None:
    plans = planned()
    # Another one of them is kept since, or the distribution was installed anew.
    anew = planned(replace(WATCHED, opened=("k/b.cubin",)))
    [files] = lock_of(anew, plans)
    assert kept(files) == ["k/a.cubin", "k/b.cubin"]
    other = planned(replace(WATCHED, digest="e" * 64))
    assert lock_of(other, other) == lock_of(other, plans) == ()
    [row] = judge_files([other[0].plan], [], {("/site/Some.Kernels (files)", "d" * 64)})
    assert (row.detail or "").endswith("its RECORD is another one than when it was traced")


def test_a_watch_that_lost_a_file_of_one_distribution_proves_the_others() -> None:
    plans = planned()
    lost, elsewhere = (Opens(unseen={path: "lost"}) for path in ("/site/k/b.cubin", "/else"))
    assert lock_of(plans, plans, lost) == ()
    assert lock_of(plans, plans, elsewhere) == lock_of(plans, plans)


def test_a_run_without_a_watch_may_need_all_files(tmp_path: Path) -> None:
    first, second, both = (Run(tmp_path / name) for name in ("first", "second", "both"))
    seen = (WATCHED,)
    for run in first, second, both:
        run.make()
    save_opened(first, seen)
    combine_opened(both, [first, second])
    assert not load_opened(both)
    save_opened(second, seen)
    combine_opened(both, [first, second])
    assert load_opened(both) == seen
