"""Projects that nobody here wrote: each traced, proved, locked, slimmed with a spare.

A file in ``projects/`` describes a project: its source, its build, its tests (or its program). It
runs without us, then one command traces and proves it with its CPU code. With ``--next``, a copy of
the packages is slimmed with a spare by the project's lock and trace, and the *next* project of the
list runs on it.

What a project gave is a JSON file in the folder of results, so a list can be run in pieces and on
several machines. A project that has its file is not run again. Projects share the libraries of the
environment: two at a time hinder each other's proofs, unless each has its own PID namespace
(``unshare --pid --fork --mount-proc``).

Run: python benchmarks/wild/wild.py run --sources DIR --results DIR [--next] [NAME ...]
     python benchmarks/wild/wild.py page --results DIR

``--sources DIR`` has a folder of each project's name; what is missing there is cloned. The packages
that a project names under ``needs`` must be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pytest_negativa.storage.runs import RunsFolder

_PROJECTS = Path(__file__).with_name("projects")
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark")


class _Project:
    """A project in its source folder, and the folder of what its steps leave.

    Args:
        limit_s: seconds that a step may take.
    """

    def __init__(self, name: str, sources: Path, folder: Path, limit_s: int) -> None:
        self.name = name
        self._facts = yaml.safe_load((_PROJECTS / f"{name}.yaml").read_text())
        self._source = sources.absolute() / name
        self._folder = folder.absolute() / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._runs = self._folder / "negativa"
        self._report = self._folder / "report.json"
        self._limit_s = limit_s
        self._plain: dict[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        """Build the project, and run its tests without us; once."""
        if self._plain is None:
            self._build()
            self._plain = self.run("plain")
        return self._plain

    def _build(self) -> None:
        if not self._source.exists():
            clone = ["git", "clone", "-q", self._facts["repository"], str(self._source)]
            subprocess.run(clone, check=True)
            git = ["git", "-C", str(self._source)]
            subprocess.run([*git, "checkout", "-q", self._facts["commit"]], check=True)
        for number, command in enumerate(self._facts.get("build", ())):
            if self._start(f"build-{number}", ["bash", "-c", command])["status"]:
                raise SystemExit(f"{self.name}: cannot be built: see {self._folder}")

    def _start(
        self, step: str, command: Sequence[object], packages: Path | None = None
    ) -> dict[str, Any]:
        """Run a command in the source folder, on a copy of packages; its output is a log."""
        log = self._folder / f"{step}.log"
        variables = {name: str(value) for name, value in self._facts.get("environment", {}).items()}
        own = [self._source / self._facts["python_path"]] if "python_path" in self._facts else []
        copy = [packages] if packages is not None else []
        if own or copy:
            paths = [*map(str, [*own, *copy]), os.environ.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(paths)
        began = time.perf_counter()
        with log.open("w") as output:
            try:
                status = subprocess.run(
                    list(map(str, command)),
                    cwd=self._source,
                    env={**os.environ, **variables},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    timeout=self._limit_s,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = 124
        seconds = round(time.perf_counter() - began, 1)
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        print(f"{self.name:16} {step:12} {status:4} {seconds:7.1f} s  {last[:90]}", flush=True)
        return {"status": status, "seconds": seconds}

    def run(self, step: str, *flags: object, packages: Path | None = None) -> dict[str, Any]:
        """Run the tests, or the program."""
        if "program" in self._facts:
            return self._start(step, ["bash", "-c", self._facts["program"]], packages)
        outcomes = self._folder / f"{step}.xml"
        workers = ["-n", self._facts["workers"]] if "workers" in self._facts else []
        command = [*_PYTEST, *workers, *self._facts["tests"], f"--junitxml={outcomes}", *flags]
        done = self._start(step, command, packages)
        return done | {"outcomes": _outcomes(outcomes)}

    def prove(self) -> dict[str, Any]:
        """Trace and prove."""
        shutil.rmtree(self._runs, ignore_errors=True)
        report = f"json:{self._report}"
        if "program" in self._facts:
            commands = (
                ["trace", "--cpu", "bash", "-c", self._facts["program"]],
                ["locate"],
                ["verify", "--cpu", "--report", report],
            )
            steps = [self._negativa(*words) for words in commands]
            seconds = sum(step["seconds"] for step in steps)
        else:
            flags = "--negativa", "--negativa-verify", "--negativa-cpu"
            places = f"--negativa-dir={self._runs}", f"--negativa-report={report}"
            done = self.run("proof", *flags, *places, "--negativa-report=terminal")
            seconds = done["seconds"]
        return {"seconds": seconds} | self._read_report()

    def _read_report(self) -> dict[str, Any]:
        if not self._report.exists():
            return {"proved": False, "reasons": ["it ended without a report"]}
        report = json.loads(self._report.read_text())
        proof = report.get("proof") or {"proved": False, "reasons": ["no verdict"]}
        # The driver is the machine's.
        rows = [row for row in report["libraries"] if "/libcuda.so" not in row["path"]]
        return {
            "libraries": len(rows),
            "bytes": sum(row["code_bytes"] for row in rows),
            "kept_bytes": sum(reason["bytes"] for row in rows for reason in row["kept"]),
            "kernels": sum(row["used_kernels"] for row in rows),
            "proved": proof["proved"],
            "reasons": proof["reasons"],
        }

    def _negativa(self, *words: object) -> dict[str, Any]:
        return self._start(str(words[0]), ["negativa", "--dir", self._runs, *words])

    def run_next(self, following: _Project, names: Sequence[str]) -> dict[str, Any]:
        """Slim a copy of packages by this project, and run another one on it."""
        before = following.plain().get("outcomes", {})
        lock, spare, site = (self._folder / name for name in ("negativa.lock", "spare", "site"))
        site.mkdir()
        installed = Path(sysconfig.get_path("platlib"))
        found = [path for name in names for path in installed.glob(f"{name}*")]
        subprocess.run(["cp", "-a", *found, site], check=True)
        size = _size(site)
        self._negativa("lock", "--unproved", "--output", lock)
        run = RunsFolder(self._runs).latest
        pages = "--cpu-pages", run, "--spare", spare, "--spare-never-loaded"
        slim = self._negativa("slim", "--yes", "--lock", lock, *pages, site)
        done = following.run(f"on-{self.name}", packages=site)
        sizes = size, _size(site)
        shutil.rmtree(site)
        shutil.rmtree(spare, ignore_errors=True)
        after = done.get("outcomes", {})
        names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        return {
            "project": following.name,
            "status": done["status"],
            "plain_status": following.plain()["status"],
            "slim_seconds": slim["seconds"],
            "sizes": sizes,
            "seconds": (following.plain()["seconds"], done["seconds"]),
            "tests": len(after),
            "differing": {name: (before.get(name), after.get(name)) for name in names},
        }


def _outcomes(report: Path) -> dict[str, str]:
    if not report.exists():
        return {}
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        ends = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = (
            "+".join(sorted(ends)) or "passed"
        )
    return outcomes


def _size(site: Path) -> int:
    """Bytes of the environment's libraries."""
    files = (path for path in site.rglob("*.so*") if not path.is_symlink() and path.is_file())
    return sum(path.stat().st_size for path in files)


