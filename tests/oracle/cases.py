"""The cases: what the installed product is asked to do with fixed inputs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.oracle.inputs.regions import places_of
from tests.oracle.product import FIXTURES, INPUTS, OLD, QUICKSTART, TRACES, Box, shortened

Case = Callable[[Box], None]

LIBRARIES = sorted(path.name[: -len(".xz")] for path in INPUTS.glob("lib*.so.xz"))
REPORTS = ("terminal", "terminal-missing", "github", "json", "markdown", "html", "lcov")
REPORT_FILES = ("report.json", "report.md", "report.html")
KERNEL_FILES = ("usage.json", "plan/", "spans/")


def inspect(box: Box) -> None:
    """All fixtures and libraries: maps, gates, differences."""
    box.copy(FIXTURES, "bin")
    box.copy(QUICKSTART / "quickstart" / "libquickstart.so", "bin/libquickstart.so")
    box.negativa("inspect", "bin")
    found = box.negativa("inspect", "--json", "bin", quiet=True)
    for row in found["libraries"]:
        box.note(Path(row["summary"]["path"]).name, shortened(box.rules.value(row)))
    box.negativa("inspect", "--elements", "--kernels", "bin")
    box.negativa("inspect", "--arch", "sm_90,sm_100", "bin")
    box.negativa("inspect", "--arch", "sm_86", "--json", "bin/libmultiarch.so")
    box.negativa("inspect", "--require-arch", "sm_90,sm_75", "bin")
    box.negativa("inspect", "--max-dead", "50%", "--arch", "sm_90", "bin")
    box.negativa("inspect", "--headers-only", "bin/libquickstart.so", "bin/libframes.so")
    box.negativa("diff", "bin/libcuda11.so", "bin/libmultiarch.so")
    box.negativa("diff", "--json", "bin/libcallgraph.so", "bin/libcallgraph_rdc.so")
    (box.folder / "broken").mkdir()
    whole = (FIXTURES / "libmultiarch.so").read_bytes()
    for number, at in enumerate((0x2088, 0x20A0, 0x20AC, 0x20D8, 0x3D20)):
        data = whole[:at] + b"\xff\xff" + whole[at + 2 :]
        (box.folder / "broken" / f"lib{number}.so").write_bytes(data)
    (box.folder / "broken" / "libcut.so").write_bytes(whole[:20_000])
    box.negativa("inspect", "--elements", "broken")
    box.negativa("inspect", "--packages", "--arch", "sm_90", "bin")
    box.negativa("inspect", "--packages", "--arch", "sm_80", "--json", "bin")


def made(box: Box) -> None:
    """The libraries that are slimmed below, as inspect shows them."""
    for name in LIBRARIES:
        box.library(name, f"site/{name}")
    box.negativa("inspect", "--kernels", "site")
    found = box.negativa("inspect", "--elements", "--json", "site", quiet=True)
    for row in found["libraries"]:
        box.note(Path(row["summary"]["path"]).name, shortened(box.rules.value(row)))
    box.negativa("inspect", "--max-dead", "50%", "--arch", "sm_90", "site")


def quickstart(box: Box) -> None:
    """The session of the quickstart, which replays an H200: plans, all reports, lists."""
    box.copy(QUICKSTART, "project")
    at: dict[str, Any] = {"cwd": "project"}
    box.pytest("--negativa", **at)
    box.latest(*KERNEL_FILES, "map/", "trace.json", "report.json", "tests.jsonl", project="project")
    reports(box, at)
    box.negativa("kernels", **at)
    box.negativa("kernels", "--used", "--json", **at)
    box.negativa("tests", **at)
    box.negativa("needs", "-k", "add", **at)
    box.negativa("report", "baseline:negativa-baseline.json", **at)
    box.file("negativa-baseline.json", box.folder / "project" / "negativa-baseline.json")
    box.negativa("runs", **at)
    box.negativa("reconstruct", **at)
    box.binaries("project/.negativa/reconstructed")
    box.negativa("reconstruct", "--copies", "compacted", **at)
    box.binaries("project/.negativa/reconstructed")
    for policy in (
        ("--granularity", "kernel"),
        ("--granularity", "kernel", "--keep-kernel", "*blur*", "--keep-arch", "sm_80"),
        ("--keep-ptx", "newest", "--keep-arch", "sm_86,sm_100"),
        ("--keep-ptx", "all"),
        ("--keep-library", "libquick*"),
        ("--exclude-library", "*"),
    ):
        box.negativa("locate", *policy, **at)
        box.latest("plan/", "spans/", project="project")
    box.negativa("lock", **at)
    box.negativa("locate", "--report", "json:-", **at)
    box.negativa("report", *crossed("15", "60000", "5"), **at)
    box.negativa("diff", **at)


def crossed(fail_under: str, code: str, kernels: str) -> tuple[str, ...]:
    """Limits, which are crossed."""
    return (
        *("--fail-under", "90", "--fail-under", f"*={fail_under}"),
        *("--max-gpu-code", code, "--max-unused-percent", "50"),
        *("--min-used-kernels", kernels, "--max-unused-percent", "*=20"),
    )


def reports(box: Box, at: dict[str, Any]) -> None:
    """Every type of report."""
    box.negativa("report", *REPORTS, "cobertura", **at)
    for name in (*REPORT_FILES, "kernels.lcov", "cobertura.xml"):
        found = sorted((box.folder / at["cwd"] / ".negativa").glob(f"*{Path(name).suffix}"))
        for path in found:
            box.file(f"{name} report", path)


def recording(box: Box, name: str, **changes: str) -> str:
    """The recording of the quickstart, with the library's path as it is here."""
    text = (QUICKSTART / "recorded" / "h200.jsonl").read_text()
    here = str(box.folder / "libquickstart.so")
    text = text.replace("/quickstart/quickstart/libquickstart.so", here)
    for old, new in changes.items():
        text = text.replace(old.replace("_", " "), new)
    box.write(f"{name}/trace/h200.jsonl", text)
    return name


