"""Plants needs of removed code in a proof of real libraries, and counts which witness saw them.

    python -m benchmarks.planted_needs examples/pytorch --logs OUT --tests tests/test_math.py

The suite is copied and traced. Of all removed elements of its libraries, some are drawn at random.
On the copies, a test each needs one of them and swallows the error, in a way that no call of the
driver shows:

- ``mapping``: it reads the element through the mapping of the library;
- ``memory``: it copies the element, and gives the copy to cuModuleLoadData;
- ``lto-ir``: it gives LTO-IR to nvJitLink.

An ``ordinary`` need asks the driver for a kernel that was removed. One proof and one healing have
all needs in them. ``needs.json``, ``needs.log`` and ``commands.log`` tell the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from pytest_negativa.arch import ComputeCapability, ElementKind
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.elf_tables import PT_LOAD
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.library import Compression, Cubin, Element
from pytest_negativa.models.spans import PAGE_SIZE, Span, around, intersection, size, union
from pytest_negativa.models.verdict import Verdict, Witness
from pytest_negativa.pages.note import MAGIC, unpack_note
from pytest_negativa.storage.results import load_planned, load_verdict
from pytest_negativa.storage.runs import Run, RunsFolder

_SUITE_FILES = Path(__file__).with_name("planted")
_TESTS = "test_planted_needs.py"
_MAPPING, _MEMORY, _LTO_IR, _ORDINARY = "mapping", "memory", "lto-ir", "ordinary"
_PRINTED_REASONS = 10
# PTX, in bytes.
_MOST_COMPILED = 256 << 10


@dataclass(frozen=True, slots=True)
class Candidate:
    """A removed element that lies in memory when its library is loaded.

    Attributes:
        library: real path.
        address: of the payload, as in the ELF file.
        region: file offsets of the region that holds it; None for what lies in none.
        kernel: one that the driver would look up in it; None if it would choose another element.
        arch: of the traced device, as nvJitLink has it.
        reason: why it was removed.
    """

    library: str
    element: Element
    address: int
    region: Span | None
    kernel: str | None
    arch: str
    reason: str

    @property
    def takes_long(self) -> bool:
        """Whether the driver may compile it for minutes, once it is healed."""
        is_code = self.element.kind is ElementKind.CUBIN
        return not is_code and self.element.unpacked_size > _MOST_COMPILED

    def pages(self, kind: str) -> tuple[Span, ...]:
        """The pages that a need of a kind may touch; a load reads all headers of the region."""
        span = self.region if kind == _ORDINARY and self.region else self.element.span
        return around([span], PAGE_SIZE)


@dataclass(frozen=True, slots=True)
class Need:
    """A need of a removed element, as ``planted/test_planted_needs.py`` reads it.

    Attributes:
        number: of its test.
        offset, size: of the payload in the file.
        address, region_address: as in the ELF file.
        header_size: bytes before the payload; 0 for what lies in no region.
    """

    number: int
    kind: str
    library: str
    offset: int
    size: int
    address: int
    header_size: int
    region: int | None
    region_address: int
    kernel: str | None
    arch: str
    element_kind: str
    element_arch: str
    packed: bool
    reason: str

    @property
    def read_span(self) -> Span:
        """File offsets that it reads, as far as it is no load by the driver."""
        with_header = self.kind == _MEMORY or (self.kind == _LTO_IR and self.packed)
        return Span(self.offset - self.header_size * with_header, self.offset + self.size)

    @property
    def nodeid(self) -> str:
        """Of its test, from the root of the suite."""
        return f"{_TESTS}::test_need[{self.number}]"


def find_candidates(planned: Iterable[AnalyzedLibrary]) -> Iterator[Candidate]:
    """All removed elements that a need can be about, by library."""
    for one in planned:
        if one.plan.is_files:
            continue
        devices = [ComputeCapability.parse(device) for device in one.plan.devices]
        loaded = one.library_map.loaded_starts(devices)
        regions = {region.span.start: region.span for region in one.library_map.iter_regions()}
        elements = {element.payload.start: element for element in one.library_map.iter_code()}
        with ByteSource(one.plan.library.path) as source:
            segments = read_host_elf(source).segments
        loads = [s for s in segments if s.p_type == PT_LOAD]
        for decision in one.plan.decisions:
            element = elements[decision.start]
            segment = next(
                (s for s in loads if s.p_offset <= element.anchor and decision.end <= s.file_end),
                None,
            )
            if decision.kept or not decision.size or segment is None:
                continue
            content = element.content
            kernels = one.library_map.kernels_of(content)
            is_chosen = element.region is not None and decision.start in loaded
            # The driver compiles others, once they are healed.
            is_chosen = is_chosen and isinstance(content, Cubin) and not content.relocatable
            yield Candidate(
                library=one.plan.library.path,
                element=element,
                address=decision.start - segment.p_offset + segment.p_vaddr,
                region=None if element.region is None else regions[element.region],
                kernel=kernels[0].name if is_chosen and kernels else None,
                arch=f"sm_{devices[0].major}{devices[0].minor}",
                reason=decision.reason,
            )


def draw(
    candidates: Sequence[Candidate],
    chance: random.Random,
    *,
    hidden: int,
    lto_ir: int,
    ordinary: int,
) -> list[Need]:
    """Draw needs; two of them have no page in common, for a page names its first touch alone.

    Args:
        candidates: see ``find_candidates``.
        hidden: how many needs that no call of the driver shows, from all of them.
        lto_ir: how many more of these from LTO-IR alone.
        ordinary: how many kernels that the driver would look up.

    Returns:
        The needs; fewer if there are not so many candidates.
    """
    linkable = [one for one in candidates if one.element.kind is ElementKind.LTO_IR]
    asked = [one for one in candidates if one.kernel is not None]
    taken: dict[str, tuple[Span, ...]] = {}
    needs: list[Need] = []
    for count, group, kinds in (
        (hidden, candidates, (_MAPPING, _MEMORY)),
        (lto_ir, linkable, (_LTO_IR,)),
        (ordinary, asked, (_ORDINARY,)),
    ):
        end = len(needs) + count
        for one in chance.sample(group, len(group)):
            if len(needs) == end:
                break
            kind = kinds[len(needs) % len(kinds)]
            if kind != _ORDINARY and one.element.kind is ElementKind.LTO_IR:
                kind = _LTO_IR
            elif kind == _MEMORY and one.takes_long:
                kind = _MAPPING
            pages, others = one.pages(kind), taken.get(one.library, ())
            if not any(intersection(pages, others)):
                taken[one.library] = union([*others, *pages])
                needs.append(_need(len(needs), kind, one))
    return needs


def _need(number: int, kind: str, candidate: Candidate) -> Need:
    element, region = candidate.element, candidate.region
    start = element.payload.start
    return Need(
        number=number,
        kind=kind,
        library=candidate.library,
        offset=start,
        size=element.payload.size,
        address=candidate.address,
        header_size=0 if region is None else start - element.header_offset,
        region=None if region is None else region.start,
        region_address=candidate.address - (0 if region is None else start - region.start),
        kernel=candidate.kernel,
        arch=candidate.arch,
        element_kind=element.kind.value,
        element_arch=str(element.arch),
        packed=element.compression is not Compression.NONE,
        reason=candidate.reason,
    )


def read_armed(verification: Run) -> dict[bytes, tuple[Span, ...]]:
    """By SHA-256 of the original: file offsets of its armed pages; see ``verifying.tripwire``."""
    path = verification.armed_file
    data = path.read_bytes() if path.exists() else b""
    armed = {}
    at = data.find(MAGIC)
    while at >= 0:
        note = unpack_note(data[at:], str(path), at)
        holes = ((hole.offset, hole.offset + hole.end - hole.start) for hole in note.holes)
        armed[note.original] = union(holes)
        at = data.find(MAGIC, at + 1)
    return armed


def witnesses(need: Need, verdict: Verdict) -> list[str]:
    """What of a verdict speaks of a need."""
    found = []
    for work in verdict.needs:
        if work.witness is Witness.TOUCHED and work.library == need.library and work.image:
            image = int(work.image, 16)
            if image == need.offset:
                found.append("tripwire: element")
            elif image == need.region:
                found.append("tripwire: region")
        elif work.nodeid == need.nodeid:
            is_refused = work.witness is Witness.REFUSED
            found.append(f"driver: {work.note}" if is_refused else work.witness.value)
    found += ["outcome" for t in verdict.differences if t.nodeid == need.nodeid]
    return sorted(found)


def healed_by(need: Need, verdict: Verdict) -> str | None:
    """The evidence by which healing gave the element back; None: it didn't."""
    healed = (one for one in verdict.needs if one.is_healed and one.library == need.library)
    found = (one for one in healed if any(span.start == need.offset for span in one.spans))
    return next((one.witness.value for one in found), None)


