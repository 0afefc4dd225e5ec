"""``negativa combine``: shards, GPUs and machines in one run."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_negativa.models.spans import Span
from pytest_negativa.models.verdict import Need, Witness
from pytest_negativa.storage.lockfile import load_lock
from pytest_negativa.storage.results import save_healed
from pytest_negativa.storage.runs import Run
from tests.support.faults import PlantedFault
from tests.support.libraries import QUICKSTART_LIBRARY, TESTS
from tests.support.recordings import Lines, rewrite
from tests.support.sessions import HEADLINE, KERNELS, LOADED, PROVE_EACH, Project, used_kernels
from tests.support.standin.standin_gpu import REGIONS, USED
from tests.support.verified import VerifiedProject


def without(*names: str) -> Callable[[Lines], Lines]:
    return lambda lines: [s for s in lines if not any(f'"name":"{n}"' in s for n in names)]


def combined(project: Project) -> Path:
    """The newest run, be it the last one or not."""
    # Two runs of one second have no order by their names.
    return max(project.results.glob("2*"), key=lambda run: (run / "trace").stat().st_mtime_ns)


def usage(project: Project) -> Any:
    return json.loads((combined(project) / "usage.json").read_text())


@pytest.fixture
def shards(project: Project) -> Project:
    """Two halves of the recording, in files of one name, ``first`` and ``second``."""
    first = rewrite(project, "first/trace/h200.jsonl", without("vector_add", "vector_scale"))
    second = rewrite(project, "second/h200.jsonl", without("statistics_weighted_sum"))
    assert first.read_text() != second.read_text()
    return project


@pytest.mark.slow
def test_combine(shards: Project) -> None:
    """What neither of them used; a run that is given twice changes nothing."""
    shutil.copytree(shards.folder / "first", shards.folder / "again")

    done = shards.negativa("combine", "first", "again", "second", "first")

    assert done.stdout.startswith(HEADLINE)
    assert used_kernels(shards.latest("usage.json")) == set(KERNELS)
    assert len(list((shards.results / "latest" / "trace").glob("*.jsonl"))) == 2
    assert [tuple(d[:2]) for d in shards.plan() if d[2]] == list(LOADED)


@pytest.mark.slow
def test_a_replay_among_other_runs(shards: Project) -> None:
    """The result is marked as a replay, wherever the replay's trace is among the others."""
    shards.write("test_a.py", "def test_a():\n    pass\n")
    shards.pytest("-q", "--negativa", "--negativa-replay", "first/trace")
    replay = shards.runs()[0].name
    for others in (["first"], ["second"], ["first", "second"]):
        shards.negativa("combine", replay, *others)
        assert "latest  planned (replay)" in shards.negativa("runs").stdout


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A lock is made of samples of a service alone, which show what it used and no more",
    says="only samples of processes outside of tests used it",
)
def test_samples_only_add(project: Project, fault: PlantedFault) -> None:
    """Traces of a service keep what the tests don't use, and nothing is unused by them alone."""
    rewrite(project, "tests/trace/h200.jsonl", without("vector_add", "vector_scale"))
    project.negativa("trace", "--attach-env", "--json")
    [service] = [run for run in project.runs() if Run(run).has_samples]
    name = service.relative_to(project.folder)
    rewrite(project, f"{name}/trace/1.jsonl", without("statistics_weighted_sum"))

    alone = project.negativa("locate", "--run", service)
    assert not [row for row in project.plan() if not row[2]]
    assert alone.stdout.startswith("0 B of 67.2 kB")
    fault.check(alone.stdout)

    done = project.negativa("combine", "tests", name)
    assert done.stdout.startswith(HEADLINE)
    assert used_kernels(project.latest("usage.json")) == set(KERNELS)
    assert "it was not verified" in project.negativa("lock", status=1).stderr
    assert "NOT PROVED" in project.negativa("lock", "--unproved").stderr


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["element", "kernel"])
def test_a_lock_is_widened_by_samples(project: Project, granularity: str) -> None:
    """It then keeps what a lock of all of them keeps."""
    # The image with statistics_weighted_sum.
    image = ('"record":"image","id":59', '"image":59')

    def of_tests(lines: Lines) -> Lines:
        rest = without("vector_add")(lines)
        return [line for line in rest if not any(text in line for text in image)]

    rewrite(project, "tests/trace/h200.jsonl", of_tests)
    project.negativa("trace", "--attach-env")
    [service] = [run for run in project.runs() if Run(run).has_samples]
    rewrite(project, f"{service.relative_to(project.folder)}/trace/1.jsonl")
    as_asked = f"--granularity={granularity}"
    project.negativa("combine", "tests", as_asked)
    project.negativa("lock", "--unproved", "-o", "of-tests")
    project.negativa("combine", "tests", service, as_asked)
    project.negativa("lock", "--unproved", "-o", "of-both")

    shutil.copy(project.folder / "of-tests", project.folder / "widened")
    done = project.negativa("lock", "--add-uses", service, "-o", "widened")
    before, widened, both = (
        load_lock(project.folder / name) for name in ("of-tests", "widened", "of-both")
    )
    assert widened.proof == before.proof
    [old], [new], [all_of_it] = before.libraries, widened.libraries, both.libraries
    assert "libquickstart.so: keeps " in done.stdout
    assert {code.offset for code in new.kept} == {code.offset for code in all_of_it.kept}
    assert old.kept_elements <= new.kept_elements and old != new
    # Of a cubin that lost kernels, all come back if one was used.
    for mine, theirs in zip(new.kept, all_of_it.kept, strict=True):
        assert mine.functions is None or set(mine.functions) >= set(theirs.functions or ())
    again = project.negativa("lock", "--add-uses", service, "-o", "widened").stdout
    assert "nothing of what it removes was used" in again
    assert load_lock(project.folder / "widened") == widened