def traces(box: Box) -> None:
    """Traces recorded on a GPU: merged, located, combined."""
    box.copy(QUICKSTART / "quickstart" / "libquickstart.so", "libquickstart.so")
    for name in ("h200-ops", "h200-children"):
        box.copy(TRACES / name, name)
        box.negativa("locate", "--run", name)
        usage = box.folder / name / "usage.json"
        box.file("usage.json", usage)
        box.file("trace.json", box.folder / name / "trace.json")
    box.negativa("combine", "h200-ops", "h200-children")
    recording(box, "one")
    recording(box, "other", **{"NVIDIA_H200": "NVIDIA A100", '"9.0"': '"8.0"'})
    box.negativa("locate", "--run", "one", "--granularity", "kernel")
    box.negativa("combine", "one", "other")
    box.latest(*KERNEL_FILES, "report.json")
    box.negativa("combine", "one", "nowhere")
    lines = (box.folder / "one" / "trace" / "h200.jsonl").read_text().splitlines(keepends=True)
    box.write("torn/trace/h200.jsonl", "".join(lines[:-1]) + lines[-1][:10])
    box.negativa("locate", "--run", "torn")
    box.write("gap/trace/h200.jsonl", "".join(lines[:-1]) + '{"record":"gap","id":7,"why":"busy",'
              '"context":2,"time_ns":5}\n' + lines[-1])  # fmt: skip
    box.negativa("locate", "--run", "gap")
    box.write("bad/trace/h200.jsonl", "".join(lines[:3]) + "{no record}\n" + "".join(lines[3:]))
    box.negativa("locate", "--run", "bad")


INI = """[pytest]
addopts = -p oracle_gpu
markers =
  fast
  whole
"""


