"""Which files that are GPU code themselves may go, by what was opened of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.analysis.code_files import combine_opened
from pytest_negativa.installed.sites import Places
from pytest_negativa.models.code_files import (
    CODE_FILES_VERSION,
    CodeFile,
    FilesPlan,
    OpenedFiles,
    WatchedFiles,
)
from pytest_negativa.models.lock import LockedFiles
from pytest_negativa.models.settings import Settings
from pytest_negativa.planning.code_files import plan_files, unite
from pytest_negativa.planning.lock import make_lock
from pytest_negativa.processes.open_watch import Opens
from pytest_negativa.storage.results import load_opened, save_opened
from pytest_negativa.storage.runs import Run
from pytest_negativa.verifying.opened_files import judge_files
from tests.support.defaults import DEFAULTS
from tests.support.sites import verdict_of
from tests.support.usages import usage_of

WATCHED = WatchedFiles(
    distribution="Some.Kernels",
    version="1.0",
    site="/site",
    digest="d",
    files={f"k/{name}.cubin": CodeFile(digest=f"sha256={name}", size=10) for name in "abc"},
    opened=("k/a.cubin",),
)


def planned(
    watched: WatchedFiles = WATCHED,
    settings: Settings = DEFAULTS,
    incomplete: str | None = None,
    memory: str = "other",
) -> FilesPlan:
    [plan] = plan_files([watched], usage_of(), settings, incomplete, {f"sha256={memory}"})
    assert set(plan.kept) | set(plan.unused) == set(watched.files)
    assert plan.kept_bytes + plan.unused_bytes == 30
    return plan


def test_a_file_that_nothing_opened_is_unused() -> None:
    plan = planned()
    assert plan.kept == {"k/a.cubin": "opened"}
    assert plan.unused == {"k/b.cubin": 10, "k/c.cubin": 10}
    assert plan.paths == {"/site/k/b.cubin": "k/b.cubin", "/site/k/c.cubin": "k/c.cubin"}


def test_content_that_was_loaded_from_memory_is_used() -> None:
    assert set(planned(memory="b").unused) == {"k/c.cubin"}


def test_missing_data_keeps_all() -> None:
    for plan in (
        planned(incomplete="a worker was lost"),
        planned(replace(WATCHED, unseen="no watches are left")),
    ):
        assert not plan.unused and plan.reason is not None
        assert set(plan.kept.values()) == {"opened", plan.reason}


def test_settings_keep_files() -> None:
    keep, libraries = DEFAULTS.keep, DEFAULTS.libraries
    kept = replace(DEFAULTS, keep=replace(keep, libraries=("dist:some-kernels",)))
    assert not planned(settings=kept).unused
    one = replace(DEFAULTS, keep=replace(keep, libraries=("b.cubin",)))
    assert set(planned(settings=one).unused) == {"k/c.cubin"}
    out = replace(DEFAULTS, libraries=replace(libraries, exclude=("*/c.cubin",)))
    assert set(planned(settings=out).unused) == {"k/b.cubin"}


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
    assert not planned(settings=other).unused


def lock_of(
    plans: Sequence[FilesPlan], judged: Sequence[FilesPlan], *rounds: Opens
) -> tuple[LockedFiles, ...]:
    installed = {(plan.site, "d") for plan in plans}
    verdict = replace(verdict_of(), files=tuple(judge_files(judged, rounds, installed)))
    return make_lock("run", [], verdict, Places().of, files=plans).files


def test_the_lock_keeps_what_a_round_opened() -> None:
    plan = planned()
    [files] = lock_of([plan], [plan], Opens({"/site/k/b.cubin": 1}))
    assert files.kept == ("k/a.cubin", "k/b.cubin")
    assert (files.files, files.kept_files, files.size, files.unused_bytes) == (3, 2, 30, 10)


def test_one_of_two_folders_with_the_same_files_may_need_more() -> None:
    """A lock finds them by RECORD, which is the same."""
    plans = [planned(), planned(replace(WATCHED, opened=("k/b.cubin",), site="/elsewhere"))]
    [files] = lock_of(plans, plans)
    assert files.kept == ("k/a.cubin", "k/b.cubin")


def test_only_what_was_proved_is_locked() -> None:
    plan = planned()
    # Another one of them is kept since, or the distribution was installed anew.
    anew = planned(replace(WATCHED, opened=("k/b.cubin",)))
    assert (plan.unused_bytes, len(plan.unused)) == (anew.unused_bytes, len(anew.unused))
    assert lock_of([anew], [plan]) == ()
    other = planned(replace(WATCHED, digest="of before"))
    assert lock_of([other], [other]) == ()
    [row] = judge_files([other], [], {("/site", "d")})
    assert row.unseen == "its RECORD is another one than when it was traced"


def test_a_watch_that_lost_a_file_of_one_distribution_proves_the_others() -> None:
    plan = planned()
    lost, elsewhere = (Opens(unseen={path: "lost"}) for path in ("/site/k/b.cubin", "/else"))
    assert lock_of([plan], [plan], lost) == ()
    assert lock_of([plan], [plan], elsewhere) == lock_of([plan], [plan])


def test_a_run_without_a_watch_may_need_all_files(tmp_path: Path) -> None:
    first, second, both = (Run(tmp_path / name) for name in ("first", "second", "both"))
    seen = OpenedFiles(format_version=CODE_FILES_VERSION, distributions=(WATCHED,))
    for run in first, second, both:
        run.make()
    save_opened(first, seen)
    combine_opened(both, [first, second])
    assert load_opened(both) is None
    save_opened(second, seen)
    combine_opened(both, [first, second])
    assert load_opened(both) == seen
