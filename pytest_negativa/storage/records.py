"""Models to JSON and back: encoding, format versions, schemas.

The first key of each JSON file is ``format_version``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pytest_negativa.arch import SmArch
from pytest_negativa.errors import OptionError, StoreError
from pytest_negativa.models.base import UNDECODABLE
from pytest_negativa.storage.atomic import write_atomically

_T = TypeVar("_T")

_SCHEMA_SUFFIX = ".schema.json"


def utf8(text: str) -> str:
    """A text that JSON can hold: file names on Linux may be any bytes, and JSON is UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def encode_hook(value: Any) -> Any:
    """Encode the types that msgspec does not know."""
    if isinstance(value, SmArch):
        return str(value)
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def decode_hook(wanted: type, value: Any) -> Any:
    """Decode what ``encode_hook`` encoded."""
    if wanted is SmArch:
        if not isinstance(value, str):
            raise ValueError(f"expected an SM arch like sm_90, got {type(value).__name__}")
        try:
            return SmArch.parse(value)
        except OptionError as e:
            raise ValueError(str(e)) from None
    raise NotImplementedError(f"cannot decode {wanted.__name__}")


class _Versioned(msgspec.Struct):
    format_version: int


_VERSION_DECODER = msgspec.json.Decoder(_Versioned)


def decode_versioned(
    data: bytes, kind: type[_T], version: int, *, origin: str, what: str, remedy: str
) -> _T:
    """A record from JSON.

    The version is checked before the rest, which another release may have in any other form.

    Args:
        version: the ``format_version`` that this release reads.
        origin: where the JSON is from, for messages.
        what: what it should be, for messages: ``a plan``.
        remedy: what to do about another version.

    Raises:
        StoreError: it is something else, or of another version.
    """
    try:
        found = _VERSION_DECODER.decode(data).format_version
        if found != version:
            raise StoreError(
                f"{origin}: format_version {found}, this release reads {version}; {remedy}"
            )
        return msgspec.json.decode(data, type=kind, dec_hook=decode_hook)
    except (*UNDECODABLE, ValueError) as e:
        raise StoreError(f"{origin}: not {what} of this release: {e}") from e


def write_record(path: Path, record: object, *, indent: int = 0) -> None:
    """Write a record or plain value as JSON.

    Raises:
        StoreError: it can't be written.
    """
    data = msgspec.json.encode(record, enc_hook=encode_hook)
    write_atomically(path, msgspec.json.format(data, indent=indent) if indent else data)


def map_schema() -> dict[str, Any]:
    """JSON Schema of the map file."""
    from pytest_negativa.models.library import LibraryMap

    return _schema(LibraryMap, "Map of the GPU code in a library")


def inspection_schema() -> dict[str, Any]:
    """JSON Schema of what ``negativa inspect --json`` prints."""
    from pytest_negativa.models.summary import Inspection

    return _schema(Inspection, "Output of negativa inspect --json")


def measurement_schema() -> dict[str, Any]:
    """JSON Schema of the measurement file."""
    from pytest_negativa.models.measurement import Measurement

    return _schema(Measurement, "A program on original and on slim libraries")


def image_report_schema() -> dict[str, Any]:
    """JSON Schema of what ``negativa inspect --packages --json`` prints."""
    from pytest_negativa.models.image import ImageReport

    return _schema(ImageReport, "Output of negativa inspect --packages --json")


def lock_schema() -> dict[str, Any]:
    """JSON Schema of ``negativa.lock``, once its YAML is read."""
    # Its records take 10 ms to import; negativa inspect does without them.
    from pytest_negativa.models.lock import Lock

    return _schema(Lock, "negativa.lock")


def report_schema() -> dict[str, Any]:
    """JSON Schema of the report ``json``, which is ``report.json`` of a run."""
    from pytest_negativa.models.report import RunReport

    return _schema(RunReport, "Report of a run")


