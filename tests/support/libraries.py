"""Where things lie in the source tree; the compiled fixtures and what their manifest says."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
"""The source tree."""
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"

TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
TRACES = TESTS / "data" / "traces"
FIXTURES = TESTS / "fixtures"
QUICKSTART = FIXTURES / "quickstart"
"""A small project with a trace recorded on a GPU."""
QUICKSTART_LIBRARY = QUICKSTART / "quickstart" / "libquickstart.so"
BIN = FIXTURES / "bin"
MANIFEST: dict[str, Any] = json.loads((FIXTURES / "MANIFEST.json").read_text("utf-8"))

MULTIARCH = BIN / "libmultiarch.so"
PLAIN = BIN / "libplain.so"
SHARED_OBJECTS = tuple(sorted(BIN.glob("*.so")))

NEGATIVA = Path(sysconfig.get_path("scripts")) / "negativa"
"""The installed command."""

NO_FIXTURES = "the loader of another machine refuses the fixtures, which are for x86-64"

IS_ROOT = os.geteuid() == 0
"""Root may read and write whatever its mode says."""

LARGE = (1 << 20) + 4096
"""Size of a library that the cache takes."""


def golden_elements() -> list[dict[str, Any]]:
    """Every element header of ``libmultiarch.so``, in file order."""
    return [e for region in MANIFEST["golden"]["regions"] for e in region["elements"]]


def make_large(source: Path, target: Path, size: int = LARGE) -> Path:
    """A copy with zeros behind its end, so that it is worth caching."""
    data = source.read_bytes()
    target.write_bytes(data + bytes(size - len(data)))
    return target


def without_build_id(library: Path) -> Path:
    """Rename the note that holds the build id, in place."""
    note = b"\x14\0\0\0\x03\0\0\0GNU\0"
    data = library.read_bytes()
    assert data.count(note) == 1
    library.write_bytes(data.replace(note, note.replace(b"GNU", b"XNU")))
    return library
