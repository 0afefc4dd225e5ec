"""``negativa diff`` reads runs, baselines and libraries."""

from __future__ import annotations

import json
import shutil
import tarfile
import zipfile
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from pytest_negativa.cli.main import main
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import Scope
from pytest_negativa.rewriting.plan_edits import trim_kernels
from pytest_negativa.storage.schema import schema_text
from tests.support.libraries import BIN
from tests.support.sessions import Project
from tests.support.slimmed import compact, plan_for, read, read_slimmed


def diff(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["diff", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.slow
def test_what_can_be_compared(project: Project) -> None:
    project.write("test_a.py", "def test_passes(): pass\n")
    project.pytest("-q", "--negativa")
    [run] = project.runs()
    library = "quickstart/libquickstart.so"

    # The id of a run, its folder, and a library of it.
    compare, look = "pytest --negativa --negativa-compare=", "negativa inspect "
    for other, then in ((str(run), compare), (library, look)):
        done = project.negativa("diff", run.name, other)
        shown = done.stdout
        assert done.stderr.endswith(f"Next: {then}{other}\n")
        assert f"GPU code of {other}" in shown and "67.2 kB -> 67.2 kB (0 B, +0.0%)" in shown
    # A link and a baseline tell the run.
    project.negativa("report", "baseline:negativa-baseline.json")
    titles = project.negativa("diff", "latest", "negativa-baseline.json").stdout.split(": ")[0]
    told = f"(run {run.name})"
    assert titles == f"GPU code of negativa-baseline.json {told}, compared with latest {told}"
    # A baseline is committed, so it has no path of this machine.
    assert str(project.folder) not in (project.folder / "negativa-baseline.json").read_text()
    # A library has no plan.
    planned = project.negativa("diff", library, "negativa-baseline.json", "--json").stdout
    [changes] = json.loads(planned)["libraries"]
    assert changes["unused"] == {"before": None, "after": 60216}
    assert "unused before" in project.negativa("diff", run.name, library).stdout
    assert "No code differs in 1 library." in project.negativa("diff", library, library).stdout


@pytest.mark.slow
def test_two_folders(project: Project) -> None:
    (project.folder / "old").mkdir()
    shutil.copy(BIN / "libnames.so", project.folder / "old")
    shutil.copytree(project.folder / "old", project.folder / "new")
    shutil.copy(project.folder / "quickstart/libquickstart.so", project.folder / "new")

    shown = project.negativa("diff", "old", "new").stdout

    assert "appeared +67.2 kB" in shown
    # Six archs; no code of the old library changed.
    assert shown.count("libquickstart.so  sm_") == 6
    assert "13 kernels appeared:" in shown and "libquickstart.so: vector_add" in shown
    jsonschema.validate(
        json.loads(project.negativa("diff", "old", "new", "--json").stdout),
        json.loads(schema_text("difference")),
    )
    refused = project.negativa("diff", "old", "new", "--top=-1", status=2).stderr
    assert "--top: found '-1', expected a whole number, 0 or more" in refused
    quick = project.negativa("diff", "old", "new", "--headers-only", "--top=1").stdout
    assert "kernels appeared" not in quick and "6 more" in quick


@pytest.mark.slow
def test_a_folder_of_archives_alone(project: Project) -> None:
    (project.folder / "dist").mkdir()
    for name in ("a-1.0-py3-none-any.whl", "b.tar.gz"):
        (project.folder / "dist" / name).write_bytes(b"")
    told = project.negativa("diff", "dist", "quickstart/libquickstart.so", status=2).stderr
    assert told.endswith("dist: no library with GPU code; 2 archives were not opened: name them\n")


@pytest.mark.slow
def test_two_wheels(project: Project) -> None:
    library = project.folder / "quickstart/libquickstart.so"
    for version, files in (("1.0", ("one.so",)), ("2.0", ("one.so", "two.so.1"))):
        with zipfile.ZipFile(project.folder / f"ours-{version}.whl", "w") as wheel:
            for file in files:
                wheel.write(library, f"ours/lib/{file}")
            metadata = f"ours-{version}.dist-info"
            wheel.writestr(f"{metadata}/METADATA", f"Name: ours\nVersion: {version}\n")
            wheel.writestr(f"{metadata}/RECORD", "".join(f"ours/lib/{f},,\n" for f in files))

    shown = project.negativa("diff", "ours-1.0.whl", "ours-2.0.whl").stdout

    assert shown.startswith("GPU code of ours-2.0.whl, compared with ours-1.0.whl: 67.2 kB -> 134")
    words = ["two.so.1", "2.0", "67.2", "kB", "appeared", "+67.2", "kB"]
    assert words in [line.split() for line in shown.splitlines()]
    with zipfile.ZipFile(project.folder / "ours-2.0.whl", "a") as wheel:
        wheel.writestr("../outside.so", "\x7fELF")
        wheel.writestr("ours/torn.so", library.read_bytes()[:3000])
    failed = project.negativa("diff", "ours-1.0.whl", "ours-2.0.whl", status=1)
    assert failed.stdout.startswith("GPU code of ours-2.0.whl, compared with ours-1.0.whl: 67.2 kB")
    assert "ours-2.0.whl: at offset" in failed.stderr
    assert "'../outside.so' leads out of the archive" in failed.stderr
    assert "ours-2.0.whl/ours/torn.so: at offset" in failed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("packed", ["", "tar"])
def test_slimmed_libraries_have_the_code_that_is_left(
    tmp_path: Path, trimmed: bool, packed: str
) -> None:
    source = BIN / "libcallgraph.so"
    library_map = read(source)
    plan = plan_for(library_map, "calls_nothing")
    for side in ("old", "new"):
        (tmp_path / side).mkdir()
    shutil.copy(source, tmp_path / "old")
    shutil.copy(BIN / "libnames.so", tmp_path / "old")
    shutil.copy(BIN / "libnames.so", tmp_path / "new")
    edits = None
    if trimmed:
        with ByteSource(source) as opened:
            edits, _ = trim_kernels(opened, library_map, plan, 1)
    compact(library_map, plan, tmp_path / "new" / source.name, edits)
    _, removed = read_slimmed(tmp_path / "new" / source.name, Scope())
    sides = [str(tmp_path / side) for side in ("old", "new")]
    if packed:
        for side in sides:
            with tarfile.open(f"{side}.tar", "w") as archive:
                archive.add(side, "image")
        sides = [f"{side}.tar" for side in sides]

    done = diff(*sides, "--json")

    difference = json.loads(done.stdout)
    assert (done.exit_code, done.stderr) == (0, "")
    code = {one["name"]: one["code"] for one in difference["libraries"]}
    assert code["libnames.so"]["before"] == code["libnames.so"]["after"]
    assert 0 < code[source.name]["after"] == removed.stored_bytes < code[source.name]["before"]
    went = [name for one in difference["libraries"] for name in one["went"] or ()]
    assert bool(went) is trimmed and "calls_nothing" not in went
    # A library that is named itself is read the same way.
    new = tmp_path / "new" / source.name
    one = diff(source, new)
    assert (one.exit_code, one.stderr) == (0, f"Next: negativa inspect {new}\n")


@pytest.mark.slow
def test_libraries_of_a_folder_that_cannot_be_read_are_named(project: Project) -> None:
    library = (project.folder / "quickstart/libquickstart.so").read_bytes()
    for side in ("old", "new"):
        project.write(f"{side}/text.txt", "no library")
        (project.folder / side / "one.so").write_bytes(library)
    (project.folder / "old/two.so").write_bytes(library)
    (project.folder / "new/two.so").write_bytes(library[:3000])
    (project.folder / "new/three.fatbin").write_bytes(b"\x50\xed\x55\xba" + bytes(100))

    done = project.negativa("diff", "old", "new", status=1)

    assert "GPU code of new, compared with old: 134.4 kB -> 67.2 kB" in done.stdout
    first, second = done.stderr.splitlines()
    assert "new/two.so: at offset" in first + second and "truncated?" in first + second
    assert "new/three.fatbin: at offset 0x4" in first + second
    (project.folder / "new/one.so").unlink()
    failed = project.negativa("diff", "old", "new", status=1)
    assert not failed.stdout and "new/three.fatbin: at offset 0x4" in failed.stderr


@pytest.mark.slow
def test_files_of_gpu_code(project: Project) -> None:
    for side, count in (("old", 1), ("new", 3)):
        (project.folder / side / "kernels/sm90").mkdir(parents=True)
        for number in range(count):
            name = f"{side}/kernels/sm90/{number}.cubin"
            shutil.copy(BIN / "kernels.sm_90.cubin", project.folder / name)

    shown = project.negativa("diff", "old", "new").stdout
    rows = [line.split() for line in shown.splitlines() if ".cubin " in line]
    assert [row[:3] for row in rows[:2]] == [[f"{number}.cubin", "5.2", "kB"] for number in (1, 2)]
    named = [f"{side}/kernels/sm90/0.cubin" for side in ("old", "new")]
    assert "No code differs in 1 library." in project.negativa("diff", *named).stdout


@pytest.mark.slow
def test_what_cannot_be_read(project: Project) -> None:
    library = "quickstart/libquickstart.so"
    project.write("torch.whl", "PK")
    project.write("text.lock", "no lock")
    (project.folder / "empty").mkdir()
    for other, status, message in (
        ("torch.whl", 1, "torch.whl: File is not a zip file; is the archive damaged?"),
        ("text.lock", 1, "text.lock"),
        ("empty", 2, "empty: no library with GPU code"),
        ("no-such-thing", 2, "no-such-thing: neither a file or folder nor a distribution"),
    ):
        assert message in project.negativa("diff", library, other, status=status).stderr


@pytest.mark.slow
def test_a_run_against_its_baseline(project: Project) -> None:
    project.write("test_a.py", "def test_passes(): pass\n")
    project.pytest("-q", "--negativa")
    project.negativa("report", "baseline:negativa-baseline.json")
    strict = "--negativa-compare-fail=size:0%,unused:0,new-kernels-untested:0"

    same = project.pytest("-q", "--negativa", "--negativa-compare=negativa-baseline.json", strict)
    assert "Compared with the baseline:\n  GPU code 67.2 kB -> 67.2 kB (0 B, +0.0%)" in same.stdout

    [first, second] = [run.name for run in project.runs()]
    assert project.negativa("diff").stdout.startswith(
        f"GPU code of {second}, compared with {first}: 67.2 kB -> 67.2 kB"
    )
    alone = project.negativa("diff", "negativa-baseline.json").stdout
    assert alone.startswith(
        f"GPU code of {second}, compared with negativa-baseline.json (run {first})"
    )
    shutil.rmtree(project.results / first)
    refused = project.negativa("diff", status=2).stderr
    assert "name A and B: no two saved runs have a plan" in refused

    text = (project.folder / "negativa-baseline.json").read_text()
    older = json.loads(text)
    [covered] = older["coverage"]
    covered["kernels"] = [one for one in covered["kernels"] if one["name"] != "image_blur"]
    project.write("older.json", json.dumps(older))
    limits = ("--compare=older.json", "--compare-fail=new-kernels-untested:0")
    located = project.negativa("report", *limits, status=1)
    assert located.stderr.endswith(
        "negativa: compare.fail: 1 new kernel is untested (image_blur), the limit is 0\n"
    )
    found = project.negativa("report", "--max-gpu-code=*quick*=67199", status=1).stderr
    assert "negativa: libquickstart.so: max_gpu_code: there are 67,200 bytes" in found
    project.negativa("report", "--max-gpu-code=*quick*=67200", "--max-unused-percent=*=89.7")
    unused = project.negativa("report", "--max-unused-percent=*=89.6", status=1).stderr
    assert "negativa: libquickstart.so: max_unused_percent: 89.61% of the GPU code" in unused
