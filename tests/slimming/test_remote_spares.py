"""Spares at URLs: sent once, fetched if they are missing, and taken only if they fit."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.cli.main import main
from pytest_negativa.images.report import report_image
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.slimming.check import check_tree
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.remote_spares import fetch_spares, push_spares
from pytest_negativa.slimming.slim import SlimRequest, scan, slim_trees
from pytest_negativa.slimming.slimmer import SlimOptions
from pytest_negativa.slimming.spares import SparePolicy, find_spare
from pytest_negativa.slimming.undo import undo_trees
from pytest_negativa.storage.published import publish
from pytest_negativa.storage.urls import Url
from tests.support.compacting import needs_compiler
from tests.support.cutting import needs_stub
from tests.support.faults import PlantedFault
from tests.support.made_site import ONE, TWO, Made
from tests.support.mounts import in_namespace, read_only
from tests.support.sites import digests
from tests.support.stores import memory_url

pytestmark = [needs_compiler, needs_stub]

READER = """
import ctypes, hashlib, sys
library = ctypes.CDLL(sys.argv[1])
library.registered.restype = ctypes.c_void_p
print(hashlib.sha256(ctypes.string_at(library.registered(), 238000)).hexdigest())
"""


def slim(site: Made, spares: Path) -> None:
    """Without any GPU code but PTX; nothing is loaded for a check."""
    policy = SparePolicy(spares)
    slim_trees(
        SlimRequest(
            paths=(site.folder,),
            lock=None,
            devices=(ComputeCapability(8, 0),),
            force_archs=True,
            options=SlimOptions(spare=policy),
        )
    )


@pytest.mark.slow
def test_diff_of_trees_has_the_code_that_inspect_has(site: Made, tmp_path: Path) -> None:
    def pack(name: str) -> str:
        with tarfile.open(tmp_path / name, "w") as archive:
            archive.add(site.folder, "image")
        return str(tmp_path / name)

    before = pack("before.tar")
    options = SlimOptions(spare=SparePolicy(tmp_path / "spares"))
    slim_trees(SlimRequest((site.folder,), site.lock, options=options))
    after = pack("after.tar")

    done = CliRunner().invoke(main, ["diff", before, after, "--json"], catch_exceptions=False)

    assert (done.exit_code, done.stderr) == (0, "")
    libraries = json.loads(done.stdout)["libraries"]
    for side, archive in (("before", before), ("after", after)):
        told = sum(one["code"][side] for one in libraries)
        assert told == sum(row.code_bytes for row in report_image(Path(archive)).libraries)
    assert 0 < told < sum(one["code"]["before"] for one in libraries)


@pytest.fixture
def sent(site: Made, tmp_path: Path) -> tuple[Made, Path, Url]:
    """A slimmed site, the folder of its spares, and where they were sent."""
    spares, url = tmp_path / "spares", memory_url()
    slim(site, spares)
    details(push_spares([site.folder], url))
    return site, spares, url


def details(rows: list[SlimRow]) -> dict[str, str | None]:
    assert {row.status for row in rows} <= {SlimStatus.SOUND}, rows
    return {row.path: row.detail for row in rows}


def checked(site: Made) -> set[str | None]:
    return {row.detail for tree in scan((site.folder,)) for row in check_tree(tree)}


def lose(spares: Path) -> None:
    for spare in spares.glob("*.spare"):
        spare.unlink()


def change_code(spare: Path, target: Path) -> None:
    data = bytearray(spare.read_bytes())
    start = next(i for i in range(4096, len(data), 4096) if any(data[i : i + 4096]))
    data[start + 100] ^= 1
    target.write_bytes(data)


def test_lost_spares_are_fetched(sent: tuple[Made, Path, Url], tmp_path: Path) -> None:
    site, spares, url = sent
    assert load_manifest(site.folder).spares == url.text
    assert details(push_spares([site.folder], url)) == dict.fromkeys(
        (ONE, TWO), "its spare was there"
    )
    lost = find_spare(site.one)
    content = lost.read_bytes()
    lose(spares)
    assert checked(site) != {"its spare fits"}
    assert details(fetch_spares([site.folder], spares)) == dict.fromkeys(
        (ONE, TWO), "its spare was fetched"
    )
    assert checked(site) == {"its spare fits"}
    assert lost.read_bytes() == content and lost.stat().st_mode & 0o777 == 0o644
    assert not list(spares.glob(".unchecked-*"))
    # What is here is not fetched: not even a manifest is read.
    (url / lost.name / "manifest.json").delete()
    assert details(fetch_spares([site.folder], spares))[ONE] == "its spare is here"
    elsewhere = details(fetch_spares([site.folder], tmp_path / "other"))
    assert elsewhere[ONE] == f"its spare is {lost}"
    assert undo_trees((site.folder,)) and load_manifest(site.folder).spares is None


@in_namespace
def test_a_read_only_folder_with_all_spares_will_do(site: Made, tmp_path: Path) -> None:
    """As in an image that has them, whose entry point fetches."""
    spares = tmp_path / "spares"
    slim(site, spares)
    with read_only(spares):
        assert set(details(fetch_spares([site.folder], spares)).values()) == {"its spare is here"}
    other = tmp_path / "other"
    assert details(fetch_spares([site.folder], other)) and not other.exists()


@pytest.mark.planted_fault(
    "a spare that is to be sent is damaged", says="does not give the original back"
)
def test_a_damaged_spare_is_not_sent(
    sent: tuple[Made, Path, Url], tmp_path: Path, fault: PlantedFault
) -> None:
    site, spares, _url = sent
    spare, url = find_spare(site.one), memory_url()
    change_code(spare, spare)
    rows = {row.path: row for row in push_spares([site.folder], url)}
    assert (rows[ONE].status, rows[TWO].status) == (SlimStatus.FAILED, SlimStatus.SOUND)
    fault.check(rows[ONE].detail or "")
    for folder in (spares, tmp_path / "other"):
        rows = {row.path: row for row in fetch_spares([site.folder], folder)}
        assert (rows[ONE].status, rows[TWO].status) == (SlimStatus.FAILED, SlimStatus.SOUND)


def test_a_url_that_takes_nothing_is_not_noted(
    sent: tuple[Made, Path, Url], tmp_path: Path
) -> None:
    site, _spares, url = sent
    (tmp_path / "file").touch()
    rows = push_spares([site.folder], Url(f"file://{tmp_path}/file/store"))
    assert {row.status for row in rows} == {SlimStatus.FAILED}
    assert load_manifest(site.folder).spares == url.text


def test_a_slimmed_site_keeps_the_url(sent: tuple[Made, Path, Url]) -> None:
    site, spares, url = sent
    slim(site, spares)
    assert load_manifest(site.folder).spares == url.text


@pytest.mark.planted_fault(
    "the spare at a URL has other code", says="does not give the original back"
)
def test_other_code_in_the_store(
    sent: tuple[Made, Path, Url], tmp_path: Path, fault: PlantedFault
) -> None:
    """The store's digests are right, and the spare names the right library."""
    site, spares, url = sent
    spare = find_spare(site.one)
    changed = tmp_path / spare.name
    change_code(spare, changed)
    publish(spare.name, {spare.name: changed}, url / spare.name)
    lose(spares)
    rows = {row.path: row for row in fetch_spares([site.folder], spares)}
    assert (rows[ONE].status, rows[TWO].status) == (SlimStatus.FAILED, SlimStatus.SOUND)
    fault.check(rows[ONE].detail or "")
    assert not spare.exists()


