// Draws the charts of the page: lazily, in the page's light or dark colours; #all and printing draw every one.
// Their numbers: a table when it is opened, a CSV file when it is asked for.
"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const specs = read("kvsim-specs"), data = read("kvsim-data"), tables = read("kvsim-tables"), look = read("kvsim-look");
  const state = { views: {}, errors: [], names: Object.keys(specs) };
  window.kvsim = state;

  const unpacked = ({ rows, columns }) => {
    const values = Object.values(columns).map((c) => (c && c.words ? c.at.map((i) => c.words[i]) : c));
    const names = Object.keys(columns);
    return { rows, columns: names, at: (i) => values.map((column) => column[i]),
      objects: () => Array.from({ length: rows }, (_, i) => Object.fromEntries(names.map((name, k) => [name, values[k][i]]))) };
  };

  const mode = () => document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const dark = (value) => (typeof value === "string" && look.swap[value]) || value;

  // One policy in every chart that has a legend of policies; a click on a legend does it for its own chart.
  const chosen = document.getElementById("policy");
  const keep = (view) => {
    if (!chosen) return;
    const stores = Object.keys(view.getState({ signals: () => false, data: (name) => name === "focus_store" }).data || {});
    const tuple = { unit: "", fields: [{ field: "policy", type: "E" }], values: [chosen.value] };
    if (stores.length) view.data("focus_store", chosen.value ? [tuple] : []).run();
  };

  const embed = async (name, colours) => {
    const place = document.getElementById(name);
    const { spec, data: used, clickable } = specs[name];
    const copy = JSON.parse(JSON.stringify(spec), (_, value) => (colours === "dark" ? dark(value) : value));
    copy.datasets = Object.fromEntries(used.map((key) => [key, unpacked(data[key]).objects()]));  // its own: Vega writes into rows
    try {
      if (state.views[name]) state.views[name].finalize();
      state.views[name] = await vegaEmbed(place, copy, {
        renderer: "svg", ast: true, config: look[colours], tooltip: { theme: colours }, downloadFileName: name,
        actions: { export: true, source: false, compiled: false, editor: false },
      });
      const drawing = place.querySelector("svg.marks");
      if (drawing) {
        drawing.setAttribute("aria-label", spec.description);
        if (!clickable) drawing.setAttribute("role", "img");
      }
      keep(state.views[name].view);
      place.dataset.drawn = colours;
      place.style.minHeight = "";
    } catch (error) {
      state.errors.push(name + ": " + error);
      place.textContent = "This chart could not be drawn: " + error;
    }
  };

  const turns = {};  // one at a time per chart: scrolling, the switch and printing may all ask for it
  const draw = (name, colours = mode()) => (turns[name] = (turns[name] || Promise.resolve()).then(
    () => document.getElementById(name).dataset.drawn === colours ? null : embed(name, colours)));
  state.drawAll = async (colours) => { for (const name of state.names) await draw(name, colours); };
  const redraw = async () => { for (const name of Object.keys(state.views)) await draw(name); };

  const watch = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting) { watch.unobserve(entry.target); draw(entry.target.id); }
  }), { rootMargin: "600px" });
  state.names.forEach((name) => watch.observe(document.getElementById(name)));
  if (location.hash === "#all") state.drawAll();

  document.getElementById("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = mode() === "dark" ? "light" : "dark";
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  chosen?.addEventListener("change", () => Object.values(state.views).forEach(({ view }) => keep(view)));
  addEventListener("beforeprint", () => state.drawAll("light"));

  // A text that a spreadsheet would take for a formula gets a quote in front.
  const field = (value) => {
    if (value === null) return "";
    if (typeof value !== "string") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? "'" + value : value;
    return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };
  const csv = state.csv = (table) => [table.columns, ...Array.from({ length: table.rows }, (_, i) => table.at(i))]
    .map((cells) => cells.map(field).join(",") + "\r\n").join("");

  document.querySelectorAll("a.csv").forEach((link) => link.addEventListener("click", () => {
    if (link.href.startsWith("blob:")) return;
    link.href = URL.createObjectURL(new Blob([csv(unpacked(tables[link.dataset.of]))], { type: "text/csv;charset=utf-8" }));
  }));

  const shown = (value) => value === null ? "\u2014"
    : typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : String(value);
  const line = (tag, cells) => {
    const tr = document.createElement("tr");
    tr.append(...cells.map((cell) => Object.assign(document.createElement(tag), { textContent: cell })));
    return tr;
  };
  document.querySelectorAll("details.data").forEach((details) => details.addEventListener("toggle", () => {
    if (details.querySelector("table")) return;
    const table = unpacked(tables[details.dataset.of]), most = Math.min(table.rows, look.most);
    const box = Object.assign(document.createElement("div"), { className: "scroll", tabIndex: 0 });
    const element = document.createElement("table"), head = element.createTHead(), body = element.createTBody();
    head.append(line("th", table.columns));
    head.querySelectorAll("th").forEach((th) => { th.scope = "col"; });
    for (let i = 0; i < most; i++) body.append(line("td", table.at(i).map(shown)));
    box.append(element);
    details.append(box);
    if (most < table.rows) {
      details.append(Object.assign(document.createElement("p"),
        { className: "note", textContent: `The first ${most} of ${table.rows} rows; the CSV file has all.` }));
    }
  }));
})();
