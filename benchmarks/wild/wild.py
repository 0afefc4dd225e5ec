"""Projects that nobody here wrote: each traced, proved, locked, slimmed with a spare.

A file in ``projects/`` describes a project: its source, how it is ``installed``, its tests (or its
program), and its ``known_failures``: a part of a test's name or of a reason, and its cause. It runs
twice without us, and the second counts: the first compiles kernels. Then one command traces and
proves it with its CPU code. With ``--next``, a copy of the packages is slimmed with a spare by the
project's lock and trace, and the *next* project of the list runs on it: with modules loaded lazily
and eagerly, in one process and with four workers, all at once, here and on the originals. With
``--misses`` it runs once more, and the pages that came back are counted.

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
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from pytest_negativa.models.spans import size, spans_of_pages
from pytest_negativa.storage.runs import Run, RunsFolder

sys.path.insert(0, str(Path(__file__).parents[1]))
from page_cache import cached, drop

_PROJECTS = Path(__file__).with_name("projects")
_NEGATIVA = (sys.executable, "-m", "pytest_negativa")
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark")


class _Project:
    """A project in its source folder, and the folder of what its steps leave.

    Args:
        file: its facts.
        limit_s: seconds that a step may take.
    """

    def __init__(self, file: Path, sources: Path, folder: Path, limit_s: int) -> None:
        self.name = file.stem
        self._facts = yaml.safe_load(file.read_text())
        self._source = sources.absolute() / self.name
        self._folder = folder.absolute() / self.name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._runs = self._folder / "negativa"
        self._report = self._folder / "report.json"
        self._limit_s = limit_s
        self._plain: dict[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        """Build the project, and run its tests without us, when all is compiled; once."""
        if self._plain is None:
            self._build()
            self.run("warm")
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
        self, step: str, command: Sequence[object], environ: Mapping[str, str] = os.environ
    ) -> dict[str, Any]:
        """Run a command in the source folder; its output is a log."""
        log = self._folder / f"{step}.log"
        variables = {name: str(value) for name, value in self._facts.get("environment", {}).items()}
        if "python_path" in self._facts:
            paths = self._source / self._facts["python_path"], environ.get("PYTHONPATH", "")
            variables["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        began = time.perf_counter()
        with log.open("w") as output:
            try:
                status = subprocess.run(
                    list(map(str, command)),
                    cwd=self._source,
                    env={**environ, **variables},
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

    def run(
        self, step: str, *flags: object, environ: Mapping[str, str] = os.environ
    ) -> dict[str, Any]:
        """Run the tests, or the program."""
        if "program" in self._facts:
            return self._start(step, ["bash", "-c", self._facts["program"]], environ)
        outcomes = self._folder / f"{step}.xml"
        flags = (*(["-n", self._facts["workers"]] if "workers" in self._facts else ()), *flags)
        command = [*_PYTEST, *self._facts["tests"], f"--junitxml={outcomes}", *flags]
        done = self._start(step, command, environ)
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
            "cpu": self._read_pages(),
        }

    def _read_pages(self) -> dict[str, Any] | None:
        """The verdict on CPU code, and its bytes; None without one."""
        run = Run(RunsFolder(self._runs).latest)
        if not run.verdict_file.exists():
            return None
        verdict = json.loads(run.verdict_file.read_text())
        if verdict["cpu_reasons"] is None:
            return None
        usage = json.loads(run.host_usage_file.read_text())
        watched = (span for library in usage["libraries"] for span in library["watched"])
        proved = (spans_of_pages(row["pages"] or "") for row in verdict["libraries"])
        return {
            "bytes": sum(end - start for start, end in watched),
            "untouched_bytes": sum(map(size, proved)),
            "proved": not verdict["cpu_reasons"],
            "reasons": verdict["cpu_reasons"],
        }

    def _negativa(self, *words: object) -> dict[str, Any]:
        return self._start(str(words[0]), [*_NEGATIVA, "--dir", self._runs, *words])

    def run_next(
        self, following: _Project, names: Sequence[str], *, misses: bool
    ) -> dict[str, Any]:
        """Slim a copy of packages by this project, and run another one on it.

        Args:
            following: the other one.
            names: of the packages.
            misses: whether to count what came back, which takes time.
        """
        lock, spare, site = (self._folder / name for name in ("negativa.lock", "spare", "site"))
        site.mkdir()
        installed = Path(sysconfig.get_path("platlib"))
        found = [path for name in names for path in installed.glob(f"{name}*")]
        subprocess.run(["cp", "-a", *found, site], check=True)
        size = _size(site)
        self._negativa("lock", "--unproved", "--output", lock)
        spared = "--spare", spare, "--never-loaded"
        slim = self._negativa("slim", "--yes", "--lock", lock, *spared, site)
        facts = {
            "project": following.name,
            "slim_seconds": slim["seconds"],
            "sizes": (size, _size(site)),
            "spares": [path.stat().st_blocks * 512 for path in spare.rglob("*") if path.is_file()],
            "ways": following.compare(f"on-{self.name}", site, spare),
        }
        if misses:
            logs = self._folder / "misses"
            shutil.rmtree(logs, ignore_errors=True)
            environ = _on(site) | _answer("misses", "--attach-env", logs, "--json")
            following.run(f"on-{self.name}-logged", environ=environ)
            came_back = _answer("misses", "--log", logs, "--json", site)["rows"]
            facts["misses"] = sum(row["misses"] for row in came_back)
        shutil.rmtree(site)
        shutil.rmtree(spare, ignore_errors=True)
        return facts

    def compare(self, name: str, site: Path, spare: Path) -> dict[str, Any]:
        """Run the tests on the originals and on slim packages, in each way.

        Args:
            name: of the runs.
            site: the slim packages.
            spare: the folder of their spares.
        """
        counts = (0,) if "program" in self._facts else (0, 4)
        ways = {
            loading.lower() + (f", -n {workers}" if workers else ""): (loading, workers)
            for loading, workers in product(("LAZY", "EAGER"), counts)
        }
        self._build()
        drop(spare)
        with ThreadPoolExecutor(2 * len(ways)) as pool:
            pending = {
                (way, place): pool.submit(
                    self.run,
                    f"{name}-{place}-{way.replace(', -n ', '-')}",
                    *("-n", workers),
                    environ=environ | {"CUDA_MODULE_LOADING": loading},
                )
                for place, environ in (("originals", {**os.environ}), ("slim", _on(site)))
                for way, (loading, workers) in ways.items()
            }
            ends = {key: future.result() for key, future in pending.items()}
        differing = {}
        for way in ways:
            before, after = ends[way, "originals"], ends[way, "slim"]
            tests = before.get("outcomes", {}), after.get("outcomes", {})
            differing[way] = {
                name: tuple(found.get(name) for found in tests)
                for name in sorted({*tests[0], *tests[1]})
                if tests[0].get(name) != tests[1].get(name)
            }
            if before["status"] != after["status"]:
                differing[way]["status"] = (before["status"], after["status"])
        return {
            "tests": {way: len(ends[way, "slim"].get("outcomes", {})) for way in ways},
            "differing": differing,
            "spare_bytes_read": round(cached(spare) * 1e6),
        }


def _on(site: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"}


def _answer(*words: object) -> Any:
    """The JSON that a negativa command prints."""
    done = subprocess.run([*_NEGATIVA, *map(str, words)], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


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
    names = arguments.names or sorted(file.stem for file in arguments.projects.glob("*.yaml"))
    arguments.results.mkdir(parents=True, exist_ok=True)
    files = [arguments.projects / f"{name}.yaml" for name in names]
    projects = [
        _Project(file, arguments.sources, arguments.logs, arguments.limit) for file in files
    ]
    for number, project in enumerate(projects):
        result = arguments.results / f"{project.name}.json"
        if result.exists():
            continue
        facts: dict[str, Any] = {"name": project.name, "plain": project.plain()}
        facts["proof"] = project.prove()
        if arguments.next and len(projects) > 1:
            following = projects[(number + 1) % len(projects)]
            facts["next"] = project.run_next(following, arguments.packages, misses=arguments.misses)
        result.write_text(json.dumps(facts, indent=1))


def _page(arguments: argparse.Namespace) -> None:
    rows = [
        ("project", "installed", "tests", "plain", "cost", "GPU code left", "CPU code left",
         "verdict", "CPU code", "libraries", "misses", "next project on it"),
        ("---", "---", "---", "---:", "---:", "---:", "---:", "---", "---", "---:", "---:", "---"),
    ]  # fmt: skip
    failures: list[str] = []
    for file in sorted(arguments.results.glob("*.json")):
        found = json.loads(file.read_text())
        facts = yaml.safe_load((arguments.projects / file.with_suffix(".yaml").name).read_text())
        plain, proof, following = found["plain"], found["proof"], found.get("next") or {}
        counts = Counter(plain.get("outcomes", {}).values())
        cpu = proof.get("cpu") or {}
        left = cpu.get("bytes", 0) - cpu.get("untouched_bytes", 0)
        misses = following.get("misses")
        rows.append(
            (
                found["name"],
                facts["installed"],
                ", ".join(f"{n:,} {end}" for end, n in counts.most_common()) or "a program",
                f"{plain['seconds']} s",
                f"{proof['seconds'] / plain['seconds']:.1f}",
                _share(proof.get("kept_bytes", 0), proof.get("bytes", 0)),
                _share(left, cpu["bytes"]) if cpu else "",
                _verdict(proof),
                _verdict(cpu) if cpu else "",
                " -> ".join(f"{size / 1e6:,.0f}" for size in following.get("sizes", ())),
                "" if misses is None else f"{misses:,}",
                _describe_next(following) if following else "",
            )
        )
        causes = facts.get("known_failures", {})
        texts = [name for name, end in plain.get("outcomes", {}).items() if _failed(end)]
        texts += [*proof["reasons"], *cpu.get("reasons", ())]
        failures += (f"{found['name']}: {text}: {_cause(text, causes)}" for text in texts)
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(*("", "Failures:", "", *(f"- {line}" for line in failures)) if failures else (), sep="\n")


def _share(part: int, whole: int) -> str:
    return f"{part / 1e6:,.1f} of {whole / 1e6:,.1f} MB"


def _verdict(proof: Mapping[str, Any]) -> str:
    return "proved" if proof["proved"] else "not proved"


def _failed(end: str) -> bool:
    return "failure" in end or "error" in end


def _cause(text: str, causes: Mapping[str, str]) -> str:
    return next((cause for part, cause in causes.items() if part in text), "cause not known")


def _describe_next(found: Mapping[str, Any]) -> str:
    ways = found["ways"]
    ends = (
        f"{way}: {len(differing)} of {ways['tests'][way] or 1:,}"
        for way, differing in ways["differing"].items()
    )
    read = f"{ways['spare_bytes_read'] / 1e6:,.0f} of {sum(found['spares']) / 1e6:,.0f} MB"
    return f"{found['project']}, tests that differ: {'; '.join(ends)}; read from spares: {read}"


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
    run.add_argument("--misses", action="store_true", help="count what comes back to it")
    run.add_argument("--limit", type=int, default=580, help="seconds that a step may take")
    run.set_defaults(do=_run)
    page = commands.add_parser("page", help="print a table of the results")
    page.add_argument("--results", type=Path, required=True)
    page.set_defaults(do=_page)
    for command in (run, page):
        command.add_argument("--projects", type=Path, default=_PROJECTS, help="their files")
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
