// Small parts that all pages share: elements of the document, figures, pictures.

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
const cutInside = (name) => (name.length < 2 * TAIL ? name : make("span", { class: "cut" }, make("span", {}, name.slice(0, -TAIL)), make("span", {}, name.slice(-TAIL))));
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

function legend(categories) {
  return make("ul", { class: "legend" }, categories.map((category) =>
    make("li", { title: CATEGORIES[category].text }, swatch(category), CATEGORIES[category].title)));
}

// A frame for a picture with a vertical axis in percent or bytes.
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
const PERCENT_TICKS = [0, 0.25, 0.5, 0.75, 1].map((share) => [share, `${100 * share}%`]);

function paretoChart(rows, width) {
  const total = sum(rows.map((row) => row.bytes)) || 1;
  return chart("Share of the removable bytes by library, and added up", width, 230, PERCENT_TICKS, (svg, left, room, y, foot) => {
    const step = room / rows.length;
    let added = 0;
    const points = rows.map((row, i) => {
      added += row.bytes;
      const bar = make("rect", { class: "fill", x: left + i * step + step * 0.12, width: step * 0.76, y: y(row.bytes / total), height: y(0) - y(row.bytes / total) },
        make("title", {}, `${row.name}: ${formatBytes(row.bytes)}, with those before it ${formatShare(added, total)}`));
      svg.append(bar);
      if (rows.length <= 25 && step > 17) svg.append(make("text", { x: left + (i + 0.5) * step, y: foot, "text-anchor": "middle" }, String(i + 1)));
      return [left + (i + 0.5) * step, y(added / total)];
    });
    svg.append(make("path", { class: "line", d: `M${points.join("L")}` }));
    for (const [cx, cy] of points) svg.append(make("circle", { class: "dot", cx, cy, r: 2.5 }));
  });
}

function histogram(shares, width) {
  const bins = new Array(10).fill(0);
  for (const share of shares) bins[Math.min(9, Math.floor(share * 10))]++;
  const most = Math.max(...bins, 1), unit = Math.max(1, Math.ceil(most / 4));
  const ticks = [];
  for (let count = 0; count <= most; count += unit) ticks.push([count / most, String(count)]);
  const label = `Libraries by the share of their GPU code that is unused: ${bins.map((n, i) => (n ? `${n} between ${10 * i} and ${10 * i + 10}%` : "")).filter(Boolean).join(", ")}`;
  return chart(label, width, 230, ticks, (svg, left, whole, y, foot) => {
    const room = whole - 16;
    bins.forEach((count, i) => {
      const x = left + (room * i) / 10;
      svg.append(make("rect", { class: "fill", x: x + 2, width: room / 10 - 4, y: y(count / most), height: y(0) - y(count / most) },
        make("title", {}, `${plural(count, "library", "libraries")}: ${10 * i} to ${10 * i + 10}% unused`)));
      if (room > 420 || i % 2 === 0) svg.append(make("text", { x, y: foot, "text-anchor": "middle" }, `${10 * i}%`));
    });
    svg.append(make("text", { x: left + room, y: foot, "text-anchor": "middle" }, "100%"));
  });
}

// A run's id begins with its time, e.g. 20261121T010203Z.
const RUN_TIME = /^(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z.*/;
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

// Groups of tests and the Jaccard similarity of the kernels or functions that they use.
function heatMap(groups, what, width) {
  const names = Math.min(340, width * 0.36), cell = Math.min(groups.length > 12 ? 26 : 40, (width - names) / groups.length);
  const height = cell * groups.length + 4;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
    "aria-label": `Similarity of ${groups.length} tests or modules by the ${what} that they use` });
  const sizes = groups.map((group) => groups.both(group, group));
  const shown = (name) => { const most = Math.floor(names / 6.6); return name.length > most ? `…${name.slice(1 - most)}` : name; };
  groups.forEach((a, i) => {
    // On a phone the labels of many tests would lie upon each other; the cells tell the names.
    if (cell >= 11) svg.append(make("text", { x: names - 8, y: cell * (i + 0.5) + 4, "text-anchor": "end" }, shown(a.name), make("title", {}, a.name)));
    groups.forEach((b, j) => {
      const both = groups.both(a, b), similarity = both / (sizes[i] + sizes[j] - both || 1);
      svg.append(make("rect", { class: "cell", x: names + j * cell, y: i * cell, width: cell - 1, height: cell - 1, "fill-opacity": 0.06 + 0.94 * similarity },
        make("title", {}, `${a.name} and ${b.name}: ${(100 * similarity).toFixed(0)}% of their ${what} in common`)));
    });
  });
  return svg;
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
