"""Which other files have the content of an original?"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pytest_negativa.models.library import LibraryIdentity
from pytest_negativa.verifying.used_originals import find_twins


def test_twins_are_found_by_content_whatever_their_name(tmp_path: Path) -> None:
    original = tmp_path / "one" / "lib.so"
    code = b"code"
    for name in ("one/lib.so", "two/deep/data.bin", "copies/lib.so", "node_modules/lib.so"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(code)
    (tmp_path / "two" / "other.so").write_bytes(b"edoc")
    (tmp_path / "two" / "hard.so").hardlink_to(original)
    (tmp_path / "two" / "soft.so").symlink_to(original)
    (tmp_path / "two" / "loop").symlink_to(tmp_path)
    library = LibraryIdentity(
        path=str(original),
        size=len(code),
        mtime_ns=0,
        build_id=None,
        soname=None,
        sha256=hashlib.sha256(code).hexdigest(),
    )
    folders = [tmp_path, tmp_path / "two", tmp_path / "missing"]
    twins = find_twins(folders, [library], [tmp_path / "copies"])
    assert twins == {str(tmp_path / "two/deep/data.bin"): str(original)}
