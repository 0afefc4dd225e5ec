from __future__ import annotations

from dataclasses import dataclass

import pytest

from pytest_negativa.arch import (
    ALL_MAJOR,
    GPUS,
    ComputeCapability,
    ElementKind,
    SmArch,
    can_be_compiled_for,
    choose_elements,
    cubin_runs_on,
    parse_arch,
    require_known,
)
from pytest_negativa.errors import OptionError, UnknownArch


@dataclass(frozen=True)
class Code:
    """An element as far as the choice rule looks at it, from text: ``"cubin sm_90a"``."""

    kind: ElementKind
    arch: SmArch


def code(text: str) -> Code:
    kind, arch = text.split()
    return Code(ElementKind(kind), SmArch.parse(arch))


def device(text: str) -> ComputeCapability:
    return ComputeCapability.parse(text)


@pytest.mark.parametrize(
    ("arch", "runs_on", "not_on"),
    [
        ("sm_75", "7.5", "7.2 8.0 8.6 8.9 9.0"),
        ("sm_80", "8.0 8.6 8.7 8.9", "7.5 9.0 10.0"),
        ("sm_86", "8.6 8.7 8.9", "8.0 9.0"),
        ("sm_89", "8.9", "8.0 8.6 8.7 9.0"),
        ("sm_90", "9.0", "8.9 10.0 12.0"),
        ("sm_90a", "9.0", "9.1 10.0 8.9"),
        ("sm_100", "10.0 10.1 10.3", "9.0 11.0 12.0"),
        ("sm_100a", "10.0", "10.1 10.3 11.0 12.0"),
        ("sm_100f", "10.0 10.3", "10.1 9.0 11.0 12.0 12.1"),
        ("sm_101f", "10.1", "10.0 10.3 11.0"),
        ("sm_101a", "10.1", "10.0 10.3 11.0"),
        ("sm_101", "10.1 10.3", "10.0"),
        ("sm_103", "10.3", "10.0 10.1"),
        ("sm_103f", "10.3", "10.0 10.1 12.0"),
        ("sm_103a", "10.3", "10.0"),
        ("sm_110f", "11.0", "10.1 12.0"),
        ("sm_120", "12.0 12.1", "10.0 9.0"),
        ("sm_120f", "12.0 12.1", "10.0 10.3"),
        ("sm_120a", "12.0", "12.1"),
        ("sm_121f", "12.1", "12.0"),
        ("sm_121a", "12.1", "12.0"),
    ],
)
def test_devices_that_a_cubin_runs_on(arch: str, runs_on: str, not_on: str) -> None:
    asked = runs_on.split() + not_on.split()
    assert [d for d in asked if cubin_runs_on(SmArch.parse(arch), device(d))] == runs_on.split()


@pytest.mark.parametrize(
    ("arch", "compiled_for", "not_for"),
    [
        ("compute_75", "7.5 8.0 8.9 9.0 10.0 12.1", "7.2 5.2"),
        ("compute_90", "9.0 10.0 10.3 12.0", "8.9"),
        ("compute_90a", "9.0", "10.0 12.0 8.9"),
        ("compute_100f", "10.0 10.3", "12.0 10.1 9.0"),
        ("compute_120", "12.0 12.1", "10.3"),
        ("lto_80", "8.0 8.6 9.0 12.0", "7.5"),
        ("lto_90a", "9.0", "8.0 10.0"),
    ],
)
def test_devices_that_code_can_be_compiled_for(arch: str, compiled_for: str, not_for: str) -> None:
    asked = compiled_for.split() + not_for.split()
    found = [d for d in asked if can_be_compiled_for(SmArch.parse(arch), device(d))]
    assert found == compiled_for.split()


USUAL = ["cubin sm_75", "cubin sm_80", "cubin sm_86", "cubin sm_90", "ptx sm_90"]
FAMILIES = [
    "cubin sm_90a",
    "cubin sm_100a",
    "cubin sm_100f",
    "cubin sm_103",
    "cubin sm_120a",
    "cubin sm_120f",
    "ptx sm_90a",
    "ptx sm_100f",
]


