"""Compute capabilities, SM archs, GPU names, and the driver's choice of code for a device.

A *device* has a compute capability (``ComputeCapability(9, 0)``); *code* is built for an SM arch
(``SmArch.parse("sm_90a")``). The two look alike and are two types on purpose. Code for sm_90a does
not run on a device of capability 9.1, and the bare number 90 loses the suffix that decides this.

``planning.decide`` labels code that no device loads
"for other GPUs".
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from pytest_negativa.errors import OptionError, UnknownArch, nearest

_SM_ARCH = r"(?:sm|compute|lto)_(\d+)(\d)([af]?)"
# As people write one: also a bare number, as CMake has it, or a compute capability.
_SPELLED = r"(?:sm|compute|lto)?(\d{1,2})(\d)([af]?)|(\d{1,2})\.(\d)"
# Letters, spaces and makers' words in which the spellings of one arch or GPU differ.
# With the words that drivers add to a name, as in "NVIDIA A100-SXM4-80GB MIG 1g.10gb".
_LOOSE = re.compile(
    r"(?<=90)[\s-]?d\b|\bmig .*|\(nvgpu\)|\b(ac|ls|3e)\b"
    r"|[\s_-]+|nvidia|geforce|tesla|jetson|\b\d+gb?\b|hbm\d\w?|sxm\d?|pcie|nvl\d*|super|laptop gpu"
    r"|generation|blackwell|(server|workstation) edition|with max-q design|max-q"
)


class ElementKind(str, enum.Enum):
    """Kind of the content of an element.

    The numbers in the file are 1 (PTX), 2 (cubin), 8 (LTO-IR) and 128 (Tile IR), see
    ``gpucode.fatbin``. Elements of another number or with unknown flags are unknown. LLVM bitcode
    occurs as a file of its own.
    """

    PTX = "ptx"
    CUBIN = "cubin"
    LTO_IR = "lto-ir"
    TILE_IR = "tile-ir"
    BITCODE = "bitcode"
    UNKNOWN = "unknown"

    @functools.cached_property
    def is_opaque(self) -> bool:
        """Whether no rule tells which devices load it, so that plans keep all of it."""
        return self in (ElementKind.TILE_IR, ElementKind.BITCODE, ElementKind.UNKNOWN)


@dataclass(frozen=True, slots=True, order=True)
class ComputeCapability:
    """The capability of a device, e.g. ``ComputeCapability(9, 0)`` for an H100 or H200."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @classmethod
    def parse(cls, text: str) -> ComputeCapability:
        """Read what ``parse_arch`` reads: ``9.0``, ``sm_90``, ``sm_90a`` and ``H100`` are one.

        Raises:
            OptionError: the text names no compute capability.
        """
        arch = parse_arch(text)
        return cls(arch.major, arch.minor)


_KNOWN = (
    "3.0 3.2 3.5 3.7 5.0 5.2 5.3 6.0 6.1 6.2 7.0 7.2 7.5 8.0 8.6 8.7 8.8 8.9 9.0 10.0 10.1 "
    "10.3 11.0 12.0 12.1"
)
KNOWN_DEVICES = frozenset(
    ComputeCapability(*map(int, capability.split("."))) for capability in _KNOWN.split()
)
"""Compute capabilities of devices. Source: the manuals of nvcc 9 to 13, "GPU Feature List"."""


