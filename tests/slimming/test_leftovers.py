"""Temporary files of killed runs: the next run removes them, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.models.slimming import SlimStatus
from pytest_negativa.slimming.check import check_tree
from pytest_negativa.slimming.explain import slimmed_in
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.request import SlimOptions, SlimReport, SlimRequest
from pytest_negativa.slimming.slim import slim_trees, undo_trees
from pytest_negativa.slimming.tree import MANIFEST_NAME, scan
from tests.support.compacting import needs_compiler
from tests.support.made_site import Made
from tests.support.sites import digests

pytestmark = needs_compiler

FAST = SlimOptions()
RUN = "0123456789abcdef"
OTHER = "fedcba9876543210"


def slim(site: Made) -> SlimReport:
    return slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=FAST))


def kill(site: Made) -> None:
    """Let the manifest say that a run is at work."""
    path = site.folder / MANIFEST_NAME
    manifest = json.loads(path.read_text()) if path.exists() else {"slimmed": {}}
    path.write_text(json.dumps({**manifest, "format": 1, "run": RUN}))


def of_a_killed_run(site: Made, run: str) -> list[Path]:
    """A library, a part of one, and a part of a RECORD."""
    left = [
        site.one.with_name(f".libone.so.1.{run}.negativa-slim"),
        site.one.with_name(f"..libone.so.1.{run}.negativa-slim.0a1b2c.tmp"),
        site.info / f".RECORD.{run}.negativa-slim",
    ]
    left[0].write_bytes(site.one.read_bytes())
    left[1].write_bytes(site.one.read_bytes()[:70_000])
    left[2].write_bytes(b"half")
    return left


@pytest.mark.parametrize("by_archs", [False, True])
def test_the_next_run_removes_them_and_nothing_else(site: Made, by_archs: bool) -> None:
    """Also those of a run that was killed before its first manifest got its name."""
    kill(site)
    ours = of_a_killed_run(site, RUN)
    ours.append(site.folder / f".{MANIFEST_NAME}.{OTHER}.negativa-slim")
    ours[-1].write_text('{\n "format": 1,\n "ru')
    theirs = [
        site.one.with_name(name)
        for name in (".libone.so.1.tmp", "..tmp", "x.negativa-slim", ".x.negativa-slim")
    ]
    for path in theirs:
        path.write_bytes(b"the user's")
    devices = (ComputeCapability(9, 0),)
    request = SlimRequest(paths=(site.folder,), lock=site.lock, options=FAST)
    if by_archs:
        request = SlimRequest(paths=(site.folder,), devices=devices, options=FAST)
    report = slim_trees(request)
    assert not report.failed
    assert not any("negativa-slim" in row.path for row in report.rows)
    assert not any(path.exists() for path in ours)
    assert all(path.exists() for path in theirs)
    assert load_manifest(site.folder).run is None


def test_check_does_not_take_them_for_libraries(site: Made) -> None:
    slim(site)
    left = site.one.with_name(f".libone.so.1.{RUN}.negativa-slim")
    left.write_bytes(site.one.read_bytes())
    rows = check_tree(scan((site.folder,))[0])
    assert {row.status for row in rows} == {SlimStatus.SOUND}
    assert left.exists()


def test_explain_does_not_take_them_for_libraries(site: Made) -> None:
    slim(site)
    site.one.with_name(f".libone.so.1.{RUN}.negativa-slim").write_bytes(site.one.read_bytes())
    found = {Path(library.path) for library in slimmed_in([site.folder])}
    assert found == {site.one, site.two}


def test_undo_removes_them_too(site: Made, tmp_path: Path) -> None:
    before = digests(site.folder)
    options = SlimOptions(keep_originals=tmp_path / "originals")
    slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=options))
    kill(site)
    of_a_killed_run(site, RUN)
    undo_trees((site.folder,))
    assert digests(site.folder) == before
