"""The tables, as markdown, from what was read."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paper_catalog import WORKLOADS
from paper_records import Benchmark, Figures, comparison_of
from tabulate import tabulate

from pytest_negativa.models.measurement import Comparison, Loading
from pytest_negativa.models.pages import HostRow
from pytest_negativa.models.plan import UnusedReason
from pytest_negativa.models.report import LibraryRow

_PUBLISHED = Path(__file__).resolve().parent / "published.json"
_GPU_MEMORY = ("gpu_process_bytes", "gpu_device_bytes")
_NO_TENSORFLOW = "TensorFlow is not covered; JAX takes its place"
_NO_VLLM = "vLLM is not covered"


def render(benchmark: Benchmark, figures: Sequence[Figures]) -> str:
    published = json.loads(_PUBLISHED.read_text())
    tables = published["tables"]
    paper = _Paper(benchmark, figures)
    llama = ("Llama2 Transformers Inference",)
    parts = [
        "# The paper's tables, with our figures",
        _introduction(published, benchmark),
        _differences(published["setting"], benchmark, figures),
        "## Table 2: all shared libraries of a workload\n\n" + _SIZES,
        paper.table(tables["2"], _sizes),
        "## Table 3: the largest library of a workload",
        paper.table(tables["3"], _largest),
        "## Tables 4 and 9: similarity of workloads",
        _similarity(published["similarity"], figures),
        "## Table 5: memory and time\n\n" + _MEMORY,
        paper.table(tables["5"], _runtime),
        "## Table 6: sizes of Llama on one H100",
        paper.pairs(tables["6"], llama, lambda f: [_sizes(f)[0]]),
        "## Table 7: memory and time of Llama on one H100",
        paper.pairs(tables["7"], llama, _runtime),
        "## Table 8: time from the first trace to proved libraries",
        paper.table(tables["8"], lambda f: [_end_to_end(benchmark, f)]),
        "## Table 10: large models on eight A100",
        paper.pairs(published["several_gpus"], (), _runtime, "needs several GPUs"),
        "## Figures 5 to 7: libraries, and why code is unused",
        _reasons(published["figures"], figures),
        "## What was run\n\n" + _steps(benchmark),
    ]
    return "\n\n".join(parts) + "\n"


_SIZES = (
    "File size: what compacted copies save of GPU code, and the untouched pages of CPU code, which "
    "lie in spares after `slim --lock --spare`. CPU code: code and unwind tables, in pages of "
    "4 KiB; reduced by those that the workload did not touch. Functions: those on untouched pages, "
    "so at least so many. Elements and GPU code: unused ones. All libraries but libc and the "
    "program count for CPU code, those with GPU code for the others."
)
_MEMORY = (
    "Value of the originals, and in parentheses by how much the compacted copies reduce it, by the "
    "medians. `~`: the ranges of both overlap, so these runs show no difference. GPU memory of the "
    "whole device, less what was in use before, if the process's own is not known."
)


def _introduction(published: Mapping[str, Any], benchmark: Benchmark) -> str:
    source = published["source"]
    return (
        f"Paper: {source['authors']}: {source['title']}, {source['venue']} "
        f"({', '.join(source['read'])}). Each published row stands before ours. A cell has a value "
        "and, in parentheses, its reduction in percent. 1 MB = 10^6 bytes; K: thousands. Runs of "
        f"each variant that count, for each way of loading: {benchmark.pairs}, after one that "
        "doesn't."
    )


def _differences(
    setting: Mapping[str, str], benchmark: Benchmark, figures: Sequence[Figures]
) -> str:
    devices = sorted({device for f in figures if f.report for device in f.report.devices})
    processors = sorted({model for f in figures if f.pages for model in f.pages.processors})
    verdicts = [v for f in figures for v in f.verdicts.values()]
    rows = [("GPU", ", ".join(devices) or "none", setting["GPU"])]
    if verdicts:
        v = verdicts[0].versions
        rows += [
            ("CUDA driver", v.get("cuda-driver", "unknown"), ""),
            ("system", f"{v['platform']}, {v['libc']}, Python {v['python']}", ""),
        ]
    versions = ", ".join(f"{n} {v}" for n, v in benchmark.versions.items())
    rows += [
        ("CPU", ", ".join(processors) or "unknown", ""),
        ("packages", versions or "none", setting["packages"]),
        ("data and weights", "synthetic, random; a small Llama", "trained; Llama2"),
        ("loading mode", "lazy and eager, each on its own", "not said, but in tables 6 and 7"),
        ("GPU code", "all containers", setting["what counts as GPU code"]),
        ("CPU code", "pages", "functions"),
        ("runs", str(benchmark.pairs), setting["runs"]),
        ("size of the workload", "quick" if benchmark.quick else "full", ""),
    ]
    return "## What differs\n\n" + _table(["", "here", "paper"], rows)


_Row = Sequence[object]


class _Paper:
    """The paper's rows, each before ours of the same workload."""

    def __init__(self, benchmark: Benchmark, figures: Sequence[Figures]) -> None:
        self._skipped = benchmark.skipped
        self._figures = {f.name: f for f in figures}

    def table(self, table: Mapping[str, Any], ours: Callable[[Figures], Sequence[_Row]]) -> str:
        """Rows of ours begin with what goes beside "here"."""
        rows: list[_Row] = []
        for paper, published in table["rows"].items():
            rows.append((paper, "paper", *published))
            rows += self._ours(paper, ours)
        return _table(["workload", "", *table["columns"]], rows)

    def pairs(
        self,
        table: Mapping[str, Any],
        workloads: Sequence[str],
        ours: Callable[[Figures], Sequence[_Row]],
        reason: str = "",
    ) -> str:
        """A table whose rows are not the workloads of the others."""
        rows: list[_Row] = [(name, "paper", *row) for name, row in table["rows"].items()]
        for paper in workloads:
            rows += self._ours(paper, ours)
        if not workloads:
            rows.append(("", "here", f"not run: {reason}"))
        return _table(["", "", *table["columns"]], rows)

    def _ours(self, paper: str, ours: Callable[[Figures], Sequence[_Row]]) -> Iterator[_Row]:
        workload = next((w for w in WORKLOADS if w.paper == paper), None)
        if workload is None:
            reason = _NO_VLLM if "vLLM" in paper else _NO_TENSORFLOW
            yield "", "here", f"not run: {reason}"
        elif workload.name in self._figures:
            rows = ours(self._figures[workload.name])
            for number, (label, *cells) in enumerate(rows):
                yield "" if number else workload.name, f"here{label}", *cells
        else:
            reason = self._skipped.get(workload.name, "not traced, see the last table")
            yield workload.name, "here", f"not run: {reason}"


