"""Files, folders and installed distributions to libraries."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from pytest_negativa.errors import OptionError
from pytest_negativa.installed.libraries import find_libraries
from tests.support.libraries import IS_ROOT, MULTIARCH, PLAIN
from tests.support.sites import install


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(tmp_path)
    return folder


class TestFiles:
    def test_file(self) -> None:
        found = find_libraries(str(MULTIARCH))
        assert found.explicit
        assert found.paths == (MULTIARCH,)

    @pytest.mark.parametrize(
        ("name", "problem"),
        [
            ("absent.so", "no such file or folder"),
            ("file/lib.so", "cannot be opened: Not a directory"),
            ("broken", "a broken link"),
            ("loop", "cannot be opened: Too many levels of symbolic links"),
            ("x" * 300, "cannot be opened: File name too long"),
        ],
    )
    def test_absent(self, tmp_path: Path, name: str, problem: str) -> None:
        (tmp_path / "file").write_bytes(b"")
        (tmp_path / "broken").symlink_to("nothing")
        (tmp_path / "loop").symlink_to("loop")
        argument = f"{tmp_path}/{name}"
        with pytest.raises(OptionError) as caught:
            find_libraries(argument)
        assert str(caught.value) == f"{argument}: {problem}"

    @pytest.mark.skipif(IS_ROOT, reason="root may enter any folder")
    def test_folder_that_may_not_be_entered(self, tmp_path: Path) -> None:
        (tmp_path / "closed").mkdir(mode=0)
        with pytest.raises(OptionError, match="cannot be opened: Permission denied"):
            find_libraries(f"{tmp_path}/closed/lib.so")

    def test_empty_name(self) -> None:
        with pytest.raises(OptionError, match="an empty name"):
            find_libraries("")


class TestFolders:
    def test_elf_files_once_each(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        library = tmp_path / "a" / "lib.so.1.2"
        library.write_bytes(MULTIARCH.read_bytes())
        (tmp_path / "a" / "lib.so").symlink_to("lib.so.1.2")
        (tmp_path / "b" / "hard.so").hardlink_to(library)
        (tmp_path / "b" / "other.so").write_bytes(PLAIN.read_bytes())
        (tmp_path / "b" / "text.so").write_text("INPUT(-lfoo)")
        (tmp_path / "b" / "empty.so").write_bytes(b"")
        (tmp_path / "b" / "broken.so").symlink_to("nothing")
        (tmp_path / "b" / "loop").symlink_to("..")
        (tmp_path / "b" / "program").write_bytes(MULTIARCH.read_bytes())
        os.mkfifo(tmp_path / "b" / "fifo.so")
        found = find_libraries(str(tmp_path))
        assert not found.explicit
        assert found.label == str(tmp_path)
        assert found.paths == (library, tmp_path / "b" / "other.so", tmp_path / "b" / "program")

    @pytest.mark.skipif(IS_ROOT, reason="root may read anything")
    def test_unreadable_library_is_not_forgotten(self, tmp_path: Path) -> None:
        for name in ("a.cubin", "lib.so.1", "notes.txt"):
            (tmp_path / name).write_bytes(PLAIN.read_bytes())
            (tmp_path / name).chmod(0)
        assert find_libraries(str(tmp_path)).paths == (tmp_path / "a.cubin", tmp_path / "lib.so.1")

    @pytest.mark.skipif(IS_ROOT, reason="root may list any folder")
    def test_folder_that_may_not_be_listed(self, tmp_path: Path) -> None:
        (tmp_path / "closed").mkdir(mode=0)
        with pytest.raises(OptionError, match="closed: cannot be listed: Permission denied"):
            find_libraries(f"{tmp_path}/closed")
        assert find_libraries(str(tmp_path)).paths == ()


class TestDistributions:
    def test_folder_of_the_same_name_wins(self, site: Path, tmp_path: Path) -> None:
        install(site, "demo", files=("demo/lib.so",))
        (tmp_path / "demo").mkdir()
        assert find_libraries("demo").paths == ()

    def test_with_what_it_requires(self, site: Path) -> None:
        install(
            site,
            "demo",
            files=("demo/lib.so",),
            requires=(
                "demo-kit[fft] ; python_version > '3'",
                "demo-windows ; sys_platform == 'win32'",
                "demo-dev ; extra == 'dev'",
                "not installed here",
                "demo-absent >= 2",
            ),
            extras=("dev",),
        )
        install(
            site,
            "demo-kit",
            files=("kit/kit.so",),
            requires=("demo-fft ; extra == 'fft'", "demo-blas ; extra == 'blas'", "demo"),
            extras=("fft", "blas"),
        )
        for name in ("fft", "blas", "windows", "dev"):
            install(site, f"demo-{name}", files=(f"{name}/{name}.so",))
        assert find_libraries("demo").paths == (site / "demo/lib.so",)
        found = find_libraries("demo", with_dependencies=True)
        assert found.label == "demo 1.0 and 2 distributions it requires"
        assert {p.name for p in found.paths} == {"lib.so", "kit.so", "fft.so"}

    def test_files_that_are_gone(self, site: Path) -> None:
        install(site, "demo", files=("demo/lib.so",))
        (site / "demo/lib.so").unlink()
        assert find_libraries("demo").paths == ()

    def test_unknown(self, site: Path) -> None:
        install(site, "demo-gpu")
        (site / "leftover-1.0.dist-info").mkdir()
        with pytest.raises(OptionError) as caught:
            find_libraries("demo-gpo")
        assert str(caught.value) == (
            "demo-gpo: neither a file or folder nor a distribution that is installed for "
            f"{sys.executable}; "
            "did you mean demo-gpu?"
        )
        with pytest.raises(OptionError, match=r"installed for \S+$"):
            find_libraries("zzzzzzzz")

    @pytest.mark.parametrize("name", ["..", "a b", "-", "a\nb"])
    def test_odd_names(self, site: Path, name: str) -> None:
        if name == "..":
            assert not find_libraries(name).explicit
            return
        with pytest.raises(OptionError, match=re.escape(name)):
            find_libraries(name)
