// The page's data, unpacked and indexed; reasons in words, short names, templates of kernels.

async function readData() {
  const text = atob(document.getElementById("data").textContent);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const data = JSON.parse(new TextDecoder().decode(bytes));
  for (const [name, columns] of Object.entries(data.tables)) {
    data[name] = { length: Object.values(columns)[0].length };
    for (const [column, steps] of Object.entries(columns)) {
      let value = 0;
      data[name][column] = Float64Array.from(steps, (step) => (value += step));
    }
  }
  return data;
}

// What a reason means for a reader, and the colour and hatching of what it decides.
const CATEGORIES = [
  { id: "used", title: "Used by the tests", state: "used", text: "A test loaded this code." },
  { id: "kept", title: "Kept for another reason", state: "kept", text: "A rule keeps this code, or too little is known of it." },
  { id: "idle", title: "No test used it", state: "not used", text: "It fits the tested GPU, but no test asked for a kernel in its region." },
  { id: "alien", title: "For other GPUs", state: "for other GPUs", text: "The tested GPU never loads it." },
];
const REASONS = {
  "wrong-arch": [3, "For other GPUs"],
  "no-used-kernel": [2, "Fits the tested GPU, but no test used a kernel of its region (no used kernel)"],
  "unreachable-kernel": [2, "Kernels that no test used, inside code that stays (unreachable kernel)"],
  "not-opened": [2, "A file that is GPU code, and no test opened it (not opened)"],
  "loaded": [0, "Loaded by the tests"],
  "memory-image": [0, "Loaded by the tests, unpacked by the library itself"],
  touched: [0, "Read by a process, and no call of the driver shows why"],
  "incomplete": [1, "More may have been used than the trace knows"],
  "changed": [1, "The library is not the one that was traced"],
  "unmatched": [1, "The tests loaded code that its map does not explain"],
  "library-policy": [1, "The settings keep the library (keep.libraries)"],
  "unreadable": [1, "Can't be read"],
  "plain-cubin": [1, "A cubin in the library's data, which it may read itself"],
  "relocatable": [1, "The driver may have to link it"],
  "arch-policy": [1, "The settings keep this GPU architecture (keep.archs)"],
  "ptx-policy": [1, "The settings keep PTX (keep.ptx)"],
  "kernel-policy": [1, "The settings keep a kernel in it (keep.kernels)"],
  "hook": [1, "A plugin asked for it"],
  "healed": [1, "A test failed without it"],
  "missed": [1, "It came back from a spare"],
};