@functools.total_ordering
class SmArch:
    """The arch that code was built for, e.g. ``sm_80``, ``sm_90a`` or ``sm_120f``.

    No dataclass: msgspec would write its fields, but files should hold ``"sm_90a"``. Equal
    archs may be one object, so nobody sets its attributes.

    Attributes:
        major, minor: 9 and 0 for ``sm_90a``.
        suffix: ``"a"`` (arch-specific), ``"f"`` (family-specific) or empty.
    """

    __slots__ = ("major", "minor", "suffix")

    def __init__(self, major: int, minor: int, suffix: str = "") -> None:
        if suffix not in ("", "a", "f"):
            raise ValueError(f"bad SM arch suffix {suffix!r}")
        self.major = major
        self.minor = minor
        self.suffix = suffix

    def _key(self) -> tuple[int, int, str]:
        return (self.major, self.minor, self.suffix)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SmArch) and self._key() == other._key()

    def __lt__(self, other: SmArch) -> bool:
        return self._key() < other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"SmArch.parse({str(self)!r})"

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}{self.suffix}"

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> SmArch:
        """Read ``sm_90a``.

        Raises:
            OptionError: the text names no SM arch.
        """
        if match := re.fullmatch(_SM_ARCH, text):
            return SmArch(int(match[1]), int(match[2]), match[3])
        raise OptionError(f"{text!r} is no SM arch; expected a form like sm_90 or sm_90a")

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def from_number(number: int, suffix: str = "") -> SmArch:
        """Make an arch from the number in file formats: 90 is sm_90, 120 is sm_120."""
        return SmArch(number // 10, number % 10, suffix)


NO_ARCH = SmArch(0, 0)
"""Of code that states none: Tile IR and LLVM bitcode."""


GPUS: Mapping[str, str] = MappingProxyType(
    {
        "12.1": "GB10, DGX Spark",
        "12.0": "RTX 5090, RTX 5080, RTX 5070 Ti, RTX 5070, RTX 5060 Ti, RTX 5060, RTX 5050, "
        "RTX PRO 6000, RTX PRO 5000, RTX PRO 4500, RTX PRO 4000, RTX PRO 2000",
        "11.0": "T5000, T4000, Thor",
        "10.3": "GB300, B300",
        "10.0": "GB200, B200",
        "9.0": "GH200, H200, H100, H800, H20",
        "8.9": "L4, L40, L40S, L20, L2, RTX 4090, RTX 4080, RTX 4070 Ti, RTX 4070, "
        "RTX 4060 Ti, RTX 4060, RTX 4050, RTX 6000 Ada, RTX 5880 Ada, RTX 5000 Ada, RTX 4500 Ada, "
        "RTX 4000 Ada, RTX 2000 Ada",
        "8.7": "AGX Orin, Orin NX, Orin Nano, Orin",
        "8.6": "A40, A10, A10G, A10M, A16, A2, RTX A6000, RTX A5500, RTX A5000, RTX A4500, "
        "RTX A4000, RTX A3000, RTX A2000, "
        "RTX 3090 Ti, RTX 3090, RTX 3080 Ti, RTX 3080, RTX 3070 Ti, RTX 3070, RTX 3060 Ti, "
        "RTX 3060, RTX 3050",
        "8.0": "A100, A800, A30",
        "7.5": "T4, Quadro RTX 8000, Quadro RTX 6000, Quadro RTX 5000, Quadro RTX 4000, TITAN RTX, "
        "RTX 2080 Ti, RTX 2080, RTX 2070, RTX 2060, GTX 1660 Ti, GTX 1660, GTX 1650, T1000, "
        "T600, T400",
        "7.2": "AGX Xavier, Xavier NX, Xavier",
        "7.0": "V100, Quadro GV100, TITAN V",
        "6.2": "TX2",
        "6.1": "P40, P4, GTX 1080 Ti, GTX 1080, GTX 1070 Ti, GTX 1070, GTX 1060, GTX 1050",
        "6.0": "P100, Quadro GP100",
        "5.3": "Nano",
        "5.2": "M60, M40, GTX 980 Ti, GTX 980, GTX 970, GTX 960, GTX 950",
        "3.7": "K80",
    }
)
"""GPUs by compute capability. Source: NVIDIA's pages "CUDA GPU Compute Capability" and "Legacy".

Names that these leave out, such as A10G, and words around names: the list of GPUs in the README of
NVIDIA's open kernel modules; the first two digits of a device id there are those of the chip.
A name that two capabilities share is left out.
"""
_ARCHS = {f"sm_{device.major}{device.minor}": device for device in sorted(KNOWN_DEVICES)}

_OLDEST = ComputeCapability(7, 5)  # of CUDA 13
ALL_MAJOR = tuple(
    SmArch(device.major, device.minor)
    for device in sorted(KNOWN_DEVICES)
    if device == _OLDEST or (device > _OLDEST and not device.minor)
)
"""Archs that nvcc of the latest known CUDA compiles for with ``-arch=all-major``.

Source: the manual of nvcc, ``--gpu-architecture``: the oldest arch, and the first of each major
version.
"""


def _key(text: str) -> str:
    return _LOOSE.sub("", text.lower())


@functools.cache
def _spellings() -> Mapping[str, tuple[str, str]]:
    """Name and compute capability of each GPU and known arch, by the loose spelling of its name."""
    pairs = [(name, capability) for capability, names in GPUS.items() for name in names.split(", ")]
    pairs += ((arch, str(device)) for arch, device in _ARCHS.items())
    return {_key(name): (name, capability) for name, capability in pairs}


def parse_arch(text: str) -> SmArch:
    """Read an arch as people write one: ``sm_90a``, ``compute_90``, ``90``, ``9.0`` or ``H100``.

    Case, spaces, hyphens and underscores don't matter.

    Raises:
        OptionError: the text names no arch and no GPU.
    """
    key = _key(text)
    known = _spellings()
    match = re.fullmatch(_SPELLED, known[key][1] if key in known else key)
    if match is None:
        digits = (f"sm{key}0", *(name for name in known if name.endswith(key)))
        near = next((name for name in digits if key.isdigit() and name in known), None)
        near = near or nearest(key, known, at_least=0.7)
        hint = f"; did you mean {known[near][0]}?" if near else ""
        raise OptionError(
            f"{text!r} is no GPU architecture; expected a form like sm_90, sm_90a, compute_90, 90 "
            f"or 9.0, a GPU like H100 or RTX 4090, native or all-major{hint}"
        )
    return SmArch(int(match[1] or match[4]), int(match[2] or match[5]), match[3] or "")


def require_known(arch: SmArch) -> SmArch:
    """``arch``, if a GPU has it.

    Arch-specific code exists from sm_90a on, family-specific code from sm_100f on. Source: the PTX
    ISA manual, ``.target``.

    Raises:
        UnknownArch: this release knows no such GPU; the message names the nearest arch.
    """
    has_suffix = arch.major >= {"": 0, "a": 9, "f": 10}[arch.suffix]
    if has_suffix and ComputeCapability(arch.major, arch.minor) in KNOWN_DEVICES:
        return arch
    text = f"sm_{arch.major}{arch.minor}"
    near = f"{text}0" if f"{text}0" in _ARCHS else nearest(text, _ARCHS, at_least=0)
    raise UnknownArch(f"this release knows no GPU of arch {arch}; did you mean {near}?")


def cubin_runs_on(arch: SmArch, device: ComputeCapability) -> bool:
    """Whether machine code built for ``arch`` runs on ``device``.

    CUDA C++ Programming Guide, "Binary Compatibility": binary compatibility holds
    from one minor revision to the next one, but not from one minor revision to the
    previous one or across major revisions. So code for sm_75 runs on no 8.x device,
    though 75 < 80.

    CUDA Programming Guide, "Compute Capabilities", feature sets: arch-specific code (suffix ``a``)
    runs only on devices of exactly that capability. Family-specific code (suffix ``f``) runs on
    that capability and later ones of the same family. The families published so far never span two
    majors (100f: 10.0, 10.3; 110f: 11.0; 120f: 12.0, 12.1). They hold every later minor but for
    10.1, which was a family by itself (101f) until CUDA 13 renamed it to 11.0.
    """
    if arch.major != device.major:
        return False
    alone = arch.suffix == "f" and arch.major == 10 and 1 in (arch.minor, device.minor)
    if arch.suffix == "a" or alone:
        return arch.minor == device.minor
    return arch.minor <= device.minor


def can_be_compiled_for(arch: SmArch, device: ComputeCapability) -> bool:
    """Whether the driver can compile PTX or LTO-IR of ``arch`` for ``device``.

    CUDA C++ Programming Guide, "PTX Compatibility": PTX produced for some compute
    capability can always be compiled to binary code of greater or equal capability,
    across majors; PTX for arch-specific or family-specific features is as limited as
    the machine code would be.
    """
    if arch.suffix:
        return cubin_runs_on(arch, device)
    return (arch.major, arch.minor) <= (device.major, device.minor)


def is_for_any(arch: SmArch, devices: Iterable[ComputeCapability], *, is_ptx: bool) -> bool:
    """Whether machine code or PTX of ``arch`` serves any of the devices."""
    serves = can_be_compiled_for if is_ptx else cubin_runs_on
    return any(serves(arch, device) for device in devices)


class Candidate(Protocol):
    """The facts about an element that the driver's choice depends on."""

    @property
    def kind(self) -> ElementKind: ...
    @property
    def arch(self) -> SmArch: ...


_SUFFIX_RANK = {"": 0, "f": 1, "a": 2}

_COMPILED = (ElementKind.PTX, ElementKind.LTO_IR)


def choose_elements(candidates: Sequence[Candidate], device: ComputeCapability) -> tuple[int, ...]:
    """The driver's choice: indices of the elements of one region that ``device`` loads.

    A cubin that runs on the device wins over code that must be compiled. Of several cubins the
    nearest arch wins, and at the same number the more specific one (``a`` before ``f`` before
    none). Without a cubin that fits, the driver takes the PTX and the LTO-IR nearest to the device.

    The rule can leave a tie: several elements for the same arch, as in relocatable code, or PTX
    beside LTO-IR. Each of them may be needed, so all of them count as loaded. This function never
    chooses elements of an opaque kind; callers keep them.

    Sources: ``cubin_runs_on`` and ``can_be_compiled_for`` for what fits. The choice was compared
    with the cubin that CUPTI reports for every module of a PyTorch 2.11 run on an H200, driver 580.

    Returns:
        The indices; empty if the device can load nothing of the region.
    """
    fitting = [i for i, candidate in enumerate(candidates) if can_load(candidate, device)]
    cubins = [i for i in fitting if candidates[i].kind is ElementKind.CUBIN]
    return _best(candidates, cubins) or _best_to_compile(candidates, fitting)


def may_be_loaded(candidates: Sequence[Candidate], device: ComputeCapability) -> tuple[int, ...]:
    """Indices of what a library that chooses by a rule of its own may load on ``device``.

    That is all machine code that runs there, and the PTX and the LTO-IR nearest to it.
    """
    fitting = [i for i, candidate in enumerate(candidates) if can_load(candidate, device)]
    cubins = [i for i in fitting if candidates[i].kind is ElementKind.CUBIN]
    return (*cubins, *_best_to_compile(candidates, fitting))


def can_be_linked(candidates: Sequence[Candidate], device: ComputeCapability) -> bool:
    """Whether the driver can link a relocatable region anew for ``device``.

    Source: libraries of two objects on an H100, driver 580. The driver linked cubins for the
    device, and PTX, which it compiled first. It took no LTO-IR.
    """
    chosen = choose_elements(candidates, device)
    return any(candidates[index].kind is not ElementKind.LTO_IR for index in chosen)


def can_load(candidate: Candidate, device: ComputeCapability) -> bool:
    """Whether a device can load code, if need be compiled by the driver."""
    if candidate.kind is ElementKind.CUBIN:
        return cubin_runs_on(candidate.arch, device)
    return candidate.kind in _COMPILED and can_be_compiled_for(candidate.arch, device)


def _best_to_compile(candidates: Sequence[Candidate], fitting: Sequence[int]) -> tuple[int, ...]:
    """Of the elements that fit, the PTX and the LTO-IR that are nearest to the device."""
    kinds = ([i for i in fitting if candidates[i].kind is kind] for kind in _COMPILED)
    return tuple(sorted(i for usable in kinds for i in _best(candidates, usable)))


def _best(candidates: Sequence[Candidate], indices: Sequence[int]) -> tuple[int, ...]:
    def rank(index: int) -> tuple[int, int, int]:
        arch = candidates[index].arch
        return (arch.major, arch.minor, _SUFFIX_RANK[arch.suffix])

    best = max(map(rank, indices), default=None)
    return tuple(i for i in indices if rank(i) == best)
