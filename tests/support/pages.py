"""The data of an HTML report, read a second time: the page's own script is another reader."""

from __future__ import annotations

import base64
import json
import re
import zlib
from itertools import accumulate
from pathlib import Path
from typing import Any


def read_page(path: Path) -> dict[str, Any]:
    """The data of a page; see ``unpacked``."""
    (data,) = re.findall(r'<script[^>]* id="data">([^<]*)</script>', path.read_text())
    return unpacked(base64.b64decode(data))


def unpacked(data: bytes) -> dict[str, Any]:
    """The packed data, with the names and values of each table's columns."""
    found: dict[str, Any] = json.loads(zlib.decompress(data))
    for name, columns in found["tables"].items():
        found["tables"][name] = [(key, tuple(accumulate(steps))) for key, steps in columns.items()]
    return found
