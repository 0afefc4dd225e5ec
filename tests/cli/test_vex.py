"""``negativa vex``: a library lacks code only if its file says so, and statements are OpenVEX."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from pytest_negativa.analysis.vex import load_vulnerabilities
from pytest_negativa.cli.main import main
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.elf_tables import PT_LOAD
from pytest_negativa.gpucode.library import map_slimmed
from pytest_negativa.gpucode.source import ByteSource, digest_of
from pytest_negativa.models.library import Scope
from pytest_negativa.pages.functions import local_functions
from tests.support.cutting import build_kit, needs_stub
from tests.support.faults import PlantedFault
from tests.support.libraries import DOCS, MULTIARCH
from tests.support.sites import make_wheel
from tests.support.slimmed import compact, plan_for, read

# What OpenVEX 0.2.0 asks of a document (github.com/openvex/spec), as far as we write it.
_TEXT = {"type": "string", "minLength": 1}
_IRI = {"type": "string", "pattern": "^[a-z][a-z0-9+.-]*:"}
_PARTS = {"@id": _IRI, "hashes": {"properties": {"sha-256": {"pattern": "^[0-9a-f]{64}$"}}}}


def _record(required: list[str], **fields: object) -> dict[str, object]:
    return {"type": "object", "properties": fields, "required": required,
            "additionalProperties": False}  # fmt: skip


_SUBCOMPONENT = _record(["@id"], **_PARTS)
_PRODUCT = _record(["@id"], **_PARTS, subcomponents={"items": _SUBCOMPONENT, "uniqueItems": True})
_STATEMENT = _record(
    ["vulnerability", "products", "status"],
    vulnerability=_record(["name"], name=_TEXT),
    products={"type": "array", "minItems": 1, "uniqueItems": True, "items": _PRODUCT},
    status={"enum": ["not_affected", "under_investigation"]},
    status_notes=_TEXT,
    justification={"const": "vulnerable_code_not_present"},
) | {
    "if": {"properties": {"status": {"const": "not_affected"}}},
    "then": {"required": ["justification"]},
    "else": {"not": {"required": ["justification"]}},
}
OPENVEX = _record(
    ["@context", "@id", "author", "timestamp", "version", "statements"],
    **{
        "@context": {"const": "https://openvex.dev/ns/v0.2.0"},
        "@id": _IRI,
        "author": _TEXT,
        "timestamp": {"pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
        "version": {"const": 1},
        "tooling": _TEXT,
        "statements": {"type": "array", "minItems": 1, "uniqueItems": True, "items": _STATEMENT},
    },
)

KEPT = "fill"


class Vex:
    """A folder with a library, and a list of vulnerabilities."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = folder / "site"
        self.site.mkdir()
        self.list = folder / "list.yaml"

    def state(self, *options: object, status: int = 0, **code: Any) -> Any:
        """The statements about code of a library, checked to be OpenVEX."""
        return self.state_all(*options, code=[code], status=status)

    def state_all(self, *options: object, code: Sequence[object], status: int = 0) -> Any:
        """The same about code of several libraries."""
        lists = {"format": 1, "vulnerabilities": [{"name": "CVE-2026-1", "code": code}]}
        self.list.write_text(json.dumps(lists))
        target = self.folder / "vex.json"
        words = ["vex", self.list, self.site, "--author", "The owner", "-o", target, *options]
        result = CliRunner().invoke(main, [*map(str, words)])
        assert result.exit_code == status, result.output
        self.warnings = result.stderr
        if status:
            return result.stderr
        document = json.loads(target.read_bytes())
        jsonschema.validate(document, OPENVEX)
        return document["statements"]

    def reason(self, *options: object, **code: Any) -> str:
        """Why nothing more is stated."""
        [statement] = self.state(*options, **code)
        assert statement["status"] == "under_investigation"
        return str(statement["status_notes"])

    def lacks(self, *options: object, **code: Any) -> bool:
        [statement] = self.state(*options, **code)
        return bool(statement["status"] == "not_affected")


@pytest.fixture
def vex(tmp_path: Path) -> Vex:
    return Vex(tmp_path)


