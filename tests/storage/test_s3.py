"""Runs, locks and reports in a real S3 server, over a network that fails."""

from __future__ import annotations

import hashlib
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pytest_negativa.storage.push import fetch, load_manifest, publish
from pytest_negativa.storage.urls import Url
from tests.support.faults import PlantedFault
from tests.support.libraries import NEGATIVA
from tests.support.sessions import KERNELS, Project, copy_quickstart, used_kernels
from tests.support.stores import S3, s3_server

pytestmark = pytest.mark.slow

LARGE = bytes(range(256)) * (101 << 12)
"""Of more bytes than s3fs sends in one part."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    server.plan_faults()
    return server


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with one run."""
    project = Project(copy_quickstart(tmp_path_factory.mktemp("traced") / "q"), Path())
    project.pytest("-q", "--negativa", NEGATIVA_CACHE_DIR=str(project.folder / "cache"))
    return project.folder


@pytest.fixture
def project(traced: Path, tmp_path: Path, s3: S3) -> Project:
    """A copy of it that reaches the server."""
    shutil.copytree(traced, tmp_path / "q", symlinks=True)
    found = Project(tmp_path / "q", tmp_path / "cache")
    found.environ.update(s3.environ)
    return found


def blobs_of(url: Url) -> list[Url]:
    return [url.parent / "cas" / "sha256" / file.sha256 for file in load_manifest(url).files]


def test_a_run_a_lock_and_a_report(project: Project, s3: S3) -> None:
    """From one machine to another, by the bucket alone."""
    bucket = s3.new_bucket()
    project.negativa("push", f"{bucket}/build/shard")
    project.negativa("lock", "--unproved", "-o", f"{bucket}/negativa.lock")
    project.negativa("report", f"baseline:{bucket}/baseline.json")
    shutil.rmtree(project.results)

    report = f"json:{bucket}/reports/gpu.json"
    done = project.negativa("combine", f"{bucket}/build/shard", "--report", report)
    assert used_kernels(project.latest("usage.json")) == set(KERNELS)
    assert "failed" not in done.stderr
    written = Url(f"{bucket}/reports/gpu.json").read(1 << 20)
    assert written.startswith(b'{\n "format"')
    compared = project.negativa("report", "--compare", f"{bucket}/baseline.json")
    assert "baseline" in compared.stdout
    shutil.copytree(project.folder / "quickstart", project.folder / "site")
    slim = project.negativa("slim", "site", "--lock", f"{bucket}/negativa.lock", "--dry-run")
    assert "libquickstart.so: left as it is: saves only" in slim.stdout


def test_a_server_that_fails_for_the_moment(project: Project, s3: S3) -> None:
    url = f"{s3.new_bucket()}/build/shard"
    s3.plan_faults("PUT cas 503", "PUT cas 500", "HEAD cas 503", "PUT manifest 503")
    project.negativa("push", url)
    assert sum(line.endswith(" 200") is False for line in s3.requests("PUT")) == 3
    shutil.rmtree(project.results)
    s3.plan_faults("GET manifest 503", "GET cas 500", "GET cas 503", "GET cas cut")
    project.negativa("fetch", url)
    assert len(project.runs()) == 1


def kill_push(project: Project, s3: S3, url: Url, plan: str) -> None:
    """Kill a push while the store holds the request of a plan."""
    s3.plan_faults(plan)
    pushing = project.start(NEGATIVA, "push", url.text)
    s3.wait_until_held()
    pushing.send_signal(signal.SIGKILL)
    pushing.communicate()


@pytest.mark.planted_fault(
    "a push to an object store is killed in the middle",
    says="there is no manifest.json; check the URL",
)
def test_a_push_that_is_killed_and_goes_on(project: Project, s3: S3, fault: PlantedFault) -> None:
    url = Url(f"{s3.new_bucket()}/build/shard")
    kill_push(project, s3, url, "PUT manifest hold")
    fault.check(project.negativa("fetch", url.text, status=1).stderr)
    s3.plan_faults()
    project.negativa("push", url.text)
    assert [line for line in s3.requests("PUT") if "cas" in line] == []
    assert len(blobs_of(url)) > 5