def suite(box: Box, *options: str) -> dict[str, Any]:
    """A traced run of the suite, with a GPU of the oracle's own; how to go on with it."""
    box.copy(INPUTS / "suite.py", "project/test_app.py")
    box.write("project/pytest.ini", INI)
    box.write("project/negativa.yaml", 'keep: {kernels: ["takes_*"]}\n')
    box.library("libapp.so", "project/libapp.so")
    # No hard link: a file of its own, elsewhere.
    original = box.library("libapp.so", "kept/libapp.so")
    places = {"libapp.so": places_of(original.read_bytes())}
    box.write("project/places.json", json.dumps(places))
    at = {"cwd": "project", "PYTHONPATH": str(INPUTS), "ORIGINAL": str(original)}
    box.pytest("--negativa", *options, **at)
    return at


def launches(box: Box) -> None:
    """A trace that counts launches: coverage, tests, needs of a part, limits, history."""
    at = suite(box, "--negativa-level=launch", "--negativa-top=0")
    box.latest(*KERNEL_FILES, "report.json", project="project")
    box.negativa("tests", **at)
    box.negativa("tests", "--json", **at)
    box.negativa("tests", "--similar", "test", **at)
    box.negativa("kernels", "--test", "test_app.py::TestMatrices::test_multiply", **at)
    reports(box, at)
    box.negativa("report", "baseline:before.json", **at)
    box.negativa("needs", "--json", "-m", "fast", **at)
    box.negativa("diff", "before.json", ".negativa/latest", **at)
    box.pytest("--negativa", "-k", "add", "--negativa-granularity=kernel", **at)
    box.latest("plan/", "spans/", project="project")
    grew = ("--compare", "before.json", "--compare-fail", "unused:1")
    box.negativa("report", *grew, *crossed("50", "100", "9"), **at)
    box.negativa("diff", **at)
    box.negativa("diff", "--json", "before.json", ".negativa/latest", **at)


def proved(box: Box, granularity: str) -> dict[str, Any]:
    """A run that is proved, and its lock."""
    at = suite(box, f"--negativa-granularity={granularity}")
    box.pytest("--negativa-verify", **at)
    box.latest("plan/", "spans/", "verdict.json", project="project")
    box.negativa("lock", **at)
    box.file("negativa.lock", box.folder / "project" / "negativa.lock")
    for copies in ("overwritten", "compacted"):
        box.negativa("reconstruct", "--copies", copies, **at)
        box.binaries("project/.negativa/reconstructed")
    return at


def site(box: Box, name: str) -> str:
    """A folder of packages with the libraries, which pip would have recorded."""
    for library in LIBRARIES:
        box.library(library, f"{name}/app/{library}")
    return name


def proof(box: Box) -> None:
    """Proved whole elements: verdict, lock, copies, slimming by the lock and back."""
    at = proved(box, "element")
    lock = ("--lock", "project/negativa.lock")
    box.negativa("inspect", "--packages", *lock, site(box, "image"))
    box.negativa("slim", *lock, "--dry-run", "--json", site(box, "site"))
    box.negativa("slim", *lock, "--keep-originals", "kept-originals", "site")
    box.binaries("site")
    box.negativa("slim", "check", "site")
    box.negativa("inspect", "--json", "site/app/libapp.so")
    box.negativa("kernels", **at)
    error = "CUDA error: no kernel image is available for execution on the device"
    box.negativa("explain", error, "site")
    kernels = {"library": "libapp.so", "kernels": ["image_blur"]}
    left = {"library": "libapp.so", "kernels": ["vector_add"]}
    found = [{"name": f"CVE-{n}", "code": [code]} for n, code in enumerate((kernels, left))]
    box.write("list.json", json.dumps({"format": 1, "vulnerabilities": found}))
    box.negativa("vex", "list.json", "site", "--author", "The owner")
    box.negativa("slim", "undo", "site")
    box.binaries("site")
    box.negativa("slim", *lock, "--arch", "sm_80", "--spare", "spares", site(box, "both"))
    box.binaries("both")
    box.binaries("spares")


def kernels(box: Box) -> None:
    """Proved kernels: those trimmed out of elements that stay."""
    proved(box, "kernel")
    lock = ("--lock", "project/negativa.lock")
    box.negativa("slim", *lock, "--keep-originals", "kept-originals", site(box, "site"))
    box.binaries("site")
    box.negativa("slim", *lock, "--spare", "spares", site(box, "cut"))
    box.negativa("slim", "undo", "site")
    box.binaries("site")