@pytest.fixture
def gone(vex: Vex) -> list[str]:
    """Kernels that the library of the folder lost; it has no manifest."""
    whole = read(MULTIARCH)
    names = {k.name for block in whole.iter_code() for k in whole.kernels_of(block.content)}
    compact(whole, plan_for(whole, KEPT), vex.site / "libmultiarch.so")
    with ByteSource(vex.site / "libmultiarch.so") as source:
        left, _ = map_slimmed(source, read_host_elf(source), Scope())
    assert KEPT in left.names
    found = sorted(names - set(left.names))
    assert found
    return found


@pytest.mark.slow
def test_a_kernel_that_is_gone(vex: Vex, gone: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    found = vex.state(library="libmulti*.so", kernels=gone)
    [statement] = found
    assert statement["status"] == "not_affected"
    assert statement["justification"] == "vulnerable_code_not_present"
    assert "does not tell whether the list names all code" in statement["status_notes"]
    [product] = statement["products"]
    assert product["@id"] == (
        f"pkg:generic/libmultiarch.so?checksum=sha256:{product['hashes']['sha-256']}"
    )
    [statement] = vex.state(
        "--product", "pkg:oci/ours@sha256:aa", library="*/site/*", kernels=gone[:1]
    )
    assert statement["products"] == [{"@id": "pkg:oci/ours@sha256:aa", "subcomponents": [product]}]


@pytest.mark.slow
def test_the_same_document_again(
    vex: Vex, gone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for epoch in ("1700000000", "1700000000", "1700000001"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
        vex.state(library="lib*", kernels=gone)
        texts.append((vex.folder / "vex.json").read_bytes())
    assert texts[0] == texts[1]
    first, other = json.loads(texts[0]), json.loads(texts[2])
    assert first["timestamp"] == "2023-11-14T22:13:20Z" and first["@id"] != other["@id"]


@pytest.mark.slow
@pytest.mark.planted_fault(
    "The kernel of a CVE is still in a slimmed library",
    says="Its code may be there: it has fill. pytest-negativa read the file.",
)
def test_a_kernel_that_is_there(vex: Vex, gone: list[str], fault: PlantedFault) -> None:
    fault.check(vex.reason(library="lib*", kernels=[*gone, KEPT]))


@pytest.mark.slow
@pytest.mark.planted_fault(
    "The list of a CVE misspells its kernel", says="nothing shows that it ever had fil ("
)
def test_a_name_that_is_wrong(vex: Vex, gone: list[str], fault: PlantedFault) -> None:
    fault.check(vex.reason(library="lib*", kernels=["fil"]))
    reason = vex.reason("--original", MULTIARCH, library="lib*", kernels=["fil"])
    assert "nothing shows" in reason


@pytest.mark.slow
@pytest.mark.planted_fault(
    "The list of a CVE names a CPU function as a kernel", says="nothing shows that it ever had"
)
def test_a_cpu_function_is_no_kernel(vex: Vex, gone: list[str], fault: PlantedFault) -> None:
    path = vex.site / "libmultiarch.so"
    with ByteSource(path) as source:
        left, _ = map_slimmed(source, read_host_elf(source), Scope())
    symbols = subprocess.run(
        ["readelf", "-W", "--dyn-syms", path], check=True, capture_output=True, text=True
    ).stdout
    rows = [line.split() for line in symbols.splitlines() if " FUNC " in line]
    functions = {row[7] for row in rows if row[6] != "UND"}
    name = min(functions - set(left.names) - set(gone))
    assert b"\0" + name.encode() + b"\0" in path.read_bytes()
    fault.check(vex.reason(library="lib*", kernels=[name]))


@pytest.mark.slow
def test_another_hard_link(vex: Vex, gone: list[str]) -> None:
    path = vex.site / "libmultiarch.so"
    (vex.site / "libzero.so").hardlink_to(path)
    assert vex.lacks(library="libzero.so", kernels=gone)
    assert vex.lacks(library="libmultiarch.so", kernels=gone)


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A product has a second copy of a library, which is whole", says="it is not slimmed"
)
def test_one_of_two_copies(vex: Vex, gone: list[str], fault: PlantedFault) -> None:
    """Some readers of OpenVEX pass over the subcomponents: the product itself is not cleared."""
    (vex.site / "other").mkdir()
    shutil.copy(MULTIARCH, vex.site / "other/libmultiarch.so")
    cleared, open_ = vex.state("--product", "pkg:oci/ours@sha256:aa", library="lib*", kernels=gone)
    assert cleared["status"] == "not_affected"
    assert [p["@id"][:28] for p in cleared["products"]] == ["pkg:generic/libmultiarch.so?"]
    assert [p["@id"] for p in open_["products"]] == ["pkg:oci/ours@sha256:aa"]
    fault.check(open_["status_notes"])


@pytest.mark.slow
def test_a_library_of_the_list_is_not_here(vex: Vex, gone: list[str]) -> None:
    """The library is cleared, and the product is not."""
    code = [{"library": "libm*", "kernels": gone}, {"library": "libelse.so*", "kernels": gone}]
    [cleared] = vex.state_all("--product", "pkg:oci/ours@sha256:aa", code=code)
    assert cleared["status"] == "not_affected" and "subcomponents" not in cleared["products"][0]
    assert "CVE-2026-1: no library here is libelse.so*" in vex.warnings


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A library was installed again since it was slimmed", says="it is not slimmed"
)
def test_the_original(vex: Vex, gone: list[str], fault: PlantedFault) -> None:
    shutil.copy(MULTIARCH, vex.site / "libmultiarch.so")
    fault.check(vex.reason(library="lib*", kernels=gone))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["code", "header of a region"])
