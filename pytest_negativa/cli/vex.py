"""``negativa vex``: code of vulnerabilities that slimmed libraries lack; SOURCE_DATE_EPOCH."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from pathlib import Path

import click

from pytest_negativa.analysis.vex import SearchedLibraries, load_vulnerabilities, make_document
from pytest_negativa.cli.common import EXISTING, PathOrUrl, active_paths, encode_json
from pytest_negativa.errors import OptionError, StoreError
from pytest_negativa.images.archive_kinds import is_wheel
from pytest_negativa.images.layers import is_container
from pytest_negativa.reporting.text import print_warning
from pytest_negativa.slimming.package import unpacked_wheel
from pytest_negativa.storage.urls import Url
from pytest_negativa.storage.user_files import STDOUT, write_output


@click.command()
@click.argument("vulnerabilities", type=EXISTING, metavar="FILE")
@click.argument("paths", nargs=-1, type=EXISTING, metavar="[PATH]...")
@click.option("--author", required=True, metavar="WHO", help="Set the author, who answers for it.")
@click.option("--product", metavar="IRI", help="Set what has the libraries, such as an image.")
@click.option(
    "--original",
    "originals",
    multiple=True,
    type=EXISTING,
    metavar="PATH",
    help="Search the originals of slimmed libraries here, too. Repeatable.",
)
@click.option(
    "-o",
    "--output",
    type=PathOrUrl(path_type=Path),
    default=STDOUT,
    help="Write the document to this file or URL. (default: standard output)",
)
def vex(
    vulnerabilities: Path,
    paths: tuple[Path, ...],
    author: str,
    product: str | None,
    originals: tuple[Path, ...],
    output: Path | Url,
) -> None:
    """State which code of vulnerabilities slimmed libraries lack.

    FILE lists vulnerabilities, such as CVEs, with the kernels and functions in which they lie. PATH
    is a folder, a library or a wheel; by default, the active environment. A
    package is unpacked into a temporary folder; unpack another archive first. The result is an
    OpenVEX document. A library that lacks all of the code is not_affected, because of
    vulnerable_code_not_present. Any other library of the list is under_investigation: what is not
    slimmed, has a spare in reach, or can't be told.

    vex judges no vulnerability. It reads the libraries, and takes FILE's word for where the
    vulnerability lies. SOURCE_DATE_EPOCH sets the time, so that the result is the same again.

    Exit status: 0, or 1 if a file can't be read, or if no library of the list is there.
    """
    listed = load_vulnerabilities(vulnerabilities).vulnerabilities
    findings = []
    with contextlib.ExitStack() as stack:
        libraries = SearchedLibraries(
            [_folder_or_file(path, stack) for path in paths or active_paths()],
            [_folder_or_file(path, stack) for path in originals],
        )
        for one in listed:
            found, missing = tuple(libraries.find(one)), libraries.missing(one)
            findings.append((one, found, not missing))
            for glob in missing:
                print_warning(f"{one.name}: no library here is {glob}; nothing is stated of it")
    if not any(found for _, found, _ in findings):
        raise StoreError(f"{vulnerabilities}: none of the libraries is here")
    document = make_document(findings, author=author, timestamp=_timestamp(), product=product)
    write_output(output, encode_json(document))


def _folder_or_file(path: Path, stack: contextlib.ExitStack) -> Path:
    """The path, or the folder that a wheel is unpacked into until the stack is closed.

    Raises:
        OptionError: it is another archive.
        NegativaError: the wheel can't be read or unpacked.
    """
    if is_wheel(path) and path.is_file():
        return stack.enter_context(unpacked_wheel(path))[0]
    if is_container(path):
        raise OptionError(
            f"{path}: vex reads no archive but wheels; unpack it, and name the folder"
        )
    return path


def _timestamp() -> str:
    """Now, or the time of SOURCE_DATE_EPOCH (reproducible-builds.org)."""
    text = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        seconds = int(text) if text else int(time.time())
        moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        raise OptionError(f"SOURCE_DATE_EPOCH: {text}: expected seconds since 1970") from None
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
