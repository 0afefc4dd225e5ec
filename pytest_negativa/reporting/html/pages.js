// The pages (libraries, elements, kernels, tests); one row for all instantiations of a template.
//
// Each function turns the data, and what the address says, into elements.

const num = (column) => ({ kind: "num", ...column });
const libraryLink = (library) => `#/library/${library}`;
const link = (href, text) => make("a", { href }, text);
const marked = (category, text) => make("span", {}, swatch(category), text);
const STATES = [["used", "used"], ["unused", "not used"]];
// The state in words, for colour alone does not show it to everybody.
const stateColumn = (text) => ({ id: "short", title: "State", width: 120, cell: text, key: text });
const facts = (rows) => make("dl", { class: "facts" }, rows.filter((row) => row && row[1] !== null && row[1] !== undefined).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
const range = (count) => Uint32Array.from({ length: count }, (_, i) => i);
const unusedOf = (row) => sum(row.unused.map((part) => part.bytes));
const unusedBy = (row, category, data) => sum(row.unused.filter((part) => data.categoryOf(part.reason) === category).map((part) => part.bytes));
const keptBy = (row, category, data) => sum(row.kept.filter((part) => data.categoryOf(part.reason) === category).map((part) => part.bytes));
const partsOf = (row, data) => CATEGORIES.map(({ id }, i) => [id, i < 2 ? keptBy(row, i, data) : unusedBy(row, i, data)]);

const sizesOf = (data) => CATEGORIES.map((_, i) => sum(data.report.libraries.map((row) => partsOf(row, data)[i][1])));

// What the run was, and the verdict on it.
function runCard({ report, proof, facts: rows }) {
  const kind = !report.proof ? "" : report.proof.proved ? "good" : "bad";
  const title = proof ? proof.split(": ", 1)[0] : report.replay ? "Not proved: a replay" : "Not verified yet";
  return make("section", { class: "card", "aria-label": "The run" },
    make("p", {}, make("strong", { class: `badge ${kind}` }, title), proof ? ` ${proof.slice(title.length + 2)} ` : null, report.proof?.evidence ? `Evidence: ${report.proof.evidence}.` : null),
    facts(rows.map(([name, value]) => [name, name === "Command" ? make("code", {}, value) : value])));
}

// The next command, and the size of all files without what is unused.
function todo({ nextCommand, report, host }) {
  const before = sum(report.libraries.map((row) => row.size)), after = before - sum(report.libraries.map(unusedOf));
  const [command, ...where] = (nextCommand || "").split(", ");
  const copy = make("button", { type: "button", onclick: () => navigator.clipboard?.writeText(command).then(() => { copy.textContent = "Copied"; }) }, "Copy");
  const idle = sum(host.watched) - sum(host.touched);
  return card("What to do", null,
    command ? make("p", { class: "command" }, make("code", {}, command), copy, where.length ? ` ${where.join(", ")}` : null) : null,
    before ? barRows([
      ["Libraries now", null, [["accent", before]], formatBytes(before)],
      ["Once slimmed", null, [["accent", after]], `${formatBytes(after)}, ${formatShare(before - after, before)} less`],
    ]) : null,
    idle > 0 ? make("p", {}, `${formatBytes(idle)} of CPU code that nothing touched can go to spares, too.`) : null);
}

function notes({ report, part }) {
  const compiled = [...new Set(report.runtime.flatMap((one) => one.kernels))].sort();
  const list = (items, kind, title) => {
    if (!items.length) return null;
    const lines = make("ul", {}, items.slice(0, 2).map((item) => make("li", {}, item)));
    const more = items.length > 2 ? make("details", {}, make("summary", {}, `${items.length - 2} more`), make("ul", {}, items.slice(2).map((item) => make("li", {}, item)))) : null;
    return make("div", { class: `note ${kind}` }, make("strong", {}, title), lines, more);
  };
  return [
    report.replay ? make("p", { class: "note" }, report.replay) : null,
    part ? make("p", { class: "note" }, part) : null,
    list(report.crossed, "bad", "Limits that were crossed"),
    list(report.not_covered, "warn", "Not covered by the trace, so what it may have used is kept"),
    list(report.warnings, "warn", "Warnings"),
    list(report.compared, "", "Compared with the baseline"),
    compiled.length ? make("details", { class: "note" }, make("summary", {}, `${plural(compiled.length, "kernel was", "kernels were")} compiled at run time, or came from a compiler's cache.`),
      make("ul", {}, compiled.map((name) => make("li", {}, name)))) : null,
  ];
}

function overview(data, path) {
  const { report } = data, rows = report.libraries;
  const neverOpened = sum(rows.flatMap((row) => row.unused).filter((part) => part.reason === "not-opened").map((part) => part.bytes));
  const code = sum(rows.map((row) => row.code_bytes)), unused = sum(rows.map(unusedOf));
  const codeFiles = rows.filter((row) => row.is_files), ofCodeFiles = sum(codeFiles.map((row) => row.size));
  const kernels = sum(rows.map((row) => row.kernels)), used = sum(rows.map((row) => row.used_kernels));
  const width = Math.min(1240, innerWidth - 40) > 820 ? HALF_WIDTH : Math.max(260, innerWidth - 60);
  const tile = (href, figure, name, text) => make("a", { class: "tile", href }, make("span", { class: "name" }, name), make("b", {}, figure), make("span", {}, text));
  const count = data.testsThatRan;
  const tests = count ? (count === 1 ? "this test" : `these ${formatCount(count)} tests`) : data.hasTests ? "the tests" : "this run";
  const pieces = [
    make("h1", {}, !code ? "No GPU code was loaded" : `${formatShare(unused, code)} of the GPU code was not used by ${tests}`),
    make("p", { class: "lead" }, `The run loaded ${plural(rows.length - codeFiles.length, "library", "libraries")} with ${formatBytes(code - ofCodeFiles)} of GPU code on ${report.devices.join(", ") || "an unknown device"}. ` +
      (codeFiles.length ? `${plural(sum(codeFiles.map((row) => row.elements)), "file that is GPU code adds", "files that are GPU code add")} ${formatBytes(ofCodeFiles)}. ` : "")),
    make("div", { class: "grid first" }, runCard(data), todo(data)),
    ...notes(data),
    make("div", { class: "tiles" },
      tile("#/libraries", formatBytes(unused), "Unused", `of ${formatBytes(code)} of GPU code`),
      tile("#/elements?reason=wrong-arch", formatBytes(sum(rows.map((row) => unusedBy(row, 3, data)))), "For other GPUs", "never loaded by the tested GPU"),
      tile("#/elements?reason=no-used-kernel", formatBytes(sum(rows.map((row) => unusedBy(row, 2, data))) - neverOpened), "No test used it", "fits the tested GPU"),
      codeFiles.length ? tile("#/elements?reason=not-opened", formatBytes(neverOpened), "Never opened", "files that are GPU code") : null,
      tile("#/kernels?state=used", `${formatCount(used)} of ${formatCount(kernels)}`, "Kernels used", `${formatShare(used, kernels)} of those that fit the tested GPU`)),
  ];
  const map = data.elements.length ? new Treemap(data, path, (zoomed) => history.replaceState(null, "", zoomed.length ? `#/map/${zoomed.map(encodeURIComponent).join("/")}` : "#/")) : null;
  if (map) pieces.push(map.root);
  pieces.push(coverage(data));
  pieces.push(make("div", { class: "grid" }, pictures(data, width)));
  return pieces;
}

// Kernels of the libraries that the project builds itself: an unused one is untested.
function coverage(data) {
  const { kernels, texts } = data, groups = new Map(), untested = [];
  for (let i = 0; i < kernels.length; i++) {
    if (!data.isOwn.has(kernels.library[i])) continue;
    const group = kernels.file[i] < 0 ? data.libraryNames[kernels.library[i]] : texts[kernels.file[i]];
    if (!groups.has(group)) groups.set(group, [kernels.library[i], 0, 0]);
    groups.get(group)[kernels.first[i] < 0 ? 2 : 1]++;
    if (kernels.first[i] < 0) untested.push(i);
  }
  if (!groups.size) return null;
  const all = sum([...groups.values()].map(([, tested, not]) => tested + not));
  return make("section", { class: "card coverage" }, make("h2", {}, "Kernel coverage of this project"),
    make("p", {}, `The tests ran ${formatCount(all - untested.length)} of ${plural(all, "kernel", "kernels")} (${formatShare(all - untested.length, all)}) of the project's own libraries.`),
    barRows([...groups].sort((a, b) => b[1][2] - a[1][2]).slice(0, 30).map(([name, [library, tested, not]]) => [name, libraryLink(library), [["used", tested], ["idle", not]], `${formatCount(tested)} of ${formatCount(tested + not)}`])),
    untested.length ? make("h3", {}, `Untested kernels: ${formatCount(untested.length)}`) : null,
    untested.length ? kernelTable(data, new URLSearchParams(), undefined, { only: untested, ofLibrary: data.isOwn.size === 1, untested: true }).root : null);
}

// Widths of pictures in a window with two columns.
const HALF_WIDTH = 560, FULL_WIDTH = 1180;

function pictures(data, width) {
  const { report, elements, texts } = data, rows = report.libraries, found = [];
  const half = (draw) => found.push({ draw, full: false }), full = (draw) => found.push({ draw, full: true });
  const shown = rows.slice(0, 12), others = rows.slice(12);
  const unused = sum(rows.map(unusedOf));
  const bars = shown.map((row, i) => [data.libraryNames[i], libraryLink(i), partsOf(row, data), `${formatBytes(row.code_bytes)}, ${formatShare(sum(rows.slice(0, i + 1).map(unusedOf)), unused)}`]);
  if (others.length) {
    const merged = CATEGORIES.map(({ id }, c) => [id, sum(others.map((row) => partsOf(row, data)[c][1]))]);
    bars.push([`${others.length} more`, "#/libraries", merged, `${formatBytes(sum(others.map((row) => row.code_bytes)))}, 100%`]);
  }
  if (rows.length > 2) {
    const total = sum(rows.map(unusedOf));
    let count = 0;
    for (let added = 0; added < 0.8 * total; count++) added += unusedOf(rows[count]);
    half(() => card("Where to begin: GPU code by library", total ? `The first ${plural(count, "library holds", "libraries hold")} 80% of the unused bytes. The percentage is of a library with those above it.` : null, barRows(bars)));
  }

  const archs = new Map();
  for (let i = 0; i < elements.length; i++) {
    const name = texts[elements.arch[i]];
    if (!archs.has(name)) archs.set(name, [0, 0, 0, 0]);
    archs.get(name)[data.category[i]] += elements.size[i];
  }
  if (archs.size > 2) {
    const list = [...archs].sort((a, b) => sum(b[1]) - sum(a[1])).slice(0, 14);
    half(() => card("GPU code by architecture", "What each GPU architecture adds to the libraries.",
      barRows(list.map(([name, parts]) => [name, `#/elements?arch=${encodeURIComponent(name)}`, parts.map((size, c) => [CATEGORIES[c].id, size]), formatBytes(sum(parts))]))));
  }
  const { host } = data;
  if (host.length) {
    const names = uniqueNames(Array.from(host.path, (path) => texts[path])), touched = sum(Array.from(host.touched)), watched = sum(Array.from(host.watched));
    const largest = [...range(host.length)].sort((a, b) => host.watched[b] - host.watched[a]).slice(0, 12);
    const doubt = data.hostIncomplete.length ? ` More may have been touched: ${data.hostIncomplete.join("; ")}.` : "";
    half(() => card("CPU code by library", `The run touched ${formatBytes(touched)} of ${formatBytes(watched)} in ${plural(host.length, "library", "libraries")}.${doubt} ${data.hostProof || ""}`,
      make("ul", { class: "legend" }, make("li", {}, swatch(0), "Touched"), make("li", {}, swatch(3), "Never touched")),
      barRows(largest.map((i) => [names[i], null, [["used", host.touched[i]], ["alien", host.watched[i] - host.touched[i]]], `${formatBytes(host.touched[i])} of ${formatBytes(host.watched[i])}`]))));
  }
  const code = sum(rows.map((row) => row.code_bytes));
  const reasons = new Map();
  for (const row of rows) for (const part of [...row.unused, ...row.kept]) {
    const known = reasons.get(part.reason) || { bytes: 0, elements: 0 };
    reasons.set(part.reason, { bytes: known.bytes + part.bytes, elements: known.elements + part.elements });
  }
  const byBytes = [...reasons].sort((a, b) => b[1].bytes - a[1].bytes);
  // The legend of the map has the sizes of the four categories.
  if (new Set([...reasons.keys()].map(data.categoryOf)).size < reasons.size) half(() => card("Reasons of removal, and of keeping", null, barRows(byBytes.map(([reason, { bytes, elements: count }]) =>
    [(REASONS[reason] || [0, reason])[1], `#/elements?reason=${encodeURIComponent(reason)}`, [[CATEGORIES[data.categoryOf(reason)].id, bytes]], `${formatBytes(bytes)}, ${formatShare(bytes, code)}`]), "tall")));

  const groups = testGroups(data);
  if (groups.length > 2 && heatMap(groups, width)) {
    (groups.length > 8 ? full : half)((room) => card("Which tests use the same kernels",
      `Kernels in common, of all that either test launched (Jaccard similarity).${groupingOf(groups)}`, heatMap(groups, room)));
  }
  if (varies(data.history.code_bytes) || varies(data.history.unused_bytes)) {
    half((room) => card("Growth over saved runs", oneDay(data.history, texts) ? `All runs are of ${dayOf(texts[data.history.run[0]])}; times are in UTC.` : null,
      make("ul", { class: "legend" }, make("li", {}, make("span", { class: "swatch accent" }), "GPU code"), make("li", {}, make("span", { class: "swatch idle" }), "unused")),
      growthChart(data.history, texts, room)));
  }
  // The last one takes the place of two if it would stand alone.
  const halves = found.filter((picture) => !picture.full);
  if (halves.length % 2) halves[halves.length - 1].full = true;
  return found.map((picture) => {
    const drawn = picture.draw(picture.full && width === HALF_WIDTH ? FULL_WIDTH : width);
    if (picture.full) drawn.classList.add("full");
    return drawn;
  });
}

// Tests with the kernels that they launched; a trace of first look-ups alone can't tell them.
function testGroups(data) {
  const { tests, texts, launches } = data;
  if (!launches.length) return [];
  const all = [...data.kernelsOfTest].filter(([, rows]) => rows.some(([, count]) => count));
  const byModule = all.length > 64, groups = new Map();
  for (const [test, rows] of all) {
    const name = texts[tests.name[test]], key = byModule ? name.split("::")[0] : name;
    if (!groups.has(key)) groups.set(key, { name: key, kernels: new Set() });
    for (const [kernel] of rows) groups.get(key).kernels.add(kernel);
  }
  const list = [...groups.values()].sort((a, b) => (a.name < b.name ? -1 : 1)).slice(0, 64);
  list.byModule = byModule;
  list.leftOut = groups.size - list.length;
  list.both = (a, b) => [...a.kernels].filter((kernel) => b.kernels.has(kernel)).length;
  return list;
}

// What a heat map shows instead of all tests.
function groupingOf({ byModule, leftOut }) {
  const rest = leftOut ? ` ${plural(leftOut, "module comes", "modules come")} later by name and ${leftOut === 1 ? "is" : "are"} left out.` : "";
  return `${byModule ? " Tests are grouped by module." : ""}${rest}`;
}

function libraryTable(data, params, onChange) {
  const rows = data.report.libraries;
  return new Table({
    label: "libraries", rows: range(rows.length), params, onChange, sort: "-unused", placeholder: "Search path",
    search: (i) => rows[i].path, href: libraryLink,
    columns: [
      { id: "name", title: "Library", cell: (i) => data.libraryNames[i], key: (i) => data.libraryNames[i].toLowerCase() },
      num({ id: "size", title: "File", width: 90, hide: "wide", cell: (i) => formatBytes(rows[i].size), key: (i) => rows[i].size }),
      num({ id: "code", title: "GPU code", width: 115, hide: "middle", cell: (i) => formatBytes(rows[i].code_bytes), key: (i) => rows[i].code_bytes }),
      num({ id: "unused", title: "Unused", width: 95, cell: (i) => formatBytes(unusedOf(rows[i])), key: (i) => unusedOf(rows[i]) }),
      num({ id: "share", title: "Share", width: 78, cell: (i) => formatShare(unusedOf(rows[i]), rows[i].code_bytes), key: (i) => unusedOf(rows[i]) / (rows[i].code_bytes || 1) }),
      num({ id: "arch", title: "For other GPUs", width: 150, hide: "wide", cell: (i) => formatBytes(unusedBy(rows[i], 3, data)), key: (i) => unusedBy(rows[i], 3, data) }),
      num({ id: "idle", title: "No test", width: 95, hide: "wide", cell: (i) => formatBytes(unusedBy(rows[i], 2, data)), key: (i) => unusedBy(rows[i], 2, data) }),
      num({ id: "elements", title: "Elements", width: 110, hide: "wide", cell: (i) => formatCount(rows[i].elements), key: (i) => rows[i].elements }),
      num({ id: "kernels", title: "Kernels", width: 100, hide: "wide", cell: (i) => formatCount(rows[i].kernels), key: (i) => rows[i].kernels }),
      num({ id: "used", title: "Used", width: 70, hide: "middle", cell: (i) => formatCount(rows[i].used_kernels), key: (i) => rows[i].used_kernels }),
    ],
  });
}

const libraryFilter = (data, column) => {
  const options = data.libraryNames.map((name, i) => [String(i), name]);
  return { id: "library", label: "All libraries", options, key: (row) => options[column[row]][0] };
};
// An element by its source file or largest kernel.
const elementText = (data, i) => {
  const { elements, texts } = data;
  // A name may be of spaces alone.
  const named = elements.name[i] < 0 ? "" : texts[elements.name[i]].trim();
  return named || (elements.region[i] < 0 && texts[elements.section[i]]) || `region ${elements.region[i]}`;
};
const codeOf = ({ elements, texts }, i) => `${texts[elements.arch[i]]} ${texts[elements.kind[i]]}`;

// The rows of one library need no column for it on a page that names it.
const libraryColumn = (data, column, width) => ({ id: "library", title: "Library", width, hide: width ? "wide" : "middle", cell: (i) => data.libraryNames[column[i]], key: (i) => data.libraryNames[column[i]].toLowerCase() });

function elementTable(data, params, onChange, only) {
  const { elements, texts } = data, text = (column) => (i) => (column[i] < 0 ? "" : texts[column[i]]);
  const arch = text(elements.arch), reason = text(elements.reason), detail = text(elements.detail), kind = text(elements.kind), section = text(elements.section);
  const distinct = (column) => [...new Set(column)].map((i) => texts[i]).sort();
  return new Table({
    label: "elements", rows: only || range(elements.length), params, onChange, sort: "-size", placeholder: "Search kernel, library, architecture, reason, test",
    search: (i) => `${data.libraryNames[elements.library[i]]} ${arch(i)} ${kind(i)} ${section(i)} ${reason(i)} ${reasonOf(data, i)} ${detail(i)} ${elementText(data, i)}`,
    href: (i) => `#/element/${i}`,
    filters: [
      libraryFilter(data, elements.library),
      { id: "arch", label: "All architectures", options: distinct(elements.arch).map((name) => [name, name]), key: arch },
      { id: "reason", label: "All reasons", options: distinct(elements.reason).map((name) => [name, (REASONS[name] || [0, name])[1]]), key: reason },
    ],
    columns: [
      { id: "element", title: "Element", hint: "Source file or largest kernel", cell: (i) => marked(data.category[i], cutInside(shortName(elementText(data, i)), "mono")), whole: (i) => elementText(data, i), key: (i) => shortName(elementText(data, i)) },
      { id: "code", title: "Code", width: 125, hide: "middle", cell: (i) => codeOf(data, i), key: (i) => codeOf(data, i) },
      ...(only ? [] : [libraryColumn(data, elements.library)]),
      stateColumn((i) => CATEGORIES[data.category[i]].state),
      num({ id: "size", title: "Size", width: 84, cell: (i) => formatBytes(elements.size[i]), key: (i) => elements.size[i] }),
      ...(only ? [{ id: "reason", title: "Reason", hide: "wide", cell: (i) => reasonOf(data, i), key: reason }] : []),
    ],
  });
}

// Kernels of one library and template as lists, in the order of the first.
function byTemplate({ kernels, texts }, rows) {
  const groups = new Map();
  for (const i of rows) {
    const key = `${kernels.library[i]} ${templateOf(texts[kernels.name[i]])}`;
    if (groups.has(key)) groups.get(key).push(i); else groups.set(key, [i]);
  }
  return [...groups.values()];
}

// A row is a kernel, or several instantiations of a template. Options: "only" these kernels, all of
// one library ("ofLibrary") or untested; "counts" as of data.kernelsOfTest; "alone": in no groups.
function kernelTable(data, params, onChange, { only, counts, ofLibrary, untested, alone } = {}) {
  const { kernels, tests, texts } = data, all = only || range(kernels.length);
  const groups = alone || counts ? Array.from(all, (i) => [i]) : byTemplate(data, all), one = (g) => groups[g][0];
  const name = (i) => texts[kernels.name[i]], isUsed = (i) => kernels.first[i] >= 0;
  const used = (g) => groups[g].filter(isUsed).length, several = (g) => groups[g].length > 1;
  const state = (g) => (!used(g) ? "not used" : used(g) === groups[g].length ? "used" : `${formatCount(used(g))} used`);
  const shown = (g) => (several(g) ? `${shortName(templateOf(name(one(g))))}<…>` : shortName(name(one(g))));
  const first = (g) => { const i = groups[g].find(isUsed); return i === undefined ? "" : texts[tests.name[kernels.first[i]]]; };
  const place = (g) => { const i = one(g); return kernels.file[i] < 0 ? "" : `${texts[kernels.file[i]]}:${kernels.line[i]}`; };
  const size = (g) => sum(groups[g].map((i) => kernels.size[i]));
  return new Table({
    label: "kernels", rows: range(groups.length), params, onChange, sort: counts ? "-gpu" : "-size", placeholder: "Search kernels, e.g. gemm bf16",
    search: (g) => groups[g].map((i) => (kernels.mangled[i] < 0 ? name(i) : `${name(i)} ${texts[kernels.mangled[i]]}`)).join("\n"),
    href: (g) => `#/${several(g) ? "template" : "kernel"}/${one(g)}`,
    filters: [
      libraryFilter(data, Float64Array.from(groups, ([i]) => kernels.library[i])),
      { id: "state", label: "Used or not", options: STATES, key: (g) => (used(g) ? "used" : "unused") },
    ],
    columns: [
      { id: "name", title: "Kernel", cell: (g) => marked(used(g) ? 0 : 2, cutInside(shown(g), "mono")), whole: (g) => name(one(g)), key: shown },
      ...(groups.length < all.length ? [num({ id: "count", title: "Instances", hint: "Instantiations of the template", width: 110, hide: "middle", cell: (g) => (several(g) ? formatCount(groups[g].length) : ""), key: (g) => groups[g].length })] : []),
      ...(ofLibrary ? [] : [libraryColumn(data, Float64Array.from(groups, ([i]) => kernels.library[i]), 230)]),
      ...(counts || untested ? [] : [stateColumn(state)]),
      num({ id: "size", title: "Code", width: 88, hide: counts ? "middle" : undefined, cell: (g) => (size(g) ? formatBytes(size(g)) : "-"), key: size }),
      ...(counts ? launchColumns(counts.map(([i, ...row]) => [Array.prototype.indexOf.call(all, i), ...row])) : []),
      ...(untested && groups.some((rows) => kernels.file[rows[0]] >= 0) ? [{ id: "place", title: "Source", hide: "wide", cell: place, key: place }] : counts || untested ? [] : [{ id: "first", title: "Used first in", width: 220, hide: "wide", cell: first, key: first }]),
    ],
  });
}

// Launches and GPU time, out of rows as of data.testsOfKernel.
function launchColumns(rows) {
  const of = new Map(rows.map((row) => [row[0], row])), count = (i) => of.get(i)[1], time = (i) => of.get(i)[2];
  return [
    num({ id: "launches", title: "Launches", width: 105, cell: (i) => (count(i) ? formatCount(count(i)) : "-"), key: count }),
    num({ id: "gpu", title: "GPU time", width: 110, cell: (i) => formatGpuTime(time(i)), key: time }),
  ];
}

// The ranges of a test with their kernels; the most GPU time first.
function rangeList(data, test) {
  if (data.leftOutRanges) return make("p", { class: "quiet" }, "This run has too many ranges for one page: negativa tests --ranges shows them.");
  const { launches, kernels, texts } = data, groups = new Map();
  for (const i of data.launchesOfTest.get(test) || []) {
    if (!groups.has(launches.ranges[i])) groups.set(launches.ranges[i], []);
    groups.get(launches.ranges[i]).push(i);
  }
  if (![...groups.keys()].some((name) => name >= 0)) return null;
  const count = (i) => launches.times[i], time = (i) => launches.nanoseconds[i], total = (rows) => sum(rows.map(time));
  const figures = (count, time) => `${plural(count, "launch", "launches")}, ${formatGpuTime(time)}`;
  return make("section", {}, make("h2", {}, "Ranges"),
    make("p", { class: "quiet" }, "The NVTX ranges around its launches, such as a framework's operators; of kernels of libraries alone."),
    [...groups].sort((a, b) => total(b[1]) - total(a[1])).map(([name, rows], place) =>
      make("details", { class: "range", open: place === 0 },
        make("summary", {}, name < 0 ? "Outside of ranges" : texts[name], make("span", { class: "quiet" }, ` ${figures(sum(rows.map(count)), total(rows))}`)),
        make("ul", {}, rows.sort((a, b) => time(b) - time(a)).map((i) => make("li", {},
          make("a", { class: "mono", href: `#/kernel/${launches.kernel[i]}`, title: texts[kernels.name[launches.kernel[i]]] }, shortName(texts[kernels.name[launches.kernel[i]]])),
          make("span", { class: "quiet" }, ` ${data.libraryNames[kernels.library[launches.kernel[i]]]}, ${figures(count(i), time(i))}`)))))));
}

// A replayed trace is of another session than the outcomes.
const outcomeTitle = (data) => (data.report.replay ? "Outcome here" : "Outcome");

function testTable(data, params, onChange, only, counts) {
  const { tests, texts } = data, name = (i) => texts[tests.name[i]];
  const outcome = (i) => (tests.outcome[i] < 0 ? "" : texts[tests.outcome[i]]);
  const kernels = (i) => (data.kernelsOfTest.get(i) || []).length;
  const gpuTime = (i) => tests.nanoseconds[i];
  const outcomes = [...new Set(tests.outcome)].filter((i) => i >= 0).map((i) => texts[i]).sort();
  return new Table({
    label: "tests", rows: only || range(tests.length), params, onChange, sort: counts ? "-launches" : "-kernels", placeholder: "Search tests",
    search: name, href: (i) => `#/test/${i}`,
    filters: outcomes.length ? [{ id: "outcome", label: "All outcomes", options: outcomes.map((text) => [text, text]), key: outcome }] : [],
    columns: [
      { id: "name", title: "Test", cell: (i) => cutInside(name(i)), key: name },
      { id: "outcome", title: outcomeTitle(data), width: data.report.replay ? 145 : 100, hide: "middle", cell: outcome, key: outcome },
      num({ id: "time", title: "Time", width: 90, hide: "middle", cell: (i) => (tests.outcome[i] < 0 ? "-" : formatTime(tests.milliseconds[i])), key: (i) => tests.milliseconds[i] }),
      ...(counts ? launchColumns(counts) : [
        num({ id: "kernels", title: data.launches.length ? "Kernels" : "New kernels", hint: data.launches.length ? "Kernels that it launched" : "Kernels that it was the first to use", width: data.launches.length ? 95 : 140, cell: (i) => formatCount(kernels(i)), key: kernels }),
        data.launches.length ? num({ id: "gpu", title: "GPU time", width: 110, cell: (i) => formatGpuTime(gpuTime(i)), key: gpuTime }) : null,
      ].filter(Boolean)),
    ],
  });
}

function listing(title, text, table) {
  return [make("h1", {}, title), make("p", { class: "lead" }, text), table.root];
}

function libraryPage(data, i) {
  const row = data.report.libraries[i], unused = unusedOf(row), { elements, kernels } = data;
  const own = range(elements.length).filter((at) => elements.library[at] === i);
  const ownKernels = range(kernels.length).filter((at) => kernels.library[at] === i);
  return [
    make("p", { class: "path" }, link("#/libraries", "Libraries"), " ›"),
    make("h1", {}, data.libraryNames[i]),
    make("p", { class: "lead" }, `${formatBytes(unused)} of ${formatBytes(row.code_bytes)} GPU code (${formatShare(unused, row.code_bytes)}) is unused; the tests used ${formatCount(row.used_kernels)} of ${plural(row.kernels, "kernel", "kernels")}.`),
    ...row.notes.map((note) => make("p", { class: "note" }, note)),
    make("div", { class: "grid" },
      card("Facts", null, facts([
        ["Path", make("code", {}, row.path)], ["File", formatBytes(row.size)],
        ["GPU code", `${formatBytes(row.code_bytes)} in ${plural(row.elements, "element", "elements")}`],
        row.trimmed ? ["Inside kept elements", `${formatBytes(row.trimmed.unused_bytes)} of ${formatBytes(row.trimmed.code_bytes)} code (unpacked) belongs to kernels that no test used`] : null,
        ["In the treemap", link(`#/map/${i}`, "open")],
      ])),
      card("Reasons", null, barRows([...row.unused, ...row.kept].map((part) => [(REASONS[part.reason] || [0, part.reason])[1], `#/elements?library=${i}&reason=${part.reason}`, [[CATEGORIES[data.categoryOf(part.reason)].id, part.bytes]], formatBytes(part.bytes)]), "tall"))),
    own.length ? make("section", {}, make("h2", {}, "Elements"), elementTable(data, new URLSearchParams(), undefined, own).root) : null,
    ownKernels.length ? make("section", {}, make("h2", {}, "Kernels"), kernelTable(data, new URLSearchParams(), undefined, { only: ownKernels, ofLibrary: true }).root) : null,
  ];
}

function elementPage(data, i) {
  const { elements, texts } = data, library = elements.library[i], inside = data.kernelsIn(i);
  return [
    make("p", { class: "path" }, link("#/elements", "Elements"), " › ", link(libraryLink(library), data.libraryNames[library]), " ›"),
    make("h1", { class: "mono", title: elementText(data, i) }, `${shortName(elementText(data, i))}, ${codeOf(data, i)}`),
    make("p", { class: "lead" }, marked(data.category[i], `${reasonOf(data, i)}.`)),
    make("div", { class: "card" }, facts([
      ["Library", link(libraryLink(library), data.libraryNames[library])],
      ["Section", make("code", {}, texts[elements.section[i]])],
      elements.region[i] < 0 ? null : ["Region", String(elements.region[i])],
      ["File offset", `0x${elements.start[i].toString(16)}`],
      ["Size", `${formatBytes(elements.size[i])} (${formatCount(elements.size[i])} bytes)`],
      ["Architecture", texts[elements.arch[i]]], ["Kind", texts[elements.kind[i]]],
      ["Decision", data.category[i] < 2 ? "stays" : "unused"],
      elements.detail[i] < 0 ? null : ["Because of", texts[elements.detail[i]]],
    ])),
    make("section", {}, make("h2", {}, "Kernels in it"), inside.length ? kernelTable(data, new URLSearchParams(), undefined, { only: inside, ofLibrary: true }).root
      : make("p", { class: "quiet" }, "None that the tested GPU could load is known here.")),
  ];
}

function templatePage(data, i) {
  const { kernels, texts } = data, name = templateOf(texts[kernels.name[i]]), library = kernels.library[i];
  const alike = range(kernels.length).filter((at) => kernels.library[at] === library && templateOf(texts[kernels.name[at]]) === name);
  return [
    make("p", { class: "path" }, link("#/kernels", "Kernels"), " › ", link(libraryLink(library), data.libraryNames[library]), " ›"),
    make("h1", { class: "mono" }, `${name}<…>`),
    make("p", { class: "lead" }, `The tests used ${formatCount(alike.filter((at) => kernels.first[at] >= 0).length)} of ${plural(alike.length, "instantiation", "instantiations")}.`),
    kernelTable(data, new URLSearchParams(), undefined, { only: alike, ofLibrary: true, alone: true }).root,
  ];
}

function kernelPage(data, i) {
  const { kernels, texts } = data, users = data.testsOfKernel.get(i) || [], library = kernels.library[i];
  const launched = users.some(([, count]) => count);
  const places = data.placesOf(i);
  return [
    make("p", { class: "path" }, link("#/kernels", "Kernels"), " › ", link(libraryLink(library), data.libraryNames[library]), " ›"),
    make("h1", { class: "mono" }, shortName(texts[kernels.name[i]])),
    make("p", { class: "lead" }, marked(kernels.first[i] < 0 ? 2 : 0, kernels.first[i] < 0 ? "No test used this kernel." : launched ? `${plural(users.length, "test", "tests")} launched this kernel.` : "The tests use this kernel.")),
    make("div", { class: "card" }, facts([
      ["Whole name", make("code", {}, texts[kernels.name[i]])],
      kernels.file[i] < 0 ? null : ["Source", `${texts[kernels.file[i]]}:${kernels.line[i]}`],
      kernels.mangled[i] < 0 ? null : ["Mangled name", make("code", {}, texts[kernels.mangled[i]])],
      ["Library", link(libraryLink(library), data.libraryNames[library])],
      ["Code", kernels.size[i] ? `${formatBytes(kernels.size[i])}, unpacked` : "only as PTX, which has no size"],
    ])),
    users.length ? make("section", {}, make("h2", {}, launched ? "Tests that launched it" : "The test that used it first"),
      launched ? null : make("p", { class: "quiet" }, "Others may use it, too. A trace at level launch tells (--negativa-level=launch)."),
      testTable(data, new URLSearchParams(), undefined, users.map(([test]) => test), launched ? users : undefined).root) : null,
    places.length ? make("section", {}, make("h2", {}, "Elements that hold it"), elementTable(data, new URLSearchParams(), undefined, places).root) : null,
  ];
}

function testPage(data, i) {
  const { tests, texts } = data, used = data.kernelsOfTest.get(i) || [], launched = used.some(([, count]) => count);
  const outcome = tests.outcome[i] < 0 ? null : texts[tests.outcome[i]];
  return [
    make("p", { class: "path" }, link("#/tests", "Tests"), " ›"),
    make("h1", {}, texts[tests.name[i]]),
    make("p", { class: "lead" }, data.usedNothing(tests.outcome[i]) && !used.length ? "It was skipped, so it used no GPU code." : !used.length ? (data.launches.length ? "It launched no kernel of a library." : "It was not the first to use any kernel.")
      : (launched ? "It launched" : "It was the first to use") + ` ${plural(used.length, "kernel", "kernels")}${data.report.replay ? " when the trace was recorded" : ""}.`),
    outcome ? make("div", { class: "card" }, facts([[outcomeTitle(data), outcome], ["Time", formatTime(tests.milliseconds[i])], tests.launches[i] ? ["On the GPU", `${plural(tests.launches[i], "launch", "launches")}, ${formatGpuTime(tests.nanoseconds[i])}`] : null])) : null,
    rangeList(data, i),
    used.length ? make("section", {}, make("h2", {}, "Kernels"), kernelTable(data, new URLSearchParams(), undefined, { only: used.map(([kernel]) => kernel), counts: launched ? used : undefined }).root) : null,
  ];
}