def test_what_can_not_be_fetched(sent: tuple[Made, Path, Url], tmp_path: Path) -> None:
    site, spares, url = sent
    one, two = find_spare(site.one), find_spare(site.two)
    publish(one.name, {"a": one}, url / one.name)
    (url / two.name / "manifest.json").delete()
    lose(spares)
    rows = {row.path: row.detail or "" for row in fetch_spares([site.folder], spares)}
    assert "is no spare; send it again with negativa push --spares" in rows[ONE]
    assert "there is no manifest.json; check the URL" in rows[TWO]
    rows = {row.path: row.detail or "" for row in push_spares([site.folder], url)}
    assert "its spare" in rows[ONE] and "can't be used" in rows[ONE]
    (site.folder / "negativa-slim.json").unlink()
    rows = {row.path: row.detail or "" for row in fetch_spares([site.folder], spares / "new")}
    assert rows[ONE].startswith("no URL of spares is known")
    assert not (spares / "new").exists()


@pytest.mark.slow
def test_the_commands(site: Made, tmp_path: Path) -> None:
    """A process gets no library without its spare; the spare is fetched; then it runs."""
    before, spares = digests(site.folder), tmp_path / "spares"
    read = [sys.executable, "-I", "-S", "-c", READER, str(site.one)]
    expected = subprocess.run(read, capture_output=True, check=True).stdout
    slim(site, spares)
    store = f"file://{tmp_path}/store"

    def negativa(*words: str | Path, status: int = 0) -> str:
        done = CliRunner().invoke(main, [*map(str, words)])
        assert done.exit_code == status, done.output
        return done.output

    assert "its spare was sent" in negativa("push", "--spares", site.folder, store)
    lose(spares)
    refused = subprocess.run(read, env={}, capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and "spare" in refused.stderr

    fetched = negativa("fetch", "--spare", spares, site.folder)
    assert "its spare was fetched" in fetched and ONE in fetched
    assert subprocess.run(read, env={}, capture_output=True, check=True).stdout == expected
    negativa("slim", "undo", site.folder)
    assert digests(site.folder) == before
    assert "no spare to fetch" in negativa("fetch", "--spare", spares, site.folder)
    assert "--spare DIR" in negativa("fetch", site.folder, status=2)
    assert "a URL with a password" in negativa(
        "push", "--spares", site.folder, "s3://a:b@c/d", status=2
    )
