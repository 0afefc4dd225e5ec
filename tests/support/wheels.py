"""Wheels of other projects, from the package index."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path


def unpack_wheel(requirement: str, folder: Path) -> list[Path]:
    """Download a wheel and unpack its ELF files; returns them."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", f"--dest={folder}", requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    [archive] = folder.glob("*.whl")
    found = []
    with zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            with file.open(member) as opened:
                is_elf = opened.read(5) == b"\x7fELF\x02"
            if is_elf:
                found.append(Path(file.extract(member, folder)))
    archive.unlink()
    return sorted(found)
