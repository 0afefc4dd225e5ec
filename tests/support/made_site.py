"""A site with three distributions that pip installed from wheels; a copy for each test."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_negativa.models.lock import Lock
from pytest_negativa.storage.lockfile import save_lock
from tests.support.compacting import build, gpu_code
from tests.support.libraries import PLAIN
from tests.support.sites import lock_of, make_wheel, pip_install

DEBUG = '.section .debug_fake,"",@progbits\n.zero 200000'
"""Something that is never loaded."""

ONE, TWO = "gpu/lib/libone.so.1", "gpu/lib/libtwo.so"
HOST, PLAIN_NAME = "host/libhost.so", "host/libplain.so"


@dataclass(frozen=True)
class Made:
    """A site, a lock for the two libraries with GPU code, and where the lock's file is."""

    folder: Path
    lock: Lock
    lock_file: Path

    @property
    def one(self) -> Path:
        return self.folder / ONE

    @property
    def two(self) -> Path:
        return self.folder / TWO

    @property
    def host(self) -> Path:
        return self.folder / HOST

    @property
    def info(self) -> Path:
        return self.folder / "gpu_code-1.0.dist-info"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("installed")
    one = build(folder / "one", "-Wl,-soname,libone.so.1", name="libone.so.1")
    two = build(folder / "two", name="libtwo.so", fatbin=gpu_code(3), ldata=gpu_code(4))
    host = build(folder / "host", name="libhost.so", fatbin=b"\0" * 8, ldata=b"", extra=DEBUG)
    wheels = (
        make_wheel(folder, "gpu-code", "1.0", {ONE: one, TWO: two}, "host-code"),
        make_wheel(folder, "host-code", "2.0", {HOST: host, PLAIN_NAME: PLAIN}),
        make_wheel(folder, "unrelated", "3.0", {"other/libother.so": host}),
    )
    site = folder / "site-packages"
    pip_install(site, *wheels)
    lock = lock_of(site / ONE, site / TWO)
    save_lock(lock, folder / "negativa.lock")
    return Made(site, lock, folder / "negativa.lock")


@pytest.fixture
def site(installed: Made, tmp_path: Path) -> Made:
    """The site anew: its files have no other names."""
    folder = tmp_path / "site-packages"
    shutil.copytree(installed.folder, folder, symlinks=True)
    return Made(folder, installed.lock, installed.lock_file)
