"""Files have their format first, and files of other formats are refused with the remedy."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from pytest_negativa import models
from pytest_negativa.analysis.vex import load_vulnerabilities
from pytest_negativa.errors import StoreError
from pytest_negativa.models.base import Versioned
from pytest_negativa.models.outcomes import SessionStarted
from pytest_negativa.models.trace import Header
from pytest_negativa.pages.gather import gather, load_files
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.storage.lockfile import load_lock
from pytest_negativa.storage.records import load_map
from pytest_negativa.storage.results import (
    load_baseline,
    load_digests,
    load_healed,
    load_opened,
    load_plans,
    load_report,
    load_tests,
    load_usage,
    load_verdict,
)
from pytest_negativa.storage.runs import Run, digests_in

Load = Callable[[Path], object]

for _module in pkgutil.iter_modules(models.__path__):
    importlib.import_module(f"{models.__name__}.{_module.name}")


def _kinds(base: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


@pytest.mark.parametrize("kind", [*_kinds(Versioned), Header, SessionStarted])
def test_the_format_is_written_first(kind: type[msgspec.Struct]) -> None:
    """In records that leave out defaults, too."""
    record = kind(**dict.fromkeys({*kind.__struct_fields__} - {"format"}, ()))
    written = [row for row in msgspec.to_builtins(record).items() if row[0] != "record"]
    assert written[0] == ("format", 1)


def _of_run(name: str, load: Callable[[Run], object]) -> tuple[str, Load]:
    return name, lambda path: load(Run(path.parents[name.count("/")]))


_RUN = Run(Path("run"))


def _below(path: Path) -> str:
    return str(path.relative_to(_RUN.folder))


@pytest.mark.parametrize(
    ("name", "load", "remedy"),
    [
        (*_of_run(_below(_RUN.usage_file), load_usage), "plan again"),
        (*_of_run(_below(_RUN.plan_dir / "a.json"), load_plans), "plan again"),
        (*_of_run(_below(_RUN.report_file), load_report), "make it again with negativa locate"),
        (*_of_run(_below(_RUN.verdict_file), load_verdict), "verify again"),
        (*_of_run(_below(_RUN.healed_file), load_healed), "remove it, or trace again"),
        (*_of_run(_below(_RUN.opened_file), load_opened), "trace again"),
        (*_of_run(_below(_RUN.combined_tests_file), load_tests), "combine again"),
        (*_of_run(_below(_RUN.page_log_files), load_files), "trace again"),
        (*_of_run(_below(_RUN.host_usage_file), gather), "trace again"),
        (digests_in(Path()).name, lambda path: load_digests(path.parent), "and trace again"),
        ("map.json", load_map, "make the map again"),
        ("baseline.json", load_baseline, "write it again (negativa report baseline:FILE)"),
        ("negativa.lock", load_lock, "make it again with negativa lock"),
        ("list.yaml", load_vulnerabilities, "negativa schema vulnerabilities describes one"),
        ("negativa-slim.json", lambda path: load_manifest(path.parent), "use the release"),
    ],
)
def test_an_old_file_is_refused(name: str, load: Load, remedy: str, tmp_path: Path) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"format_version": 1}')
    with pytest.raises(StoreError, match=r"format none, this|lacks the key .format") as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert remedy in str(caught.value)