@pytest.mark.planted_fault(
    "A part of a slimmed library's GPU code can't be read", says="of its GPU code can't be read"
)
def test_code_that_cannot_be_read(
    vex: Vex, gone: list[str], what: str, fault: PlantedFault
) -> None:
    path = vex.site / "libmultiarch.so"
    with ByteSource(path) as source:
        left, _ = map_slimmed(source, read_host_elf(source), Scope())
        space = read_host_elf(source)
    block = next(b for b in left.iter_code() if b.content is not None)
    start, damage = block.payload.start, b"\x01" * block.stored_size
    if what != "code":
        # The version, behind the magic number.
        start, damage = next(left.iter_regions()).span.start + 4, b"\xff\xff"
    [load] = [
        s
        for s in space.segments
        if s.p_type == PT_LOAD and s.p_vaddr <= start < s.p_vaddr + s.p_filesz
    ]
    with path.open("r+b") as file:
        file.seek(start - load.p_vaddr + load.p_offset)
        file.write(damage)
    fault.check(vex.reason(library="lib*", kernels=gone))


@pytest.mark.slow
def test_the_original_that_slim_kept_shows_the_names(vex: Vex, gone: list[str]) -> None:
    path, name = vex.site / "libmultiarch.so", gone[0].encode()
    data = path.read_bytes()
    # Nothing in the library itself tells that it had the kernel.
    path.write_bytes(data.replace(b"\0%s\0" % name, b"\0%s\0" % (b"x" * len(name))))
    assert "nothing shows that it ever had" in vex.reason(library="lib*", kernels=gone[:1])
    entry = {
        "names": [path.name],
        "original_sha256": digest_of(MULTIARCH),
        "original_size": MULTIARCH.stat().st_size,
        "sha256": digest_of(path),
        "size": len(data),
        "mtime_ns": path.stat().st_mtime_ns,
        "recipe": "",
        "source": "a lock",
        "gpu_code_removed": 1,
    }
    (other := vex.folder / "other.so").write_bytes(MULTIARCH.read_bytes() + b"\0")
    for original in (other, MULTIARCH):
        kept = {path.name: {**entry, "original": str(original)}}
        manifest = {"format": 1, "slimmed": kept}
        (vex.site / "negativa-slim.json").write_text(json.dumps(manifest))
        # By its digest: another file shows nothing.
        assert vex.lacks(library="lib*", kernels=gone[:1]) is (original == MULTIARCH)


@pytest.mark.slow
def test_cpu_functions_of_a_library_without_a_spare(vex: Vex, gone: list[str]) -> None:
    reason = vex.reason(library="lib*", functions=["main"])
    assert "slim --spare alone removes CPU code" in reason


