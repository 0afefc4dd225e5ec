"""JSON Schemas of the files and outputs (``negativa schema``), made from their records."""

from __future__ import annotations

import inspect
from importlib import resources
from typing import Any

import msgspec

from pytest_negativa.arch import SmArch
from pytest_negativa.models.base import Listing, Record
from pytest_negativa.models.difference import Difference
from pytest_negativa.models.image import ImageReport
from pytest_negativa.models.library import LibraryMap
from pytest_negativa.models.listing import (
    LibraryKernels,
    ListedTest,
    MachineFact,
    MissedLibrary,
    NeedList,
    RunRow,
    SimilarPair,
)
from pytest_negativa.models.lock import Lock
from pytest_negativa.models.measurement import Measurement
from pytest_negativa.models.pages import HostReport
from pytest_negativa.models.report import RunReport
from pytest_negativa.models.slimming import SlimRow
from pytest_negativa.models.summary import Inspection
from pytest_negativa.models.verdict import Verdict
from pytest_negativa.models.vex import Vulnerabilities

CONFIGURATION = "negativa"
"""The schema of ``negativa.yaml``, a file of the package: editors read it from there."""

_RECORDS: dict[str, tuple[type[Record], str]] = {
    "difference": (Difference, "Output of negativa diff --json"),
    "doctor": (Listing[MachineFact], "Output of negativa doctor --json"),
    "inspection": (Inspection, "Output of negativa inspect --json"),
    "kernels": (Listing[LibraryKernels], "Output of negativa kernels --json"),
    "library-map": (LibraryMap, "Map of the GPU code in a library"),
    "lock": (Lock, "negativa.lock"),
    "measurement": (Measurement, "A program on original and on slim libraries"),
    "misses": (Listing[MissedLibrary], "Output of negativa misses --json"),
    "needs": (NeedList, "Output of negativa needs --json"),
    "packages": (ImageReport, "Output of negativa inspect --packages --json"),
    "pages": (HostReport, "Output of negativa pages --json"),
    "report": (RunReport, "Report of a run"),
    "runs": (Listing[RunRow], "Output of negativa runs --json"),
    "similarity": (Listing[SimilarPair], "Output of negativa tests --similar --json"),
    "slim": (Listing[SlimRow], "Output of negativa slim, slim undo and slim check with --json"),
    "tests": (Listing[ListedTest], "Output of negativa tests --json"),
    "verdict": (Verdict, "Verdict on a plan: verdict.json"),
    "vulnerabilities": (Vulnerabilities, "List of vulnerabilities for negativa vex"),
}

SCHEMA_NAMES = tuple(sorted((*_RECORDS, CONFIGURATION)))
"""The formats that have a schema."""


def schema_text(name: str) -> str:
    """The schema of a format as JSON; ``name`` is one of ``SCHEMA_NAMES``."""
    if name == CONFIGURATION:
        file = resources.files(__package__) / "schemas" / "negativa.schema.json"
        return file.read_text("utf-8")
    record, title = _RECORDS[name]
    schema = msgspec.json.schema(record, schema_hook=_schema_hook)
    for definition in schema["$defs"].values():
        # Up to Python 3.12 docstrings have the indentation of the source.
        if "description" in definition:
            definition["description"] = inspect.cleandoc(definition["description"])
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return msgspec.json.format(msgspec.json.encode(head | schema), indent=1).decode() + "\n"


def _schema_hook(wanted: type) -> dict[str, Any]:
    # The one type of our records that msgspec does not know.
    assert wanted is SmArch, wanted
    return {"type": "string", "pattern": r"^sm_\d{2,}[af]?$"}
