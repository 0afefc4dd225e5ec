// The treemap: library > architecture, section or reason > region > element; keys that move in it.

// Items are nodes or elements, by size; what is too small to see is drawn as one by category.
const SMALLEST_AREA = 14;

function buildTree(data, grouping) {
  const { elements, texts } = data;
  const newNode = (key, name, parent) => ({ key, get name() { return typeof name === "string" ? name : name(); }, parent, size: 0, count: 0, parts: [0, 0, 0, 0], nodes: new Map(), items: [] });
  const child = (node, key, name) => {
    if (!node.nodes.has(key)) node.nodes.set(key, newNode(key, name, node));
    return node.nodes.get(key);
  };
  const root = newNode("", "All libraries", null);
  for (let i = 0; i < elements.length; i++) {
    const library = child(root, String(elements.library[i]), data.libraryNames[elements.library[i]]);
    const group = texts[elements[grouping][i]];
    const node = child(library, group, group), region = elements.region[i];
    const item = { element: i, size: elements.size[i], category: data.category[i], count: 1, region };
    const last = node.items[node.items.length - 1];
    // Elements of a region follow each other. One that is alone in its group needs no level of its own.
    if (region < 0 || !last || last.region !== region) { node.items.push(item); continue; }
    const key = `region ${region}`;
    if (!node.nodes.has(key)) child(node, key, () => shortName(elementText(data, i))).items.push({ ...last });
    node.nodes.get(key).items.push(item);
    last.inside = true;
  }
  finishNode(root);
  return root;
}

function finishNode(node) {
  for (const child of node.nodes.values()) {
    finishNode(child);
    node.items.push({ node: child, size: child.size, count: child.count });
  }
  if (node.nodes.size) node.items = node.items.filter((item) => !item.inside);
  for (const item of node.items) {
    node.size += item.size;
    node.count += item.count;
    if (item.node) item.node.parts.forEach((part, i) => { node.parts[i] += part; });
    else node.parts[item.category] += item.size;
  }
  node.items.sort((a, b) => b.size - a.size);
}

// Rectangles of areas in proportion to sizes, as square as can be (Bruls, Huizing, van Wijk 2000).
function squarify(items, x, y, width, height, emit) {
  let rest = sum(items.map((item) => item.size));
  for (let from = 0; from < items.length && rest > 0; ) {
    const side = Math.min(width, height), scale = (width * height) / rest;
    let row = 0, worst = Infinity, to = from;
    for (; to < items.length; to++) {
      const next = row + items[to].size, depth = (next * scale) / side;
      const largest = (items[from].size * scale) / depth, least = (items[to].size * scale) / depth;
      const ratio = Math.max(largest / depth, depth / least);
      if (ratio > worst) break;
      [row, worst] = [next, ratio];
    }
    const depth = (row * scale) / side;
    let at = 0;
    for (let i = from; i < to; i++) {
      const length = (items[i].size * scale) / depth;
      if (width >= height) emit(items[i], x, y + at, depth, length);
      else emit(items[i], x + at, y, length, depth);
      at += length;
    }
    if (width >= height) { x += depth; width -= depth; } else { y += depth; height -= depth; }
    rest -= row;
    from = to;
  }
}

class Treemap {
  constructor(data, path, onZoom) {
    this.data = data;
    this.onZoom = onZoom;
    this.focus = -1;
    this.crumbs = make("div", { class: "crumbs" });
    this.grouping = make("select", { "aria-label": "Group code of a library by", onchange: () => this.load([]) },
      [["arch", "by GPU architecture"], ["section", "by section"], ["reason", "by reason"]].map(([value, text]) => make("option", { value }, text)));
    this.canvas = make("canvas", {
      tabindex: 0, role: "application", "aria-roledescription": "treemap",
      "aria-label": "Treemap of GPU code. Arrow keys move, Enter opens, Escape goes up. The table Elements has the same data.",
      onpointermove: (event) => this.hover(event), onpointerleave: () => tip.hide(),
      onclick: (event) => { tip.hide(); this.open(this.topAt(event)); },
      onkeydown: (event) => this.key(event),
      onfocus: () => { if (this.focus < 0) this.focus = 0; this.draw(); this.announce(); },
      onblur: () => { this.focus = -1; this.draw(); },
    });
    this.root = make("section", { class: "card" }, make("h2", {}, "Where the GPU code is"),
      make("p", {}, "Each rectangle is a piece of GPU code, as large as its share of the file. Click or press Enter to look inside."),
      make("div", { class: "map-head" }, this.crumbs, this.grouping), legend(sizesOf(data)), this.canvas);
    this.load(path);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
    PRINTED.push(this);
  }