class Trial:
    """A copy of a suite with planted needs, and the sessions in it.

    Args:
        suite: the folder of the suite, which stays as it is.
        folder: for the copy, its runs and the copies of libraries; about as large as these.
        logs: for what is left in the end.
        tests: of the suite, as pytest takes them.
    """

    def __init__(self, suite: Path, folder: Path, logs: Path, tests: Sequence[str]) -> None:
        self.folder = folder / "suite"
        self.runs = RunsFolder((folder / "runs").resolve())
        self._logs = logs.resolve()
        self._tests = (*tests, _TESTS)
        ignored = shutil.ignore_patterns(".negativa", ".pytest_cache", "__pycache__")
        shutil.copytree(suite, self.folder, ignore=ignored, symlinks=True)
        for file in _SUITE_FILES.glob("*.py"):
            if not (self.folder / file.name).exists():
                shutil.copy(file, self.folder)
        self._logs.mkdir(parents=True, exist_ok=True)
        for name in ("needs.log", "commands.log"):
            (self._logs / name).write_text("")

    @property
    def run(self) -> Run:
        """The traced run."""
        return Run(self.runs.latest.resolve())

    def plant(self, count: int, needs: Iterable[Need]) -> None:
        """Write what the tests do on copies; ``count`` is the number of tests."""
        planted: Mapping[str, Any] = {
            "count": count,
            "copies": str(self.runs.copies),
            "log": str(self._logs / "needs.log"),
            "needs": [asdict(need) for need in needs],
        }
        (self.folder / "planted_needs.json").write_text(json.dumps(planted, indent=1))

    def session(self, *flags: str) -> float:
        """Run pytest with flags, whatever its status; returns seconds."""
        command = [sys.executable, "-m", "pytest", "-q", *flags, *self._tests]
        environ = {**os.environ, "NEGATIVA_DIR": str(self.runs.folder)}
        begin = time.monotonic()
        with (self._logs / "commands.log").open("a") as log:
            log.write(f"$ pytest {' '.join(command[3:])}\n")
            log.flush()
            done = subprocess.run(
                command, cwd=self.folder, env=environ, stdout=log, stderr=subprocess.STDOUT
            )
            seconds = time.monotonic() - begin
            log.write(f"status {done.returncode}, {seconds:.1f} s\n\n")
        print(f"pytest {' '.join(flags)}: status {done.returncode}, {seconds:.1f} s", flush=True)
        return seconds

    def verdict(self) -> Verdict:
        """The last verdict."""
        verdict = load_verdict(self.run)
        if verdict is None:
            raise SystemExit(f"no verdict in {self.run}; see {self._logs / 'commands.log'}")
        return verdict

    def armed(self, planned: Iterable[AnalyzedLibrary]) -> dict[str, tuple[Span, ...]]:
        """By real path: file offsets of the armed pages of the last verification."""
        armed = read_armed(Run(max((self.run.folder / "verify").iterdir())))
        libraries = (one.plan.library for one in planned)
        return {
            library.path: armed.get(bytes.fromhex(library.sha256 or ""), ())
            for library in libraries
        }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the needs one by one, and by kind and witness."""
    print(
        tabulate(
            [
                [
                    row["number"],
                    row["kind"],
                    f"{Path(row['library']).name} {row['offset']:#x}",
                    f"{row['element_arch']} {row['element_kind']}",
                    row["size"],
                    row["armed_bytes"],
                    "; ".join(row["witnesses"]) or "nothing",
                    row["healed"] or "-",
                ]
                for row in rows
            ],
            ["need", "kind", "element", "of", "bytes", "armed", "seen by", "healed"],
        )
    )
    counts = Counter((row["kind"], _armed_label(row), _seen_label(row)) for row in rows)
    healed = Counter(
        (row["kind"], _armed_label(row), _seen_label(row)) for row in rows if row["healed"]
    )
    print()
    print(
        tabulate(
            [[*key, count, healed[key]] for key, count in sorted(counts.items())],
            ["kind", "page", "seen by", "needs", "healed"],
        )
    )


def _armed_label(row: Mapping[str, Any]) -> str:
    return "armed" if row["armed_bytes"] else "none armed"


def _seen_label(row: Mapping[str, Any]) -> str:
    if not row["made"]:
        return "not made"
    # Where the driver refused it stands in the list of needs.
    names = {re.sub("^driver: .*", "driver", witness) for witness in row["witnesses"]}
    return ", ".join(sorted(names)) or "nothing"


def _made(log: Path) -> set[int]:
    """Numbers of the needs that were made on copies."""
    words = (line.split() for line in log.read_text().splitlines() if line.endswith(": begins"))
    return {int(line[line.index("need") + 1]) for line in words}


def _summary(
    rows: Sequence[Mapping[str, Any]], proof: Verdict, healing: Verdict | None
) -> Iterator[str]:
    hidden = [row for row in rows if row["kind"] != _ORDINARY and row["made"]]
    armed = [row for row in hidden if row["armed_bytes"]]
    seen = [row for row in armed if any(w.startswith("tripwire") for w in row["witnesses"])]
    healed = [row for row in armed if row["healed"]]
    yield (
        f"hidden needs with an armed page: {len(seen)} of {len(armed)} seen by the tripwire, "
        f"{len(healed)} healed"
    )
    others = [row for row in hidden if not row["armed_bytes"]]
    seen = [row for row in others if row["witnesses"]]
    yield f"hidden needs without one: {len(seen)} of {len(others)} seen by any witness"
    asked = [row for row in rows if row["kind"] == _ORDINARY and row["made"]]
    seen = [row for row in asked if any(w.startswith("driver") for w in row["witnesses"])]
    yield f"ordinary needs: {len(seen)} of {len(asked)} refused by the driver's word"
    missing = [row["number"] for row in rows if not row["made"]]
    if missing:
        yield f"not made, see needs.log: {missing}"
    for label, verdict in (("proof", proof), ("healing", healing)):
        if verdict is None:
            continue
        rounds = Counter(facts.kind for facts in verdict.rounds)
        starts = ", ".join(f"{count} {kind}" for kind, count in sorted(rounds.items()))
        yield f"{label}: {'PROVED' if verdict.proved else 'NOT PROVED'}; rounds: {starts}"
        yield from (f"  {reason[:300]}" for reason in verdict.reasons[:_PRINTED_REASONS])


def main() -> None:
    """Trace, draw, prove, heal, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", type=Path)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--hidden", type=int, default=20, help="needs that no driver call shows")
    parser.add_argument("--lto-ir", type=int, default=3, help="more of these, of LTO-IR alone")
    parser.add_argument("--ordinary", type=int, default=20, help="kernels to ask for")
    parser.add_argument("--tests", nargs="+", default=["tests/test_math.py"], help="by path")
    arguments = parser.parse_args()
    count = arguments.hidden + arguments.lto_ir + arguments.ordinary
    print(f"seed {arguments.seed}")
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(arguments.suite, Path(folder), arguments.logs, arguments.tests)
        trial.plant(count, ())
        seconds = {"trace": trial.session("--negativa")}
        planned = load_planned(trial.run)
        candidates = [*find_candidates(planned)]
        needs = draw(
            candidates,
            random.Random(arguments.seed),
            hidden=arguments.hidden,
            lto_ir=arguments.lto_ir,
            ordinary=arguments.ordinary,
        )
        trial.plant(count, needs)
        seconds["proof"] = trial.session("--negativa-verify")
        proof, armed = trial.verdict(), trial.armed(planned)
        kinds = Counter(_kind_and_page(one, armed) for one in candidates)
        print(f"{len(candidates):,} removed elements in {len(planned)} libraries: {dict(kinds)}")
        record = {
            "seed": arguments.seed,
            "tests": arguments.tests,
            "seconds": seconds,
            "removed_elements": dict(kinds),
        }
        made = _made(arguments.logs / "needs.log")
        # Also written before the healing: who has little time has half of the answer.
        _finish(arguments.logs, record, [_row(n, armed, made, proof, None) for n in needs], proof)
        seconds["healing"] = trial.session("--negativa-heal")
        healing = trial.verdict()
    rows = [_row(need, armed, made, proof, healing) for need in needs]
    show(rows)
    _finish(arguments.logs, record, rows, proof, healing)