// Everything that the pages look up, computed once.
function indexData(data) {
  const { report, texts, elements, kernels, launches, copies, tests } = data;
  data.libraryNames = uniqueNames(report.libraries.map((row) => row.path));
  data.isOwn = new Set(data.own);
  const unused = new Set(data.unusedReasons);
  const categoryOf = (reason) => (REASONS[reason] || [unused.has(reason) ? 2 : 1])[0];
  data.categoryOf = categoryOf;
  data.category = Uint8Array.from(elements.reason, (reason) => categoryOf(texts[reason]));
  data.testsOfKernel = new Map();
  data.kernelsOfTest = new Map();
  const note = (map, key, row) => (map.has(key) ? map.get(key).push(row) : map.set(key, [row]));
  data.launchesOfTest = new Map();
  const pairs = new Map();
  // Rows of both maps: what it leads to, launches, GPU time in ns. Ranges are added up.
  for (let i = 0; i < launches.length; i++) {
    const kernel = launches.kernel[i], test = launches.test[i], key = kernel * tests.length + test;
    note(data.launchesOfTest, test, i);
    if (!pairs.has(key)) {
      pairs.set(key, [[test, 0, 0], [kernel, 0, 0]]);
      note(data.testsOfKernel, kernel, pairs.get(key)[0]);
      note(data.kernelsOfTest, test, pairs.get(key)[1]);
    }
    for (const row of pairs.get(key)) {
      row[1] += launches.times[i];
      row[2] += launches.nanoseconds[i];
    }
  }
  const counted = new Set(data.testsOfKernel.keys());
  for (let kernel = 0; kernel < kernels.length; kernel++) {
    // A kernel that was looked up and never launched, or a trace without launches.
    if (kernels.first[kernel] < 0 || counted.has(kernel)) continue;
    note(data.testsOfKernel, kernel, [kernels.first[kernel], 0, 0]);
    note(data.kernelsOfTest, kernels.first[kernel], [kernel, 0, 0]);
  }
  data.placesOf = (kernel) => {
    const places = kernels.element[kernel] < 0 ? [] : [kernels.element[kernel]];
    for (let i = 0; i < copies.length; i++) if (copies.kernel[i] === kernel) places.push(copies.element[i]);
    return places;
  };
  data.kernelsIn = (element) => {
    const found = [];
    for (let i = 0; i < kernels.length; i++) if (kernels.element[i] === element) found.push(i);
    for (let i = 0; i < copies.length; i++) if (copies.element[i] === element) found.push(copies.kernel[i]);
    return found;
  };
  // The node ids tell tests from phases of the session.
  data.hasTests = tests.length > 0 && tests.name.some((name) => texts[name].includes("::"));
  // Skipped tests could not use anything, unless they ran when a replayed trace was recorded.
  data.usedNothing = (outcome) => !data.report.replay && outcome >= 0 && texts[outcome] === "skipped";
  // Outcomes are those of the tests that were traced, except in a replay.
  const known = tests.length > 0 && !report.replay;
  data.testsThatRan = known ? tests.outcome.filter((outcome) => outcome >= 0 && !data.usedNothing(outcome)).length : 0;
  return data;
}

// File names, with as many parent folders as tell them apart.
function uniqueNames(paths) {
  const parts = paths.map((path) => path.split("/"));
  const depth = paths.map(() => 1);
  const short = (i) => parts[i].slice(-depth[i]).join("/");
  for (let again = true; again; ) {
    again = false;
    const names = paths.map((_, i) => short(i));
    names.forEach((name, i) => {
      if (names.indexOf(name) !== names.lastIndexOf(name) && depth[i] < parts[i].length) { depth[i]++; again = true; }
    });
  }
  return paths.map((_, i) => short(i));
}

// Why an element stays or goes, in words.
function reasonOf(data, element) {
  const reason = data.texts[data.elements.reason[element]];
  return (REASONS[reason] || [0, reason])[1];
}

// A demangled name without return type, which templates alone have, and parameters.
function withoutTypes(text) {
  let depth = 0, start = 0, end = 0;
  for (; end < text.length && !(text[end] === "(" && !depth); end++) {
    if ("<[{".includes(text[end])) depth++;
    else if ("]}".includes(text[end]) || (text[end] === ">" && text[end - 1] !== "-")) depth--;
    else if (text[end] === " " && !depth) start = end + 1;
  }
  // Without parameters it is no function: a source file, a region.
  return (end < text.length && text.slice(start, end)) || text;
}

// The C++ runtime demangles no name of more than a thousand characters or so: such a name as its template alone.
function readable(name) {
  const parts = [];
  let rest = name.startsWith("_ZN") ? name.slice(3) : "";
  for (let size; (size = /^\d+/.exec(rest)); rest = rest.slice(size[0].length + Number(size[0])))
    parts.push(rest.slice(size[0].length, size[0].length + Number(size[0])));
  return parts.length ? `${parts.join("::")}${rest[0] === "I" ? "<…>" : ""}` : name.replaceAll("(anonymous namespace)::", "");
}

// A kernel's name and template arguments: without return type, parameters and namespaces.
const shortName = (name) => withoutTypes(readable(name)).replace(/\b(?:\w+::)+(?=[\w{])/g, "").trim() || name;

// What the instantiations of a template share: they have one row. planning/by_tests.py, split_signature, has
// another answer for text: without template arguments, parameters and return type.
function templateOf(name) {
  const text = readable(name);
  const bare = text.startsWith("void ") ? text.slice(5) : /^[^(]*</.test(text) ? withoutTypes(text) : text;
  return /^[^<(]*/.exec(bare)[0];
}