@pytest.mark.slow
def test_code_that_healing_gave_back_stays(shards: Project) -> None:
    """No trace tells of it, and the library may have been elsewhere."""
    shards.negativa("combine", "first", "second")
    start, end = next(tuple(row[:2]) for row in shards.plan() if not row[2])
    here = shards.folder / "quickstart" / "libquickstart.so"
    digest = hashlib.sha256(here.read_bytes()).hexdigest()
    machine(shards, "a", digest)
    elsewhere = "/builds/a/site/libquickstart.so"
    span = Need(
        library=elsewhere,
        spans=(Span(start, end),),
        nodeid="test_hidden",
        witness=Witness.TOUCHED,
    )
    save_healed(Run(shards.folder / "a"), [span])
    shutil.copytree(shards.folder / "a", shards.folder / "b")
    (shards.folder / "b" / "healed.json").unlink()

    for parts in (["a", "b"], ["b", "a/trace"]):
        shards.negativa("combine", *parts, f"--path=/builds/*/site={here.parent}")
        [kept] = [row for row in shards.plan() if row[0] == start]
        assert kept[2:4] == [True, "healed"]
    # Nor is it lost when the result is planned or combined again, or by another path.
    shards.negativa("locate")
    shards.negativa("combine", combined(shards) / "trace", "first")
    assert [row[3] for row in shards.plan() if row[0] == start] == ["healed"]


@pytest.mark.slow
def test_shards_of_several_gpus(project: Project) -> None:
    """The plan keeps what each of the GPUs loads of the used code."""
    archs = {"sm_80": "8.0", "sm_90": "9.0", "sm_120": "12.0"}
    for number, (arch, capability) in enumerate(archs.items()):

        def on_gpu(lines: Lines, capability: str = capability, number: int = number) -> Lines:
            text = "".join(lines).replace(
                '"compute_capability":"9.0"', f'"compute_capability":"{capability}"'
            )
            return text.replace('"pid":', f'"pid":{number + 1}').splitlines(keepends=True)

        rewrite(project, f"{arch}/h.jsonl", on_gpu)
    project.negativa("combine", *archs)

    kept = {tuple(row[:2]) for row in project.plan() if row[2]}
    assert {d["compute_capability"] for d in usage(project)["devices"]} == set(archs.values())
    for arch in archs:
        project.negativa("combine", arch)
        alone = {tuple(row[:2]) for row in project.plan() if row[2]}
        assert alone and alone < kept