FAULTS = ("fail", "segv", "skip", "fallback", "swallowed", "copied", "child", "new", "xpass")


def faults(box: Box) -> None:
    """Rounds in which something goes wrong on the copies: not proved, and why."""
    at = suite(box)
    for fault in FAULTS:
        box.pytest("--negativa-verify", "--negativa-rerun=0", **at, FAULT=fault,
                   show=f"FAULT={fault} pytest --negativa-verify")  # fmt: skip
        box.latest("verdict.json", project="project")
    box.negativa("lock", **at)
    box.negativa("lock", "--unproved", "-o", "-", **at)


def hidden(box: Box) -> None:
    """Code that is needed and was not seen: not proved, then healed."""
    at = {**suite(box), "HIDDEN": "3"}
    box.pytest("--negativa-verify", "--negativa-rerun=1", **at)
    box.latest("verdict.json", project="project")
    box.pytest("--negativa-heal", "--negativa-rerun=0", **at)
    box.latest("verdict.json", "plan/", project="project")
    box.negativa("lock", **at)
    box.file("negativa.lock", box.folder / "project" / "negativa.lock")


def program(box: Box) -> None:
    """A program that the native library traces, on a driver and CUPTI of the oracle's own."""
    box.library("libapp.so")
    driver = box.library("libcuda.so.1", "driver/libcuda.so.1")
    toolkit = box.path("cuda/lib64/libcupti.so")
    toolkit.symlink_to(driver)
    box.copy(INPUTS / "program.py", "program.py")
    [first, second, *_] = places_of((box.folder / "libapp.so").read_bytes())
    command = ("--", "python", "program.py", str(driver), "./libapp.so")
    at: dict[str, Any] = {"CUDA_HOME": str(box.folder / "cuda")}
    box.negativa("trace", *command, str(first["start"]), "vector_add", **at)
    box.negativa("locate", "--include-library", "libapp*", **at)
    box.latest("usage.json", "plan/")
    box.negativa("verify", "--copies", "compacted", **at)
    box.latest("verdict.json")
    box.negativa("lock")
    box.file("negativa.lock")
    chosen = ("--include-library", "libapp*", "--granularity", "kernel")
    box.negativa("debloat", *chosen, *command, str(second["start"]), "no_such_kernel", **at)
    box.negativa("trace", "--", "python", "-c", "raise SystemExit(3)", **at)


