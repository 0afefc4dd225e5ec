"""Would it pay to unpack only the front of a cubin?

Names need three tables (``.shstrtab``, ``.strtab``, ``.symtab``, and ``.nv.callgraph``), which lie
at the front, and the section table, which says where they are. This prints where they end and
what stops an unpacker that yields bytes in order: the furthest byte that must be reached.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import zstandard
from measuring import print_load

from pytest_negativa.arch import ComputeCapability, ElementKind, choose_elements
from pytest_negativa.gpucode.cubin import section_headers
from pytest_negativa.gpucode.elf_tables import EHDR, SHT_STRTAB, SHT_SYMTAB
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Compression, Scope

SHT_CUDA_CALLGRAPH = 0x70000001
TABLES = (SHT_SYMTAB, SHT_STRTAB, SHT_CUDA_CALLGRAPH)


@dataclass
class Sums:
    """Over all cubins: bytes, and seconds to unpack them whole or up to the last table."""

    cubins: int = 0
    unpacked: int = 0
    front: int = 0
    table_at_end: int = 0
    whole_s: float = 0.0
    front_s: float = 0.0


def front_end(cubin: bytes) -> tuple[int, int]:
    """Where the last table that names need ends, and where the section table starts."""
    ends = [s.file_end for s in section_headers(cubin) if s.sh_type in TABLES]
    return max(ends), EHDR.unpack_from(cubin).e_shoff


def measure(path: Path, device: ComputeCapability, sums: Sums) -> None:
    library_map = read_library(path, Scope(headers_only=True))
    unpacker = zstandard.ZstdDecompressor()
    with path.open("rb") as file:
        for region in library_map.iter_regions():
            for index in choose_elements(region.elements, device):
                element = region.elements[index]
                if (element.kind, element.compression) != (ElementKind.CUBIN, Compression.ZSTD):
                    continue
                file.seek(element.payload.start)
                payload = file.read(element.stored_size)
                start = time.perf_counter()
                cubin = unpacker.decompress(payload, max_output_size=element.unpacked_size)
                sums.whole_s += time.perf_counter() - start
                end, table = front_end(cubin)
                sums.cubins += 1
                sums.unpacked += len(cubin)
                sums.front += end
                sums.table_at_end += table > end
                start = time.perf_counter()
                with unpacker.stream_reader(payload) as reader:
                    reader.read(end)
                sums.front_s += time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("libraries", type=Path, nargs="+")
    parser.add_argument("--arch", default="sm_90")
    arguments = parser.parse_args()
    print_load()
    sums = Sums()
    for path in arguments.libraries:
        measure(path, ComputeCapability.parse(arguments.arch), sums)
    print(
        f"{sums.cubins:,} cubins that are packed with zstd, {sums.unpacked / 1e6:,.0f} MB unpacked"
    )
    print(
        f"section table behind all other tables: {sums.table_at_end:,} of {sums.cubins:,}; "
        f"the other tables end after {100 * sums.front / sums.unpacked:.1f}% of the bytes"
    )
    print(
        f"unpacking whole: {sums.whole_s:.2f} s; the front alone, streaming: {sums.front_s:.2f} s"
    )
    saved = 100 * (1 - sums.front_s / sums.whole_s)
    at_end = 100 * sums.table_at_end / sums.cubins
    print(
        f"conclusion: streaming by itself saves nothing for the {at_end:.1f}% of cubins whose\n"
        "section table comes last, for it must be reached. Taking the places of the front tables\n"
        f"for granted would save {saved:.0f}% of the unpacking, with nothing to check that against."
    )


if __name__ == "__main__":
    main()
