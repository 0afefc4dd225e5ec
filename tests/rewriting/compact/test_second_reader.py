"""The rows of the second reader against those of pyelftools."""

from __future__ import annotations

from pathlib import Path

import pytest
from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile

from pytest_negativa.gpucode.elf import HostSection
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.rewriting.compact.second_reader import read_again
from tests.support.libraries import BIN


@pytest.mark.parametrize("library", sorted(BIN.glob("*.so")), ids=lambda path: path.stem)
def test_sections_are_those_of_pyelftools(library: Path) -> None:
    with library.open("rb") as stream:
        expected = tuple(
            HostSection(
                section.name,
                section["sh_offset"],
                section["sh_size"],
                section["sh_addr"],
                bool(section["sh_flags"] & SH_FLAGS.SHF_EXECINSTR),
            )
            for section in ELFFile(stream).iter_sections()
            if section["sh_flags"] & SH_FLAGS.SHF_ALLOC and section["sh_type"] != "SHT_NOBITS"
        )
    assert expected
    with ByteSource(library) as source:
        assert read_again(source).sections == expected
