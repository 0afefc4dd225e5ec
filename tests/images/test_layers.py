"""Saved images: layers over each other, in all formats, give what the unpacked image gives."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import struct
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zstandard
from click.testing import CliRunner

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.cli.main import main
from pytest_negativa.images.overlay import Link, Overlay
from pytest_negativa.images.report import KnownLibrary, Suite, report_image
from pytest_negativa.models.image import ImageReport, MatchedBy, SlimmableBy, SuiteUse
from tests.support.commands import inspect
from tests.support.libraries import BIN, MULTIARCH, PLAIN

SITE = "usr/lib/python3/site-packages"
SUFFIX, CALLGRAPH = BIN / "libsuffix.so", BIN / "libcallgraph.so"
RECORD = "pack/lib/libm.so,,\n"
CONDA = json.dumps({"name": "cuda", "version": "13.0", "files": ["lib/libsuffix.so"]})


class Hard(NamedTuple):
    """The content of a hard link: the other name."""

    target: str


PIPE, DEVICE = object(), object()

Layer = Mapping[str, Any]
LAYERS: tuple[Layer, ...] = (
    {
        "opt/old/libgone.so": CALLGRAPH,
        "opt/cache/sub/libopaque.so": CALLGRAPH,
        "opt/folder/libunder.so": CALLGRAPH,
        f"{SITE}/pack/lib/libm.so": PLAIN,
        "k.cubin": BIN / "kernels.sm_90.cubin",
        "opt/plain.so": PLAIN,
        "lib": "usr/lib",
        "usr/lib/libsuffix.so": SUFFIX,
    },
    {
        "opt/old/.wh.libgone.so": b"",
        "opt/cache/.wh..wh..opq": b"",
        "opt/.wh.folder": b"",
        f"{SITE}/pack/lib/libm.so": MULTIARCH,
        f"{SITE}/pack-1.0.dist-info/RECORD": RECORD.encode(),
    },
    {
        "opt/cache/libsuffix.so": SUFFIX,
        "opt/old/other.txt": b"text",
        "conda-meta/cuda-13.0.json": CONDA.encode(),
        "lib64": "lib",
        "var/lib/dpkg/status": b"Package: libs\nVersion: 2-1\n",
        "var/lib/dpkg/info/libs.list": b"/lib64/libsuffix.so\n/opt/cache/libsuffix.so\n",
    },
)
FILES = "no package (files)"
VISIBLE = {"opt/cache/libsuffix.so", f"{SITE}/pack/lib/libm.so", "usr/lib/libsuffix.so", FILES}


def tar_of(files: Layer) -> bytes:
    """A layer; a text is the target of a link."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            if content in (PIPE, DEVICE) or isinstance(content, str | Hard):
                if content in (PIPE, DEVICE):
                    info.type = tarfile.FIFOTYPE if content is PIPE else tarfile.CHRTYPE
                elif isinstance(content, Hard):
                    info.type, info.linkname = tarfile.LNKTYPE, content.target
                else:
                    info.type, info.linkname = tarfile.SYMTYPE, content
                archive.addfile(info)
                continue
            data = content.read_bytes() if isinstance(content, Path) else content
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def encode(document: Any) -> bytes:
    return json.dumps(document).encode()


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def docker(layers: Iterable[bytes]) -> dict[str, bytes]:
    """What docker save wrote before release 25."""
    files = {f"{digest_of(data)}/layer.tar": data for data in layers}
    names = list(files)
    config = encode({"rootfs": {"type": "layers"}})
    files[f"{digest_of(config)}.json"] = config
    files["manifest.json"] = encode(
        [{"Config": f"{digest_of(config)}.json", "RepoTags": ["a:1"], "Layers": names}]
    )
    return files


