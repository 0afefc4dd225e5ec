"""The conda recipe says what pyproject.toml and setup.py say; actions are those of a commit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.support.libraries import DOCS, EXAMPLES, ROOT

PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
WHEEL = ROOT / ".ci" / "wheel"
SETUP = (ROOT / "setup.py").read_text("utf-8")
RECIPE: dict[str, Any] = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text("utf-8"))


def value(key: str) -> str:
    """A text of pyproject.toml."""
    found = re.search(rf'^{key} = "(.+)"$', PYPROJECT, re.MULTILINE)
    assert found is not None
    return found[1]


def conda_names(requirements: list[str]) -> list[str]:
    """The requirements as conda writes them."""
    parsed = [Requirement(requirement) for requirement in requirements]
    return [f"{requirement.name} {requirement.specifier}" for requirement in parsed]


def test_names() -> None:
    assert RECIPE["package"]["name"] == value("name")
    assert str(RECIPE["context"]["version"]) == value("version")
    assert RECIPE["about"]["summary"] == value("description")
    assert RECIPE["about"]["license"] == value("license")
    assert RECIPE["build"]["python"]["entry_points"] == [f"negativa = {value('negativa')}"]


def test_requirements() -> None:
    block = re.search(r"^dependencies = \[(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)
    build = re.search(r"^requires = \[\"(.+)\"\]$", PYPROJECT, re.MULTILINE)
    assert block is not None and build is not None
    needed = conda_names(re.findall(r'^ *"(.+)",$', block[1], re.MULTILINE))
    assert RECIPE["requirements"]["run"] == [f"python {value('requires-python')}", *needed]
    assert RECIPE["requirements"]["host"] == ["python", "pip", *conda_names([build[1]])]


def c_parts() -> dict[str, str]:
    """The file of each library and program that setup.py compiles."""
    names = re.findall(r'^    "([\w.]+)": "[\w/]+\.c",$', SETUP, re.MULTILINE)
    files = {name: name.replace(".", "/") + ".so" for name in names}
    files["pytest_negativa.rewriting.compact._certify"] = (
        "pytest_negativa/rewriting/compact/_certify"
    )
    files["pytest_negativa.pages._stub"] = "pytest_negativa/pages/_stub.bin"
    return files


def test_libraries() -> None:
    """All that setup.py compiles must be in the package."""
    (contents,) = (
        test["package_contents"] for test in RECIPE["tests"] if "package_contents" in test
    )
    *everywhere, special = contents["site_packages"]
    only = re.search(r"^X86_64_ONLY = \{([^}]+)\}$", SETUP, re.MULTILINE)
    assert only is not None
    x86_64_only = set(re.findall(r'"([\w.]+)"', only[1]))
    files = c_parts()
    assert {*special["then"]} == {files[name] for name in x86_64_only}
    assert {*everywhere} == {files[name] for name in files.keys() - x86_64_only}


@pytest.mark.skipif(not WHEEL.exists(), reason="a source distribution")
def test_the_build_of_wheels_looks_for_all_c_parts() -> None:
    (names,) = re.findall(
        r"^for name in ((?:.*\\\n)?.*); do$", WHEEL.read_text("utf-8"), re.MULTILINE
    )
    in_wheel = names.replace("\\\n", " ").split()
    assert {f"pytest_negativa/{name}" for name in in_wheel} == {*c_parts().values()}


def test_actions_are_pinned() -> None:
    """A tag can be moved to other code; one action has one commit."""
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / "README.md"]
    files += [*DOCS.rglob("*.md"), *EXAMPLES.rglob("*.yml")]
    used = {
        line.split("uses: ")[1]
        for file in files
        for line in file.read_text("utf-8").splitlines()
        if "uses: " in line and "uses: ./" not in line
    }
    names = [re.fullmatch(r"([\w./-]+)@[0-9a-f]{40}  # v[0-9.]+", line) for line in used]
    assert None not in names, used
    assert len({name[1] for name in names if name}) == len(used) > 4


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # Such an import fails.
import pytest
sys.exit(pytest.main(["-p", "pytest_negativa.plugin", "--help"]))
"""


def test_pytest_starts_without_the_extras() -> None:
    """In the repository, after ``pip install -e .`` alone."""
    needed, extras = set[str](), set[str]()
    for text in requires("pytest-negativa") or ():
        requirement = Requirement(text)
        (extras if "extra" in str(requirement.marker) else needed).add(requirement.name)
    absent = [
        module
        for module, owners in packages_distributions().items()
        if extras.issuperset(owners) and needed.isdisjoint(owners)
    ]
    assert "hypothesis" in absent
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *absent],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--negativa-verify" in done.stdout
