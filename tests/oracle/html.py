"""The data of an HTML report. How the page looks is not compared."""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from typing import Any

from tests.support.pages import unpacked


def html_data(page: str) -> Any:
    """The page's packed data, if it has such, and its text without scripts and styles."""
    data = re.search(r'<script[^>]* id="data">([^<]*)</script>', page)
    text = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    text = re.sub(r"<[^>]*>", "\n", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if data is None:
        return {"text": lines}
    try:
        found = unpacked(base64.b64decode(data[1]))
        for name, columns in found["tables"].items():
            found["tables"][name] = {
                key: [] if key == "milliseconds" else [*rows] for key, rows in columns
            }
    except (ValueError, KeyError, zlib.error, binascii.Error):
        found = {"packed": "otherwise"}
    return {"text": lines, "data": found}
