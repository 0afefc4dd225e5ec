"""The tables, as markdown, from what was read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from paper_records import Benchmark, Figures, comparison_of
from tabulate import tabulate

from pytest_negativa.models.measurement import Comparison, Loading
from pytest_negativa.models.plan import UnusedReason
from pytest_negativa.models.report import LibraryRow

_PUBLISHED = Path(__file__).resolve().parent / "published.json"
_NO_FIGURE = "not in published.json"
_TOP = 5
_GPU_MEMORY = ("gpu_process_bytes", "gpu_device_bytes")


def render(benchmark: Benchmark, figures: Sequence[Figures]) -> str:
    published = json.loads(_PUBLISHED.read_text())
    tables = published["tables"]
    parts = [
        "# The paper's tables, with our figures",
        _introduction(published, benchmark),
        _differences(published["scope"]["framework_names"], benchmark, figures),
        "## Highest reductions\n\n" + _headlines(published["highest_reduction_percent"], figures),
        "## Table 2: libraries of each workload\n\n" + _sizes(tables["2"], figures),
        "## Table 3: the largest libraries\n\n" + _largest(tables["3"], figures),
        "## Table 5: where the unused GPU code is, and why\n\n" + _reasons(tables["5"], figures),
        "## Table 6: kernels that workloads share\n\n" + _overlap(tables["6"], figures),
        "## Table 8: memory and time\n\n" + _runtime(tables["8"], figures),
        "## What was run\n\n" + _steps(benchmark),
    ]
    return "\n\n".join(parts) + "\n"


def _introduction(published: Mapping[str, Any], benchmark: Benchmark) -> str:
    source, scope = published["source"], published["scope"]
    return (
        f"Paper: {source['authors']}: {source['title']}, {source['venue']} "
        f"({', '.join(source['read'])}); {scope['frameworks']} frameworks, {scope['workloads']} "
        f"workloads, over {scope['libraries']} libraries. {source['note']} The tables below take "
        "their numbers and subjects from the paper's. If `published.json` lacks a value, the "
        f"cell says: {_NO_FIGURE}.\n\n"
        "Sizes: 1 MB = 10^6 bytes. Runs of each variant that count, for each way of loading: "
        f"{benchmark.pairs}, after one that doesn't; medians. `~`: the ranges of the two variants "
        "overlap, so these runs show no difference."
    )


def _differences(paper_frameworks: str, benchmark: Benchmark, figures: Sequence[Figures]) -> str:
    devices = sorted({device for f in figures for device in f.report.devices})
    verdicts = [v for f in figures for v in f.verdicts.values()]
    rows = [("GPU", ", ".join(devices) or "none", _NO_FIGURE)]
    if verdicts:
        v = verdicts[0].versions
        rows += [
            ("CUDA driver", v.cuda_driver or "unknown", _NO_FIGURE),
            ("system", f"{v.platform}, {v.libc}, Python {v.python}", _NO_FIGURE),
        ]
    versions = ", ".join(f"{n} {v}" for n, v in benchmark.versions.items())
    rows += [
        ("packages", versions or "none", _NO_FIGURE),
        ("frameworks", "PyTorch, Transformers, JAX", paper_frameworks),
        ("data and weights", "synthetic, random", _NO_FIGURE),
        ("loading mode", "lazy and eager, each on its own", _NO_FIGURE),
        ("what is removed", "GPU code in every container", "GPU code and CPU code"),
        ("libraries that count", "those with GPU code", _NO_FIGURE),
        ("size of the workload", "quick" if benchmark.quick else "full", _NO_FIGURE),
    ]
    return "## What differs\n\n" + _table(["", "here", "paper"], rows)


def _headlines(published: Mapping[str, float], figures: Sequence[Figures]) -> str:
    ours: dict[str, list[tuple[float, str]]] = {key: [] for key in published}
    for f in figures:
        verdict = f.verdicts.get("compacted")
        if verdict is None or not verdict.proved:
            continue
        totals = _Totals(f)
        ours["gpu_code"].append((_reduction(totals.code, totals.code_after), f.name))
        if totals.size_after is not None:
            ours["file_size"].append((_reduction(totals.size, totals.size_after), f.name))
        for loading, result in f.loading_results().items():
            for key, names in (
                ("peak_cpu_memory", ("peak_rss_bytes",)),
                ("peak_gpu_memory", _GPU_MEMORY),
                ("execution_time", ("wall_s",)),
            ):
                found = comparison_of(result, *names)
                if found is not None and found.ratio is not None and not found.overlap:
                    ours[key].append((100 * (1 - found.ratio), f"{f.name}, {loading.value}"))
    rows = []
    for key, value in published.items():
        best = max(ours[key], default=None)
        told = "none" if best is None else f"{best[0]:.1f}% ({best[1]})"
        if key == "cpu_code":
            told = "CPU code is not touched"
        rows.append((key.replace("_", " "), f"{value:g}%", told))
    return (
        "Here: of the workloads that were proved on compacted copies, and of memory and time only "
        "what the runs show (no `~`).\n\n"
        + _table(["reduction of", "paper: up to", "here: up to"], rows)
    )


class _Totals:
    """Sums over the libraries with GPU code that a workload loaded. Sizes in bytes.

    What follows from the compacted copies is None where these weren't verified.
    """

    def __init__(self, figures: Figures) -> None:
        rows, copies = figures.report.libraries, figures.compacted
        self.libraries = len(rows)
        self.size = sum(row.size for row in rows)
        self.code = sum(row.code_bytes for row in rows)
        self.code_after = sum(row.code_bytes - row.unused_bytes for row in rows)
        self.elements = sum(row.elements for row in rows)
        self.elements_after = sum(row.kept_elements for row in rows)
        self.kernels = sum(row.kernels for row in rows)
        self.used_kernels = sum(row.used_kernels for row in rows)
        self.size_after = (
            sum(_copy_size(figures, row) or row.size for row in rows) if copies else None
        )


def _sizes(published: Any, figures: Sequence[Figures]) -> str:
    rows = []
    for f in figures:
        t = _Totals(f)
        rows.append(
            (
                f.name,
                t.libraries,
                _change_mb(t.size, t.size_after),
                _change_mb(t.code, t.code_after),
                _change(t.elements, t.elements_after),
                _change(t.kernels, t.used_kernels),
                *(_proved(f, copies) for copies in ("overwritten", "compacted")),
                _published(published, f.name),
            )
        )
    head = ["workload", "libraries", "files, MB", "GPU code, MB", "elements", "kernels, used"]
    head += ["overwritten copies", "compacted copies", "published"]
    return (
        "Libraries with GPU code that the workload loaded. Files: compacted copies. Kernels: those "
        "that the device could load.\n\n" + _table(head, rows)
    )


def _largest(published: Any, figures: Sequence[Figures]) -> str:
    rows = []
    for f in figures:
        for row in sorted(f.report.libraries, key=lambda row: -row.size)[:_TOP]:
            rows.append(
                (
                    f.name,
                    Path(row.path).name,
                    _change_mb(row.size, _copy_size(f, row)),
                    _change_mb(row.code_bytes, row.code_bytes - row.unused_bytes),
                    _change(row.elements, row.kept_elements),
                    _change(row.kernels, row.used_kernels),
                    _published(published, f.name, Path(row.path).name),
                )
            )
    head = ["workload", "library", "file, MB", "GPU code, MB", "elements", "kernels, used"]
    return _table([*head, "published"], rows)


def _reasons(published: Any, figures: Sequence[Figures]) -> str:
    wrong, unasked = UnusedReason.WRONG_ARCH.value, UnusedReason.NO_USED_KERNEL.value
    rows = []
    for f in figures:
        libraries = f.report.libraries
        total = sum(row.unused_bytes for row in libraries)
        elements = sum(row.unused_elements for row in libraries)
        by_elements = {
            reason: sum(r.elements for row in libraries for r in row.unused if r.reason == reason)
            for reason in (wrong, unasked)
        }
        most = sorted((row.unused_bytes for row in libraries), reverse=True)
        first = max(libraries, key=lambda row: row.unused_bytes, default=None)
        rows.append(
            (
                f.name,
                f"{total / 1e6:,.1f}",
                *(_share(sum(most[:n]), total) for n in (1, 3, _TOP)),
                "" if first is None else Path(first.path).name,
                *(
                    f"{_share(sum(row.unused_bytes_by(r) for row in libraries), total)}, "
                    f"{_share(by_elements[r], elements)}"
                    for r in (wrong, unasked)
                ),
                _published(published, f.name),
            )
        )
    head = ["workload", "unused GPU code, MB", "in 1 library", "in 3", f"in {_TOP}", "most in"]
    head += ["reason I: other arch (bytes, elements)", "reason II: nothing used (bytes, elements)"]
    return _table([*head, "published"], rows)


def _overlap(published: Any, figures: Sequence[Figures]) -> str:
    used = {
        f.name: {(path, k) for path, kernels in f.used_kernels.items() for k in kernels}
        for f in figures
    }
    rows = []
    for name, mine in used.items():
        alike = (f"{_jaccard(mine, other):.2f}" for other in used.values())
        rows.append((name, len(mine), *alike, _published(published, name)))
    lines = (
        "Jaccard similarity of the sets of used kernels (library and name): 1 for the same, 0 for "
        "none in common.\n\n"
    )
    every = set(chain.from_iterable(used.values()))
    return (
        lines
        + _table(["workload", "used kernels", *used, "published"], rows)
        + f"\n\nKernels that any workload used: {len(every):,}."
    )


def _runtime(published: Any, figures: Sequence[Figures]) -> str:
    rows, notes, memory = [], [], set()
    for f in figures:
        results = f.loading_results()
        for loading in Loading:
            result = results.get(loading)
            if result is None:
                continue
            if result.failure is not None:
                notes.append(f"{f.name}, {loading.value}: {' '.join(result.failure.split())[:300]}")
                continue
            gpu = comparison_of(result, *_GPU_MEMORY)
            if gpu is not None:
                memory.add(gpu.figure)
            wall = comparison_of(result, "wall_s")
            rows.append(
                (
                    f.name,
                    loading.value,
                    _compared(comparison_of(result, "peak_rss_bytes"), 1e-6),
                    _compared(gpu, 1e-6),
                    _compared(wall, 1),
                    _compared(comparison_of(result, "first_result_s"), 1),
                    0 if wall is None else wall.original.runs,
                    _published(published, f.name, loading.value),
                )
            )
        notes += [f"{f.name}: {note}" for m in f.measurements for note in m.notes]
    head = ["workload", "loading", "peak CPU memory, MB", "peak GPU memory, MB"]
    head += ["execution time, s", "first GPU result, s", "runs", "published"]
    told = "Original -> compacted copies (change of the medians)."
    if "gpu_device_bytes" in memory:
        told += " GPU memory is that of the whole device, less what was in use before."
    listed = "".join(f"\n- {note}" for note in dict.fromkeys(notes))
    return f"{told}\n\n{_table(head, rows)}" + (f"\n{listed}" if listed else "")


def _steps(benchmark: Benchmark) -> str:
    rows = [
        (
            s.workload,
            s.name,
            f"{s.seconds:.1f}",
            "" if s.status is None else s.status,
            s.problem or "",
        )
        for s in benchmark.steps
    ]
    lines = "".join(f"- {name}: skipped, {reason}\n" for name, reason in benchmark.skipped.items())
    return (
        f"{lines}\n{_table(['workload', 'step', 's', 'status', 'problem'], rows)}\n\n"
        f"{benchmark.seconds:.0f} s in all. Not covered: CPU code, TensorFlow, vLLM, several GPUs."
    )


def _copy_size(figures: Figures, row: LibraryRow) -> int | None:
    copy = figures.compacted.get(row.path)
    return None if copy is None else copy.copy_size


def _proved(figures: Figures, copies: str) -> str:
    verdict = figures.verdicts.get(copies)
    if verdict is None:
        return "no verdict"
    return "proved" if verdict.proved else f"not proved: {'; '.join(verdict.reasons)[:120]}"


def _published(table: Any, *keys: str) -> str:
    """What the data file has under these keys, as ``{"files": "-55%"}``."""
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    if not isinstance(table, dict):
        return _NO_FIGURE
    return ", ".join(f"{name} {value}" for name, value in table.items())


def _jaccard(one: set[Any], other: set[Any]) -> float:
    return len(one & other) / len(one | other) if one | other else 1.0


def _reduction(before: float, after: float) -> float:
    return 100 * (1 - after / before) if before else 0.0


def _difference(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else "-"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _change(before: int, after: int) -> str:
    return f"{before:,} -> {after:,} ({_difference(before, after)})"


def _change_mb(before: int, after: int | None) -> str:
    if after is None:
        return f"{before / 1e6:,.1f}, no copy"
    return f"{before / 1e6:,.1f} -> {after / 1e6:,.1f} ({_difference(before, after)})"


def _compared(found: Comparison | None, scale: float) -> str:
    if found is None:
        return "unknown"
    before, after = found.original.median * scale, found.slim.median * scale
    digits = 2 if scale == 1 else 0
    ratio = "" if found.ratio is None else f" ({100 * (found.ratio - 1):+.1f}%)"
    return f"{before:,.{digits}f} -> {after:,.{digits}f}{ratio}{' ~' if found.overlap else ''}"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return "Nothing to show."
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return tabulate(cells, headers=list(head), tablefmt="github", disable_numparse=True)
