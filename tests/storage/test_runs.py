"""The folder of a run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.errors import OptionError, StoreError
from pytest_negativa.models.analysis import Analysis
from pytest_negativa.models.spans import Span
from pytest_negativa.models.trace import AFTER_SESSION, UsageWarning
from pytest_negativa.models.verdict import Need, Witness
from pytest_negativa.settings.resolve import resolve
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.results import (
    load_healed,
    load_planned,
    load_usage,
    save_healed,
    write_run,
)
from pytest_negativa.storage.runs import Run, RunsFolder, new_run_id
from pytest_negativa.storage.urls import Url
from tests.support.analyses import settings, used
from tests.support.libraries import BIN, MULTIARCH
from tests.support.usages import TEST, Launched, with_launches


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / ".negativa" / "run-1")
    run.trace_dir.mkdir(parents=True)
    return run


def analysis(tmp_path: Path, *names: str) -> Analysis:
    paths = []
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(BIN / "libmultiarch.so", path)
        paths.append(path)
    return analyze(used(*paths), settings(tmp_path))


def files(run: Run) -> dict[str, list[str]]:
    return {
        folder.name: sorted(p.name for p in folder.iterdir())
        for folder in (run.map_dir, run.plan_dir, run.spans_dir)
        if folder.is_dir()
    }


def test_libraries_of_one_base_name(tmp_path: Path, run: Run) -> None:
    found = analysis(tmp_path, "a/libx.so", "b/libx.so", "c/libx.so")

    written = write_run(run, found, with_plans=True)

    assert written == ("trace/", "trace.json", "usage.json", "map/", "plan/", "spans/")
    names = files(run)
    assert names["map"] == names["plan"] == names["spans"]
    assert len(names["map"]) == 3 and "libx.so.json" in names["map"]
    paths = {json.loads((run.spans_dir / n).read_text())["so_path"] for n in names["spans"]}
    assert paths == {str(tmp_path / folder / "libx.so") for folder in "abc"}
    for name in names["plan"]:
        plan = json.loads((run.plan_dir / name).read_text())
        spans = json.loads((run.spans_dir / name).read_text())
        assert plan["library"]["path"] == spans["so_path"]
    # By path, so the same in each run.
    write_run(run, found, with_plans=True)
    assert files(run) == names


def test_what_is_no_longer_found_goes(tmp_path: Path, run: Run) -> None:
    both = analysis(tmp_path, "liba.so", "libb.so")
    write_run(run, both, with_plans=True)
    one = analysis(tmp_path, "libb.so")

    write_run(run, one, with_plans=True)
    assert files(run) == {name: ["libb.so.json"] for name in ("map", "plan", "spans")}

    assert write_run(run, one, with_plans=False) == ("trace/", "trace.json", "usage.json", "map/")
    assert files(run) == {"map": ["libb.so.json"], "plan": [], "spans": []}


def test_latest_is_replaced(tmp_path: Path, run: Run) -> None:
    link = RunsFolder(run.folder.parent).latest
    write_run(run, analysis(tmp_path), with_plans=True)
    assert link.is_symlink() and link.readlink() == Path("run-1")
    other = Run(run.folder.with_name("run-2"))
    other.folder.mkdir()
    # What a killed process may have left.
    link.with_name(f".latest.{os.getpid()}").symlink_to("nowhere")
    other.make_latest()
    assert link.resolve() == other.folder
    assert [p.name for p in link.parent.glob(".*")] == []


def test_latest_is_never_absent(run: Run) -> None:
    """Whoever looks while it changes sees the old one or the new one."""
    link = RunsFolder(run.folder.parent).latest
    run.make_latest()
    absent = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            if not link.is_symlink():
                absent.append(1)

    watcher = threading.Thread(target=look)
    watcher.start()
    for _ in range(500):
        run.make_latest()
    done.set()
    watcher.join()
    assert not absent


def test_latest_that_is_a_folder(run: Run) -> None:
    (run.folder.parent / "latest").mkdir()
    with pytest.raises(StoreError, match="latest: cannot be written"):
        run.make_latest()


def test_a_folder_of_traces_gets_no_link(tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    write_run(Run(folder), analysis(tmp_path), with_plans=True)
    assert Run(folder).usage_file.exists()
    assert not (tmp_path / "latest").is_symlink()


def test_failed(run: Run) -> None:
    assert run.failure is None and run.failure is None
    run.mark("failed", "2 tests\nfailed")
    assert run.failure is not None and run.failure == "2 tests failed"
    (run.folder / "failed").write_text("")
    assert run.failure == "it is marked as failed"


def test_what_cannot_be_written(tmp_path: Path, run: Run) -> None:
    run.plan_dir.write_text("a file")
    with pytest.raises(StoreError, match=r"plan/liba.so.json: cannot be written"):
        write_run(run, analysis(tmp_path, "liba.so"), with_plans=True)


def test_what_was_written_is_loaded(tmp_path: Path, run: Run) -> None:
    found = analysis(tmp_path, "a/libx.so", "b/libx.so", "liby.so")
    write_run(run, found, with_plans=True)
    loaded = load_planned(run)
    assert sorted(loaded, key=lambda one: one.plan.library.path) == list(found.libraries)
    digest = hashlib.sha256((BIN / "libmultiarch.so").read_bytes()).hexdigest()
    for one in loaded:
        assert one.plan.library.sha256 == one.library_map.library.sha256 == digest
    for path in run.spans_dir.iterdir():
        assert json.loads(path.read_text())["sha256"] == digest


def test_what_cannot_be_loaded(tmp_path: Path, run: Run) -> None:
    with pytest.raises(StoreError, match="no plans here"):
        load_planned(run)
    write_run(run, analysis(tmp_path, "liba.so", "libb.so"), with_plans=True)
    map_path, plan_path = (d / "liba.so.json" for d in (run.map_dir, run.plan_dir))
    sound = {path: path.read_bytes() for path in (map_path, plan_path)}
    other = (run.map_dir / "libb.so.json").read_bytes()
    old = sound[plan_path].replace(b'"format":1', b'"format":99', 1)
    for path, data, reason in (
        (plan_path, b"{", "plan/liba.so.json: not a plan of this release"),
        (plan_path, old, "plan/liba.so.json: format 99, this release reads 1"),
        (map_path, b"{", "map/liba.so.json: not a library map"),
        (map_path, other, "plan/liba.so.json: of .*/liba.so, and the map of that name is of"),
    ):
        path.write_bytes(data)
        with pytest.raises(StoreError, match=reason):
            load_planned(run)
        path.write_bytes(sound[path])
    map_path.unlink()
    with pytest.raises(StoreError, match=r"map/liba.so.json: cannot be read: No such file"):
        load_planned(run)


def test_a_run_is_found_by_its_own_name(run: Run) -> None:
    runs = RunsFolder(run.folder.parent)
    with pytest.raises(OptionError, match="latest: no traced run here; make one with"):
        runs.find()
    run.make_latest()
    assert runs.find() == runs.find(str(runs.latest)) == runs.find(str(run)) == run
    with pytest.raises(OptionError, match="nowhere: no such run"):
        runs.find(str(runs.folder / "nowhere"))


def test_an_id_alone_names_a_run_of_this_folder(tmp_path: Path) -> None:
    runs = RunsFolder(tmp_path / ".negativa")
    run = Run(runs.folder / new_run_id())
    run.make()

    def named(text: str) -> str | None:
        return resolve({"run": text}, {}, None, root=tmp_path, cwd=tmp_path).run

    assert runs.find(named(run.run_id)) == run
    assert runs.find(named(f".negativa/{run.run_id}")) == run
    with pytest.raises(OptionError, match=f"/elsewhere/{run.run_id}: no such run"):
        runs.find(named(f"elsewhere/{run.run_id}"))


def test_why_nothing_is_planned(tmp_path: Path, run: Run) -> None:
    assert f"no plans here; make them with negativa locate --run {run}" in run.why_unplanned()
    write_run(run, analysis(tmp_path), with_plans=True)
    assert run.why_unplanned().endswith("no plans here: no GPU code was loaded that is looked at")
    assert Run(tmp_path).why_unplanned().endswith("expected the folder of a run")
    # Neither a failed run nor the link to it is a good one, nor one that nothing is planned from.
    run.mark("failed", "1 test failed")
    ids = (f"20260101T00000{n}Z-0123ab" for n in (2, 3, 4))
    good, failed, bare = (Run(run.folder.with_name(run_id)) for run_id in ids)
    for traced in (good, failed):
        write_run(traced, analysis(tmp_path, "liba.so"), with_plans=True)
    failed.mark("failed", "1 test failed")
    bare.folder.mkdir()
    assert f"trace again, or take the last good run: --run {good} (with" in failed.why_unplanned()
    shutil.rmtree(good.folder)
    assert "take the last good run" not in failed.why_unplanned()


def test_run_ids_differ_and_sort_by_time() -> None:
    ids = [new_run_id() for _ in range(20)]
    assert len(set(ids)) == 20
    moments = [i[:-3] for i in ids]
    assert moments == sorted(moments)
    assert len(set(moments)) > 1


def test_a_run_sees_its_own_traces_only(tmp_path: Path) -> None:
    runs = [Run(tmp_path / f"run-{i}") for i in (1, 2)]
    for one in runs:
        one.trace_dir.mkdir(parents=True)
        one.new_trace_file().touch()
    [path] = runs[0].trace_files()
    assert path.name.startswith(f"run-1.{os.getpid()}.")


def test_names_of_traces_are_unique(run: Run) -> None:
    assert len({run.new_trace_file() for _ in range(50)}) == 50


def test_a_usage_of_another_release(run: Run) -> None:
    """The version tells, whatever the rest of the file looks like."""
    assert load_usage(run) is None
    run.usage_file.write_text('{"format": 99, "unknown": []}')
    with pytest.raises(StoreError, match=r"usage.json: format 99, .*; plan again"):
        load_usage(run)


_NAME = "the first"
_USE = ("libraries", 0, "images", 0)
_KERNEL = (*_USE, "kernels", _NAME)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("warnings", 0, "process"), -1, r"`int` >= 0 - at `\$.warnings\[0\].process`"),
        ((*_KERNEL, "context"), -1, r">= 0 - at `\$.libraries.*.kernels\[\.\.\.\].context`"),
        (("launches", _NAME, 0, 3), -1, r"`int` >= 0 - at `\$.launches\[\.\.\.\]\[0\]\[3\]`"),
    ],
)
def test_an_index_that_leads_nowhere(
    run: Run, path: tuple[str | int, ...], value: int, message: str
) -> None:
    """In a file that was made by hand. From its end, or another table, it would name another."""
    lack = UsageWarning(code="x", text="x", process=0)
    usage = with_launches(used(MULTIARCH, regions=(0,)), Launched("scale", 1, 2, 3, ("step",)))
    usage = replace(usage, contexts=(TEST, AFTER_SESSION), warnings=(lack,), incomplete=(lack,))
    write_record(run.usage_file, usage)
    assert load_usage(run) == usage

    *way, last = path
    document = json.loads(run.usage_file.read_text())
    row = document
    for key in way:
        row = row[next(iter(row)) if key == _NAME else key]
    row[last] = value
    run.usage_file.write_text(json.dumps(document))
    with pytest.raises(StoreError, match=f"usage.json: not the usage of a traced run.*{message}"):
        load_usage(run)


def test_what_healing_has_left(run: Run) -> None:
    run.make()
    assert load_healed(run) == ()
    span = Need(library="/l.so", spans=(Span(1, 2),), nodeid="t", witness=Witness.REFUSED)
    save_healed(run, (span, span))
    assert load_healed(run) == (span,)
    run.healed_file.write_text("{")
    with pytest.raises(StoreError, match=r"healed.json: not a list of healed spans of .*; remove"):
        load_healed(run)


def pushed(folder: Path) -> Url:
    """The URL of a run that has a folder of traces."""
    run = RunsFolder(folder / "pushed").new_run()
    run.trace_dir.mkdir(parents=True)
    for number in range(20):
        (run.trace_dir / f"{number}.jsonl").write_text(str(number))
    url = Url(f"file://{folder}/store/run")
    run.publish(url)
    return url


def test_processes_fetch_a_run_at_the_same_time(tmp_path: Path) -> None:
    url = pushed(tmp_path)
    runs = RunsFolder(tmp_path / "here")
    with ThreadPoolExecutor(6) as pool:
        found = set(pool.map(lambda _: runs.fetch(url), range(6)))
    assert len(found) == 1
    run = found.pop()
    names = {path.name for path in runs.folder.iterdir()}
    assert names == {".gitignore", "latest", run.run_id} and runs.find() == run


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list any folder")
def test_a_folder_that_may_not_be_listed_is_not_empty(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for folder, find in ((run.trace_dir, run.trace_files), (run.plan_dir, run.plan_files)):
        assert find() == ()
        folder.mkdir(mode=0)
        with pytest.raises(StoreError, match="cannot be listed: Permission denied"):
            find()


def test_a_folder_for_runs_that_was_there_is_ignored_by_git(tmp_path: Path) -> None:
    runs = RunsFolder(tmp_path / ".negativa")
    runs.folder.mkdir()
    runs.make()
    assert (runs.folder / ".gitignore").read_text().endswith("\n*\n")
    (runs.folder / ".gitignore").write_text("mine\n")
    runs.make()
    assert (runs.folder / ".gitignore").read_text() == "mine\n"


def test_what_is_the_users_gets_no_gitignore(tmp_path: Path) -> None:
    """A link leads to a folder of the user's; a ``.gitignore`` that leads nowhere stays."""
    (tmp_path / "project").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "project/.negativa").symlink_to(tmp_path / "results")
    RunsFolder(tmp_path / "project/.negativa").make()
    assert not [*(tmp_path / "results").iterdir()]
    (tmp_path / ".negativa").mkdir()
    (tmp_path / ".negativa/.gitignore").symlink_to("gone")
    RunsFolder(tmp_path / ".negativa").make()
    assert not (tmp_path / ".negativa/.gitignore").exists()
