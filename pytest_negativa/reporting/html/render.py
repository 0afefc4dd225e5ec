"""The HTML report as one file: template, style, scripts, data, Content-Security-Policy.

The page loads nothing. Its Content-Security-Policy allows the script and the style by their hashes,
and nothing else (CSP Level 3, "Usage of hash sources").
"""

from __future__ import annotations

import base64
import hashlib
import html
from importlib import resources

from pytest_negativa.models.analysis import ReportContents
from pytest_negativa.reporting.html.pack import pack
from pytest_negativa.reporting.html.page import build_page
from pytest_negativa.reporting.rows import describe_unused

_SCRIPTS = ("data.js", "view.js", "treemap.js", "table.js", "pages.js", "main.js")


def render_html(contents: ReportContents) -> bytes:
    """The report as one HTML file, which needs no network."""
    style = _asset("style.css")
    script = '"use strict";\n' + "\n".join(map(_asset, _SCRIPTS))
    values = {
        "policy": (
            f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        ),
        "style": style,
        "script": script,
        "summary": html.escape(describe_unused(contents.report)),
        "origin": html.escape(
            f"Run {contents.report.run_id}, made by pytest-negativa. All data is inside this file."
        ),
        "data": base64.b64encode(pack(build_page(contents))).decode(),
    }
    # In one pass over the template: a value may hold what looks like a place for another.
    first, *rest = _asset("page.html").split("{{")
    parts = (part.partition("}}") for part in rest)
    return (first + "".join(values[name] + text for name, _, text in parts)).encode()


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