def machine(project: Project, name: str, digest: str) -> None:
    """A run of a machine that has the library elsewhere."""

    def moved(lines: Lines) -> Lines:
        text = "".join(lines).replace("/quickstart/quickstart/", f"/builds/{name}/site/")
        return text.replace('"mtime_ns":', f'"mtime_ns":{len(name)}').splitlines(keepends=True)

    trace = rewrite(project, f"{name}/trace/h200.jsonl", moved)
    libraries = [
        {**record["library"], "sha256": digest}
        for record in map(json.loads, trace.read_text().splitlines())
        if record["record"] == "library" and "libquickstart" in record["library"]["path"]
    ]
    digests = {"format": 1, "rows": libraries}
    (trace.parent / "digests.json").write_bytes(msgspec.json.encode(digests))


@pytest.mark.slow
def test_machines_with_other_paths(project: Project) -> None:
    """Rules map paths, and digests tell whether the library is the same."""
    here = project.folder / "quickstart" / "libquickstart.so"
    digest = hashlib.sha256(here.read_bytes()).hexdigest()
    for name in ("a", "bb"):
        machine(project, name, digest)

    done = project.negativa("combine", "a", "bb")
    said = " ".join(done.stdout.split())
    assert "not the last run: no library is here whose GPU code was used; name" in said
    assert "libquickstart.so: not found" in done.stdout
    assert not (project.results / "latest").exists()

    project.write("negativa.yaml", "paths: /builds/*/site=quickstart\n")
    done = project.negativa("combine", "a", "bb")
    assert done.stdout.startswith(HEADLINE) and done.stderr == PROVE_EACH
    assert [tuple(d[:2]) for d in project.plan() if d[2]] == list(LOADED)
    paths = [used["library"]["path"] for used in usage(project)["libraries"]]
    assert paths.count(str(here)) == 1


@pytest.mark.slow
@pytest.mark.planted_fault(
    "Two machines have different libraries at one path, of the same size and build id.",
    says="two libraries were at",
)
def test_machines_with_other_libraries(project: Project, fault: PlantedFault) -> None:
    here = project.folder / "quickstart" / "libquickstart.so"
    digest = hashlib.sha256(here.read_bytes()).hexdigest()
    for name, content in (("a", digest), ("bb", "0" * 64)):
        machine(project, name, content)
    done = project.negativa("combine", "a", "bb", "--path", f"/builds/*/site={here.parent}")
    assert all(row[2] for row in project.plan()), "all of it is kept"
    fault.check(done.stdout)


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A shard is missing when runs are combined, and the plan is to make libraries smaller.",
    says="second: no such run",
)
def test_a_missing_shard(shards: Project, fault: PlantedFault) -> None:
    shutil.rmtree(shards.folder / "second")
    fault.check(shards.negativa("combine", "first", "second", status=2).stderr)
    assert not shards.results.exists()


@pytest.mark.slow
def test_a_failed_shard(shards: Project) -> None:
    Run(shards.folder / "first").mark("failed", "2 tests failed")
    done = shards.negativa("combine", "first", "second", status=1)
    assert "nothing is planned from this run: first: 2 tests failed" in done.stdout


@pytest.mark.slow
def test_a_pipe_among_the_traces(shards: Project) -> None:
    os.mkfifo(shards.folder / "second" / "pipe.jsonl")
    done = shards.negativa("combine", "first", "second", status=1)
    assert "pipe.jsonl: cannot be read: not a regular file" in done.stderr
    assert not shards.results.exists()


@pytest.mark.slow
def test_nothing_to_combine(project: Project) -> None:
    (project.folder / "empty").mkdir()
    done = project.negativa("combine", "empty", status=1)
    assert "no trace files" in done.stderr and "last run" not in done.stderr
    (project.folder / "empty" / "latest").mkdir()
    done = project.negativa("combine", "empty", status=1)
    assert f"its last run is {project.folder / 'empty' / 'latest'}" in done.stderr
    assert not project.results.exists()


