"""Runs an installed pytest-negativa in a folder of its own, and notes what it printed and wrote."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.oracle.html import html_data

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INPUTS = HERE / "inputs"
FIXTURES = ROOT / "tests" / "fixtures" / "bin"
QUICKSTART = ROOT / "tests" / "fixtures" / "quickstart"
TRACES = ROOT / "tests" / "data" / "traces"

OLD = 1_700_000_000
"""The time of input files, in seconds."""
_LENGTH = 90
"""Of the path of each case's folder: files and tables hold paths."""
_HANGS_S = 600
_LONG = 4_000
"""Characters of a list or text that is recorded whole; a longer one by its digest and ends."""
_FEW = 12
# Only a slow machine shows it.
_PROGRESS = re.compile(r"^negativa: [a-z ]+: [^\n]* s( left)?\n", re.M)
_RUN_OR_TIME = re.compile(rb"\d{8}T\d{6}Z-[0-9a-f]{8}|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_PARAMETERS = 80
"""Bytes in front of the stub's code."""

# Of this run, this machine or this process; all other values are compared.
_CHANGING_KEYS = re.compile(
    r"(boot|pid|ppid|inode|created|timestamp|duration|duration_s|seconds|executable|python|libc|platform"
    r"|cpu_model|recipe|keywords|.*_ns)"
)
_FIXED_KEYS = {"gpu_ns"}


class Product(NamedTuple):
    """An installation.

    Attributes:
        prefixes: folders of its Python.
        stub: code that it puts into libraries, as this machine's compiler made it.
    """

    python: Path
    version: str
    prefixes: tuple[str, ...]
    stub: bytes


class Rules:
    """What differs from run to run, and what stands for it."""

    def __init__(self, box: Path, product: Product) -> None:
        self._numbers: dict[str, str] = {}
        self._box = str(box)
        self.stub = product.stub
        self._foreign = (*product.prefixes, "/usr/", "/lib")
        self.digests: dict[str, str] = {}
        """Of files that hold the path of the box: what stands for their SHA-256."""
        prefix, version = product.python.parent.parent, product.version
        self._texts: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
            (re.compile(f"/?{re.escape(str(box)[1:])}"), "BOX"),
            (re.compile(rf"{re.escape(str(prefix))}/bin/python[\d.]*"), "PYTHON"),
            (re.compile(re.escape(str(prefix))), "VENV"),
            (re.compile(r"\b\d{8}T\d{6}Z-[0-9a-f]{6,8}\b"), self._run_id),
            (re.compile(r"\.\d+\.[0-9a-f]{8}\.jsonl"), ".PID.jsonl"),
            (re.compile(r"\b[0-9a-f]{32}\.jsonl"), "TRACE.jsonl"),
            # Of a lock, with the time in it.
            (re.compile(r"^digest: [0-9a-f]{64}"), "digest: ~"),
            (re.compile(r"\btimestamp=\"\d+\""), 'timestamp="~"'),
            (re.compile(r"(process|pid) \d+"), r"\1 PID"),
            (re.compile(r" in \d+(\.\d+)? ?s\b"), " in TIME"),
            (re.compile(r", \d+ s (when traced|last time)$", re.M), r", TIME \1"),
            (re.compile(r"[\d.]+ [kMG]?B on disk"), "SIZE on disk"),
            # As zlib packed it.
            (re.compile(r"(\.whl: .* ->) [\d.]+ [kMG]?B"), r"\1 SIZE"),
            (re.compile(r"^(size  +|RUN-\d+ .*  )[\d.]+ [kMG]?B$"), r"\1SIZE"),
            (re.compile(r"^( *(python|platform|libc): ).*"), r"\1~"),
            # Who it was is seen if it still runs.
            (
                re.compile(
                    r"its opener is unknown|process (\d+|PID) .{,200} had it open or mapped then"
                ),
                "OPENER",
            ),
            (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(Z|\+00:00)?"), "TIME"),
            (re.compile(rf"\b{re.escape(version)}\b"), "VERSION"),
            (re.compile(r"\bon (AMD|Intel)\b[^.\"]*"), "on CPU"),
        )

    def _run_id(self, match: re.Match[str]) -> str:
        """Runs are numbered in the order in which they are named."""
        return self._numbers.setdefault(match[0], f"RUN-{len(self._numbers) + 1}")

    def _is_foreign(self, value: Any) -> bool:
        """Whether a row of a list is about a file of the machine, such as Python's own."""
        if isinstance(value, dict):
            library = value.get("library", value)
            value = library.get("path") if isinstance(library, dict) else None
        elif isinstance(value, str) and ".so" not in value:
            return False
        foreign = isinstance(value, str) and value.startswith(self._foreign)
        return foreign and not value.startswith(self._box)

    def text(self, value: str) -> str:
        if value in self.digests:
            return self.digests[value]
        for pattern, stands in self._texts:
            value = pattern.sub(stands, value)
        return value

    def value(self, value: Any, key: str = "") -> Any:
        """Any JSON value."""
        if key == "circumstances":
            # The options of pytest and its plugins, and the machine's environment.
            return "~"
        if isinstance(value, dict):
            values = {self.text(k): self.value(v, k) for k, v in value.items()}
            # Whether a default is written depends on the version of a library.
            return {k: v for k, v in values.items() if v is not None and v != []}
        if isinstance(value, list) and not _CHANGING_KEYS.fullmatch(key):
            return [self.value(v) for v in value if not self._is_foreign(v)]
        if key not in _FIXED_KEYS and _CHANGING_KEYS.fullmatch(key) and value is not None:
            return "~"
        if key == "device" and isinstance(value, int):
            # A file system's, not a GPU.
            return "~"
        return self.text(value) if isinstance(value, str) else value


def shortened(value: Any) -> Any:
    """A JSON value in which long texts and lists are their digests and key figures."""
    if isinstance(value, dict):
        return {key: shortened(one) for key, one in value.items()}
    if isinstance(value, str):
        whole = len(value) <= _LONG
        return value if whole else {"length": len(value), "sha256": digest(value.encode())}
    if not isinstance(value, list):
        return value
    rows = [shortened(one) for one in value]
    most = _LONG * (5 if any(isinstance(row, dict) for row in rows) else 1)
    if len(json.dumps(rows, ensure_ascii=False)) <= most:
        return rows
    packed = json.dumps(value, ensure_ascii=False).encode()
    figures = {"length": len(value), "sha256": digest(packed), "first": rows[0], "last": rows[-1]}
    return {**figures, **_columns(value)}


def _columns(rows: list[Any]) -> dict[str, Any]:
    """Of rows: sums of numbers, and how often each word stands in a column of few."""
    if not all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows):
        return {}
    found: dict[str, Any] = {}
    for number, column in enumerate(zip(*rows, strict=True)):
        if all(isinstance(one, int) and not isinstance(one, bool) for one in column):
            found[f"sum of column {number}"] = sum(column)
        elif len(counts := Counter(json.dumps(one) for one in column)) <= _FEW:
            found[f"column {number}"] = dict(sorted(counts.items()))
    return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def words_of_session(output: str) -> str:
    """What the product printed in a session of pytest, and how many tests passed."""
    lines = output.splitlines()
    section = next(
        (n for n, line in enumerate(lines) if "(pytest-negativa) ==" in line), len(lines)
    )
    counts = re.compile(r"\d+ (passed|failed|error|skipped|warning).* in ")
    head = [line for line in lines[:section] if "negativa" in line or counts.match(line)]
    return "\n".join(head + lines[section:])


