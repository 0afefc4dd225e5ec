// A table with search, filters and sorting, for any number of rows; it draws those in sight.

const ROW_HEIGHT = 34;
const SPARE_ROWS = 8;
const FEW_ROWS = 8; // They need no search.
const SLICE_MS = 12; // A search gives way to keys and drawing after this time.
const PRINTED_ROWS = 200;
const PRINTED = []; // Tables and maps that are drawn otherwise on paper.

// columns: { id, title, hint, width, kind, cell(row), key(row), whole(row) } where cell gives text or
// a node, and whole all of a shortened text; filters: { id, label, options, key(row) } where key gives the value of an option;
// search(row) gives the text to look in.
class Table {
  constructor({ label, rows, columns, filters = [], search, href, sort, params = new URLSearchParams(), onChange = () => {}, placeholder }) {
    Object.assign(this, { rows, columns, filters, search, href, onChange });
    this.sorted = new Map();
    this.hay = new Array(rows.length);
    this.drawn = new Map();
    this.sort = params.get("sort") || sort;
    this.input = make("input", { type: "search", placeholder, "aria-label": `Search ${label}`, value: params.get("q") || "", spellcheck: "false", autocomplete: "off", oninput: () => this.update() });
    // A choice that no row or every row has helps nobody.
    for (const filter of filters) {
      const seen = new Set(Array.from(rows, filter.key));
      filter.options = filter.options.filter(([value]) => seen.has(value));
    }
    this.filters = filters = filters.filter((filter) => filter.options.length > 1);
    this.selects = filters.map((filter) => {
      const select = make("select", { "aria-label": filter.label, onchange: () => this.update() },
        make("option", { value: "" }, filter.label), filter.options.map(([value, text]) => make("option", { value }, text)));
      select.value = params.get(filter.id) || "";
      return select;
    });
    this.count = make("output", {});
    this.heads = columns.map((column) => {
      const head = make("th", { scope: "col", class: classOf(column), title: column.hint }, make("button", { type: "button", onclick: () => this.sortBy(column) }, column.title));
      if (column.width) head.style.width = `${column.width}px`;
      return head;
    });
    this.body = make("tbody", {});
    this.table = make("table", { "aria-label": label }, make("thead", {}, make("tr", {}, this.heads)), this.body);
    this.scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${label}, scrollable`, onscroll: () => this.draw(), onkeydown: (event) => this.key(event) }, this.table);
    this.root = make("div", {}, make("div", { class: "tools", hidden: rows.length <= FEW_ROWS }, this.input, this.selects, this.count), this.scroll);
    this.update(true);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.scroll);
    PRINTED.push(this);
    this.warm(0);
  }

  // Lower-case texts are made while nobody waits for them.
  warm(from) {
    const to = Math.min(from + 4000, this.rows.length);
    for (let i = from; i < to; i++) this.text(i);
    if (to < this.rows.length) setTimeout(() => this.warm(to), 0);
  }

  text(i) {
    return this.hay[i] === undefined ? (this.hay[i] = this.search(this.rows[i]).toLowerCase()) : this.hay[i];
  }

  sortBy(column) {
    const down = column.kind === "num";
    const first = `${down ? "-" : ""}${column.id}`, second = `${down ? "" : "-"}${column.id}`;
    this.sort = this.sort === first ? second : first;
    this.update();
  }

  // Positions in this.rows, in the wanted order.
  order() {
    if (this.sorted.has(this.sort)) return this.sorted.get(this.sort);
    const id = this.sort.replace(/^-/, ""), column = this.columns.find((one) => one.id === id) || this.columns[0];
    const keys = Array.from(this.rows, column.key), order = Uint32Array.from(keys.keys());
    if (column.kind === "num") order.sort((a, b) => keys[a] - keys[b] || a - b);
    else order.sort((a, b) => (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : a - b));
    if (this.sort.startsWith("-")) order.reverse();
    this.sorted.set(this.sort, order);
    return order;
  }

  update(first) {
    const query = this.input.value.trim().toLowerCase();
    const picked = this.selects.map((select) => select.value), key = JSON.stringify([this.sort, picked]);
    // One more letter narrows what the letters before found.
    const narrows = this.job && this.job.done && this.job.key === key && this.job.query && query.startsWith(this.job.query);
    const wanted = this.filters.map((filter, i) => [filter.key, picked[i]]).filter(([, value]) => value);
    this.job = { key, query, wanted, terms: query.split(/\s+/).filter(Boolean), source: narrows ? this.found : this.order(), at: 0, found: [], done: false };
    this.heads.forEach((head, i) => {
      const mark = { [this.columns[i].id]: "ascending", [`-${this.columns[i].id}`]: "descending" }[this.sort];
      if (mark) head.setAttribute("aria-sort", mark); else head.removeAttribute("aria-sort");
    });
    this.body.replaceChildren();
    this.drawn.clear();
    if (!first) {
      this.scroll.scrollTop = 0;
      const state = new URLSearchParams();
      if (this.input.value) state.set("q", this.input.value);
      if (this.sort) state.set("sort", this.sort);
      this.filters.forEach((filter, i) => { if (picked[i]) state.set(filter.id, picked[i]); });
      this.onChange(state.toString());
    }
    this.work(this.job);
  }

  // Looks through rows for a while, shows what it found, and goes on when nothing else waits.
  work(job) {
    if (job !== this.job) return;
    const { source, terms, wanted } = job, end = performance.now() + SLICE_MS;
    while (job.at < source.length && (job.at % 64 || performance.now() < end || job.at === 0)) {
      const at = source[job.at++], row = this.rows[at];
      if (wanted.every(([keyOf, value]) => keyOf(row) === value) && (!terms.length || this.matches(at, terms))) job.found.push(at);
    }
    job.done = job.at === source.length;
    this.found = job.found;
    const all = formatCount(this.rows.length);
    this.count.textContent = !job.done ? `… of ${all}` : job.found.length === this.rows.length ? all : `${formatCount(job.found.length)} of ${all}`;
    this.table.setAttribute("aria-rowcount", job.found.length + 1);
    this.draw();
    if (!job.done) setTimeout(() => this.work(job), 0);
  }

  matches(at, terms) {
    const text = this.text(at);
    return terms.every((term) => text.includes(term));
  }

  draw(all) {
    const most = this.found.length;
    let from = 0, to = Math.min(most, PRINTED_ROWS);
    if (!all) {
      from = Math.max(0, Math.floor(this.scroll.scrollTop / ROW_HEIGHT) - SPARE_ROWS);
      to = Math.min(most, from + Math.ceil((this.scroll.clientHeight || 600) / ROW_HEIGHT) + 2 * SPARE_ROWS);
    }
    const before = this.drawn, rows = [];
    this.drawn = new Map();
    for (let at = from; at < to; at++) {
      const row = before.get(at) || this.row(at);
      this.drawn.set(at, row);
      rows.push(row);
    }
    if (!most && this.job.done) rows.push(make("tr", {}, make("td", { class: "none", colspan: this.heads.filter((head) => head.offsetWidth).length || 1 }, "Nothing matches.")));
    const more = make("tr", {}, make("td", {}, `and ${formatCount(most - to)} more`));
    const gap = (count) => {
      const cell = make("td");
      cell.style.height = `${count * ROW_HEIGHT}px`;
      return make("tr", { class: "gap", "aria-hidden": "true" }, cell);
    };
    const children = [...(from ? [gap(from)] : []), ...rows, ...(to < most ? [all ? more : gap(most - to)] : [])];
    // Rows that stay are not moved: the one that has the focus keeps it.
    const kept = new Set(children);
    for (const child of [...this.body.children]) if (!kept.has(child)) child.remove();
    children.forEach((child, i) => { if (this.body.children[i] !== child) this.body.insertBefore(child, this.body.children[i] || null); });
  }

  row(at) {
    const row = this.rows[this.found[at]];
    return make("tr", { "aria-rowindex": at + 2 }, this.columns.map((column, i) => {
      const cell = column.cell(row), text = typeof cell === "string" ? cell : cell.textContent;
      const href = i === 0 && this.href ? this.href(row) : null;
      return make("td", { class: classOf(column), title: column.kind === "num" ? null : column.whole ? column.whole(row) : text },
        href ? make("a", { href }, cell) : cell);
    }));
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const row = event.target.closest && event.target.closest("tbody tr");
    if (!step || !row || event.target.tagName !== "A") return;
    const at = Number(row.getAttribute("aria-rowindex")) - 2 + step;
    if (at < 0 || at >= this.found.length) return;
    event.preventDefault();
    const top = at * ROW_HEIGHT, room = this.scroll.clientHeight - 2 * ROW_HEIGHT;
    if (top < this.scroll.scrollTop) this.scroll.scrollTop = top;
    if (top > this.scroll.scrollTop + room) this.scroll.scrollTop = top - room;
    this.draw();
    this.drawn.get(at).querySelector("a").focus({ preventScroll: true });
  }
}

const classOf = (column) => [column.kind, column.hide].filter(Boolean).join(" ") || null;