# ---- Sizes ----


def _sizes(figures: Figures) -> list[_Row]:
    rows, pages = figures.libraries, figures.pages
    host = {row.path: row for row in pages.libraries} if pages else {}
    gpu = {row.path: row for row in rows}
    paths = sorted({*gpu, *host})
    return [("", len(paths), *_cells(figures, paths, gpu, host))]


def _largest(figures: Figures) -> list[_Row]:
    gpu = {row.path: row for row in figures.libraries}
    host = {row.path: row for row in figures.pages.libraries} if figures.pages else {}
    sizes = {path: row.size for path, row in gpu.items()}
    sizes.update({path: row.size for path, row in host.items()})
    if not sizes:
        return [("", "no library was traced")]
    path = max(sizes, key=lambda path: sizes[path])
    return [("", Path(path).name, *_cells(figures, [path], gpu, host))]


def _cells(
    figures: Figures,
    paths: Sequence[str],
    gpu: Mapping[str, LibraryRow],
    host: Mapping[str, HostRow],
) -> _Row:
    """File size, CPU code, functions, GPU code, elements of some libraries."""
    rows = [gpu[path] for path in paths if path in gpu]
    traced = [host[path] for path in paths if path in host]
    size = sum(host[path].size if path in host else gpu[path].size for path in paths)
    copies = figures.compacted
    gone = sum(
        row.size - (copies[row.path].copy_size or row.size) for row in rows if row.path in copies
    )
    untouched = sum(row.watched - row.touched for row in traced)
    named = [row for row in traced if row.functions is not None]
    functions = sum(row.functions or 0 for row in named)
    touched = sum(row.touched_functions or 0 for row in named)
    code, elements = sum(row.code_bytes for row in rows), sum(row.elements for row in rows)
    unused = elements - sum(row.kept_elements for row in rows)
    return (
        _mb(size, gone + untouched) if copies or traced else _mb(size, None),
        _mb(sum(row.watched for row in traced), untouched) if traced else "not traced",
        f"{functions / 1e3:,.0f}K ({_percent(functions - touched, functions)})" if named else "",
        _mb(code, sum(row.unused_bytes for row in rows)) if rows else "none traced",
        f"{elements:,} ({_percent(unused, elements)})" if rows else "",
    )


