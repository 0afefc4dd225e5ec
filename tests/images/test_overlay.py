"""Layers unpacked in memory give what the file system gives."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pytest_negativa.images.overlay import OPAQUE, WHITEOUT, HardLink, Link, Overlay

PATHS = st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map("/".join)
TARGETS = st.one_of(PATHS, PATHS.map("../{}".format), PATHS.map("/{}".format))
GONE = st.tuples(PATHS, st.sampled_from([WHITEOUT + "a", WHITEOUT + "b", OPAQUE])).map("/".join)
NODES = st.one_of(
    st.builds(object),
    st.builds(object),
    st.none(),
    st.builds(Link, TARGETS),
    st.builds(HardLink, PATHS),
)
LAYERS = st.lists(
    st.tuples(
        st.dictionaries(GONE, st.just(object()), max_size=2),
        st.lists(st.tuples(PATHS, NODES), max_size=6, unique_by=lambda entry: entry[0]),
    ),
    max_size=3,
)


class Unpacked:
    """A folder in which layers are unpacked by system calls."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[int, object] = {}

    def place(self, path: str, *, make: bool = True) -> Path | None:
        """Where a path leads, with its folders made; None if a loop of links is on the way.

        Without ``make``, None if one of its folders is missing, too.
        """
        *folders, name = Path(path).parts
        folder, links = self.root, 0
        while folders:
            part = folders.pop(0)
            if part in ("..", "/"):
                # As in a changed root.
                folder = self.root if part == "/" or folder == self.root else folder.parent
                continue
            below = folder / part
            if below.is_symlink():
                links += 1
                if links > 40:
                    return None
                folders = [*Path(os.readlink(below)).parts, *folders]
                continue
            if not below.is_dir():
                if not make:
                    return None
                below.unlink(missing_ok=True)
                below.mkdir()
            folder = below
        return folder / name

    def remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def put(self, path: Path, node: object) -> None:
        if node is None and path.is_dir() and not path.is_symlink():
            return
        made = self.root / "made"
        if isinstance(node, HardLink):
            target = self.place(node.target, make=False)
            # The path may be that of the file, or of a folder around it.
            if (
                target is not None
                and os.path.lexists(target)
                and (target.is_symlink() or target.is_file())
            ):
                os.link(target, made, follow_symlinks=False)
        elif isinstance(node, Link):
            made.symlink_to(node.target)
        elif node is None:
            made.mkdir()
        else:
            made.touch()
            self.files[made.stat().st_ino] = node
        self.remove(path)
        if os.path.lexists(made):
            made.rename(path)


@given(LAYERS)
def test_random_layers(layers: list[tuple[dict[str, object], list[tuple[str, object]]]]) -> None:
    overlay: Overlay[object] = Overlay()
    with tempfile.TemporaryDirectory() as folder:
        tree = Unpacked(Path(folder).resolve())
        for gone, entries in layers:
            overlay.unpack({**gone, **dict(entries)})
            for path in gone:
                place = tree.place(path)
                if place is None:
                    return
                if place.name == OPAQUE:
                    for child in list(place.parent.iterdir()):
                        tree.remove(child)
                elif os.path.lexists(target := place.with_name(place.name[len(WHITEOUT) :])):
                    tree.remove(target)
            for path, node in entries:
                place = tree.place(path)
                if place is None:
                    return
                tree.put(place, node)
        expected = {
            str(path.relative_to(tree.root)): (
                os.readlink(path) if path.is_symlink() else tree.files[path.stat().st_ino]
            )
            for path in tree.root.rglob("*")
            if path.is_symlink() or path.is_file()
        }
    found = {p: n.target if isinstance(n, Link) else n for p, n in overlay.walk()}
    assert found == expected
