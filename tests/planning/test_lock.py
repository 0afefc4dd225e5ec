"""The lock: from verdict and plans to the file and back, and to plans again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pytest_negativa.errors import ReconstructError, StoreError
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.mapping import MapRequest, map_libraries
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.library import Cubin, LibraryMap, Scope
from pytest_negativa.models.lock import Lock, LockedLibrary, Place, seal
from pytest_negativa.models.spans import Span
from pytest_negativa.models.verdict import LibraryStatus, Need, Verdict, Witness
from pytest_negativa.planning.keep_needed import keep_needed
from pytest_negativa.planning.lock import code_digest, make_lock, plan_from_lock
from pytest_negativa.storage.lockfile import decode_lock, encode_lock
from pytest_negativa.storage.schema import schema_text
from tests.support.faults import PlantedFault
from tests.support.libraries import BIN, MULTIARCH
from tests.support.reconstructing import planned_of, trimmed_of
from tests.support.sites import verdict_of


def planned(path: Path = MULTIARCH) -> AnalyzedLibrary:
    made = planned_of(path)
    return AnalyzedLibrary(made.library_map, made.plan)


def place(path: str) -> Place:
    return Place(f"lib/{Path(path).name}", "some-code", "1.0")


def lock(*all_planned: AnalyzedLibrary) -> Lock:
    return make_lock("run", all_planned, verdict_of(*all_planned), place)


def fresh_map(path: str, *, contents: bool = False) -> LibraryMap:
    """As slimming makes it, with nothing known but the file and the lock."""
    scope = Scope(devices=("9.0",)) if contents else Scope(headers_only=True)
    library_map = read_library(path, scope)
    [mapped] = map_libraries([Path(path)], MapRequest(scope=scope, with_map=True, with_digest=True))
    assert mapped.library_map is not None
    library = msgspec.structs.replace(library_map.library, sha256=mapped.library_map.library.sha256)
    return msgspec.structs.replace(library_map, library=library)


class TestMaking:
    def test_what_stays_is_listed_and_nothing_else(self) -> None:
        one = planned()
        [library] = lock(one).libraries
        kept = [d for d in one.plan.decisions if d.kept]
        assert kept
        assert [(k.offset, k.reason.value, k.detail) for k in library.kept] == [
            (d.start, d.reason, d.detail) for d in kept
        ]
        assert library.sha256 == one.plan.library.sha256
        assert (library.path, library.distribution, library.version) == (
            "lib/libmultiarch.so",
            "some-code",
            "1.0",
        )
        assert library.unused_bytes == one.plan.unused_bytes
        regions = {e.payload.start: r for r in one.library_map.iter_regions() for e in r.elements}
        for code in library.kept:
            assert code.region == regions[code.offset].span.start
            assert code.arch.major == 9

    def test_unproved_run_is_refused_unless_asked_for(self) -> None:
        one = planned()
        verdict = verdict_of(one, status=LibraryStatus.NOT_PROVED)
        with pytest.raises(ReconstructError, match="a test differs"):
            make_lock("run", [one], verdict, place)
        with pytest.raises(ReconstructError, match="not verified"):
            make_lock("run", [one], None, place)
        for given_verdict in (verdict, None):
            made = make_lock("run", [one], given_verdict, place, unproved=True)
            assert not made.proof.proved
            assert made.proof.not_proved
            assert made.libraries[0].not_proved

    def test_libraries_that_are_not_proved_are_left_out(self) -> None:
        one, two = planned(), planned(BIN / "libnames.so")
        verdict = verdict_of(one, two)
        rows = list(verdict.libraries)
        rows[1] = msgspec.structs.replace(
            rows[1], status=LibraryStatus.NOT_SUBSTITUTED, detail="opened by itself"
        )
        verdict = msgspec.structs.replace(verdict, libraries=tuple(rows))
        made = make_lock("run", [one, two], verdict, place)
        assert [library.name for library in made.libraries] == ["libmultiarch.so"]
        assert [(row.path, row.reason) for row in made.left_out] == [
            ("lib/libnames.so", "not substituted: opened by itself")
        ]

    @pytest.mark.planted_fault(
        "Two paths hold one library, and the proof failed for the second of them.",
        says="not proved: opened by itself",
    )
    def test_a_library_at_two_paths_has_the_doubts_of_both(self, fault: PlantedFault) -> None:
        one = planned()
        library = replace(one.plan.library, path="/elsewhere/libmultiarch.so")
        two = AnalyzedLibrary(one.library_map, replace(one.plan, library=library))
        verdict = verdict_of(one, two)
        doubted = replace(
            verdict.libraries[1], status=LibraryStatus.NOT_PROVED, detail="opened by itself"
        )
        verdict = replace(verdict, libraries=(verdict.libraries[0], doubted))
        [locked] = make_lock("run", [one, two], verdict, place, unproved=True).libraries
        fault.check(str(locked.not_proved))

    def test_library_without_unused_code_is_left_out(self) -> None:
        one = planned()
        decisions = tuple(
            msgspec.structs.replace(d, kept=True, reason="loaded") for d in one.plan.decisions
        )
        whole = AnalyzedLibrary(
            one.library_map, msgspec.structs.replace(one.plan, decisions=decisions)
        )
        for unproved in (False, True):
            made = make_lock("run", [whole], verdict_of(whole), place, unproved=unproved)
            assert made.libraries == ()
            assert made.left_out[0].reason == "nothing unused"

    def test_plan_made_anew_since_the_proof_is_left_out(self) -> None:
        one = planned()
        verdict = verdict_of(one)
        at = next(i for i, d in enumerate(one.plan.decisions) if d.kept)
        decisions = list(one.plan.decisions)
        decisions[at] = msgspec.structs.replace(
            decisions[at], kept=False, reason="no-used-kernel", detail=None
        )
        bolder = msgspec.structs.replace(one.plan, decisions=tuple(decisions))
        made = make_lock("run", [AnalyzedLibrary(one.library_map, bolder)], verdict, place)
        assert made.left_out[0].reason == "planned anew since it was proved: prove it again"

    def test_what_compaction_left_in_place_is_kept(self) -> None:
        one = planned()
        verdict = verdict_of(one)
        [row] = verdict.libraries
        left_in_place, *proved = row.spans
        compacted = msgspec.structs.replace(
            verdict,
            copies="compacted",
            libraries=(msgspec.structs.replace(row, spans=tuple(proved)),),
        )
        [library] = make_lock("run", [one], compacted, place).libraries
        assert library.not_proved is None
        [code] = [code for code in library.kept if code.offset == left_in_place.start]
        assert code.detail == "not proved: it was still there when the tests ran"
        assert library.unused_bytes == one.plan.unused_bytes - left_in_place.size
        plan = plan_from_lock(library, fresh_map(one.plan.library.path))
        assert [(d.start, d.end) for d in plan.decisions if not d.kept] == [
            (s.start, s.end) for s in proved
        ]

    def test_all_was_left_in_place(self) -> None:
        one = planned()
        verdict = verdict_of(one)
        row = msgspec.structs.replace(verdict.libraries[0], spans=())
        verdict = msgspec.structs.replace(verdict, copies="compacted", libraries=(row,))
        made = make_lock("run", [one], verdict, place)
        assert made.libraries == ()
        assert "nothing that is unused was taken out" in made.left_out[0].reason
        [library] = make_lock("run", [one], verdict, place, unproved=True).libraries
        assert library.not_proved == made.left_out[0].reason
        assert library.unused_bytes == one.plan.unused_bytes

    def test_code_in_cubins_that_was_left_in_place_is_kept(self) -> None:
        """By name, with what it calls."""
        one = trimmed_of()
        [cubin] = one.plan.trimmed
        assert len(cubin.unused) > 1
        for left_in_place in cubin.unused:
            proved = tuple(code for code in cubin.unused if code != left_in_place)
            [library] = make_lock("run", [one], with_trimmed(one, proved), place).libraries
            plan = plan_from_lock(library, fresh_map(one.plan.library.path, contents=True))
            locked = {code for cubin in plan.trimmed for code in cubin.unused}
            assert locked < set(cubin.unused)
            assert left_in_place not in locked
            names = {
                one.library_map.names[f.name]
                for block in one.library_map.iter_code()
                if block.payload.start == cubin.start and isinstance(block.content, Cubin)
                for f in block.content.functions
                if left_in_place.start <= f.offset_in_cubin < left_in_place.end
            }
            assert names and names <= set(library.kept[0].functions or ())
            assert set(cubin.kept) < set(library.kept[0].functions or ())

    def test_a_cubin_that_was_given_back_stays_whole(self) -> None:
        one = trimmed_of()
        [cubin] = one.plan.trimmed
        span = Need(
            library=one.plan.library.path,
            spans=(Span(cubin.start, cubin.start + 1),),
            nodeid="test_needs",
            witness=Witness.REFUSED,
        )
        healed = AnalyzedLibrary(one.library_map, keep_needed(one.plan, [span]))
        made = make_lock("run", [healed], None, place, unproved=True)
        [library] = made.libraries
        [code] = [code for code in library.kept if code.offset == cubin.start]
        assert code.functions is None
        assert (code.reason.value, code.detail) == (
            "healed",
            "the driver refused it to test_needs",
        )
        assert not plan_from_lock(library, fresh_map(one.plan.library.path)).trimmed

    def test_map_of_another_state_is_refused(self) -> None:
        one = planned()
        fewer = msgspec.structs.replace(one.plan, decisions=one.plan.decisions[1:])
        bad = AnalyzedLibrary(one.library_map, fewer)
        with pytest.raises(ReconstructError, match="don't fit"):
            make_lock("run", [bad], verdict_of(bad), place)

    def test_order_does_not_matter(self) -> None:
        names = ("libmultiarch.so", "libnames.so", "libglobals.so")
        all_planned = [planned(BIN / name) for name in names]
        verdict = verdict_of(*all_planned)
        forwards = make_lock("run", all_planned, verdict, place)
        backwards = make_lock("run", all_planned[::-1], verdict, place)
        assert encode_lock(forwards) == encode_lock(backwards)

    def test_same_file_loaded_from_two_places(self, tmp_path: Path) -> None:
        shutil.copy(MULTIARCH, tmp_path / "libagain.so")
        both = [planned(), planned(tmp_path / "libagain.so")]
        made = make_lock("run", both, verdict_of(*both), place)
        assert len(made.libraries) == 1


def with_trimmed(one: AnalyzedLibrary, filled: tuple[Span, ...] | None) -> Verdict:
    """A verdict on the one cubin of a plan; None: it says nothing about it."""
    verdict = verdict_of(one)
    trimmed = {} if filled is None else {one.plan.trimmed[0].start: filled}
    row = msgspec.structs.replace(verdict.libraries[0], trimmed=trimmed)
    return msgspec.structs.replace(verdict, libraries=(row,))


class TestPlanFromLock:
    @pytest.mark.parametrize(
        "name", ["libmultiarch.so", "libnames.so", "libframes.so", "libplaces.so", "libglobals.so"]
    )
    def test_keeps_and_drops_the_same(self, name: str) -> None:
        one = planned(BIN / name)
        made = make_lock("run", [one], None, place, unproved=True)
        [library] = decode_lock(encode_lock(made), "lock").libraries
        plan = plan_from_lock(library, fresh_map(one.plan.library.path))
        assert [(d.start, d.end, d.kept) for d in plan.decisions] == [
            (d.start, d.end, d.kept) for d in one.plan.decisions
        ]

    def test_functions(self) -> None:
        one = trimmed_of()
        [library] = decode_lock(encode_lock(lock(one)), "lock").libraries
        assert library.kept[0].functions == (
            "$calls_shared$_Z13shared_by_twof",
            "calls_shared",
        )
        plan = plan_from_lock(library, fresh_map(one.plan.library.path, contents=True))
        assert plan.trimmed == one.plan.trimmed

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"elements": 99}, "another release"),
            ({"code_sha256": "0" * 64}, "another release"),
        ],
    )
    def test_other_elements(self, change: dict[str, object], problem: str) -> None:
        one = planned()
        library = msgspec.structs.replace(lock(one).libraries[0], **change)
        with pytest.raises(ReconstructError, match=problem):
            plan_from_lock(library, fresh_map(one.plan.library.path))

    @pytest.mark.planted_fault(
        "A total of the lock is not that of the library.",
        says="make the lock again",
    )
    @pytest.mark.parametrize(
        "total",
        [
            "kept_elements",
            "code_bytes",
            "unused_bytes",
            "trimmed_bytes",
        ],
    )
    def test_other_totals(self, total: str, fault: PlantedFault) -> None:
        one = trimmed_of()
        [library] = lock(one).libraries
        assert library.trimmed_bytes
        other = msgspec.structs.replace(library, **{total: getattr(library, total) + 1})
        with pytest.raises(ReconstructError, match=f"the lock says {total} is ") as caught:
            plan_from_lock(other, fresh_map(one.plan.library.path, contents=True))
        fault.check(str(caught.value))

    @pytest.mark.planted_fault(
        "A lock made by hand, with a digest that fits, keeps fewer elements than it says.",
        says="the lock says unused_bytes is",
    )
    def test_fewer_kept_elements_than_were_proved(self, fault: PlantedFault) -> None:
        one = planned()
        [library] = lock(one).libraries
        kept = library.kept[:-1]
        fewer = msgspec.structs.replace(library, kept=kept, kept_elements=len(kept))
        with pytest.raises(ReconstructError) as caught:
            plan_from_lock(fewer, fresh_map(one.plan.library.path))
        fault.check(str(caught.value))

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"offset": 1}, "where there is none"),
            ({"functions": ("missing",)}, "can't be read|no function missing"),
        ],
    )
    def test_kept_code_that_does_not_fit(self, change: dict[str, object], problem: str) -> None:
        one = planned()
        library = with_first(lock(one).libraries[0], **change)
        for contents in (False, True):
            with pytest.raises(ReconstructError, match=problem):
                plan_from_lock(library, fresh_map(one.plan.library.path, contents=contents))

    def test_functions_that_need_others(self) -> None:
        one = trimmed_of()
        library = with_first(lock(one).libraries[0], functions=("calls_shared",))
        with pytest.raises(ReconstructError, match=r"not all that they need|no function"):
            plan_from_lock(library, fresh_map(one.plan.library.path, contents=True))


def with_first(library: LockedLibrary, **change: object) -> LockedLibrary:
    first = msgspec.structs.replace(library.kept[0], **change)
    return msgspec.structs.replace(library, kept=(first, *library.kept[1:]))


class TestFile:
    def test_fits_its_schema(self) -> None:
        document = yaml.safe_load(encode_lock(lock(planned(), trimmed_of())))
        schema = json.loads(schema_text("lock"))
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(document, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**document, "more": 1}, schema)

    @given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
    def test_any_text_survives(self, text: str) -> None:
        made = LOCK
        library = with_first(made.libraries[0], detail=text)
        library = msgspec.structs.replace(library, path=f"a/{text}", version=text)
        made = seal(msgspec.structs.replace(made, libraries=(library,)))
        assert decode_lock(encode_lock(made), "lock") == made

    @pytest.mark.parametrize(
        ("old", "new", "problem"),
        [
            (b"size: ", b"size: x", r"lock:\d+: .*Expected `int`, got `str` - at `\S+size`;"),
            (b"size: ", b"length: ", r"lock:(\d+): .*unknown field `length` - at `\S+\[0\]`;"),
            (
                b"reason: loaded",
                b"reason: because",
                r"lock:\d+: .*'because' - at `\S+reason`",
            ),
            (
                b"arch: sm_90",
                b"arch: sm_",
                r"lock:\d+: .*no SM arch.*libraries\[0\].kept\[0\].arch",
            ),
            (
                b"  elements: ",
                b"  elements: 0 # ",
                r"lock:\d+: .*kept: .* of 0 elements.*libraries\[0\]",
            ),
            (
                b"proved: true",
                b"proved: yes",
                r"lock:\d+: .*Expected `bool`, got `str` - at `\$.proof.proved`",
            ),
            (b"  run: ", b"  run: a\n  run: ", r"lock:\d+: .*the key 'run' is there twice"),
            (b"  run: ", b"  run: *x # ", r"lock:\d+: .*an alias"),
            (b"  run: ", b"  run: !!python/name:os.system ", r"lock:\d+: .*the tag"),
            (b"  run: ", b"  run: [[[[[[[[[[[1]]]]]]]]]]] # ", r"lock:\d+: .*nested too deep"),
            (
                b"  run: ",
                b"  run: [",
                r"lock:\d+: not a lock file of this release: did not find expected",
            ),
            (b"  run: ", b"  run: \xff", r"lock:\d+: not a lock file of this release: "),
        ],
    )
    def test_what_is_refused(self, old: bytes, new: bytes, problem: str) -> None:
        text = encode_lock(LOCK)
        assert old in text
        with pytest.raises(StoreError, match=f"^{problem}"):
            decode_lock(text.replace(old, new, 1), "lock")

    def test_harmless_forms(self) -> None:
        text = encode_lock(LOCK)
        assert decode_lock(text.replace(b"libraries:", b"libraries: &a", 1), "lock") == LOCK
        assert decode_lock(text.replace(b"proved: true", b"proved:   true # "), "lock") == LOCK

    def test_a_long_number_is_a_text(self) -> None:
        digits = "9" * 5000
        made = seal(replace(LOCK, proof=replace(LOCK.proof, run=digits)))
        text = encode_lock(made).replace(f"'{digits}'".encode(), digits.encode())
        assert f"run: {digits}\n".encode() in text
        assert decode_lock(text, "lock") == made

    def test_line_is_that_of_the_fault(self) -> None:
        lines = encode_lock(LOCK).decode().splitlines()
        [number] = [i for i, line in enumerate(lines, 1) if line.startswith("  code_bytes:")]
        lines[number - 1] = "  code_bytes: many"
        with pytest.raises(StoreError, match=f"^lock:{number}: "):
            decode_lock("\n".join(lines).encode(), "lock")

    @pytest.mark.parametrize(
        "text", [b"", b"# nothing\n", b"[]", b"a: b", b"1", b"format: x", b"--- 1\n--- 2\n"]
    )
    def test_other_documents(self, text: bytes) -> None:
        with pytest.raises(StoreError, match="not a lock file"):
            decode_lock(text, "lock")

    def test_unsorted_or_twice(self) -> None:
        library = LOCK.libraries[0]
        code = library.kept[0]
        later = msgspec.structs.replace(code, offset=code.offset + 8)
        for kept in ((code, code), (later, code)):
            document = msgspec.to_builtins(LOCK, enc_hook=lambda arch: str(arch))
            document["libraries"][0]["kept"] = msgspec.to_builtins(
                kept, enc_hook=lambda arch: str(arch)
            )
            with pytest.raises(StoreError, match="not sorted by offset"):
                decode_lock(yaml.safe_dump(document).encode(), "lock")


LOCK = lock(planned())


def test_digest_of_code_tells_places_apart() -> None:
    assert code_digest([(1, 2), (3, 4)]) == code_digest([(3, 4), (1, 2)])
    assert len({code_digest(s) for s in ([], [(1, 2)], [(1, 3)], [(1, 2), (3, 4)])}) == 4