def oci(layers: Iterable[bytes], **platform: str) -> dict[str, bytes]:
    """An OCI layout with an attestation, as BuildKit writes it."""
    files: dict[str, bytes] = {"oci-layout": encode({"imageLayoutVersion": "1.0.0"})}

    def put(data: bytes, **more: Any) -> dict[str, Any]:
        files[f"blobs/sha256/{digest_of(data)}"] = data
        return {"digest": f"sha256:{digest_of(data)}", "size": len(data), **more}

    manifest = encode({"layers": [put(data) for data in layers]})
    attestation = encode({"layers": [put(b'{"statement": 1}')]})
    index = encode(
        {
            "manifests": [
                put(manifest, platform=platform or {"os": "linux", "architecture": "amd64"}),
                put(attestation, platform={"os": "unknown", "architecture": "unknown"}),
            ]
        }
    )
    files["index.json"] = encode({"manifests": [put(index)]})
    return files


def save_folder(files: Mapping[str, bytes], path: Path) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def save_tar(files: Mapping[str, bytes], path: Path) -> Path:
    path.write_bytes(tar_of(files))
    return path


def save_gzip(files: Mapping[str, bytes], path: Path) -> Path:
    path.write_bytes(gzip.compress(tar_of(files), 1))
    return path


def plain(data: bytes) -> bytes:
    return data


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def pzstd(data: bytes) -> bytes:
    """One frame, with a skippable one before it."""
    return struct.pack("<III", 0x184D2A50, 4, 0) + zstd(data)


def unpack(layers: Iterable[Layer], root: Path) -> Path:
    """The image as a runtime shows it."""
    for layer in layers:
        for name, content in layer.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            assert path.parent.resolve().is_relative_to(root.resolve())
            if path.name == ".wh..wh..opq":
                shutil.rmtree(path.parent)
                path.parent.mkdir()
            elif path.name.startswith(".wh."):
                gone = path.with_name(path.name.removeprefix(".wh."))
                shutil.rmtree(gone) if gone.is_dir() and not gone.is_symlink() else gone.unlink()
            elif isinstance(content, str):
                path.symlink_to(content)
            else:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
                if isinstance(content, Hard):
                    path.hardlink_to(root / content.target.removeprefix("../"))
                elif content in (PIPE, DEVICE):
                    # Only root may make devices.
                    os.mkfifo(path)
                else:
                    path.write_bytes(content.read_bytes() if isinstance(content, Path) else content)
    return root


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    return unpack(LAYERS, tmp_path / "root")


def comparable(report: ImageReport) -> ImageReport:
    return msgspec.structs.replace(report, root="", hidden=0, hidden_bytes=0)


