"""Changes the recording of the quickstart, as other machines and shards would have written it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.sessions import Project

Lines = list[str]


def rewrite(project: Project, name: str, change: Callable[[Lines], Lines] = list) -> Path:
    """Write the recording, or what ``change`` makes of its lines, to a file of the project."""
    lines = (project.folder / "recorded" / "h200.jsonl").read_text().splitlines(keepends=True)
    path = project.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    here = str(project.folder / "quickstart" / "libquickstart.so")
    text = "".join(change(lines)).replace("/quickstart/quickstart/libquickstart.so", here)
    path.write_text(text)
    return path
