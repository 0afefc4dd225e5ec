"""YAML to plain values with places; negativa.yaml and negativa.lock have tests of their own."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_negativa.storage.yaml_document import Node, Position, parse_document


def parse(text: str) -> Node:
    root = parse_document(text.encode())
    assert root is not None
    return root


# PyYAML loses line ends and control characters that are not ASCII.
TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=8)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | TEXT
    | st.from_regex(r"[0-9.e]+", fullmatch=True),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(PLAIN)
@example("08")
def test_what_pyyaml_writes_is_read_as_it_was(value: Any) -> None:
    text = yaml.safe_dump(value, allow_unicode=True, sort_keys=False)
    assert parse(text).plain() == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("no", "no"),
        ("~", None),
        ("true", True),
        ("True", "True"),
        ("0x1F", 31),
        ("-12", -12),
        ("08", "08"),
        ("12.50", 12.5),
        ("1e5", "1e5"),
        ("1_000", "1_000"),
        ("'12'", "12"),
        ("|\n  12", "12"),
        ("2001-01-01", "2001-01-01"),
        ("9" * 31, "9" * 31),
    ],
)
def test_plain_words(text: str, value: object) -> None:
    found = parse(text).plain()
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_nothing(text: str) -> None:
    assert parse_document(text.encode()) is None


def test_places() -> None:
    root = parse("a:\n  b: [x,\n    y]\n")
    assert root.nearest(("a", "b")).key_place == Position(2, 3)
    assert root.nearest(("a", "b", 1)).place == Position(3, 5)
    # The path ends at what is there.
    assert root.nearest(("a", "b", 7, "c")).plain() == ["x", "y"]
    assert root.nearest(("z",)) is root