@pytest.mark.parametrize(
    "pack",
    [
        pytest.param(plain, id="plain"),
        pytest.param(gzip.compress, id="gzip", marks=pytest.mark.slow),
        pytest.param(zstd, id="zstd", marks=pytest.mark.slow),
        pytest.param(pzstd, id="pzstd", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("form", [docker, oci])
@pytest.mark.parametrize("save", [save_folder, save_tar, save_gzip])
def test_it_is_what_the_unpacked_image_is(
    unpacked: Path,
    tmp_path: Path,
    pack: Callable[[bytes], bytes],
    form: Callable[[Iterable[bytes]], dict[str, bytes]],
    save: Callable[[Mapping[str, bytes], Path], Path],
) -> None:
    saved = save(form([pack(tar_of(layer)) for layer in LAYERS]), tmp_path / "saved")
    report = report_image(saved)
    wanted = report_image(unpacked)
    assert {row.path for row in wanted.libraries} == VISIBLE
    assert comparable(report) == comparable(wanted)
    hidden = [CALLGRAPH, CALLGRAPH, CALLGRAPH, PLAIN]
    assert (report.hidden, report.hidden_bytes) == (4, sum(p.stat().st_size for p in hidden))
    owners = {row.path: row.package.name if row.package else None for row in report.libraries}
    assert owners == {
        f"{SITE}/pack/lib/libm.so": "pack",
        "usr/lib/libsuffix.so": "cuda",
        "opt/cache/libsuffix.so": "libs",
        FILES: None,
    }


# As uv installs: its cache is in the layer of the packages, which link to it.
CACHED = "root/.cache/uv/archive-v0/abc/pack"
INSTALLED: Layer = {
    f"{CACHED}/lib/libm.so": MULTIARCH,
    f"{CACHED}/lib/libplain.so": PLAIN,
    f"{SITE}/pack/lib/libm.so": Hard(f"{CACHED}/lib/libm.so"),
    f"{SITE}/pack/lib/libplain.so": Hard(f"{CACHED}/lib/libplain.so"),
    f"{SITE}/pack/lib/libm.so.1": Hard(f"{SITE}/pack/lib/libm.so"),
    f"{SITE}/pack-1.0.dist-info/RECORD": RECORD.encode(),
}
BELOW: Layer = {"lib": "usr/lib", "usr/lib/libsuffix.so": SUFFIX, "lib64": "lib"}
LINK: Layer = {"opt/a": "b", "opt/b/libsuffix.so": SUFFIX}


@pytest.mark.parametrize(
    ("layers", "visible", "hidden"),
    [
        pytest.param([INSTALLED], {f"{CACHED}/lib/libm.so": "pack"}, 0, id="kept"),
        pytest.param(
            [INSTALLED, {"root/.wh..cache": b""}],
            {f"{SITE}/pack/lib/libm.so": "pack"},
            0,
            id="cache-removed",
        ),
        pytest.param(
            [INSTALLED, {f"{CACHED}/lib/libm.so": CALLGRAPH}],
            {f"{CACHED}/lib/libm.so": None, f"{SITE}/pack/lib/libm.so": "pack"},
            0,
            id="first-name-replaced",
        ),
        pytest.param([INSTALLED, {"root/.wh..cache": b"", "usr/.wh.lib": b""}], {}, 2, id="gone"),
        pytest.param(
            [BELOW, {"lib/libsuffix.so": MULTIARCH, "lib64/libc.so": CALLGRAPH}],
            {"usr/lib/libsuffix.so": None, "usr/lib/libc.so": None},
            1,
            id="through-a-link",
        ),
        pytest.param(
            [BELOW, {"lib/.wh.libsuffix.so": b"", "lib/libc.so": CALLGRAPH}],
            {"usr/lib/libc.so": None},
            1,
            id="removed-through-a-link",
        ),
        pytest.param(
            [LINK, {"opt/.wh..wh..opq": b"", "opt/a/libm.so": MULTIARCH}],
            {"opt/a/libm.so": None},
            1,
            id="link-in-a-folder-made-anew",
        ),
        pytest.param(
            [LINK, {".wh.opt": b""}, {"opt/a/libm.so": MULTIARCH}],
            {"opt/a/libm.so": None},
            1,
            id="link-in-a-folder-that-is-gone",
        ),
        pytest.param(
            [LINK, {".wh.opt": b"", "opt/a": "c", "opt/c/t": b""}, {"opt/a/libm.so": MULTIARCH}],
            {"opt/c/libm.so": None},
            1,
            id="link-that-became-another",
        ),
        pytest.param(
            [BELOW, {"lib/py": "python3", "lib/python3/t": b""}, {"lib64/py/libm.so": MULTIARCH}],
            {"usr/lib/libsuffix.so": None, "usr/lib/python3/libm.so": None},
            0,
            id="through-a-link-made-through-a-link",
        ),
        pytest.param([BELOW, {"usr/lib/libsuffix.so": PIPE}], {}, 1, id="pipe"),
        pytest.param([BELOW, {"lib/libsuffix.so": DEVICE}], {}, 1, id="device"),
        pytest.param([BELOW, {"usr/lib": DEVICE}], {}, 1, id="device-over-a-folder"),
        pytest.param(
            [{**BELOW, "usr/lib/libm.so": Hard("../usr/lib/libsuffix.so")}],
            {"usr/lib/libm.so": None},
            0,
            id="hard-link-that-stops-at-the-root",
        ),
        pytest.param(
            [{**BELOW, "a.so": Hard("lib64/libsuffix.so"), "b.so": Hard("a.so")}],
            {"a.so": None},
            0,
            id="hard-link-through-a-link",
        ),
        pytest.param(
            [BELOW, {"usr/lib/libm.so": Hard("lib/libsuffix.so")}],
            {"usr/lib/libm.so": None},
            0,
            id="hard-link-to-a-lower-layer",
        ),
        pytest.param(
            [
                BELOW,
                {"usr/lib/a.so": Hard("usr/lib/libsuffix.so")},
                {"usr/lib/libsuffix.so": MULTIARCH, "usr/lib/b.so": Hard("usr/lib/a.so")},
                {"usr/lib/.wh.a.so": b"", "usr/lib/c.so": Hard("usr/lib/libsuffix.so")},
            ],
            {"usr/lib/b.so": None, "usr/lib/c.so": None},
            0,
            id="hard-links-to-two-files-of-one-name",
        ),
        pytest.param(
            [INSTALLED, {"x/libm.so": Hard(f"{SITE}/pack/lib/libm.so")}, {"root/.wh..cache": b""}],
            {f"{SITE}/pack/lib/libm.so": "pack"},
            0,
            id="hard-link-to-a-hard-link",
        ),
    ],
)
@pytest.mark.parametrize("save", [save_tar, save_gzip])
def test_names_of_one_file(
    layers: list[Layer],
    visible: dict[str, str | None],
    hidden: int,
    save: Callable[[Mapping[str, bytes], Path], Path],
    tmp_path: Path,
) -> None:
    report = report_image(save(docker(map(tar_of, layers)), tmp_path / "saved"))
    assert {r.path: r.package.name if r.package else None for r in report.libraries} == visible
    assert comparable(report) == comparable(report_image(unpack(layers, tmp_path / "root")))
    assert report.hidden == hidden


def test_a_link_to_a_file_that_is_not_there(tmp_path: Path) -> None:
    layer: Layer = {"lib/libm.so": Hard("lib/libn.so"), "lib/text": Hard("lib/other")}
    report = report_image(save_tar(docker([tar_of(layer)]), tmp_path / "saved"))
    [problem] = report.unreadable
    assert "lib/libm.so: is a hard link to lib/libn.so, which is not before it" in problem
    gone: Layer = {"usr/.wh.lib": b"", "opt/.wh.t": b""}
    upper: Layer = {"a.so": Hard("usr/lib/libsuffix.so"), "b.so": Hard(".."), "c.so": Hard("b.so")}
    saved = save_tar(docker(map(tar_of, (BELOW, gone, upper))), tmp_path / "saved")
    report = report_image(saved)
    problems = "\n".join(report.unreadable)
    assert not report.libraries and problems.count("which is not before it") == 3


def test_a_folder_of_an_upper_layer_replaces_a_link(tmp_path: Path) -> None:
    upper = io.BytesIO()
    with tarfile.open(fileobj=upper, mode="w") as archive:
        folder = tarfile.TarInfo("lib")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        archive.add(MULTIARCH, "lib/libsuffix.so")
    saved = save_tar(docker([tar_of(BELOW), upper.getvalue()]), tmp_path / "saved")
    paths = {row.path for row in report_image(saved).libraries}
    assert paths == {"lib/libsuffix.so", "usr/lib/libsuffix.so"}


@pytest.mark.parametrize("save", [save_folder, save_tar, save_gzip])
def test_a_library_is_recognised_by_its_content(
    tmp_path: Path, save: Callable[[Mapping[str, bytes], Path], Path]
) -> None:
    data = MULTIARCH.read_bytes()
    known = KnownLibrary(digest_of(data), None, len(data), used=True, unused_bytes=7)
    suite = Suite("run", SlimmableBy.PLAN, (ComputeCapability(9, 0),), (known,))
    saved = save(docker([tar_of(layer) for layer in LAYERS]), tmp_path / "saved")
    rows = {row.path: row for row in report_image(saved, suite).libraries}
    found = rows.pop(f"{SITE}/pack/lib/libm.so")
    assert (found.suite, found.matched_by, found.slimmable_bytes) == (
        (SuiteUse.USED, MatchedBy.SHA256, 7)
    )
    assert {row.suite for row in rows.values() if not row.files} == {SuiteUse.NEVER_LOADED}


@pytest.mark.parametrize("save", [save_folder, save_tar, save_gzip])
@pytest.mark.parametrize("size", [1024, 10240])
def test_layers_in_which_nothing_changed(
    tmp_path: Path, save: Callable[[Mapping[str, bytes], Path], Path], size: int
) -> None:
    """Docker and BuildKit end a layer with 1,024 zeros, and Python with more."""
    layers = [tar_of(layer) for layer in LAYERS]
    for name, empty in (("first", [bytes(size), *layers]), ("last", [*layers, bytes(size)])):
        report = report_image(save(docker(empty), tmp_path / name))
        assert {row.path for row in report.libraries} == VISIBLE and not report.unreadable


def test_an_image_of_jib(tmp_path: Path) -> None:
    layers = [gzip.compress(tar_of(layer)) for layer in LAYERS]
    files = {f"{digest_of(data)}.tar.gz": data for data in layers}
    saved = [{"Config": "config.json", "RepoTags": ["a:1"], "Layers": list(files)}]
    files |= {"config.json": encode({"rootfs": {}}), "manifest.json": encode(saved)}
    report = report_image(save_tar(files, tmp_path / "saved"))
    assert {row.path for row in report.libraries} == VISIBLE and not report.unreadable


def test_an_image_with_two_tags_is_one(tmp_path: Path) -> None:
    files = oci([tar_of(layer) for layer in LAYERS])
    files["index.json"] = encode({"manifests": json.loads(files["index.json"])["manifests"] * 2})
    report = report_image(save_folder(files, tmp_path / "saved"))
    assert {row.path for row in report.libraries} == VISIBLE and not report.unreadable


def test_the_commands(unpacked: Path, tmp_path: Path) -> None:
    layers = [{n: data for n, data in layer.items() if n != "k.cubin"} for layer in LAYERS]
    saved = save_tar(docker([tar_of(layer) for layer in layers]), tmp_path / "image.tar")
    shutil.copyfile(saved, tmp_path / "other.tar")

    def run(*arguments: str | Path) -> str:
        result = CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)
        assert result.exit_code == 0 and not re.sub("Next: .*\n", "", result.stderr)
        return result.stdout

    shown = run("inspect", "--packages", saved)
    assert "Upper layers hide 4 files of code (" in shown
    assert "--arch sm_90 adds slimmable alone" in shown
    assert "3 libraries with GPU code, 1 without" in run("inspect", saved)
    assert "No code differs in 3 libraries" in run("diff", saved, tmp_path / "other.tar")


def test_gates(tmp_path: Path) -> None:
    """They judge what a container has: a layer's PTX below another layer doesn't count."""
    debug, frames = BIN / "libdebug.so", BIN / "libframes.so"
    layers: list[Layer] = [{"usr/lib/libdebug.so": debug}]
    below = save_tar(docker(map(tar_of, layers)), tmp_path / "below.tar")
    layers.append({"usr/lib/.wh.libdebug.so": b"", "usr/lib/libframes.so": frames})
    image = save_tar(docker(map(tar_of, layers)), tmp_path / "image.tar")
    for archs, saved, has_others in (
        ("80,90", below, True),
        ("80,90", image, False),
        ("80", image, True),
    ):
        done = inspect(saved, "--arch", archs, "--max-dead", "0")
        assert done.exit_code == has_others, done.output
    [library] = json.loads(inspect(frames, "--json").stdout)["libraries"]
    size = sum(section["code_bytes"] for section in library["summary"]["sections"])
    assert inspect(image, "--max-size", str(size)).exit_code == 0
    done = inspect(image, "--max-size", str(size - 1))
    assert done.exit_code == 1
    assert f"there are {size:,} bytes of GPU code, the limit is {size - 1:,}" in done.stderr


def unpacked_names(*layers: Mapping[str, str | None]) -> set[str]:
    """Paths of the files that are there at the end; the content of each is its own path."""
    overlay: Overlay[str] = Overlay()
    for layer in layers:
        assert not overlay.unpack(layer)
    return {path for path, _ in overlay.walk()}


class TestOverlay:
    def test_a_loop_of_links(self) -> None:
        overlay: Overlay[str] = Overlay()
        overlay.unpack({"a": Link("b"), "b": Link("a"), "a/x": "x", "up": Link("../../a")})
        overlay.unpack({"up/y": "y"})
        assert {path for path, node in overlay.walk() if node in ("x", "y")} == {"a/x", "a/y"}

    def test_a_deep_tree(self) -> None:
        assert unpacked_names({"a/" * 2000 + "x": "x"}) == {"a/" * 2000 + "x"}


class TestHostile:
    def problem(self, path: Path) -> str:
        return report_image(path).unreadable[-1]

    def test_several_images(self, tmp_path: Path) -> None:
        files = docker([tar_of(LAYERS[0])])
        [image] = json.loads(files["manifest.json"])
        files["manifest.json"] = encode([image, {**image, "RepoTags": ["b:2"]}])
        found = self.problem(save_tar(files, tmp_path / "x.tar"))
        assert "holds 2 images (a:1, b:2), expected 1; save one image alone" in found

    def test_an_index_that_lists_itself(self, tmp_path: Path) -> None:
        # Each listing of each would be followed: 1,000 to the fourth power.
        itself = {"digest": f"sha256:{'a' * 64}"}
        index = encode({"manifests": [itself] * 1000})
        files = {"oci-layout": b"{}", "index.json": index, f"blobs/sha256/{'a' * 64}": index}
        found = self.problem(save_tar(files, tmp_path / "x.tar"))
        assert "holds 0 images (none), expected 1" in found

    def test_images_for_several_machines(self, tmp_path: Path) -> None:
        files = oci([tar_of(LAYERS[0])], os="linux", architecture="s390x")
        more = oci([tar_of(LAYERS[1])], os="linux", architecture="riscv64")
        lists = [json.loads(one["index.json"])["manifests"] for one in (files, more)]
        both = {**more, **files, "index.json": encode({"manifests": [*lists[0], *lists[1]]})}
        found = self.problem(save_tar(both, tmp_path / "x.tar"))
        assert "holds 2 images (linux/s390x, linux/riscv64), expected 1" in found

    @pytest.mark.parametrize("save", [save_tar, save_gzip])
    @pytest.mark.parametrize(
        "layer", ["../../etc/passwd", "blobs/../../x", "0" * 64 + "/layer.tar"]
    )
    def test_a_layer_that_is_not_there(
        self, tmp_path: Path, layer: str, save: Callable[[Mapping[str, bytes], Path], Path]
    ) -> None:
        files = docker([tar_of(LAYERS[0])])
        files["manifest.json"] = encode([{"Layers": [layer]}])
        path = save(files, tmp_path / "x.tar")
        assert self.problem(path) == f"{path}: layer {layer} is not in it; save the image again"

    def test_a_layer_outside_of_the_folder(self, tmp_path: Path) -> None:
        (tmp_path / "secret.tar").write_bytes(tar_of(LAYERS[0]))
        folder = save_folder(docker([tar_of(LAYERS[0])]), tmp_path / "image")
        (folder / "manifest.json").write_bytes(encode([{"Layers": ["../secret.tar"]}]))
        result = CliRunner().invoke(main, ["inspect", "--packages", str(folder)])
        assert result.exit_code == 1
        assert "layer ../secret.tar is not in it; save the image again" in result.stderr

    def test_a_digest_that_is_a_path(self, tmp_path: Path) -> None:
        files = oci([tar_of(LAYERS[0])])
        files["index.json"] = encode({"manifests": [{"digest": "sha256:../../../etc/passwd"}]})
        found = self.problem(save_tar(files, tmp_path / "x.tar"))
        assert "'sha256:../../../etc/passwd' in the image's index is no digest" in found

    def test_a_damaged_layer(self, tmp_path: Path) -> None:
        whole = gzip.compress(tar_of(LAYERS[1]), 1)
        files = docker([tar_of(LAYERS[0]), whole[: len(whole) // 2]])
        path = save_tar(files, tmp_path / "x.tar")
        assert self.problem(path).startswith(f"{path}/{digest_of(whole[: len(whole) // 2])}/layer")

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("manifest.json", '{"name": "an extension of a browser"}'),
            ("manifest.json", "[]"),
            ("index.json", '{"name": "a site"}'),
        ],
    )
    def test_a_folder_with_a_file_of_that_name(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        shutil.copyfile(MULTIARCH, tmp_path / "libm.so")
        assert [row.path for row in report_image(tmp_path).libraries] == ["libm.so"]
