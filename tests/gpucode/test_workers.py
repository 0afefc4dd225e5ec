"""Libraries read by the workers of real Dask clusters."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_negativa.cli.main import main
from pytest_negativa.errors import WorkerError
from pytest_negativa.gpucode import mapping
from pytest_negativa.gpucode.cache import MapCache
from pytest_negativa.gpucode.mapping import MappedLibrary, MapRequest, map_libraries
from pytest_negativa.gpucode.workers import LocalProcesses
from pytest_negativa.models.library import Scope
from tests.support.clusters import Cluster, KillsWorkers, cluster_of, two_hosts, workers_of
from tests.support.libraries import BIN, MULTIARCH, NEGATIVA, PLAIN, SHARED_OBJECTS, make_large
from tests.support.modules import require_modules
from tests.support.sessions import Project

DIGEST = MapRequest(scope=Scope(), with_map=True, with_digest=True)
SUMMARY = MapRequest(scope=Scope())
ONE = LocalProcesses(1)

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of(tmp_path_factory.mktemp("cluster"), 3) as cluster:
        yield cluster


def by_path(mapped: Iterable[MappedLibrary]) -> dict[Path, MappedLibrary]:
    return {one.path: one._replace(cached=False) for one in mapped}


def large(folder: Path, count: int) -> list[Path]:
    """Libraries that the cache takes; the last two have the same content."""
    names = ["libmultiarch.so", "libcallgraph.so", "libframes.so", "libglobals.so", "libnames.so"]
    made = [make_large(BIN / name, folder / name) for name in names[: count - 1]]
    return [*made, Path(shutil.copy(made[-1], folder / "libcopy.so"))]


@slow
class TestCluster:
    def test_gives_what_this_machine_gives(self, cluster: Cluster, tmp_path: Path) -> None:
        paths = [*SHARED_OBJECTS, *large(tmp_path, 4), tmp_path / "gone.so", tmp_path]
        for request in (DIGEST, SUMMARY):
            with workers_of(cluster) as workers:
                found = by_path(map_libraries(paths, request, None, workers))
            here = by_path(map_libraries(paths, request, None, ONE))
            assert {p: m._replace(error=None) for p, m in found.items()} == {
                p: m._replace(error=None) for p, m in here.items()
            }
            assert {p: str(m.error) for p, m in found.items()} == {
                p: str(m.error) for p, m in here.items()
            }

    def test_shares_the_cache(
        self, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        paths, cache = large(tmp_path, 5), MapCache(tmp_path / "cache", 1 << 30)
        with workers_of(cluster) as workers:
            first = by_path(map_libraries(paths, SUMMARY, cache, workers))
        monkeypatch.setattr(mapping, "map_library", None)
        assert by_path(map_libraries(paths, SUMMARY, cache, ONE)) == first

    def test_command(self, cluster: Cluster) -> None:
        command = [str(NEGATIVA), "inspect", str(BIN), "--json", "--no-cache"]
        done = [
            subprocess.run([*command, *more], capture_output=True, text=True, check=False)
            for more in ([], ["--executor", cluster.url])
        ]
        assert done[0].stdout == done[1].stdout
        assert done[0].stderr == done[1].stderr
        assert done[0].returncode == done[1].returncode

    def test_plans(self, cluster: Cluster, project: Project) -> None:
        """locate, debloat and combine get the same plan."""
        project.write("test_a.py", "def test_passes():\n    pass\n")
        project.pytest("-q", "--negativa")
        expected = project.plan()
        project.negativa("locate", "--executor", cluster.url)
        assert project.plan() == expected
        project.negativa("combine", ".negativa/latest", "--executor", cluster.url)
        assert project.plan() == expected


@slow
def test_a_worker_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    paths = large(tmp_path, 6)
    expected = by_path(map_libraries(paths, DIGEST))
    cache = KillsWorkers(tmp_path / "cache", 2)
    with cluster_of(tmp_path, 3) as cluster, workers_of(cluster) as workers:
        assert by_path(map_libraries(paths, DIGEST, cache, workers)) == expected
        assert cache.killed == 2


@slow
def test_a_library_that_kills_its_workers(tmp_path: Path) -> None:
    path = make_large(MULTIARCH, tmp_path / "lib.so")
    cache = KillsWorkers(tmp_path / "cache", 9)
    patience = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1"}
    with cluster_of(tmp_path, 2, **patience) as cluster, workers_of(cluster) as workers:
        (found,) = map_libraries([path], DIGEST, cache, workers)
    assert str(found.error) == (
        f"{path}: not read: each worker of the cluster that began it died (out of memory?)"
    )


@slow
@pytest.mark.parametrize("there", ["nothing", "another file"])
def test_a_worker_without_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    make_large(MULTIARCH, tmp_path / "here" / "lib.so")
    if there == "another file":
        (tmp_path / "there" / "lib.so").write_bytes(b"other")
    # It is the folder of each process.
    path = Path("/proc/self/cwd/lib.so")
    monkeypatch.chdir(tmp_path / "here")
    cluster = Cluster(tmp_path)
    try:
        cluster.add_worker(cwd=tmp_path / "there")
        with (
            workers_of(cluster) as workers,
            pytest.raises(WorkerError) as found,
        ):
            list(map_libraries([path], DIGEST, None, workers))
    finally:
        cluster.close()
    assert str(found.value).startswith(f"{path}: a worker has another file there, or none; share")


@slow
def test_two_hosts(tmp_path: Path) -> None:
    """One reads what the other has, as long as both see it."""
    (folder := tmp_path / "libraries").mkdir()
    large(folder, 5)
    with two_hosts() as (first, second):
        cluster = Cluster(tmp_path, first, "10.77.0.1")

        def inspect() -> tuple[int, str, str]:
            command = [*first, str(NEGATIVA), "inspect", str(folder), "--json", "--no-cache"]
            command += ["--executor", cluster.url]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            return done.returncode, done.stdout, done.stderr

        try:
            worker = cluster.add_worker(second, host="10.77.0.2")
            status, found, error = inspect()
            assert status == 0, error
            expected = CliRunner().invoke(main, ["inspect", str(folder), "--json", "--no-cache"])
            assert found == expected.stdout

            worker.kill()
            hidden = (*second, "sh", "-c", f'mount -t tmpfs none {folder}; exec "$@"', "sh")
            cluster.add_worker(hidden, host="10.77.0.2")
            status, _, error = inspect()
            assert status == 1
            assert re.search(
                rf"error: {folder}/lib\w+.so: a worker has another file there, or none; share the ",
                error,
            )
        finally:
            cluster.close()


@slow
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("return '9.9'", "has pytest-negativa 9.9; install pytest-negativa "),
        ("raise importlib.metadata.PackageNotFoundError(name)", "has none (No package metadata"),
    ],
    ids=["another", "none"],
)
def test_a_worker_with_another_installation(tmp_path: Path, code: str, problem: str) -> None:
    (tmp_path / "prepare.py").write_text(
        "import importlib.metadata\n"
        f"def version(name):\n    {code}\n"
        "importlib.metadata.version = version\n"
    )
    cluster = Cluster(tmp_path)
    try:
        cluster.add_worker(DASK_DISTRIBUTED__WORKER__PRELOAD=f"['{tmp_path / 'prepare.py'}']")
        cluster.wait_for(1)
        with workers_of(cluster) as workers, pytest.raises(WorkerError) as found:
            list(map_libraries([MULTIARCH], DIGEST, None, workers))
    finally:
        cluster.close()
    assert str(found.value).startswith("worker tcp://127.0.0.1:")
    assert problem in str(found.value)


@slow
def test_a_scheduler_that_goes_away(tmp_path: Path) -> None:
    (folder := tmp_path / "libraries").mkdir()
    # The worker never ends with one of them.
    (tmp_path / "prepare.py").write_text(
        "import sys, time\n"
        "def wait(event, arguments):\n"
        "    if event == 'open' and 'libnames' in str(arguments[0]):\n"
        "        time.sleep(3600)\n"
        "sys.addaudithook(wait)\n"
    )
    cluster = Cluster(tmp_path)
    try:
        cluster.add_worker(DASK_DISTRIBUTED__WORKER__PRELOAD=f"['{tmp_path / 'prepare.py'}']")
        cluster.wait_for(1)
        with (
            workers_of(cluster) as workers,
            pytest.raises(WorkerError, match="the scheduler went away; run the command again"),
        ):
            for _ in map_libraries(large(folder, 6), DIGEST, None, workers):
                cluster.close()
    finally:
        cluster.close()


@pytest.mark.parametrize("url", ["dask:8786", "http://host:1", "dask://host", "dask://:12"])
def test_urls_of_another_form(url: str) -> None:
    done = CliRunner().invoke(main, ["inspect", str(PLAIN), "--executor", url])
    assert done.exit_code == 2
    assert f"{url}: expected dask://HOST:PORT or dask+tls://HOST:PORT" in done.stderr


def start_with_executor(url: str) -> subprocess.Popen[str]:
    """A command with Dask's limit for connections set to 2 s."""
    require_modules("distributed", extra="dask")
    return subprocess.Popen(
        [str(NEGATIVA), "inspect", str(PLAIN), "--executor", url],
        env={**os.environ, "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "2s"},
        stderr=subprocess.PIPE,
        text=True,
    )


@slow
@pytest.mark.parametrize(
    ("scheme", "problem"),
    [("dask", "OSError: Timed out trying to connect"), ("dask+tls", "TypeError: TLS expects")],
)
def test_no_scheduler_there(scheme: str, problem: str) -> None:
    url = f"{scheme}://127.0.0.1:9"
    with start_with_executor(url) as process:
        _, error = process.communicate()
    assert process.returncode == 1
    assert error.startswith(f"negativa: error: {url}: no Dask scheduler answers: {problem}")


def test_without_dask() -> None:
    code = (
        "import sys; sys.modules['distributed'] = None\n"
        "from pytest_negativa.cli.main import main\n"
        "main(['inspect', 'x', '--executor', 'dask://h:1'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "dask://h:1 needs dask.distributed: pip install 'pytest-negativa[dask]'" in done.stderr
