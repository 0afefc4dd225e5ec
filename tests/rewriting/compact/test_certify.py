"""The certificate: sound results have it, and no result with one thing wrong."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
from pathlib import Path

import pytest

from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.pages.note import _STUB, STUB_SIZE
from pytest_negativa.rewriting.compact.compact import (
    PROGRAM,
    certify,
    compact_library,
    declared_code,
)
from pytest_negativa.rewriting.compact.records import (
    CannotCompactError,
    CheckError,
    CompactOptions,
)
from tests.support.compacting import (
    COMPACTABLE,
    build,
    image,
    needs_compiler,
    plan_of,
    read,
)
from tests.support.compiling import CC
from tests.support.corrupting import (
    CORRUPTIONS,
    DYN,
    PHDR,
    PT_DYNAMIC,
    PT_LOAD,
    Pair,
    a_byte,
    a_segment,
    a_spare_row,
    gives_original_back,
    meaningless,
    put,
    view,
)
from tests.support.cutting import needs_stub
from tests.support.libraries import QUICKSTART_LIBRARY, ROOT
from tests.support.slimmed import refusal
from tests.support.sound import Sound

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(not PROGRAM.is_file(), reason="the program that certifies was not built"),
]
SANITIZERS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def test_sound_results_are_certified(sound: list[Sound], tmp_path: Path) -> None:
    for case in sound:
        done = case.ask(case.pair, tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("certified: ")


@needs_stub
def test_a_cut_library_is_of_this_original(sound: list[Sound], tmp_path: Path) -> None:
    case = sound[-1]
    (tmp_path / "lib.so").write_bytes(case.pair.library)
    (tmp_path / "lib.spare").write_bytes(case.pair.spare)
    sha256 = hashlib.sha256(case.original.read_bytes()).hexdigest()
    args = (case.original, tmp_path / "lib.so", tmp_path / "lib.spare")
    assert certify(*args, sha256=sha256).startswith("certified: ")
    with pytest.raises(CheckError, match="of this original"):
        certify(*args, sha256="0" * 64)
    with pytest.raises(CannotCompactError, match="can't read"):
        certify("", *args[1:])
    with pytest.raises(CheckError, match="a spare, which is not given"):
        certify(*args[:2])


@pytest.mark.parametrize("library", COMPACTABLE, ids=lambda path: path.stem)
@pytest.mark.parametrize("every", [2, 1000])
def test_libraries_of_nvidias_compilers(library: Path, every: int, tmp_path: Path) -> None:
    library_map = read(library)
    plan = plan_of(library_map, lambda number: number % every == 1)
    with ByteSource(library) as source:
        declared = declared_code(source, library_map, plan)
    options = CompactOptions(min_gain=-(1 << 30), strip=every == 2)
    compact_library(library, tmp_path / "2", library_map, plan, options=options)
    assert certify(library, tmp_path / "2", declared=declared).startswith("certified: ")
    if any(not decision.kept for decision in plan.decisions):
        with pytest.raises(CheckError):
            certify(library, tmp_path / "2")


def test_nothing_is_slimmed_without_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an installation without a C compiler."""
    monkeypatch.setattr("pytest_negativa.rewriting.compact.compact.PROGRAM", tmp_path / "none")
    library = build(tmp_path / "build")
    library_map = read(library)
    plan = plan_of(library_map, lambda number: number == 7)
    done = refusal(library, tmp_path / "lib.so", library_map, plan)
    assert "with a C compiler" in done.reason
    assert not (tmp_path / "lib.so").exists()


@needs_stub
def test_no_segment_turns_into_a_second_dynamic_section(sound: list[Sound], tmp_path: Path) -> None:
    """Without the others, a stack is executable, and relocated data stay writable."""
    case = sound[-1]
    tables = view(case.pair.library)
    dynamic = next(row for row in tables.segments if row[0] == PT_DYNAMIC)
    for number, row in enumerate(tables.segments):
        # The dynamic section itself gets another size in memory.
        changed = dynamic if row != dynamic else (*dynamic[:6], 0, dynamic[7])
        if row[0] == PT_LOAD:
            continue
        at = tables.phoff + number * PHDR.size
        library = put(case.pair.library, at, PHDR.pack(*changed))
        done = case.ask(Pair(library, case.pair.spare), tmp_path)
        assert f"of type {row[0]:#x} is another one" in done.stderr, row
    at = tables.phoff + tables.segments.index(dynamic) * PHDR.size
    library = put(case.pair.library, at, PHDR.pack(*dynamic[:7], 4096))
    assert "of type 0x2 is another" in case.ask(Pair(library, case.pair.spare), tmp_path).stderr
    without = put(case.pair.library, dynamic[2] + dynamic[5] - DYN.size, DYN.pack(1, 1))
    assert "has no end" in case.ask(Pair(without, case.pair.spare), tmp_path).stderr