LAUNCHES = """
from standin_gpu import launch

@pytest.mark.alpha
def test_one():
    use(LIB, 0)
    launch("vector_add")

@pytest.mark.beta
def test_two():
    use(LIB, 0, 1)
    launch("vector_add")

def test_three():
    use(LIB, 2)
    launch("statistics_weighted_sum")
"""


@pytest.mark.slow
def test_shards_that_count_launches(tmp_path: Path) -> None:
    """All that a run tells of its tests, but no proof."""
    project = VerifiedProject(tmp_path / "project", LAUNCHES)
    project.write("pytest.ini", "[pytest]\nmarkers =\n    alpha\n    beta\n")
    for selected in ("one", "two or three"):
        project.trace("--negativa-level=launch", "-k", selected)
    project.negativa("combine", *project.runs())
    rows = project.negativa("tests", "--similar=marker").stdout.splitlines()[2:]
    assert [line.split() for line in rows] == [["alpha", "beta", "1", "1", "1.00"]]
    needed = project.negativa("needs", "-m", "alpha").stdout
    assert needed.startswith("1 of 3 tests: 4.1 kB of 67.2 kB")
    for asked in (project.verify(status=1), project.negativa("verify", status=1).stderr):
        assert "it unites several runs; verify each of them" in asked


@pytest.mark.slow
def test_a_trace_that_is_a_link_is_not_copied(project: Project) -> None:
    """A run that comes from elsewhere must not bring files of this machine into another run."""
    project.write("test_a.py", "def test_a():\n    pass\n")
    project.pytest("-q", "--negativa")
    [run] = project.runs()
    project.write("secret", "wJalrXUtnFEMI\n")
    (run / "trace" / "other.jsonl").symlink_to(project.folder / "secret")
    done = project.negativa("combine", run, status=1)
    assert "a link, which is not followed" in done.stderr
    files = (path for path in project.results.rglob("*") if path.is_file())
    assert not [p for p in files if "wJalr" in p.read_text("latin-1") and not p.is_symlink()]


SUITES = {
    "a": "    use(LIB, 0)",
    "b": "    use(LIB, 0, 1)",
    "plain": "    pass",
}
PLACES = ("REGIONS", "USED")
# What an A100 loads of the regions.
SM_80 = (14992, 28280, 48872, 68256)


def sharded(folder: Path) -> VerifiedProject:
    """A project with a folder of tests for each shard."""
    project = VerifiedProject(folder, "")
    for name, body in SUITES.items():
        text = f"from standin_gpu import use\nLIB = 'lib.so'\ndef test_{name}():\n{body}\n"
        project.write(f"{name}/test_{name}.py", text)
    device = f"import os, standin_gpu\nif 'A100' in os.environ:\n    standin_gpu.USED = {SM_80}\n"
    project.write("conftest.py", device)
    return project


def prove(project: VerifiedProject, shard: str) -> Path:
    project.trace("--negativa-verify", shard)
    return project.run_folder


@pytest.mark.slow
def test_shards_that_were_proved_apart(tmp_path: Path) -> None:
    """Their common plan is proved: each shard ran without what it removes, and more."""
    project = sharded(tmp_path / "project")
    first, second = (prove(project, shard) for shard in "ab")
    project.pytest("-q", "--negativa", "plain")
    third = next(run for run in project.runs() if run not in (first, second, project.results))

    refused = project.negativa("combine", first, second, "--expect=3", status=1).stderr
    assert "2 runs are here, expected 3; name the run of each shard" in refused
    latest = project.results / "latest"
    done = project.negativa("combine", first, second, third, latest, "--expect=3")
    assert "Proved by 2 parts: the tests end as before without 63.1 kB of GPU" in done.stdout
    assert "Next: negativa lock" in done.stderr
    project.negativa("lock")
    made = load_lock(project.folder / "negativa.lock")
    assert made.proof.proved and made.proof.parts == tuple(sorted((first.name, second.name)))
    assert made.proof.tests == {"passed": 2}
    [library] = made.libraries
    assert {code.offset for code in library.kept} == {USED[0], USED[1]}
    done = project.negativa("slim", ".", "--dry-run")
    assert "NOT PROVED" not in done.stderr and "lib.so: left as it is: saves only" in done.stdout

    # The same runs on another machine, of another GPU.
    verdict = second / "verdict.json"
    verdict.write_bytes((first / "verdict.json").read_bytes())
    done = project.negativa("combine", first, second)
    assert f"{second.name}: its verdict is on another run, {first.name}" in done.stdout
    assert "for each run that is not proved, then negativa combine" in done.stderr
    verdict.unlink()
    project.negativa("combine", first, second)
    refused = project.negativa("lock", status=1).stderr
    assert f"{second.name}: it was not verified; next: pytest --negativa-verify for each" in refused