def _run(arguments: argparse.Namespace) -> None:
    names = arguments.names or sorted(file.stem for file in _PROJECTS.glob("*.yaml"))
    arguments.results.mkdir(parents=True, exist_ok=True)
    projects = [
        _Project(name, arguments.sources, arguments.logs, arguments.limit) for name in names
    ]
    for number, project in enumerate(projects):
        result = arguments.results / f"{project.name}.json"
        if result.exists():
            continue
        facts: dict[str, Any] = {"name": project.name, "plain": project.plain()}
        facts["proof"] = project.prove()
        if arguments.next and len(projects) > 1:
            facts["next"] = project.run_next(
                projects[(number + 1) % len(projects)], arguments.packages
            )
        result.write_text(json.dumps(facts, indent=1))


def _page(arguments: argparse.Namespace) -> None:
    rows = [
        ("project", "tests", "plain", "cost", "GPU code kept", "verdict", "next project on it"),
        ("---", "---", "---:", "---:", "---:", "---", "---"),
    ]
    for file in sorted(arguments.results.glob("*.json")):
        facts = json.loads(file.read_text())
        plain, proof = facts["plain"], facts["proof"]
        counts = Counter(plain.get("outcomes", {}).values())
        kept, whole = (proof.get(name, 0) / 1e6 for name in ("kept_bytes", "bytes"))
        rows.append(
            (
                facts["name"],
                ", ".join(f"{n:,} {end}" for end, n in counts.most_common()) or "a program",
                f"{plain['seconds']} s",
                f"{proof['seconds'] / plain['seconds']:.1f}",
                f"{kept:,.1f} of {whole:,.1f} MB",
                "proved" if proof["proved"] else "; ".join(proof["reasons"]),
                _describe_next(facts.get("next")),
            )
        )
    for row in rows:
        print(f"| {' | '.join(row)} |")


def _describe_next(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    before, after = (f"{size / 1e6:,.0f}" for size in found["sizes"])
    tests = found["tests"] or 1
    ended_otherwise = found["status"] != found["plain_status"]
    differing = len(found["differing"]) if found["tests"] else int(ended_otherwise)
    return f"{found['project']}: {differing} of {tests:,} differ; {before} -> {after} MB"


def main() -> None:
    """Run projects, or print the page of what they gave."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run projects; all by default")
    run.add_argument("names", nargs="*")
    run.add_argument("--sources", type=Path, required=True)
    run.add_argument("--results", type=Path, required=True)
    run.add_argument("--logs", type=Path, default=Path("wild-logs"))
    run.add_argument("--packages", nargs="+", default=["torch", "nvidia", "cupy"])
    run.add_argument("--next", action="store_true", help="slim, and run the next project on it")
    run.add_argument("--limit", type=int, default=580, help="seconds that a step may take")
    run.set_defaults(do=_run)
    page = commands.add_parser("page", help="print a table of the results")
    page.add_argument("--results", type=Path, required=True)
    page.set_defaults(do=_page)
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
