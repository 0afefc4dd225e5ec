"""negativa.yaml: finding and reading it, and its mistakes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_negativa.errors import OptionError, one_of
from pytest_negativa.models.settings import (
    Compare,
    Coverage,
    Granularity,
    GrowthLimit,
    Keep,
    Limits,
    PtxPolicy,
    Report,
    ReportFormat,
    Reports,
    Settings,
    Thresholds,
    TraceLevel,
)
from pytest_negativa.settings.file import find_config, load_config
from pytest_negativa.settings.options import OPTIONS
from pytest_negativa.settings.resolve import load_settings
from pytest_negativa.storage.yaml_document import parse_document
from tests.support.analyses import settings
from tests.support.config_schema import config_schema
from tests.support.libraries import DOCS, ROOT

FORMATS = one_of([kind.value for kind in ReportFormat])
CONFIGURATION = DOCS / "reference" / "configuration.md"


def documented(language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", CONFIGURATION.read_text(), re.DOTALL | re.MULTILINE
    )


def write(folder: Path, text: str) -> Path:
    path = folder / "negativa.yaml"
    path.write_text(text)
    return path


def load(folder: Path, text: str) -> Settings:
    return load_settings({}, {}, root=write(folder, text).parent)


def mistakes(folder: Path, text: str) -> list[str]:
    """What loading complains of, without the folder."""
    with pytest.raises(OptionError) as caught:
        load(folder, text)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


# Finding


def test_the_nearest_file_upwards_is_found(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    assert find_config(deep) is None
    far = write(tmp_path, "")
    assert find_config(deep) == str(far)
    near = write(deep.parent, "")
    assert find_config(deep) == str(near)
    assert find_config(tmp_path) == str(far)


@pytest.mark.parametrize("git_is_a_file", [False, True], ids=["repository", "worktree"])
def test_the_search_ends_at_the_repository(tmp_path: Path, git_is_a_file: bool) -> None:
    write(tmp_path, "")
    inner = tmp_path / "checkout" / "tests"
    inner.mkdir(parents=True)
    assert find_config(inner) == str(tmp_path / "negativa.yaml")
    git = inner.parent / ".git"
    git.write_text("gitdir: elsewhere") if git_is_a_file else git.mkdir()
    assert find_config(inner) is None
    beside = write(inner.parent, "")
    assert find_config(inner) == str(beside)


def test_the_other_ending_is_no_silent_miss(tmp_path: Path) -> None:
    (tmp_path / "negativa.yml").write_text("")
    with pytest.raises(OptionError, match=r"negativa\.yml: rename it to negativa\.yaml"):
        find_config(tmp_path)


# In pyproject.toml


def write_project(folder: Path, text: str) -> Path:
    path = folder / "pyproject.toml"
    path.write_text(text, encoding="utf-8")
    return path


PROJECT = """
[project]
name = "ours"
[tool.negativa]
granularity = "kernel"
require_gpu = true
directory = "out"
[tool.negativa.keep]
kernels = ["ours::*"]
archs = [8.6, "sm_90a"]
[tool.negativa.thresholds]
max_unused_percent = 12.5
"""


def test_a_table_of_pyproject_is_read_like_the_file(tmp_path: Path) -> None:
    path = write_project(tmp_path, PROJECT)
    (inner := tmp_path / "tests").mkdir()
    found = load_settings({}, {}, root=inner)
    assert found.config == str(path)
    assert found.directory == str(tmp_path / "out")
    assert (found.granularity, found.require_gpu) == (Granularity.KERNEL, True)
    assert found.keep.kernels == ("ours::*",)
    assert found.keep.archs == ("sm_86", "sm_90a")
    assert found.thresholds.max_unused_percent.overall == 12.5
    assert found.sources["keep.kernels"] == f"{path}: [tool.negativa]"
    named = load_settings({"config": str(path)}, {}, root=tmp_path.parent)
    assert named.keep == found.keep


def test_a_pyproject_without_our_table_is_passed_by(tmp_path: Path) -> None:
    own = write(tmp_path, "")
    (inner := tmp_path / "tests").mkdir()
    for text in ("", '[project]\ndependencies = ["pytest-negativa"]', "tool = 'negativa'"):
        write_project(inner, text)
        assert find_config(inner) == str(own)


def test_settings_in_two_files_of_a_folder(tmp_path: Path) -> None:
    own = write(tmp_path, "")
    shared = write_project(tmp_path, "[tool.negativa]")
    with pytest.raises(OptionError) as caught:
        find_config(tmp_path)
    assert str(own) in str(caught.value) and f"[tool.negativa] in {shared}" in str(caught.value)


@pytest.mark.parametrize(
    "text, says",
    [
        ("[tool.negativa.keep]\nkernel = 1", "unknown key 'kernel' in keep; did you mean kernels?"),
        ("[tool.negativa]\nkeep.ptx = 2020-01-01", "keep.ptx: found '2020-01-01', expected off"),
        ("[tool.negativa]\ndirectory = [[]]", "directory: found a list, expected"),
    ],
)
def test_mistakes_in_pyproject(tmp_path: Path, text: str, says: str) -> None:
    path = write_project(tmp_path, text)
    with pytest.raises(OptionError) as caught:
        load_settings({}, {}, root=tmp_path)
    assert str(caught.value).startswith(f"{path}: [tool.negativa]: {says}")


@pytest.mark.parametrize("data", [b"[tool.negativa", b"negativa = '\xff'"])
def test_a_pyproject_that_is_no_toml(tmp_path: Path, data: bytes) -> None:
    (path := tmp_path / "pyproject.toml").write_bytes(data)
    with pytest.raises(OptionError) as caught:
        find_config(tmp_path)
    assert str(caught.value).startswith(f"{path}: cannot be read as TOML: ")


# Loading


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n", "keep:\n  # ptx: all\ntrace:\n"])
def test_nothing_written_is_all_defaults(tmp_path: Path, text: str) -> None:
    assert load_config(write(tmp_path, text)).values == {}


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    (example,) = documented("yaml")
    found = load(tmp_path, example)
    assert found.libraries.include == ("dist:torch", "dist:nvidia-*", "libours.so")
    assert found.keep == Keep(
        kernels=("ours::fallback_*",),
        libraries=("dist:nvidia-cublas-*",),
        archs=("sm_80", "sm_90a"),
        ptx=PtxPolicy.NEWEST,
    )
    assert found.keep.archs == ("sm_80", "sm_90a")
    assert found.require_gpu
    assert found.trace.level is TraceLevel.LOOKUP
    assert found.reports == Reports(
        formats=(
            Report(format=ReportFormat.TERMINAL, path=None),
            Report(format=ReportFormat.JSON, path=f"{tmp_path}/build/negativa.json"),
            Report(format=ReportFormat.MARKDOWN, path=f"{tmp_path}/.negativa/report.md"),
        ),
        top=10,
    )
    assert found.coverage == Coverage(
        libraries=("libours*.so",), fail_under=Limits(overall=80.0, libraries={"libours.so": 90.0})
    )
    assert found.thresholds == Thresholds(
        max_unused_percent=Limits(overall=99.5, libraries={}),
        min_used_kernels=Limits(overall=200, libraries={"libours.so": 20}),
        max_gpu_code=Limits(overall=3 * 10**9, libraries={"libours.so": 50 * 10**6}),
    )
    assert found.compare == Compare(
        baseline=f"{tmp_path}/negativa-baseline.json",
        fail=Limits(
            overall=(
                GrowthLimit(figure="size", limit=5.0, is_percent=True),
                GrowthLimit(figure="new-kernels-untested", limit=0.0, is_percent=False),
            ),
            libraries={},
        ),
    )
    # The example shows every section, so that it can be copied and cut down.
    assert set(yaml.safe_load(example)) == set(config_schema()["properties"])
    jsonschema.validate(yaml.safe_load(example), config_schema())


@pytest.mark.parametrize("text", ["compare: {fail: ['size:0%']}", "compare: {fail: ['*=size:0%']}"])
def test_a_limit_of_growth_needs_a_baseline(tmp_path: Path, text: str) -> None:
    with pytest.raises(OptionError, match=r"negativa\.yaml:1:\d+: compare.fail needs a baseline"):
        settings(tmp_path, text)
    settings(tmp_path, text[:-1] + ", baseline: b.json}")


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (str(page.relative_to(ROOT)), text)
        for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
        for text in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        # The others are jobs of CI services, and lists for negativa vex.
        if not re.search(
            r"^ +(- uses|runs-on|script):|^(repos|vulnerabilities):", text, re.MULTILINE
        )
    ],
)
def test_examples_in_the_docs_are_read(tmp_path: Path, page: str, text: str) -> None:
    assert settings(tmp_path, text).config == str(tmp_path / "negativa.yaml"), page


def test_the_schema_line_of_the_example_names_the_file_of_the_package() -> None:
    first = documented("yaml")[0].splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (ROOT / first.partition("=")[2]).is_file()


def test_archs_may_be_numbers(tmp_path: Path) -> None:
    text = "keep: {archs: [90, 8.6, 10.0, 12.0, compute_80, 9.0a]}"
    with pytest.raises(OptionError, match=r"1:49: keep.archs: '9.0a' is no GPU arch"):
        load(tmp_path, text)
    found = load(tmp_path, text.replace(", 9.0a", ""))
    assert found.keep.archs == ("sm_90", "sm_86", "sm_100", "sm_120", "sm_80")
    jsonschema.validate(yaml.safe_load(text.replace(", 9.0a", "")), config_schema())


def test_the_gpus_of_a_machine_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "msgspec.py").write_text("raise SystemExit('of the folder')")
    [problem] = mistakes(tmp_path, "keep: {archs: native}")
    assert problem.startswith("negativa.yaml:1:15: keep.archs: native: no GPU works on this mach")
    assert problem.endswith("; name the archs") and "of the folder" not in problem


BARE = {
    "libraries: {include: libours.so}": ("libraries.include", ("libours.so",)),
    "keep: {archs: sm_80}": ("keep.archs", ("sm_80",)),
    "keep: {archs: 90}": ("keep.archs", ("sm_90",)),
    "verify: {tolerate: subtests}": ("verify.tolerate", ("subtests",)),
}


@pytest.mark.parametrize("text", BARE)
def test_one_item_stands_for_a_list_of_it(tmp_path: Path, text: str) -> None:
    name, value = BARE[text]
    found = msgspec.to_builtins(load(tmp_path, text))
    section, key = name.split(".")
    assert tuple(found[section][key]) == value
    jsonschema.validate(yaml.safe_load(text), config_schema())


def test_every_value_remembers_its_place(tmp_path: Path) -> None:
    text = "keep:\n  archs: [sm_80,\n    sm_90]\nreports:\n  formats: [json:a.json]\n"
    found = load_settings({}, {}, root=write(tmp_path, text).parent)
    path = tmp_path / "negativa.yaml"
    assert found.sources["keep.archs"] == f"{path}:2:10"
    assert found.sources["reports.formats"] == f"{path}:5:12"


@pytest.mark.parametrize(
    ("text", "formats"),
    [
        ("[]", []),
        ("[json]", [("json", ".negativa/report.json")]),
        ("json:a.json", [("json", "a.json")]),
        ("[json, 'json:a.json', json]", [("json", ".negativa/report.json"), ("json", "a.json")]),
        ("[terminal, 'json:a b.json']", [("terminal", None), ("json", "a b.json")]),
    ],
)  # fmt: skip
def test_reports(tmp_path: Path, text: str, formats: list[tuple[str, str | None]]) -> None:
    found = load(tmp_path, f"reports: {{formats: {text}}}").reports.formats
    expected = [(name, path and f"{tmp_path}/{path}") for name, path in formats]
    assert [(report.format.value, report.path) for report in found] == expected


def test_a_report_and_a_baseline_at_urls(tmp_path: Path) -> None:
    text = "reports: {formats: ['json:s3://bucket/a.json']}\ncompare: {baseline: gs://bucket/b}"
    found = load(tmp_path, text)
    assert found.reports.formats[0].path == "s3://bucket/a.json"
    assert found.compare.baseline == "gs://bucket/b"


# Mistakes

GROWTH = (
    "compare.fail: found 'kernels:0', expected size:, code: or unused: with a percentage or size, "
    "or new-kernels-untested:N"
)
MISTAKES: list[tuple[str, list[str]]] = [
    # keys
    ("kep: {}", ["negativa.yaml:1:1: unknown key 'kep'; did you mean keep?"]),
    ("keep:\n  kernel: []",
     ["negativa.yaml:2:3: unknown key 'kernel' in keep; did you mean kernels?"]),
    ("ptx: all", ["negativa.yaml:1:1: unknown key 'ptx'; did you mean keep.ptx?"]),
    ("trace:\n  directory: x",
     ["negativa.yaml:2:3: unknown key 'directory' in trace; it belongs to the top level"]),
    ("trace: {zzz: 1}",
     ["negativa.yaml:1:9: unknown key 'zzz' in trace; expected one of level, children, "
      "replay"]),
    ("enabled: true",
     ["negativa.yaml:1:1: unknown key 'enabled'; expected one of directory, paths, libraries, "
      "keep, granularity, require_gpu, no_jit, cpu, trace, verify, reports, coverage, "
      "thresholds, compare, cache_dir"]),
    ("reports: {formats: ['json:ftp://me:secret@host/a']}",
     ["negativa.yaml:1:21: reports.formats: ftp://...: a URL with a password is not taken, for it "
      "would get into files and logs; set credentials in the environment, or in the "
      "configuration files of the store's tools"]),
    ("? [a]\n: b", ["negativa.yaml:1:3: found a list or mapping, expected a key"]),
    ("keep: {}\ntests: {}\nkeep: {}",
     ["negativa.yaml:3:1: the key 'keep' is there twice, first in line 1"]),
    # shapes
    ("- keep",
     ["negativa.yaml:1:1: found a list, expected a mapping with the keys directory, paths, "
      "libraries, keep, granularity, require_gpu, no_jit, cpu, trace, verify, reports, "
      "coverage, thresholds, compare, cache_dir"]),
    ("trace: launch",
     ["negativa.yaml:1:8: trace: found 'launch', expected a mapping with the keys level, "
      "children, replay"]),
    # types
    ("trace:\n  children: 2",
     ["negativa.yaml:2:13: trace.children: found the number 2, expected true or false"]),
    ("trace: {level: 2}",
     ["negativa.yaml:1:16: trace.level: found the number 2, expected lookup, launch or range"]),
    ("trace: {level: Launch}",
     ["negativa.yaml:1:16: trace.level: found 'Launch', expected lookup, launch or range; "
      "did you mean launch?"]),
    ("libraries: {include: }",
     ["negativa.yaml:1:22: libraries.include: found nothing, expected a glob on a path, a file "
      "name or a soname, or dist:NAME, where only * and ? are special"]),
    ("keep:\n  kernels:\n    - a\n    - 3",
     ["negativa.yaml:4:7: keep.kernels: found the number 3, expected a glob with * and ?"]),
    ("keep: {libraries: ['lib[0-9].so']}",
     ["negativa.yaml:1:20: keep.libraries: found 'lib[0-9].so', expected a glob on a path, a "
      "file name or a soname, or dist:NAME, where only * and ? are special"]),
    ("keep: {archs: RTX 4900}",
     ["negativa.yaml:1:15: keep.archs: 'RTX 4900' is no GPU architecture; expected a form like "
      "sm_90, sm_90a, compute_90, 90 or 9.0, a GPU like H100 or RTX 4090, native or all-major; "
      "did you mean RTX 4090?"]),
    ("keep: {archs: [sm_900]}",
     ["negativa.yaml:1:16: keep.archs: this release knows no GPU of arch sm_900; did you mean "
      "sm_90?"]),
    ("paths: b=c",
     ["negativa.yaml:1:8: paths: found 'b', expected an absolute path with * and ?"]),
    ("paths: /b", ["negativa.yaml:1:8: paths: found '/b', expected GLOB=PATH"]),
    ("directory: ' '", ["negativa.yaml:1:12: directory: found ' ', expected a path"]),
    ("reports: {top: -1}",
     ["negativa.yaml:1:16: reports.top: found the number -1, expected a whole number, 0 or more"]),
    ("reports: {formats: [html5]}",
     [f"negativa.yaml:1:21: reports.formats: found 'html5', expected {FORMATS}; "
     "did you mean html?"]),
    ("reports: {formats: {json: a}}",
     [f"negativa.yaml:1:20: reports.formats: found a mapping, expected {FORMATS}"]),
    ("reports: {formats: ['terminal:a.txt']}",
     ["negativa.yaml:1:21: reports.formats: found 'terminal:a.txt', expected terminal alone"]),
    ("thresholds: {max_unused_percent: 101}",
     ["negativa.yaml:1:34: thresholds.max_unused_percent: found the number 101, expected a "
      "percentage from 0 to 100"]),
    ("thresholds: {max_gpu_code: 1.5}",
     ["negativa.yaml:1:28: thresholds.max_gpu_code: found the number 1.5, expected a size like "
      "4096, 500 MB or 1.5 GiB"]),
    ("directory: !!python/name:os.system ''",
     ["negativa.yaml:1:12: found the tag '!!python/name:os.system', expected none"]),
    # several at once, in the order of the file
    ("keep:\n  ptx: latest\n  kernel: []\ntrase: {}",
     ["negativa.yaml:2:8: keep.ptx: found 'latest', expected off, newest or all",
      "negativa.yaml:3:3: unknown key 'kernel' in keep; did you mean kernels?",
      "negativa.yaml:4:1: unknown key 'trase'; did you mean trace?"]),
    # YAML itself
    ("keep: [a", ["negativa.yaml:2:1: did not find expected ',' or ']'"]),
    ("keep:\n\tptx: all",
     ["negativa.yaml:2:1: found character that cannot start any token; indent with spaces, and "
      "quote a value that begins with @, % or `"]),
    ("keep: *a",
     ["negativa.yaml:1:7: found an alias, expected a value; quote a value that begins with * or "
      "&"]),
    ("libraries: {include: [*torch*]}",
     ["negativa.yaml:1:29: did not find expected alphabetic or numeric character; quote a value "
      "that begins with * or &"]),
    ("a: 1\n---\nb: 2", ["negativa.yaml:2:1: found a second document, expected one"]),
    # parts of a text, which have no places of their own
    ("compare: {baseline: b, fail: 'size:5%,kernels:0'}", [f"negativa.yaml:1:30: {GROWTH}"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "messages"), MISTAKES, ids=[text for text, _ in MISTAKES])
def test_mistakes(tmp_path: Path, text: str, messages: list[str]) -> None:
    assert mistakes(tmp_path, text) == messages


def test_the_mistakes_of_the_documentation(tmp_path: Path) -> None:
    (shown,) = documented("text")
    assert mistakes(tmp_path, "trace:\nkeep:\n  kernel: []\n  ptx: latest\n") == shown.splitlines()


def test_unreadable_files(tmp_path: Path) -> None:
    path = tmp_path / "negativa.yaml"
    with pytest.raises(OptionError, match=r"negativa\.yaml: cannot be read: No such file"):
        load_config(path)
    with pytest.raises(OptionError, match="cannot be read: Is a directory"):
        load_config(tmp_path)
    path.write_bytes(b"keep: {}\ndirectory: a\xff\n")
    with pytest.raises(OptionError, match=r"negativa\.yaml:2:1: invalid leading UTF-8 octet"):
        load_config(path)
    path.write_bytes(b"directory: a\x07b")
    with pytest.raises(OptionError, match=r"negativa\.yaml:1:1: control characters"):
        load_config(path)
    path.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(OptionError, match="larger than 1048576 bytes, expected a configuration"):
        load_config(path)
    path.write_text("keep: " + "[" * 50_000)
    with pytest.raises(OptionError, match=r"nested too deep|maximum nesting depth"):
        load_config(path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    (tmp_path / "negativa.yaml").write_bytes(b"\xef\xbb\xbfdirectory: out")
    assert load_config(tmp_path / "negativa.yaml").values["directory"].value == str(
        tmp_path / "out"
    )


KEYS = sorted({key for option in OPTIONS for key in option.name.split(".")})
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(
        ["off", "all", "launch", "json", "sm_90", "dist:a", "5 MB", "10%", "", "[", "~"]
    ),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.text(alphabet=st.sampled_from("keps:ptx: [],{}&*!#|>-'\"\n\t0.5%<?\x00\ud7ff"), max_size=40)
)
@example("&a [*a]")
@example("? ")
@example("!!float a")
def test_any_text_is_a_config_or_an_option_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "negativa.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        load_config(path)
    except OptionError as error:
        assert str(error).startswith(str(path))


@given(VALUES | st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
def test_whatever_loads_is_sound_and_fits_the_schema(tmp_path: Path, value: Any) -> None:
    text = yaml.safe_dump(value, allow_unicode=True)
    try:
        found = load(tmp_path, text)
    except OptionError:
        return
    assert msgspec.convert(msgspec.to_builtins(found), Settings) == found
    root = parse_document(text.encode())
    jsonschema.validate(root and root.plain(), config_schema())


# A JSON Schema can't see what YAML refuses, nor what a text says.
ONLY_OURS = ("there twice", "an alias", "the tag", "did not find", "cannot start", "a second",
             "list or mapping, expected a key", "with a password",
             "GPU arch", "of arch", "a percentage", "a size", "dist:NAME",
             "GLOB=PATH", "an absolute path",
             "'a.txt'")  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        text
        for text, messages in MISTAKES
        if not any(word in f"{text} {messages}" for word in ONLY_OURS)
    ],
)
def test_editors_complain_of_the_same_mistakes(text: str) -> None:
    root = parse_document(text.encode())
    document = root and root.plain()
    assert not jsonschema.Draft202012Validator(config_schema()).is_valid(document)