@pytest.mark.slow
def test_machines_that_proved_a_shard_each(tmp_path: Path) -> None:
    """Each has its GPU, and the library at a path of its own. What either GPU loads stays."""
    here, there = sharded(tmp_path / "here"), sharded(tmp_path / "there")
    first = prove(here, "a")
    there.environ |= {"STANDIN_DEVICE": "8.0", "A100": "1"}
    second = prove(there, "b")
    shutil.move(second, here.folder / "second")
    shutil.rmtree(there.folder)
    done = here.negativa("combine", first, "second", f"--path={there.folder}={here.folder}")
    assert "Proved by 2 parts: " in done.stdout
    here.negativa("lock")
    made = load_lock(here.folder / "negativa.lock")
    assert [d.compute_capability for d in made.proof.devices] == ["8.0", "9.0"]
    [library] = made.libraries
    assert library.path == "lib.so" and not library.not_proved
    assert {code.offset for code in library.kept} == {*SM_80[:2], *USED[:2]}


@pytest.mark.slow
def test_a_lock_of_parts_makes_a_library_smaller(tmp_path: Path) -> None:
    """Without ``--unproved``; the tests of all parts pass on the result."""
    project = sharded(tmp_path / "project")
    library, small = project.folder / "lib.so", QUICKSTART_LIBRARY.read_bytes()
    library.write_bytes(lzma.decompress((TESTS / "oracle/inputs/libapp.so.xz").read_bytes()))
    by = library.read_bytes().index(small[REGIONS[0] : USED[3]]) - REGIONS[0]
    moved = [f"standin_gpu.{name} = [n + {by} for n in standin_gpu.{name}]" for name in PLACES]
    project.write("conftest.py", "\n".join(["import standin_gpu", *moved]))
    before = library.stat().st_size
    project.negativa("combine", *(prove(project, shard) for shard in "ab"))
    project.negativa("lock")
    done = project.negativa("slim", ".", "--no-way-back")
    assert "NOT PROVED" not in done.stderr and library.stat().st_size < before - 500_000
    project.pytest("-q", "a", "b", "plain")
    # What no part used is gone.
    (project.folder / "a/test_a.py").write_text("from standin_gpu import use\nuse('lib.so', 2)\n")
    assert "kernel image is available in region 2" in project.pytest("-q", "a", status=2).stdout


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A session was stopped before its last test, and the plan unites it with others.",
    says="it was interrupted",
)
def test_a_session_that_was_stopped_is_repeated_as_a_part(
    tmp_path: Path, fault: PlantedFault
) -> None:
    project = sharded(tmp_path / "project")
    first = prove(project, "a")
    stops = "import os\ndef test_stops():\n    if 'STOP' in os.environ: raise KeyboardInterrupt\n"
    project.write("b/test_a.py", stops)
    words = ("-q", "--negativa", "--negativa-verify", "b")
    project.pytest(*words, status=2, STOP="1")
    stopped = project.run_folder
    refused = project.negativa("combine", first, stopped, status=1)
    fault.check(refused.stdout + refused.stderr)
    done = project.negativa("combine", first, prove(project, "b"))
    assert "Proved by 2 parts: " in done.stdout
    project.negativa("lock")
    [library] = load_lock(project.folder / "negativa.lock").libraries
    assert {code.offset for code in library.kept} == {USED[0], USED[1]}