@pytest.mark.parametrize(
    ("elements", "on", "chosen"),
    [
        pytest.param([], "9.0", [], id="nothing"),
        pytest.param(USUAL, "7.5", ["cubin sm_75"], id="exact"),
        pytest.param(USUAL, "8.0", ["cubin sm_80"], id="exact-not-75"),
        pytest.param(USUAL, "8.9", ["cubin sm_86"], id="nearest-minor"),
        pytest.param(USUAL, "9.0", ["cubin sm_90"], id="cubin-before-ptx"),
        pytest.param(USUAL, "12.0", ["ptx sm_90"], id="ptx-across-majors"),
        pytest.param(USUAL, "7.2", [], id="all-above"),
        pytest.param(["cubin sm_75"], "8.0", [], id="75-never-on-8.0"),
        pytest.param(["cubin sm_75"], "8.9", [], id="75-never-on-8.9"),
        pytest.param(["cubin sm_75", "ptx sm_70"], "8.6", ["ptx sm_70"], id="75-no-but-ptx-70"),
        pytest.param(["cubin sm_86", "ptx sm_80"], "8.0", ["ptx sm_80"], id="86-not-on-8.0"),
        pytest.param(FAMILIES, "9.0", ["cubin sm_90a"], id="a-exact"),
        pytest.param(FAMILIES, "10.0", ["cubin sm_100a"], id="a-before-f"),
        pytest.param(FAMILIES, "10.1", [], id="10.1-is-in-no-family-here"),
        pytest.param(FAMILIES, "10.3", ["cubin sm_103"], id="nearer-before-family"),
        pytest.param(FAMILIES, "12.0", ["cubin sm_120a"], id="120a"),
        pytest.param(FAMILIES, "12.1", ["cubin sm_120f"], id="family"),
        pytest.param(FAMILIES, "11.0", [], id="suffixed-ptx-not-across-majors"),
        pytest.param(
            ["cubin sm_90", "cubin sm_90a", "ptx sm_90"], "9.0", ["cubin sm_90a"], id="a-wins"
        ),
        pytest.param(
            ["cubin sm_100", "cubin sm_100f"], "10.3", ["cubin sm_100f"], id="f-before-plain"
        ),
        pytest.param(["cubin sm_101f", "ptx sm_90"], "10.1", ["cubin sm_101f"], id="101f"),
        pytest.param(["cubin sm_101f", "ptx sm_90"], "10.3", ["ptx sm_90"], id="101f-not-10.3"),
        pytest.param(
            ["ptx sm_75", "ptx sm_90", "ptx sm_120"], "10.0", ["ptx sm_90"], id="nearest-ptx"
        ),
        pytest.param(["lto-ir sm_75", "lto-ir sm_80"], "9.0", ["lto-ir sm_80"], id="nearest-lto"),
        pytest.param(
            ["ptx sm_90", "ptx sm_90a", "lto-ir sm_80"],
            "9.0",
            ["ptx sm_90a", "lto-ir sm_80"],
            id="ptx-and-lto-both",
        ),
        pytest.param(
            ["lto-ir sm_90", "cubin sm_80"], "8.6", ["cubin sm_80"], id="cubin-before-lto"
        ),
        pytest.param(
            ["cubin sm_90", "cubin sm_80", "cubin sm_90"],
            "9.0",
            ["cubin sm_90", "cubin sm_90"],
            id="tie",
        ),
        pytest.param(["unknown sm_90"], "9.0", [], id="unknown-kind"),
        pytest.param(["unknown sm_90", "ptx sm_80"], "9.0", ["ptx sm_80"], id="unknown-no-rival"),
    ],
)
def test_choice_of_a_region(elements: list[str], on: str, chosen: list[str]) -> None:
    found = choose_elements([code(e) for e in elements], device(on))
    assert [elements[i] for i in found] == chosen
    assert list(found) == sorted(set(found))


def test_choice_does_not_depend_on_the_order_of_elements() -> None:
    for elements in (USUAL, FAMILIES):
        for on in ("7.5", "8.6", "9.0", "10.0", "10.3", "12.1"):
            forward = choose_elements([code(e) for e in elements], device(on))
            backward = choose_elements([code(e) for e in reversed(elements)], device(on))
            assert {elements[i] for i in forward} == {elements[::-1][i] for i in backward}