def test_a_segment_of_no_size_maps_no_page_over_others(sound: list[Sound], tmp_path: Path) -> None:
    """ld.so rounds its start down and its end up."""
    case = sound[0]
    tables = view(case.pair.library)
    at = -(-len(case.pair.library) // 4096) * 4096
    loads = [row for row in tables.segments if row[0] == PT_LOAD]
    behind = -(-(loads[-1][3] + loads[-1][6]) // 4096) * 4096 + 64
    for address, problem in ((loads[-1][3] + 64, "shares a page"), (behind, "has no size")):
        empty = (PT_LOAD, 4, at + address % 4096, address, address, 0, 0, 4096)
        rows = [*tables.segments, empty]
        library = case.pair.library.ljust(at, b"\0")
        library += b"".join(PHDR.pack(*row) for row in rows).ljust(4096, b"\0")
        library = put(library, 32, at.to_bytes(8, "little"))
        library = put(library, 56, len(rows).to_bytes(2, "little"))
        done = case.ask(Pair(library), tmp_path)
        assert (done.returncode, problem in done.stderr) == (1, True), done


def test_nothing_is_known_of_an_original_without_sections(
    sound: list[Sound], tmp_path: Path
) -> None:
    """Nothing names its code, tables and symbols."""
    case = sound[0]
    files: list[Path] = []
    for data in (case.original.read_bytes(), case.pair.library):
        files.append(tmp_path / f"{len(files)}.so")
        files[-1].write_bytes(put(put(data, 40, bytes(8)), 60, bytes(4)))
    with pytest.raises(CheckError, match="or the original has none"):
        certify(*files, declared=case.declared)


def loads_the_same(changed: Pair, sound: Pair, folder: Path) -> bool:
    """Whether a loader makes the same of both: zeros may be of the file or not."""
    images = []
    for pair in (changed, sound):
        (folder / "image").write_bytes(pair.library)
        found = image(folder / "image")
        rows = [(row[0], row[1], row[3], row[6]) for row in found.loads]
        images.append((found.memory, rows, len(found.headers)))
    return images[0] == images[1]


def try_seeds(sound: list[Sound], folder: Path, seeds: range) -> None:
    """Change one thing for each seed, and ask again."""
    silent = [
        {i for span in meaningless(s.pair, s.unused, s.original.read_bytes()) for i in span}
        for s in sound
    ]
    missed = []
    for seed in seeds:
        chance = random.Random(seed)
        number = chance.randrange(len(sound))
        case = sound[number]
        corruption = chance.choice(CORRUPTIONS)
        changed = corruption(chance, case.pair)
        if changed is None or changed == case.pair:
            continue
        done = case.ask(changed, folder)
        assert done.returncode in (0, 1), (seed, done)
        if done.returncode == 0:
            places = zip(changed.library, case.pair.library, strict=False)
            at = next((i for i, (x, y) in enumerate(places) if x != y), None)
            same = corruption is a_byte and at in silent[number]
            if corruption is a_spare_row:
                same = gives_original_back(changed, case.original.read_bytes())
            if corruption is a_segment:
                same = loads_the_same(changed, case.pair, folder)
            if not same:
                missed.append((seed, corruption.__name__, number, at))
    assert missed == []


def test_one_thing_wrong_is_found(sound: list[Sound], tmp_path: Path) -> None:
    try_seeds(sound, tmp_path, range(300))


@pytest.mark.slow
@pytest.mark.nightly
def test_any_one_thing_wrong_is_found(sound: list[Sound], tmp_path: Path) -> None:
    try_seeds(sound, tmp_path, range(300, 6000))


@pytest.mark.slow
def test_hostile_files_under_sanitizers(sound: list[Sound], tmp_path: Path) -> None:
    """Damage anywhere, most of it in the tables, and files that are cut off."""
    program = tmp_path / "certify"
    source = ROOT / "pytest_negativa/rewriting/compact/certify.c"
    stub = (_STUB.read_bytes() if _STUB.is_file() else b"")[80:].ljust(STUB_SIZE - 80, b"\0")
    known = f'-DSTUB_SHA256="{hashlib.sha256(stub).hexdigest()}"'
    built = subprocess.run([CC or "cc", *SANITIZERS, known, "-o", program, source], check=False)
    if built.returncode:
        pytest.skip("the compiler has no sanitizers")
    for case in sound:
        assert case.ask(case.pair, tmp_path, program).returncode == 0
    for seed in range(400):
        chance = random.Random(seed)
        case = chance.choice(sound)
        pair = chance.choice(CORRUPTIONS)(chance, case.pair) or case.pair
        library, spare = bytearray(pair.library), bytearray(pair.spare)
        for _ in range(chance.randrange(4)):
            at = chance.choice((chance.randrange(24, 64), chance.randrange(len(library))))
            library[at] = chance.choice((0, 1, 127, 255))
        if spare and chance.random() < 0.3:
            at = chance.randrange(max(len(spare) - 200, 0), len(spare))
            spare[at] = chance.choice((0, 255))
        done = case.ask(Pair(bytes(library), bytes(spare)), tmp_path, program)
        assert done.returncode in (0, 1, 2), (seed, done.stderr[-3000:])


def test_a_file_that_cannot_be_read_is_no_fault_of_the_writer(tmp_path: Path) -> None:
    with pytest.raises(CannotCompactError, match=r"can't read .*missing\.so") as refused:
        certify(QUICKSTART_LIBRARY, tmp_path / "missing.so")
    assert not isinstance(refused.value, CheckError)


def test_a_pipe_in_the_place_of_a_result_is_not_waited_for(tmp_path: Path) -> None:
    """Its folder may belong to another user."""
    pipe = tmp_path / "lib.so"
    os.mkfifo(pipe)
    with pytest.raises(CannotCompactError, match="can't read "):
        certify(QUICKSTART_LIBRARY, pipe)