class Box:
    """The folder of a case, the commands that run in it, and what is noted of them."""

    def __init__(self, name: str, product: Product, parent: Path) -> None:
        padding = _LENGTH - len(str(parent)) - len(name) - 2
        if padding < 1:
            raise SystemExit(f"{parent}: the path is too long; set TMPDIR to a shorter one")
        self.folder = parent / ("o" * padding) / name
        self.folder.mkdir(parents=True)
        self.python = product.python
        self.rules = Rules(self.folder, product)
        self.noted: dict[str, Any] = {}
        self._command = ""
        (self.folder / "home").mkdir()
        self.environ = {
            "PATH": f"{self.python.parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.folder / "home"),
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "COLUMNS": "1000",
            "CUDA_VISIBLE_DEVICES": "",
            "NEGATIVA_CACHE_DIR": str(self.folder / "cache"),
            "SOURCE_DATE_EPOCH": "1767225600",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            # Only the plugins that a case names.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "-p negativa -p no:cacheprovider -p no:faulthandler",
        }
        for kept in ("TMPDIR", "PYTHONHASHSEED", "PYTHONPYCACHEPREFIX"):
            if kept in os.environ:
                self.environ[kept] = os.environ[kept]

    def path(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, name: str, text: str) -> Path:
        path = self.path(name)
        path.write_text(text)
        return path

    def copy(self, source: Path, name: str) -> Path:
        """Copy a file or folder into the box; files are as old each time."""
        target = self.path(name)
        if source.is_dir():
            ignored = shutil.ignore_patterns(".negativa", "__pycache__", ".pytest_cache")
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copyfile(source, target)
        for path in [target, *target.rglob("*")] if target.is_dir() else [target]:
            os.utime(path, (OLD, OLD))
        return target

    def library(self, name: str, target: str = "") -> Path:
        """Unpack one of the libraries of ``inputs/``."""
        path = self.path(target or name)
        path.write_bytes(lzma.decompress((INPUTS / f"{name}.xz").read_bytes()))
        # Not what umask gives, so that it is seen if it is lost.
        path.chmod(0o754)
        os.utime(path, (OLD, OLD))
        return path

    # What runs.

    def run(
        self, *words: str, cwd: str = ".", quiet: bool = False, show: str = "", **environ: str
    ) -> Any:
        """Run a command, and note its exit status and what it printed.

        Args:
            words: the command; ``negativa`` and ``python`` are those of the installation.
            cwd: where, below the box.
            quiet: note the exit status alone.
            show: the command's name in the recorded results.
            environ: more variables.

        Returns:
            What it printed to standard output, as JSON if it is.
        """
        command = [str(self.python) if word == "python" else word for word in words]
        done = subprocess.run(
            command,
            cwd=self.folder / cwd,
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=_HANGS_S,
            stdin=subprocess.DEVNULL,
            umask=0o022,
        )
        entry: dict[str, Any] = {"status": done.returncode}
        if not quiet:
            out = words_of_session(done.stdout) if words[0] == "pytest" else done.stdout
            entry["out"] = self.output(out)
            entry["err"] = self.output(_PROGRESS.sub("", done.stderr))
        name = show or self.rules.text(" ".join(words))
        self._command = self._free(self.noted, name)
        self.noted[self._command] = {key: one for key, one in entry.items() if one != []}
        try:
            return json.loads(done.stdout)
        except ValueError:
            return done.stdout

    def negativa(self, *words: str, **options: Any) -> Any:
        return self.run("negativa", *words, **options)

    def pytest(self, *words: str, **options: Any) -> Any:
        return self.run("pytest", "-q", *words, **options)

    # What is noted.

    def note(self, name: str, value: Any) -> None:
        """Note something that the last command wrote."""
        files = self.noted[self._command].setdefault("files", {})
        files[self._free(files, self.rules.text(name))] = value

    def _free(self, taken: dict[str, Any], name: str) -> str:
        key, number = name, 1
        while key in taken:
            number += 1
            key = f"{name} ({number})"
        return key

    def output(self, text: str) -> Any:
        """What a command printed: JSON as a value, text as lines."""
        if text[:1] in ("{", "["):
            try:
                return shortened(self.rules.value(json.loads(text)))
            except ValueError:
                pass
        return [self.rules.text(line.rstrip()) for line in text.splitlines()]

    def file(self, name: str, of: Path | None = None) -> None:
        """Note a file: JSON as a value, text as lines, HTML by its data, others by digest."""
        path = of or self.folder / name
        self.note(name, self.content(path))

    def content(self, path: Path) -> Any:
        if not path.exists():
            return "missing"
        data = path.read_bytes()
        try:
            text = data.decode()
        except ValueError:
            return self.binary(path)
        if path.suffix == ".html":
            return shortened(self.rules.value(html_data(text)))
        if path.suffix == ".jsonl":
            return [self.rules.value(json.loads(line)) for line in text.splitlines()]
        return self.output(text)

    def whole(self, path: Path) -> str:
        """The same, with the mode, and whether it is as old as the inputs."""
        status = path.stat()
        age = "old" if status.st_mtime == OLD else "new"
        return f"{self.binary(path)}, mode {status.st_mode & 0o7777:o}, {age}"

    def binary(self, path: Path) -> str:
        """Size and digest of a file, whatever the path of the box that it may hold."""
        data = path.read_bytes()
        same = data.replace(str(self.folder).encode(), b"$" * len(str(self.folder)))
        same = _RUN_OR_TIME.sub(b"", same).replace(self.rules.stub, bytes(len(self.rules.stub)))
        if same != data:
            self.rules.digests[hashlib.sha256(data).hexdigest()] = f"of {digest(same)}"
        return f"{len(data)} bytes, {digest(same)}"

    def binaries(self, name: str) -> None:
        """Note all files below a folder: binary ones by digest, texts as they are."""
        found: dict[str, Any] = {}
        folder = self.folder / name
        # Those with lists of digests last.
        for path in sorted(folder.rglob("*"), key=lambda path: (path.suffix == ".json", path)):
            key = self.rules.text(path.relative_to(folder).as_posix())
            if path.is_symlink():
                found[key] = f"-> {self.rules.text(os.readlink(path))}"
            elif path.is_file():
                found[key] = self.content(path) if path.suffix == ".json" else self.whole(path)
        self.note(f"{name}/", found)

    def latest(self, *names: str, project: str = ".") -> None:
        """Note files of the latest run; a name may end with ``/`` for all files of a folder."""
        run = (self.folder / project / ".negativa" / "latest").resolve()
        for name in names:
            for path in self._below(run, name):
                self.file(f"{path.relative_to(run).as_posix()}", path)

    def _below(self, run: Path, name: str) -> Iterator[Path]:
        if name.endswith("/"):
            yield from sorted(path for path in (run / name).rglob("*") if path.is_file())
        else:
            yield run / name


def find_product(python: Path) -> Product:
    """The installation of an interpreter."""
    code = "import sys; print(sys.base_prefix)"

    def words(*command: str | Path) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    version = words(python.parent / "negativa", "--version").split()[-1]
    prefixes = (f"{python.parent.parent}/", f"{words(python, '-c', code)}/", f"{ROOT}/")
    code = "import pytest_negativa as p; print(*p.__path__)"
    stub = Path(words(python, "-c", code), "pages", "_stub.bin").read_bytes()[_PARAMETERS:]
    return Product(python, version, prefixes, stub)


def run_case(name: str, case: Callable[[Box], None], product: Product) -> dict[str, Any]:
    """What a case notes."""
    parent = Path(tempfile.mkdtemp(prefix="oracle-"))
    try:
        box = Box(name, product, parent)
        case(box)
        noted: dict[str, Any] = json.loads(json.dumps(box.noted))
        return noted
    finally:
        shutil.rmtree(parent, ignore_errors=True)