@pytest.mark.parametrize(
    ("text", "capability"),
    [
        ("9.0", ComputeCapability(9, 0)),
        ("12.1", ComputeCapability(12, 1)),
        ("sm_90", ComputeCapability(9, 0)),
        ("sm_90a", ComputeCapability(9, 0)),
        ("compute_103f", ComputeCapability(10, 3)),
        ("90", ComputeCapability(9, 0)),
        ("120f", ComputeCapability(12, 0)),
        ("SM_90", ComputeCapability(9, 0)),
        ("sm-100a", ComputeCapability(10, 0)),
        ("H100", ComputeCapability(9, 0)),
        ("NVIDIA GeForce RTX 4090", ComputeCapability(8, 9)),
        ("rtx-4090", ComputeCapability(8, 9)),
        ("NVIDIA H100 80GB HBM3", ComputeCapability(9, 0)),
        ("NVIDIA A100-SXM4-80GB", ComputeCapability(8, 0)),
        ("NVIDIA A100-SXM-64GB", ComputeCapability(8, 0)),
        ("Tesla V100-SXM2-16GB", ComputeCapability(7, 0)),
        ("NVIDIA H800 PCIe", ComputeCapability(9, 0)),
        ("NVIDIA H100 NVL", ComputeCapability(9, 0)),
        ("NVIDIA GH200 480GB", ComputeCapability(9, 0)),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", ComputeCapability(8, 9)),
        ("NVIDIA GeForce RTX 2070 Super with Max-Q Design", ComputeCapability(7, 5)),
        ("NVIDIA RTX 6000 Ada Generation", ComputeCapability(8, 9)),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", ComputeCapability(12, 0)),
        ("NVIDIA A10G", ComputeCapability(8, 6)),
        ("tesla t4", ComputeCapability(7, 5)),
        ("GB200", ComputeCapability(10, 0)),
        ("gb_300", ComputeCapability(10, 3)),
        ("DGX Spark", ComputeCapability(12, 1)),
        ("NVIDIA B300 SXM6 AC", ComputeCapability(10, 3)),
        ("NVIDIA GB200 NVL72", ComputeCapability(10, 0)),
        ("NVIDIA GeForce RTX 4090 D", ComputeCapability(8, 9)),
        ("RTX 5090D", ComputeCapability(12, 0)),
        ("NVIDIA RTX 5880 Ada Generation", ComputeCapability(8, 9)),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", ComputeCapability(8, 0)),
        ("NVIDIA H100 PCIe MIG 3g.40gb+me", ComputeCapability(9, 0)),
        ("Orin (nvgpu)", ComputeCapability(8, 7)),
        ("NVIDIA Thor", ComputeCapability(11, 0)),
        ("NVIDIA H20-3e", ComputeCapability(9, 0)),
        ("Tesla V100-SXM2-16GB-LS", ComputeCapability(7, 0)),
    ],
)
def test_capability_from_text(text: str, capability: ComputeCapability) -> None:
    assert ComputeCapability.parse(text) == capability
    assert ComputeCapability.parse(str(capability)) == capability


@pytest.mark.parametrize(
    "text", ["", "9", "9.", "sm_9", "sm_90x", "9.10", "RTX", "A1000", "H100 A100", "80GB"]
)
def test_text_that_is_no_capability(text: str) -> None:
    with pytest.raises(OptionError, match="is no GPU architecture"):
        ComputeCapability.parse(text)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("sm_9x", "sm_90"),
        ("RTX 4900", "RTX 4090"),
        ("h10", "H100"),
        ("hopper", None),
        ("9", "sm_90"),
        ("4090", "RTX 4090"),
        ("3090", "RTX 3090"),
        ("1080", "GTX 1080"),
        ("MIG 1g.10gb", None),
        ("4D", None),
    ],
)
def test_the_nearest_arch_of_a_typing_mistake(text: str, near: str | None) -> None:
    with pytest.raises(OptionError, match=f"; did you mean {near}" if near else "all-major$"):
        parse_arch(text)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("sm_91", "sm_90"),
        ("85", "sm_89"),
        ("sm_901", "sm_90"),
        ("9.9", "sm_90"),
        ("12", "sm_120"),
        ("10", "sm_100"),
    ],
)
def test_the_nearest_arch_of_one_that_no_gpu_has(text: str, near: str) -> None:
    with pytest.raises(UnknownArch, match=f"did you mean {near}"):
        require_known(parse_arch(text))


@pytest.mark.parametrize("text", ["sm_90a", "sm_100f", "sm_103a", "sm_120f", "sm_121a"])
def test_archs_with_a_suffix(text: str) -> None:
    assert str(require_known(parse_arch(text))) == text


@pytest.mark.parametrize("text", ["sm_89a", "sm_90f", "sm_75f"])
def test_a_suffix_that_no_arch_of_its_age_has(text: str) -> None:
    with pytest.raises(UnknownArch, match=f"arch {text}; did you mean {text[:-1]}"):
        require_known(parse_arch(text))


def test_each_gpu_is_there_once_and_known() -> None:
    names = [name for listed in GPUS.values() for name in listed.split(", ")]
    assert len(names) == len({name.replace(" ", "").lower() for name in names})
    for capability, listed in GPUS.items():
        for name in listed.split(", "):
            assert require_known(parse_arch(name)) == parse_arch(capability)


def test_all_major() -> None:
    """As in nvcc of CUDA 13."""
    assert " ".join(map(str, ALL_MAJOR)) == "sm_75 sm_80 sm_90 sm_100 sm_110 sm_120"


@pytest.mark.parametrize("text", ["sm_75", "sm_90a", "sm_100f", "sm_121"])
def test_arch_survives_text(text: str) -> None:
    assert str(SmArch.parse(text)) == text


@pytest.mark.parametrize("text", ["", "9.0", "sm_", "sm_9", "sm_90b", "sm_90aa", "SM_90"])
def test_text_that_is_no_arch(text: str) -> None:
    with pytest.raises(OptionError, match="is no SM arch"):
        SmArch.parse(text)


def test_numbers_of_file_formats() -> None:
    assert SmArch.from_number(90, "a") == SmArch(9, 0, "a")
    assert SmArch.from_number(120) == SmArch(12, 0)
    with pytest.raises(ValueError, match="suffix"):
        SmArch(9, 0, "x")
