"""A Dask cluster reads whole wheels; a worker and the command are killed, and it goes on."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.clusters import cluster_of
from tests.support.libraries import NEGATIVA
from tests.support.wheels import unpack_wheel

pytestmark = pytest.mark.wheels

WHEELS = ("torch==2.11.0", "cupy-cuda13x==14.2.0", "tensorflow==2.21.0")


class Inspection:
    """``negativa inspect --json`` of all libraries, with a cache of its own."""

    def __init__(self, cache: Path, *arguments: str | Path) -> None:
        self._cache = cache
        self.process = subprocess.Popen(
            [NEGATIVA, "inspect", "--json", *arguments],
            env={**os.environ, "NEGATIVA_CACHE_DIR": str(cache)},
            stdout=subprocess.PIPE,
        )

    def wait_for_maps(self, count: int) -> None:
        """Wait until so many libraries are in the cache."""
        while sum(path.is_file() for path in self._cache.rglob("*")) < count:
            assert self.process.poll() is None
            time.sleep(0.05)

    def finish(self) -> bytes:
        """What it prints."""
        out, _ = self.process.communicate()
        assert self.process.returncode == 0
        return out


def test_a_cluster_that_is_killed_and_goes_on(tmp_path: Path) -> None:
    (folder := tmp_path / "wheels").mkdir()
    for wheel in WHEELS:
        unpack_wheel(wheel, folder)
    expected = Inspection(tmp_path / "local", folder).finish()
    assert not json.loads(expected)["errors"]
    with cluster_of(tmp_path, 3) as cluster:
        options = (folder, "--executor", cluster.url)
        first = Inspection(tmp_path / "shared", *options)
        first.wait_for_maps(2)
        cluster.processes[1].kill()
        first.wait_for_maps(4)
        first.process.kill()
        first.process.communicate()
        cluster.add_worker()
        assert Inspection(tmp_path / "shared", *options).finish() == expected