  load(path) {
    const tree = buildTree(this.data, this.grouping.value);
    this.node = tree;
    for (const key of path) this.node = this.node.nodes.get(key) || this.node;
    this.show();
  }

  show() {
    const line = [];
    for (let node = this.node; node; node = node.parent) line.unshift(node);
    this.crumbs.replaceChildren(...line.flatMap((node, i) => {
      const text = `${node.name} (${formatBytes(node.size)})`;
      return i < line.length - 1 ? [make("button", { type: "button", onclick: () => this.zoom(node) }, node.name), " › "] : [text];
    }));
    this.draw();
  }

  zoom(node) {
    this.node = node;
    if (this.focus >= 0) this.focus = 0;
    const path = [];
    for (let at = node; at.parent; at = at.parent) path.unshift(at.key);
    this.onZoom(path);
    this.show();
    this.announce();
  }

  open(top) {
    if (!top) return;
    if (top.item.node) this.zoom(top.item.node);
    else if (top.item.element !== undefined) location.hash = `#/element/${top.item.element}`;
    else location.hash = "#/elements?sort=-size";
  }

  draw() {
    const width = this.canvas.clientWidth, ratio = devicePixelRatio || 1;
    if (!width) return;
    const height = Math.round(Math.max(320, Math.min(560, width * 0.46)));
    this.canvas.style.height = `${height}px`;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.pen = this.canvas.getContext("2d");
    this.pen.scale(ratio, ratio);
    this.plain = CATEGORIES.map(({ id }) => colour(`--${id}`));
    this.fills = CATEGORIES.map((_, i) => this.hatched(i));
    this.inks = CATEGORIES.map(({ id }) => colour(`--on-${id}`));
    this.ground = colour("--alien-line");
    this.text = colour("--text");
    this.frame = colour("--hover");
    this.tops = [];
    this.hits = [];
    this.pen.fillStyle = this.ground;
    this.pen.fillRect(0, 0, width, height);
    this.place(this.node, 0, 0, width, height, 0);
    const top = this.tops[this.focus];
    if (top) {
      this.pen.strokeStyle = colour("--accent");
      this.pen.lineWidth = 3;
      this.pen.strokeRect(top.x + 1.5, top.y + 1.5, top.width - 3, top.height - 3);
    }
  }

  // As in the style sheet: lines show the category without its colour.
  hatched(category) {
    const size = 8, tile = make("canvas", { width: size, height: size }), pen = tile.getContext("2d");
    pen.fillStyle = this.plain[category];
    pen.fillRect(0, 0, size, size);
    pen.strokeStyle = colour(`--${CATEGORIES[category].id}-line`);
    const lines = { kept: [[4, 0, 4, 8]], idle: [[-2, 2, 2, -2], [-2, 10, 10, -2], [6, 10, 10, 6]], alien: [[-2, 6, 2, 10], [-2, -2, 10, 10], [6, -2, 10, 2]] };
    for (const [x1, y1, x2, y2] of lines[CATEGORIES[category].id] || []) {
      pen.beginPath();
      pen.moveTo(x1, y1);
      pen.lineTo(x2, y2);
      pen.stroke();
    }
    return this.pen.createPattern(tile, "repeat");
  }

  place(node, x, y, width, height, depth) {
    const scale = (width * height) / node.size, shown = [], small = new Map();
    for (const item of node.items) {
      if (item.size * scale >= SMALLEST_AREA) { shown.push(item); continue; }
      const parts = item.node ? item.node.parts : null;
      for (let category = 0; category < 4; category++) {
        const size = parts ? parts[category] : item.category === category ? item.size : 0;
        if (!size) continue;
        const group = small.get(category) || { category, size: 0, small: true };
        group.size += size;
        small.set(category, group);
      }
    }
    shown.push(...small.values());
    shown.sort((a, b) => b.size - a.size);
    squarify(shown, x, y, width, height, (item, ...box) => {
      if (depth === 0) this.tops.push({ item, x: box[0], y: box[1], width: box[2], height: box[3] });
      if (item.node) this.branch(item, ...box, depth);
      else this.leaf(item, ...box);
      this.hits.push({ item, of: node, x: box[0], y: box[1], width: box[2], height: box[3] });
    });
  }