def _kind_and_page(candidate: Candidate, armed: Mapping[str, Sequence[Span]]) -> str:
    holes = armed.get(candidate.library, ())
    is_armed = any(intersection([candidate.element.payload], holes))
    return f"{candidate.element.kind.value}, {'' if is_armed else 'not '}armed"


def _row(
    need: Need,
    armed: Mapping[str, Sequence[Span]],
    made: Collection[int],
    proof: Verdict,
    healing: Verdict | None,
) -> dict[str, Any]:
    return {
        **asdict(need),
        "armed_bytes": size(intersection([need.read_span], armed.get(need.library, ()))),
        "made": need.number in made,
        "witnesses": witnesses(need, proof),
        "healed": None if healing is None else healed_by(need, healing),
    }


def _finish(
    logs: Path,
    record: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    proof: Verdict,
    healing: Verdict | None = None,
) -> None:
    """Print the sums, and write ``needs.json``."""
    print(*_summary(rows, proof, healing), sep="\n", flush=True)
    facts = {"proof": _facts(proof), "healing": None if healing is None else _facts(healing)}
    text = json.dumps({**record, "needs": rows, **facts}, indent=1)
    (logs / "needs.json").write_text(text)


def _facts(verdict: Verdict) -> dict[str, Any]:
    return {
        "proved": verdict.proved,
        "reasons": verdict.reasons,
        "rounds": [f"{r.name}: {r.tests} tests, {r.seconds:.1f} s" for r in verdict.rounds],
        "differences": [f"{t.nodeid}: {t.before} -> {t.after}" for t in verdict.differences],
        "work": [f"{work.witness.value}: {work.detail}" for work in verdict.needs],
        "watched_bytes": {
            row.path: [row.watched_bytes, row.unused_bytes] for row in verdict.libraries
        },
    }


if __name__ == "__main__":
    main()
