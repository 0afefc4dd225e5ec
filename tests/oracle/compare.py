"""Recorded results: their files, and what differs from them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

RECORDED = Path(__file__).parent / "recorded"
_WIDTH = 100
_CELL = 60
_ABSENT = "-"


class Difference(NamedTuple):
    """A value that is not as recorded; ``field`` leads to it."""

    case: str
    field: str
    recorded: str
    now: str


def load(case: str) -> Any:
    path = RECORDED / f"{case}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def save(case: str, value: Any) -> None:
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{case}.json").write_text("".join(_dumped(value)) + "\n", "utf-8")


def _dumped(value: Any, indent: int = 0) -> Iterator[str]:
    """JSON with sorted keys, and what fits on one line on one line."""
    line = json.dumps(value, ensure_ascii=False, sort_keys=True)
    if len(line) + indent <= _WIDTH or not isinstance(value, (dict, list)) or not value:
        yield line
        return
    rows: list[tuple[str, Any]]
    if isinstance(value, dict):
        rows = [(f"{json.dumps(key, ensure_ascii=False)}: ", value[key]) for key in sorted(value)]
        ends = "{}"
    else:
        rows, ends = [("", one) for one in value], "[]"
    yield ends[0]
    for number, (key, one) in enumerate(rows):
        yield f"{',' if number else ''}\n{' ' * (indent + 1)}{key}"
        yield from _dumped(one, indent + 1)
    yield f"\n{' ' * indent}{ends[1]}"


def differences(case: str, recorded: Any, now: Any, field: str = "") -> Iterator[Difference]:
    """What differs, value by value; lists are aligned, so that an added row is one difference."""
    if recorded == now:
        return
    if isinstance(recorded, dict) and isinstance(now, dict):
        for key in sorted(recorded.keys() | now.keys()):
            yield from differences(
                case,
                recorded.get(key, _ABSENT),
                now.get(key, _ABSENT),
                f"{field} > {key}" if field else key,
            )
    elif isinstance(recorded, list) and isinstance(now, list):
        yield from _rows(case, recorded, now, field)
    else:
        yield Difference(case, field, _shown(recorded), _shown(now))


def _rows(case: str, recorded: list[Any], now: list[Any], field: str) -> Iterator[Difference]:
    before, after = ([json.dumps(row, sort_keys=True) for row in rows] for rows in (recorded, now))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for _, a, b, c, d in (code for code in matcher.get_opcodes() if code[0] != "equal"):
        for number in range(max(b - a, d - c)):
            old = recorded[a + number] if a + number < b else _ABSENT
            new = now[c + number] if c + number < d else _ABSENT
            yield from differences(case, old, new, f"{field}[{c + number}]")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def table(rows: list[Difference], most: int) -> str:
    """The differences, at most ``most`` of each case."""
    lines = []
    by_case: dict[str, list[Difference]] = {}
    for row in rows:
        by_case.setdefault(row.case, []).append(row)
    for case, found in by_case.items():
        lines.append(f"{case}: {len(found)} difference{'s' * (len(found) != 1)}")
        for row in found[:most] if most else found:
            recorded, now = _excerpts(row.recorded, row.now)
            lines += [f"  {row.field}", f"    recorded  {recorded}", f"    now       {now}"]
        if most and len(found) > most:
            lines.append(f"  ... and {len(found) - most} more (--all)")
    return "\n".join(lines)


def _excerpts(recorded: str, now: str) -> tuple[str, str]:
    """Two texts from a little before their first difference on."""
    same = next((i for i, (a, b) in enumerate(zip(recorded, now, strict=False)) if a != b), 0)
    start = max(0, same - _CELL) if max(len(recorded), len(now)) > 2 * _CELL else 0
    head = "..." if start else ""
    return tuple(head + _cut(text[start:]) for text in (recorded, now))  # type: ignore[return-value]


def _cut(text: str) -> str:
    return text if len(text) <= 2 * _CELL else text[: 2 * _CELL] + "..."