  branch(item, x, y, width, height, depth) {
    const pad = depth === 0 ? 2 : 1, head = depth === 0 ? 19 : 15;
    const named = width > 46 && height > head + 16 && depth < 2;
    if (named) {
      this.pen.fillStyle = this.frame;
      this.pen.fillRect(x + 0.5, y + 0.5, width - 1, height - 1);
      this.pen.fillStyle = this.ground;
      this.pen.fillRect(x + pad, y + head, width - 2 * pad, height - head - pad);
      this.label(depth === 0 ? `${item.node.name}  ${formatBytes(item.size)}` : item.node.name, x + 5, y + head - 5, width - 9, depth === 0 ? 12.5 : 11, this.text, depth === 0);
    }
    const top = named ? head : pad;
    if (width > 2 * pad && height > top + pad) this.place(item.node, x + pad, y + top, width - 2 * pad, height - top - pad, depth + 1);
  }

  leaf(item, x, y, width, height) {
    const gap = width > 5 && height > 5 ? 0.5 : 0.15;
    this.pen.fillStyle = this.fills[item.category];
    this.pen.fillRect(x + gap, y + gap, width - 2 * gap, height - 2 * gap);
    if (width < 58 || height < 22) return;
    const text = item.small ? "many small ones" : shortName(elementText(this.data, item.element));
    this.leafLabel(text, item.category, x + 4, y + 4, width - 8);
    if (height > 42) this.leafLabel(formatBytes(item.size), item.category, x + 4, y + 20, width - 8);
  }

  // Text on a plain ground: nobody reads it on hatching.
  leafLabel(text, category, x, y, room) {
    this.pen.font = '11px system-ui, "Liberation Sans", sans-serif';
    this.pen.fillStyle = this.plain[category];
    this.pen.fillRect(x, y, Math.min(room, this.pen.measureText(text).width + 4), 15);
    this.label(text, x + 2, y + 11, room - 4, 11, this.inks[category], false);
  }

  label(text, x, y, room, size, ink, bold) {
    this.pen.font = `${bold ? "600 " : ""}${size}px system-ui, "Liberation Sans", sans-serif`;
    this.pen.fillStyle = ink;
    const width = this.pen.measureText(text).width, letters = Math.floor((room / width) * text.length) - 1;
    if (width <= room) this.pen.fillText(text, x, y);
    else if (letters > 3) this.pen.fillText(`${text.slice(0, letters)}…`, x, y);
  }

  describe(item) {
    const { elements, texts } = this.data;
    if (item.node) return [item.node.name, `${formatBytes(item.size)} in ${plural(item.count, "element", "elements")}`, ...CATEGORIES.map((category, i) => [i, category.title]).filter(([i]) => item.node.parts[i]).map(([i, title]) => `${title}: ${formatBytes(item.node.parts[i])} (${formatShare(item.node.parts[i], item.size)})`)];
    if (item.small) return [`Many small ones: ${formatBytes(item.size)}`, CATEGORIES[item.category].title];
    const i = item.element, detail = elements.detail[i] < 0 ? [] : [texts[elements.detail[i]]];
    return [shortName(elementText(this.data, i)), `${codeOf(this.data, i)}, ${formatBytes(item.size)}`, reasonOf(this.data, i), ...detail];
  }

  at(event, among) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    return among.find((hit) => x >= hit.x && x < hit.x + hit.width && y >= hit.y && y < hit.y + hit.height);
  }
  topAt(event) { return this.at(event, this.tops); }

  hover(event) {
    // Inner rectangles are drawn, and noted, before the outer ones.
    const hit = this.at(event, this.hits);
    if (!hit) return tip.hide();
    const above = [];
    for (let node = hit.of; node.parent; node = node.parent) above.unshift(node.name);
    tip.show(event.clientX, event.clientY, [...(above.length ? [above.join(" › ")] : []), ...this.describe(hit.item)]);
  }

  announce() {
    const top = this.tops[this.focus];
    if (top) document.getElementById("live").textContent = this.describe(top.item).join(", ");
  }

  key(event) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (move) {
      const from = this.tops[this.focus] || this.tops[0];
      const middle = (top) => [top.x + top.width / 2, top.y + top.height / 2];
      const [fx, fy] = middle(from);
      let best = null, least = Infinity;
      for (const top of this.tops) {
        const [x, y] = middle(top), along = (x - fx) * move[0] + (y - fy) * move[1];
        const distance = along + 2 * Math.abs((x - fx) * move[1] + (y - fy) * move[0]);
        if (along > 0.5 && distance < least) [best, least] = [top, distance];
      }
      if (best) this.focus = this.tops.indexOf(best);
      this.draw();
      this.announce();
    } else if (event.key === "Enter") this.open(this.tops[this.focus]);
    else if (event.key === "Escape" && this.node.parent) this.zoom(this.node.parent);
    else return;
    event.preventDefault();
  }
}