def by_arch(box: Box) -> None:
    """Ten libraries slimmed by arch: plain and cut, and back."""
    site(box, "site")
    box.negativa("slim", "--arch", "sm_90", "--dry-run", "site")
    # What saves little, or nothing.
    box.negativa("slim", "--arch", "sm_75,sm_80,sm_90,sm_100", "--dry-run", "site")
    box.negativa("slim", "--arch", "sm_90", "--keep-originals", "kept", "--json", "site")
    box.binaries("site")
    box.binaries("kept")
    box.negativa("slim", "check", "site")
    flip(box.folder / "site" / "app" / "libgold.so")
    box.negativa("slim", "check", "site")
    touched = box.folder / "site" / "app" / "libcxx.so"
    os.utime(touched, (OLD + 5, OLD + 5))
    touched.chmod(0o700)
    kept = largest(box.folder / "kept")
    flip(kept)
    box.negativa("slim", "undo", "site")
    flip(kept)
    box.negativa("slim", "undo", "site")
    box.binaries("site")
    for words in (
        ("--arch", "sm_80,sm_100", "--keep-ptx"),
        ("--arch", "sm_75", "--no-strip"),
        ("--arch", "sm_90", "--strip-others"),
    ):
        copy = f"out{words[1]}{words[-1]}"
        copy_tree(box.folder / "site", box.folder / copy)
        box.negativa("slim", "--no-way-back", *words, copy)
        box.binaries(copy)
    box.negativa("slim", "--no-way-back", "--arch", "sm_999", "site")
    for name, files in (("bare", ("kernels.sm_80.cubin", "kernels.sm_90.cubin", "kernels.ptx")),):
        for file in files:
            box.copy(FIXTURES / file, f"{name}/code/{file}")
        box.negativa("slim", "--arch", "sm_90", "--keep-originals", "kept2", name)
        box.binaries(name)
        box.negativa("slim", "undo", name)
        box.binaries(name)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder as ``cp -a`` does."""
    subprocess.run(["cp", "-a", source, target], check=True)


def largest(folder: Path) -> Path:
    """The largest file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return max(files, key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    """Change one bit of a file, and neither its size nor its time."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    # A spare has holes, whose bytes nobody reads.
    at = next(at for at in range(len(data) // 2, len(data)) if data[at])
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def cut(box: Box) -> None:
    """Ten libraries whose removed pages lie in spares: files, loads, check, damage, undo."""
    site(box, "site")
    box.negativa("slim", "--arch", "sm_90", "--spare", "spares", "--json", "site")
    box.binaries("site")
    box.binaries("spares")
    box.negativa("slim", "check", "site")
    box.negativa("inspect", "site")
    box.run("python", "-c", LOADS, "site/app", show="load all")
    spare = largest(box.folder / "spares")
    saved = spare.read_bytes()
    flip(spare)
    box.negativa("slim", "check", "site")
    box.negativa("slim", "undo", "site")
    spare.unlink()
    box.negativa("slim", "check", "--require", "site")
    box.negativa("slim", "undo", "site")
    spare.write_bytes(saved)
    box.negativa("slim", "undo", "site")
    box.binaries("site")
    copy_tree(box.folder / "site", box.folder / "copy")
    box.negativa("slim", "--arch", "sm_100", "--spare", "other", "copy")
    box.binaries("copy")


LOADS = """
import ctypes, glob, sys
for path in sorted(glob.glob(sys.argv[1] + "/lib*.so")):
    library = ctypes.CDLL(path)
    names = "call", "count", "bss_sum", "constructed", "catches", "page3", "page29"
    found = {name: getattr(library, name)(1) for name in names if hasattr(library, name)}
    print(path, found)
"""


def cpu(box: Box) -> None:
    """Pages of CPU code: traced, cut out, brought back, counted."""
    box.library("libapp.so", "site/app/libapp.so")
    box.library("libcxx.so", "site/app/libcxx.so")
    box.library("libhost.so", "site/app/libhost.so")
    box.negativa("trace", "--cpu", "--", "python", "-c", CALLS, "site/app", "1", "5", show="trace")
    found = box.negativa("pages", "--json", quiet=True)
    rows = [row for row in found["libraries"] if str(box.folder) in json.dumps(row)]
    box.note("pages of the libraries", box.rules.value(rows))
    box.negativa("lock", quiet=True)
    words = ("--lock", "negativa.lock", "--spare", "spares")
    box.negativa("slim", "--arch", "sm_90", *words, "site")
    box.binaries("site")
    box.binaries("spares")
    box.run("python", "-c", CALLS, "site/app", "1", "7", show="pages that come back")
    logs = box.path("logs/log").parent
    log = f'eval "$(negativa misses --attach-env {logs})" && exec "$@"'
    calls = ("python", "-c", CALLS, "site/app", "1", "7")
    box.run("sh", "-c", log, "sh", *calls, show="pages that come back, logged")
    box.negativa("misses", "--log", "logs", "site")
    box.negativa("misses", "--log", "logs", "site", "--json")
    box.negativa("lock", "--add-misses", "logs")
    box.negativa("slim", "--arch", "sm_90", *words, "site", show="slim again")
    box.binaries("site")
    box.negativa("slim", "undo", "site")
    box.binaries("site")


CALLS = """
import ctypes, sys
for name in "libapp.so", "libcxx.so", "libhost.so":
    library = ctypes.CDLL(f"{sys.argv[1]}/{name}")
    print(name, [getattr(library, f"page{n}")() for n in map(int, sys.argv[2:])])
"""


CASES: dict[str, Case] = {
    # The long ones first: two at a time, they end together.
    "faults": faults,
    "hidden": hidden,
    "quickstart": quickstart,
    "launches": launches,
    "proof": proof,
    "kernels": kernels,
    "traces": traces,
    "by_arch": by_arch,
    "cut": cut,
    "cpu": cpu,
    "program": program,
    "inspect": inspect,
    "made": made,
}

WHEELS = {
    # Requirement, and what pip needs to know to take this file on any machine. CUDA as it says.
    "torchvision==0.5.0": ("36", "cp36m", "manylinux1_x86_64", "10.1"),
    "torchvision==0.9.1": ("38", "cp38", "manylinux1_x86_64", "10.2"),
    "torchvision==0.14.1": ("310", "cp310", "manylinux1_x86_64", "11.7"),
    "torchaudio==2.5.1": ("311", "cp311", "manylinux1_x86_64", "12.4"),
    "torchvision==0.26.0": ("312", "cp312", "manylinux_2_28_x86_64", "13.0"),
    "nvidia-curand==10.4.0.35": ("312", "cp312", "manylinux_2_27_x86_64", "13.0"),
}
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "negativa-oracle"


def wheel(requirement: str) -> Path:
    """A wheel, downloaded once."""
    version, abi, platform, _ = WHEELS[requirement]
    pattern = requirement.replace("==", "-").replace("nvidia-", "nvidia_") + f"-*{platform}*.whl"
    if not (found := list(CACHE.glob(pattern))):
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", f"--dest={CACHE}", "--implementation=cp"]
        command += [f"--python-version={version}", f"--abi={abi}", f"--platform={platform}"]
        command += ["--abi=none", requirement]
        subprocess.run(command, check=True)
        found = list(CACHE.glob(pattern))
    return found[0]


def of_wheel(requirement: str) -> Case:
    """The case of a wheel."""

    def case(box: Box) -> None:
        archive = wheel(requirement)
        local = box.path(archive.name)
        local.symlink_to(archive)
        with zipfile.ZipFile(archive) as file:
            file.extractall(box.folder / "site")
        for path in (box.folder / "site").rglob("*"):
            os.utime(path, (OLD, OLD))
        box.negativa("inspect", local.name)
        found = box.negativa("inspect", "--elements", "--json", "site", quiet=True)
        for row in found["libraries"]:
            box.note(Path(row["summary"]["path"]).name, shortened(box.rules.value(row)))
        quiet = ("--arch", "sm_75")
        box.negativa("slim", *quiet, "--target", "small", local.name)
        with zipfile.ZipFile(box.folder / "small" / local.name) as file:
            file.extractall(box.folder / "unpacked")
        box.note("wheel", digests(box, "unpacked"))
        copy_tree(box.folder / "site", box.folder / "out")
        box.negativa("slim", "--no-way-back", *quiet, "out")
        box.note("out/", digests(box, "out"))
        box.negativa("slim", *quiet, "--spare", "spares", "--json", "site")
        box.note("site/", digests(box, "site", is_cut=True))
        box.note("spares/", digests(box, "spares"))
        box.negativa("slim", "check", "site")
        box.negativa("slim", "undo", "site")
        box.note("site/", digests(box, "site"))
        shutil.rmtree(box.folder / "site")

    case.__doc__ = f"{requirement}, for CUDA {WHEELS[requirement][-1]}."
    return case


def digests(box: Box, name: str, *, is_cut: bool = False) -> dict[str, str]:
    """Of libraries and records; cut libraries hold the path of the box, so records do, too."""
    files = [path for path in sorted((box.folder / name).rglob("*")) if path.is_file()]
    return {
        path.relative_to(box.folder / name).as_posix(): box.binary(path)
        for path in files
        if ".so" in path.name or (path.name == "RECORD" and not is_cut)
    }


WHEEL_CASES: dict[str, Case] = {
    f"wheel-{requirement.replace('==', '-')}": of_wheel(requirement) for requirement in WHEELS
}