def listing_schemas() -> dict[str, dict[str, Any]]:
    """JSON Schemas of what commands print with ``--json``, by name."""
    from pytest_negativa.models.listing import (
        DifferenceList,
        Explanation,
        HistoryList,
        KernelList,
        NeedList,
        RunDetails,
        RunList,
        SimilarityList,
        SlimList,
        TestList,
    )

    return {
        "kernels": _schema(KernelList, "Output of negativa kernels --json"),
        "tests": _schema(TestList, "Output of negativa tests --json"),
        "similarity": _schema(SimilarityList, "Output of negativa tests --similar --json"),
        "needs": _schema(NeedList, "Output of negativa needs --json"),
        "difference": _schema(DifferenceList, "Output of negativa diff --json"),
        "history": _schema(HistoryList, "Output of negativa diff --json without B"),
        "runs": _schema(RunList, "Output of negativa runs list --json"),
        "run": _schema(RunDetails, "Output of negativa runs show --json"),
        "slim": _schema(SlimList, "Output of negativa slim, slim undo and slim check with --json"),
        "explanation": _schema(Explanation, "Output of negativa explain --json"),
    }


def verdict_schema() -> dict[str, Any]:
    """JSON Schema of ``verdict.json``."""
    from pytest_negativa.models.verdict import Verdict

    return _schema(Verdict, "Verdict on a plan: verdict.json")


def pages_schema() -> dict[str, Any]:
    """JSON Schema of what ``negativa pages --json`` prints."""
    from pytest_negativa.models.hostcode import HostReport

    return _schema(HostReport, "Output of negativa pages --json")


def misses_schema() -> dict[str, Any]:
    """JSON Schema of what ``negativa misses --json`` prints."""
    from pytest_negativa.models.misses import MissReport

    return _schema(MissReport, "Output of negativa misses --json")


def vulnerabilities_schema() -> dict[str, Any]:
    """JSON Schema of the list that ``negativa vex`` reads, once its YAML is read."""
    from pytest_negativa.models.vex import Vulnerabilities

    return _schema(Vulnerabilities, "List of vulnerabilities for negativa vex")


def _schema(model: type, title: str) -> dict[str, Any]:
    # Takes 10 ms to import, and only who makes schemas needs it.
    import inspect

    schema = msgspec.json.schema(model, schema_hook=_schema_hook)
    for definition in schema["$defs"].values():
        # Up to Python 3.12 docstrings have the indentation of the source.
        if "description" in definition:
            definition["description"] = inspect.cleandoc(definition["description"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **schema,
    }


def schema_text(schema: dict[str, Any]) -> str:
    """A schema as its file has it."""
    return msgspec.json.format(msgspec.json.encode(schema), indent=1).decode() + "\n"


def schema_names() -> tuple[str, ...]:
    """The formats whose schemas this release ships."""
    folder = Path(__file__).parent / "schemas"
    found = folder.glob(f"*{_SCHEMA_SUFFIX}")
    return tuple(sorted(path.name.removesuffix(_SCHEMA_SUFFIX) for path in found))


def shipped_schema(name: str) -> str:
    """The text of a schema in ``schemas/``; ``name`` is one of ``schema_names``."""
    return (Path(__file__).parent / "schemas" / f"{name}{_SCHEMA_SUFFIX}").read_text("utf-8")


def _schema_hook(wanted: type) -> dict[str, Any]:
    if wanted is SmArch:
        return {"type": "string", "pattern": r"^sm_\d{2,}[af]?$"}
    raise NotImplementedError(f"no schema for {wanted.__name__}")


if __name__ == "__main__":
    # python -m pytest_negativa.storage.records writes schemas/ anew; a test compares the two.
    for name, schema in {
        "library-map": map_schema(),
        "inspection": inspection_schema(),
        "measurement": measurement_schema(),
        "image-report": image_report_schema(),
        "lock": lock_schema(),
        "report": report_schema(),
        "verdict": verdict_schema(),
        "pages": pages_schema(),
        "misses": misses_schema(),
        "vulnerabilities": vulnerabilities_schema(),
        **listing_schemas(),
    }.items():
        target = Path(__file__).parent / "schemas" / f"{name}{_SCHEMA_SUFFIX}"
        target.write_text(schema_text(schema), encoding="utf-8")
