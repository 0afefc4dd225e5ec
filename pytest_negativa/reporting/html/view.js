// Parts that pages share: elements of the document, formats of figures, bars, charts, heat map.

// Text goes into the document as text alone: names of kernels and tests may hold anything.
function make(tag, attributes, ...children) {
  const svg = ["svg", "rect", "path", "line", "text", "circle", "g", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "width%") node.style.width = `${value}%`;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function formatBytes(size) {
  let value = size;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(value) < 999.5) return unit === "B" ? `${size} B` : `${value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}
function formatShare(part, whole) {
  if (!whole) return "-";
  const share = (100 * part) / whole;
  if (part < whole && share >= 99.95) return ">99.9%";
  return part > 0 && share < 0.05 ? "<0.1%" : `${share.toFixed(1)}%`;
}
const formatCount = (count) => count.toLocaleString("en-US");
const plural = (count, one, many) => `${formatCount(count)} ${count === 1 ? one : many}`;
function formatTime(milliseconds) {
  return milliseconds < 1000 ? `${milliseconds} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}
function formatGpuTime(nanoseconds) {
  if (!nanoseconds) return "-";
  let value = nanoseconds / 1000;
  for (const unit of ["us", "ms"]) {
    if (value < 999.95) return `${value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} s`;
}
// A name that is cut keeps its end, which tells the kernels of a family apart.
const TAIL = 22;
const cutInside = (name, kind = "") => (name.length < 2 * TAIL ? make("span", { class: kind }, name) : make("span", { class: `cut ${kind}` }, make("span", {}, name.slice(0, -TAIL)), make("span", {}, name.slice(-TAIL))));
const sum = (values) => values.reduce((total, value) => total + value, 0);
const swatch = (category) => make("span", { class: `swatch ${CATEGORIES[category].id}`, "aria-hidden": "true" });
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function card(title, text, ...children) {
  return make("section", { class: "card" }, make("h2", {}, title), text ? make("p", {}, text) : null, ...children);
}

// Bars in rows: [label, href, [[class, value], ...], text]; "tall" ones have the label above.
function barRows(rows, kind = "") {
  const most = Math.max(1, ...rows.map((row) => sum(row[2].map((part) => part[1]))));
  return make("dl", { class: `bars ${kind}` }, rows.flatMap(([label, href, parts, text]) => {
    const whole = sum(parts.map((part) => part[1]));
    const track = make("div", { class: "track", "width%": (100 * whole) / most },
      parts.filter((part) => part[1]).map(([kind, value]) => make("i", { class: kind, "width%": (100 * value) / whole })));
    return [
      make("dt", { title: label }, href ? make("a", { href }, label) : label),
      make("dd", {}, track), make("dd", { class: "num" }, text),
    ];
  }));
}

// Sizes of the categories with their colours.
function legend(sizes) {
  const whole = sum(sizes);
  return make("ul", { class: "legend" }, CATEGORIES.map(({ title, text }, i) => (sizes[i] ? make("li", { title: text }, swatch(i), `${title}: ${formatBytes(sizes[i])}, ${formatShare(sizes[i], whole)}`) : null)));
}

// A frame for a picture with a vertical axis.
function chart(label, width, height, ticks, draw) {
  const left = 52, bottom = 24, top = 8;
  const y = (share) => top + (1 - share) * (height - top - bottom);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, height });
  for (const [share, text] of ticks) {
    svg.append(make("line", { class: "axis", x1: left, x2: width, y1: y(share), y2: y(share) }),
      make("text", { x: left - 8, y: y(share) + 4, "text-anchor": "end" }, text));
  }
  draw(svg, left, width - left, y, height - 6);
  return svg;
}
// A run's id begins with its time, e.g. 20261121T010203Z.
const RUN_TIME = /^(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z.*/;
const varies = (column) => new Set(column).size > 1;
const dayOf = (run) => run.replace(RUN_TIME, "$1-$2-$3");
const oneDay = (history, texts) => new Set(Array.from(history.run, (run) => dayOf(texts[run]))).size === 1;

function growthChart(history, texts, width) {
  const most = Math.max(1, ...history.code_bytes);
  const ticks = [0, 0.5, 1].map((share) => [share, formatBytes(Math.round(share * most))]);
  const label = `GPU code over ${history.length} saved runs, from ${formatBytes(history.code_bytes[0])} to ${formatBytes(history.code_bytes[history.length - 1])}`;
  return chart(label, width, 230, ticks, (svg, left, room, y, foot) => {
    const x = (i) => left + 8 + ((room - 16) * i) / Math.max(1, history.length - 1);
    for (const [column, line, dot, word] of [["code_bytes", "line", "dot", "GPU code"], ["unused_bytes", "line2", "dot2", "unused"]]) {
      const points = Array.from(history[column], (value, i) => [x(i), y(value / most)]);
      svg.append(make("path", { class: line, d: `M${points.join("L")}` }));
      points.forEach(([cx, cy], i) => svg.append(make("circle", { class: dot, cx, cy, r: 4 },
        make("title", {}, `${texts[history.run[i]]}: ${word} ${formatBytes(history[column][i])}`))));
    }
    const form = oneDay(history, texts) ? "$4:$5:$6" : "$1-$2-$3";
    const time = (i) => texts[history.run[i]].replace(RUN_TIME, form);
    svg.append(make("text", { x: left, y: foot }, time(0)),
      make("text", { x: left + room, y: foot, "text-anchor": "end" }, time(history.length - 1)));
  });
}

// Groups of tests and the Jaccard similarity of the kernels that they use; null if all pairs are alike.
function heatMap(groups, width) {
  const sizes = groups.map((group) => groups.both(group, group));
  const similarity = groups.map((a, i) => groups.map((b, j) => { const both = groups.both(a, b); return both / (sizes[i] + sizes[j] - both || 1); }));
  const pairs = new Set(similarity.flatMap((row, i) => row.slice(0, i)));
  if (pairs.size === 1) return null;
  const names = Math.min(340, width * 0.36), cell = Math.min(groups.length > 12 ? 26 : 40, (width - names) / groups.length);
  // On a phone the labels of many tests would lie upon each other; the cells have the names.
  const named = cell >= 11, head = named ? 130 : 0;
  const height = head + cell * groups.length + 4;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
    "aria-label": `Similarity of ${groups.length} tests or modules by the kernels that they use` });
  const label = (name, room, place) => {
    const most = Math.floor(room / 6.6), text = name.length > most ? `…${name.slice(1 - most)}` : name;
    if (named) svg.append(make("text", place, text, make("title", {}, name)));
  };
  groups.forEach((a, i) => {
    const middle = cell * (i + 0.5) + 4, x = names + middle;
    label(a.name, names, { x: names - 8, y: head + middle, "text-anchor": "end" });
    label(a.name.split("::").pop(), head - 8, { x, y: head - 6, transform: `rotate(-90 ${x} ${head - 6})` });
    groups.forEach((b, j) => {
      const share = similarity[i][j], text = `${(100 * share).toFixed(0)}%`;
      svg.append(make("rect", { class: "cell", x: names + j * cell, y: head + i * cell, width: cell - 1, height: cell - 1, "fill-opacity": 0.06 + 0.94 * share },
        make("title", {}, `${a.name} and ${b.name}: ${text} of their kernels in common`)));
      if (cell > 34) svg.append(make("text", { class: share > 0.5 ? "inside" : null, x: names + (j + 0.5) * cell, y: head + middle, "text-anchor": "middle" }, text));
    });
  });
  const scale = make("ul", { class: "legend" }, [0, 0.25, 0.5, 0.75, 1].map((share) => {
    const box = make("span", { class: "swatch accent", "aria-hidden": "true" });
    box.style.opacity = 0.06 + 0.94 * share;
    return make("li", {}, box, `${100 * share}%`);
  }));
  return make("div", {}, scale, svg);
}

const tip = {
  show(x, y, lines) {
    const node = document.getElementById("tip");
    node.replaceChildren(...lines.map((line) => make("div", {}, line)));
    node.hidden = false;
    const { width, height } = node.getBoundingClientRect();
    node.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 6))}px`;
    node.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 10) : y + 18}px`;
  },
  hide() { document.getElementById("tip").hidden = true; },
};
