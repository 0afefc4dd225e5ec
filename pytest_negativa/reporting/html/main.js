// Addresses (#/kernels?q=gemm) to pages; menu, theme, start; the key / leads to the search.

const PAGES = [["", "Overview"], ["libraries", "Libraries"], ["elements", "Elements"], ["kernels", "Kernels"], ["tests", "Tests"]];

function pageOf(data, parts, params) {
  const [name, id] = parts, i = Number(id);
  const change = (state) => history.replaceState(null, "", `#/${name}${state ? `?${state}` : ""}`);
  const has = (count) => Number.isInteger(i) && i >= 0 && i < count;
  const { elements, kernels, tests, report } = data;
  switch (name) {
    case "": return overview(data, []);
    case "map": return overview(data, parts.slice(1));
    case "libraries": return listing("Libraries", "All libraries with GPU code that the run loaded. File is the whole library; the other figures are of its GPU code.", libraryTable(data, params, change));
    case "elements": return listing("Elements", "An element is one entry of a library's GPU code: machine code (cubin) or PTX for one GPU architecture, usually of one source file. Its name is that file or its largest kernel.", elementTable(data, params, change));
    case "kernels": return listing("Kernels", "The GPU functions that the tested GPU could load. Instantiations of a template share a row.", kernelTable(data, params, change));
    case "tests": return listing("Tests", data.launches.length ? "The tests, and how many kernels each launched." : "The tests, and how many kernels each was the first to use. A trace at level launch tells all kernels of each test.", testTable(data, params, change));
    case "library": if (has(report.libraries.length)) return libraryPage(data, i); break;
    case "element": if (has(elements.length)) return elementPage(data, i); break;
    case "kernel": if (has(kernels.length)) return kernelPage(data, i); break;
    case "template": if (has(kernels.length)) return templatePage(data, i); break;
    case "test": if (has(tests.length)) return testPage(data, i); break;
  }
  return [make("h1", {}, "Not in this report"), make("p", {}, link("#/", "Go to the overview"))];
}

function show(data, moved) {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  const main = document.getElementById("main");
  tip.hide();
  PRINTED.length = 0;
  main.replaceChildren(...pageOf(data, parts, new URLSearchParams(query || "")).filter(Boolean));
  const plural = { map: "", library: "libraries", element: "elements", kernel: "kernels", template: "kernels", test: "tests" };
  const current = plural[parts[0]] ?? parts[0];
  document.getElementById("nav").replaceChildren(...PAGES.map(([id, title]) => make("a", { href: `#/${id}`, "aria-current": id === current ? "page" : null }, title)));
  document.title = `${main.querySelector("h1").textContent.slice(0, 80)} - GPU code report`;
  if (moved) { scrollTo(0, 0); main.focus({ preventScroll: true }); }
}

function setUpTheme() {
  const button = document.getElementById("theme"), root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem("negativa-theme"); } catch { return null; } };
  const draw = (onPaper) => PRINTED.forEach((part) => part.draw(onPaper));
  const set = (theme) => {
    const other = theme === "dark" ? "Light" : "Dark";
    root.dataset.theme = theme;
    button.textContent = other;
    button.setAttribute("aria-label", `${other} theme`);
    draw();
  };
  const wanted = () => stored() || (system.matches ? "dark" : "light");
  button.addEventListener("click", () => {
    set(root.dataset.theme === "dark" ? "light" : "dark");
    try { localStorage.setItem("negativa-theme", root.dataset.theme); } catch { /* The choice lasts as long as the page. */ }
  });
  system.addEventListener("change", () => set(wanted()));
  let screen = "", closed = [];
  addEventListener("beforeprint", () => {
    screen = root.dataset.theme;
    root.dataset.theme = "light";
    draw(true);
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const list of closed) list.open = true;
  });
  addEventListener("afterprint", () => {
    for (const list of closed) list.open = false;
    set(screen);
  });
  set(wanted());
}

async function start() {
  setUpTheme();
  const data = indexData(await readData());
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); document.getElementById("main").focus(); });
  addEventListener("hashchange", () => show(data, true));
  addEventListener("keydown", (event) => {
    if (event.key !== "/" || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
    const input = document.querySelector("input[type=search]");
    if (input) { input.focus(); event.preventDefault(); }
  });
  show(data);
  // The first frame is for the layout, which sizes the map; the second draws it.
  requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("interactive")));
}

start().catch((error) => {
  document.getElementById("main").append(make("p", { class: "note bad" }, `This page's data can't be read: ${error.message}. A browser of 2023 or later is needed.`));
  throw error;
});