# ---- Similarity ----


def _similarity(published: Sequence[str], figures: Sequence[Figures]) -> str:
    names = [f.name for f in figures]
    kernels = {
        f.name: {(path, k) for path, found in f.used_kernels.items() for k in found}
        for f in figures
    }
    functions = {
        f.name: {(name, at) for name, found in f.functions.items() for at in found} for f in figures
    }
    rows = [
        (
            one,
            f"{len(kernels[one]):,}; {len(functions[one]):,}",
            *(
                f"{_jaccard(kernels[one], kernels[other])}; "
                f"{_jaccard(functions[one], functions[other])}"
                for other in names
            ),
        )
        for one in names
    ]
    listed = "\n".join(f"- paper: {line}" for line in published)
    return (
        "Jaccard similarity of the sets of used kernels, and of functions on touched pages, over "
        "all libraries: 1 for the same, 0 for none in common. The paper's are of one library.\n\n"
        f"{listed}\n\n" + _table(["here", "kernels; functions", *names], rows)
    )


# ---- Memory and time ----


def _runtime(figures: Figures) -> list[_Row]:
    results = figures.loading_results()
    rows: list[_Row] = []
    for loading in Loading:
        result = results.get(loading)
        if result is None:
            rows.append((f", {loading.value}", "not run: see the last table"))
        elif result.failure is not None:
            rows.append((f", {loading.value}", " ".join(result.failure.split())[:120]))
        else:
            rows.append(
                (
                    f", {loading.value}",
                    _compared(comparison_of(result, "peak_rss_bytes"), 1e-6),
                    _compared(comparison_of(result, *_GPU_MEMORY), 1e-6),
                    _compared(comparison_of(result, "wall_s"), 1),
                )
            )
    return rows


def _end_to_end(benchmark: Benchmark, figures: Figures) -> _Row:
    spent = sum(
        step.seconds
        for step in benchmark.steps
        if step.workload == figures.name and not step.name.startswith("measure")
    )
    libraries = figures.pages.libraries if figures.pages else figures.libraries
    return "", len(libraries), f"{spent:,.0f}"


# ---- Figures ----


def _reasons(published: Mapping[str, str], figures: Sequence[Figures]) -> str:
    wrong = UnusedReason.WRONG_ARCH.value
    rows = []
    for f in figures:
        libraries = f.libraries
        pages = f.pages.libraries if f.pages else ()
        total = sum(row.unused_bytes for row in libraries)
        elements = sum(row.elements - row.kept_elements for row in libraries)
        by_arch = sum(r.elements for row in libraries for r in row.unused if r.reason == wrong)
        most = sorted((row.unused_bytes for row in libraries), reverse=True)
        rows.append(
            (
                f.name,
                _median([(row.watched - row.touched, row.watched) for row in pages]),
                _median([(row.unused_bytes, row.code_bytes) for row in libraries]),
                f"{_percent(sum(most[:8]), total)}% of {len(libraries)}",
                f"{_percent(by_arch, elements)}%",
            )
        )
    head = ["workload", "median of CPU code", "median of GPU code", "in the top 8 libraries"]
    listed = "\n".join(f"- paper, figure {number}: {text}" for number, text in published.items())
    return (
        "Reductions of a library's code; the share of unused GPU code in the eight libraries with "
        "most of it; unused elements that are of another arch.\n\n"
        f"{listed}\n\n" + _table([*head, "another arch"], rows)
    )


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
        f"{benchmark.seconds:.0f} s in all."
    )


def _jaccard(one: set[Any], other: set[Any]) -> str:
    return f"{len(one & other) / len(one | other):.2f}" if one | other else "-"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}" if whole else "-"


def _median(parts: Sequence[tuple[int, int]]) -> str:
    found = [100 * part / whole for part, whole in parts if whole]
    return f"{statistics.median(found):.0f}%" if found else "-"


def _mb(value: int, gone: int | None) -> str:
    told = "no copy" if gone is None else _percent(gone, value)
    return f"{value / 1e6:,.0f} ({told})"


def _compared(found: Comparison | None, scale: float) -> str:
    if found is None:
        return "unknown"
    digits = 2 if scale == 1 else 0
    ratio = "-" if found.ratio is None else f"{100 * (1 - found.ratio):.1f}"
    told = f"{found.original.median * scale:,.{digits}f} ({ratio})"
    return f"{told}{' ~' if found.overlap else ''}"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return "Nothing to show."
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return tabulate(cells, headers=list(head), tablefmt="github", disable_numparse=True)
