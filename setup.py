"""Builds the libraries in C: plain shared objects, loaded by CUDA and by the dynamic loader.

They are no extension modules: no Python headers, one file for all versions of Python. Where
no C compiler is found the installation goes on without them, and what needs them says so
when it runs. Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

# Name of the shared object, as a module path -> its source.
LIBRARIES = {
    "pytest_negativa.gpucode._search": "pytest_negativa/gpucode/search.c",
    "pytest_negativa.tracing._injection": "pytest_negativa/tracing/injection.c",
    "pytest_negativa.processes._redirect": "pytest_negativa/processes/redirect.c",
    "pytest_negativa.pages._watch": "pytest_negativa/pages/watch.c",
    "pytest_negativa.measuring._first_result": "pytest_negativa/measuring/first_result.c",
    "pytest_negativa.pages._stub": "pytest_negativa/pages/stub.c",
    "pytest_negativa.rewriting.compact._certify": "pytest_negativa/rewriting/compact/certify.c",
}
# They know the registers, system calls or relocations of this machine alone.
X86_64_ONLY = {
    "pytest_negativa.pages._watch",
    "pytest_negativa.pages._stub",
}
# What is missing where one of them is.
MISSING = {
    "pytest_negativa.gpucode._search": "GPU code takes longer to find",
    "pytest_negativa.tracing._injection": "child processes of tests will not be traced",
    "pytest_negativa.processes._redirect": "--negativa-verify will not work",
    "pytest_negativa.pages._watch": "CPU code will not be traced",
    "pytest_negativa.measuring._first_result": "time to the first GPU result is not measured",
    "pytest_negativa.pages._stub": "libraries can't be cut to have a spare",
    "pytest_negativa.rewriting.compact._certify": "libraries can't be compacted or cut",
}

FLAGS = ["-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"]
# CUPTI may call the tracer until the process is gone. glibc can't keep an auditor that declines.
NEVER_UNLOADED = {"pytest_negativa.tracing._injection"}
# Bare bytes, which are copied into libraries.
STUB = "pytest_negativa.pages._stub"
STUB_FLAGS = [
    *("-std=gnu11", "-Os", "-fPIC", "-static", "-nostdlib", "-ffreestanding", "-Wall", "-Wextra"),
    *("-fno-stack-protector", "-fno-asynchronous-unwind-tables", "-fcf-protection"),
    # No SSE, since callers may keep values there, and no calls of memcpy.
    *("-mgeneral-regs-only", "-fno-tree-loop-distribute-patterns"),
    *("-Wl,-T,pytest_negativa/pages/stub.ld", "-Wl,--build-id=none"),
]
# A program, which knows the stub by its digest. The stub is built before.
CERTIFY = "pytest_negativa.rewriting.compact._certify"
CERTIFY_FLAGS = ["-std=c11", "-O2", "-fPIE", "-pie", "-Wall", "-Wextra"]
STUB_PARAMETERS, STUB_SIZE = 80, 4096
LINK_FLAGS = ["-Wl,-z,relro,-z,now", "-Wl,--as-needed", "-ldl", "-lpthread"]


class BuildLibraries(build_ext):
    """Compiles each source with the system's C compiler."""

    def get_ext_filename(self, fullname: str) -> str:
        # Without the suffix of an extension module, which names one version of Python.
        suffixes = {STUB: ".bin", CERTIFY: ""}
        known = [suffix for name, suffix in suffixes.items() if name.endswith(fullname)]
        return str(Path(*fullname.split(".")).with_suffix(known[0] if known else ".so"))

    def build_extension(self, ext: Extension) -> None:
        if ext.name in X86_64_ONLY and not self.plat_name.endswith("x86_64"):
            sys.stderr.write(f"{ext.sources[0]} is for x86-64 only; {MISSING[ext.name]}.\n")
            return
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        flags = [*FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
        link_flags = [
            *shlex.split(os.environ.get("LDFLAGS", "")),
            *LINK_FLAGS,
            *(["-Wl,-z,nodelete"] if ext.name in NEVER_UNLOADED else []),
        ]
        if ext.name == STUB:
            flags, link_flags = STUB_FLAGS, []
        if ext.name == CERTIFY:
            flags = [*CERTIFY_FLAGS, f'-DSTUB_SHA256="{self.stub_digest()}"']
        command = [*compiler, *flags, "-o", str(target), *ext.sources, *link_flags]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as e:
            target.unlink(missing_ok=True)
            sys.stderr.write(
                f"warning: {ext.sources[0]} was not compiled ({e}); {MISSING[ext.name]}. "
                "Install a C compiler and reinstall to get it.\n"
            )

    def stub_digest(self) -> str:
        """SHA-256 of the stub's code as libraries have it, padded to a page."""
        stub = Path(self.get_ext_fullpath(STUB))
        code = stub.read_bytes()[STUB_PARAMETERS:] if stub.is_file() else b""
        return hashlib.sha256(code.ljust(STUB_SIZE - STUB_PARAMETERS, b"\0")).hexdigest()

    # setuptools lists what build_extension was to make; a file that isn't there is an error
    # when the wheel is put together.
    def get_outputs(self) -> list[str]:
        return [output for output in super().get_outputs() if Path(output).exists()]

    def get_output_mapping(self) -> dict[str, str]:
        mapping = super().get_output_mapping()
        return {k: v for k, v in mapping.items() if Path(k).exists() or Path(v).exists()}


class BuildPages(build_py):
    """Adds the pages that ``negativa help TOPIC`` prints; a clone has them in ``docs``."""

    def run(self) -> None:
        super().run()
        for folder in () if self.editable_mode else ("guides", "explanation"):
            target = Path(self.build_lib, "pytest_negativa", "docs", folder)
            self.copy_tree(str(Path("docs", folder)), str(target))
            self.copy_file(str(Path("docs", "index.md")), str(target.parent))


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[Extension(name, [source], optional=True) for name, source in LIBRARIES.items()],
    cmdclass={"build_ext": BuildLibraries, "build_py": BuildPages, "bdist_wheel": PlatformWheel},
)
