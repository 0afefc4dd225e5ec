"""CSV as RECORD files have it: rows with their places in the text.

Python's own reader takes no field of more than 131,072 characters, unless the limit is changed for
the whole process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_LINE = re.compile(r"([^\r\n]*)(?:\r\n?|\n|\Z)")
# As the csv module reads it: quotes count at the start of a field only, a quote in a quoted field
# is doubled, what follows the closing one belongs to the field, and the end of the text closes it.
_FIELD = re.compile(r'(?:"([^"]*(?:""[^"]*)*)(?:"|\Z))?([^,\r\n]*)(,|\r\n?|\n|\Z)')


def iter_rows(text: str) -> Iterator[tuple[int, int, list[str]]]:
    """Start and end of each row, with its line break, and its fields; an empty line has none."""
    start = 0
    while start < len(text):
        line = _LINE.match(text, start)
        assert line is not None
        content, end = line[1], line.end()
        if '"' not in content:
            yield start, end, content.split(",") if content else []
        else:
            fields, end = _read_fields(text, start)
            yield start, end, fields
        start = end


def _read_fields(text: str, position: int) -> tuple[list[str], int]:
    fields = []
    separator = ","
    while separator == ",":
        field = _FIELD.match(text, position)
        assert field is not None
        fields.append((field[1] or "").replace('""', '"') + field[2])
        separator, position = field[3], field.end()
    return fields, position