def test_a_push_that_is_killed_within_a_large_file(project: Project, s3: S3) -> None:
    """The store has no half object; its parts stay there, unseen, until the store gives them up."""
    bucket = s3.new_bucket()
    url = Url(f"{bucket}/build/shard")
    [run] = project.runs()
    (run / "large").write_bytes(LARGE)
    name = f"build/cas/sha256/{hashlib.sha256(LARGE).hexdigest()}"
    blob = Url(f"{bucket}/{name}")
    kill_push(project, s3, url, "PUT partNumber=2 hold")
    assert s3.unfinished(bucket) == [name]
    assert blob.size() is None
    assert "there is no manifest.json" in project.negativa("fetch", url.text, status=1).stderr
    s3.plan_faults()
    project.negativa("push", url.text)
    # It was sent anew, and the parts of before are still there.
    assert blob.size() == len(LARGE) and s3.unfinished(bucket) == [name]
    shutil.rmtree(project.results)
    project.negativa("fetch", url.text)
    assert (project.runs()[0] / "large").read_bytes() == LARGE


def test_a_fetch_that_is_killed_and_starts_anew(project: Project, s3: S3) -> None:
    url = Url(f"{s3.new_bucket()}/build/shard")
    project.negativa("push", url.text)
    blobs = {blob.text.rpartition("/")[2] for blob in blobs_of(url)}
    shutil.rmtree(project.results)
    s3.plan_faults(f"GET {sorted(blobs)[0]} hold")
    fetching = project.start(NEGATIVA, "fetch", url.text)
    s3.wait_until_held()
    fetching.send_signal(signal.SIGKILL)
    fetching.communicate()
    assert project.negativa("runs").stdout.startswith("no traced run")

    project.negativa("fetch", url.text)
    # The killed attempt left a hidden folder, which counts as no run.
    assert project.negativa("runs").stdout.count(load_manifest(url).name) == 1


@pytest.mark.planted_fault(
    "a file of a run in an object store was changed", says="damaged; delete it there"
)
def test_a_changed_object(project: Project, s3: S3, fault: PlantedFault) -> None:
    url = Url(f"{s3.new_bucket()}/build/shard")
    project.negativa("push", url.text)
    blob = blobs_of(url)[0]
    blob.write(blob.read(1 << 20)[:-1] + b"!")
    shutil.rmtree(project.results)
    fault.check(project.negativa("fetch", url.text, status=1).stderr)
    assert project.negativa("runs").stdout.startswith("no traced run")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "check the credentials in the environment"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "Unable to locate credentials"),
    ],
    ids=["wrong", "none"],
)
def test_wrong_credentials(project: Project, s3: S3, wrong: dict[str, str], says: str) -> None:
    """One line, and not the secret."""
    url = f"{s3.new_bucket()}/build/shard"
    secret = {"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI", **wrong}
    with s3.accounts():
        for command in ("push", "fetch"):
            done = project.negativa(command, url, status=1, **secret)
            assert says in done.stderr and done.stderr.count("\n") == 1
            assert "wJalrXUtnFEMI" not in done.stderr


def test_no_secret_gets_into_a_run(project: Project, s3: S3) -> None:
    project.pytest(
        "-q", "--negativa", f"--negativa-report=json:{s3.new_bucket()}/a.json",
        AWS_SESSION_TOKEN="wJalrXUtnFEMI",
    )  # fmt: skip
    files = [path for path in project.results.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if b"wJalrXUtnFEMI" in path.read_bytes()]


def test_two_writers_at_once(s3: S3, tmp_path: Path) -> None:
    """They share most files, and write to one URL and to two."""
    bucket = s3.new_bucket()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(20):
            (tmp_path / name / str(number)).write_text(str(number) * 1000)
        (tmp_path / name / "own").write_text(name)
    writers = [
        (name, Url(f"{bucket}/build/{place}"))
        for place in ("both", "both", "a", "b")
        for name in "ab"
    ]
    with ThreadPoolExecutor(len(writers)) as pool:
        sent = pool.map(
            lambda writer: publish(
                writer[0], {p.name: p for p in (tmp_path / writer[0]).iterdir()}, writer[1]
            ),
            writers,
        )
        assert len(list(sent)) == len(writers)
    for place in ("both", "a", "b"):
        url = Url(f"{bucket}/build/{place}")
        manifest = load_manifest(url)
        fetch(url, manifest, tmp_path / place / "fetched", max_bytes=1 << 20)
        assert (tmp_path / place / "fetched" / "own").read_text() == manifest.name
        assert len(manifest.files) == 21


def test_a_large_file(s3: S3, tmp_path: Path) -> None:
    """In several parts, both ways."""
    (tmp_path / "large").write_bytes(LARGE)
    url = Url(f"{s3.new_bucket()}/build/large")
    publish("large", {"large": tmp_path / "large"}, url)
    fetch(url, load_manifest(url), tmp_path / "fetched", max_bytes=1 << 30)
    assert (tmp_path / "fetched" / "large").read_bytes() == (tmp_path / "large").read_bytes()
    assert any("uploadId" in line for line in s3.requests("PUT"))