@pytest.mark.slow
def test_a_wheel_is_unpacked_and_another_archive_refused(
    vex: Vex, gone: list[str], tmp_path: Path
) -> None:
    files = {"ours/libmultiarch.so": vex.site / "libmultiarch.so"}
    vex.site = make_wheel(tmp_path, "ours", "1.0", files)
    assert vex.lacks(library="dist:ours", kernels=gone)
    vex.site = make_wheel(tmp_path, "ours", "2.0", {"ours/libmultiarch.so": MULTIARCH})
    assert "it is not slimmed" in vex.reason(library="libmulti*", kernels=gone)
    vex.site = vex.site.rename(tmp_path / "ours.zip")
    error = vex.state(library="libmulti*", kernels=gone, status=2)
    assert f"{vex.site}: vex reads no archive but wheels" in error


@pytest.mark.slow
def test_nothing_is_here(vex: Vex) -> None:
    error = vex.state(library="libother.so", kernels=["k"], status=1)
    assert "CVE-2026-1: no library here is libother.so; nothing is stated of it" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "list.yaml:1: not a list of vulnerabilities of this release: expected a mapping"),
        ("format: 1\nvulnerabilities:\n- name: n\n  cod: []\n",
         "list.yaml:4: not a list of vulnerabilities of this release: vulnerabilities[0]: unknown"),
        ("format: 1\nvulnerabilities:\n- {}\n",
         "list.yaml:3: not a list of vulnerabilities of this release: vulnerabilities[0]: lacks"),
        ("a: [", "list.yaml:2: "),
        ("{format: 2, vulnerabilities: [{name: n, code: [{library: l, kernels: [k]}]}]}",
         "format 2, this release reads 1"),
        ("{format: 1, vulnerabilities: [{name: n, code: [{library: l}]}]}",
         "expected kernels or functions"),
        ("{format: 1, vulnerabilities: []}", "length >= 1"),
    ],
)  # fmt: skip
def test_a_list_that_is_none(vex: Vex, text: str, problem: str) -> None:
    vex.list.write_text(text)
    words = ["vex", str(vex.list), str(vex.site), "--author=a"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1 and problem in result.stderr


@needs_stub
@pytest.mark.slow
@pytest.mark.planted_fault(
    "The CPU function of a CVE is in a spare, which brings it back", says="is in reach, and gives"
)
def test_a_spare(vex: Vex, tmp_path: Path, fault: PlantedFault) -> None:
    """As long as it is there, nothing is gone. Then functions are, of which no page stayed."""
    kit = build_kit(tmp_path)
    cut = kit.cut(vex.site)
    with ByteSource(kit.library) as source:
        functions = {n.decode(): a for a, (_, n) in local_functions(source) or ()}
    name = next(n for n in functions if n.startswith("_Z7throwerILi100E"))
    code: dict[str, Any] = {"library": "libpages.so", "functions": [name]}
    fault.check(vex.reason("--original", kit.library, **code))
    shutil.move(cut.spare, tmp_path / "elsewhere")
    assert "its original is needed" in vex.reason(**code)
    # A service may name its folder of spares itself; and one in the tree of an image is in reach.
    (vex.site / "spares").mkdir()
    (vex.site / "spares" / cut.spare.name).touch()
    assert "is in reach, and gives" in vex.reason("--original", kit.library, **code)
    (vex.site / "spares" / cut.spare.name).unlink()
    assert vex.lacks("--original", kit.library, **code)
    kept = vex.reason(
        "--original", kit.library, library="libpages.so", functions=[name, "misspelled"]
    )
    assert "its original has no misspelled" in kept


@pytest.mark.slow
def test_the_list_in_the_guide_is_read(tmp_path: Path) -> None:
    [text] = re.findall(r"^```yaml\n(.*?)^```$", (DOCS / "guides/vex.md").read_text(), re.S | re.M)
    (tmp_path / "cves.yaml").write_text(text)
    [vulnerability] = load_vulnerabilities(tmp_path / "cves.yaml").vulnerabilities
    assert vulnerability.name == "CVE-2026-0001" and len(vulnerability.code) == 2
