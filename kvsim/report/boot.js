// Draws the charts of the page: lazily, in the page's light or dark colours; #all and printing draw every one.
"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const specs = read("kvsim-specs"), data = read("kvsim-data"), look = read("kvsim-look");
  const state = { views: {}, errors: [], names: Object.keys(specs) };
  window.kvsim = state;

  const mode = () => document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const dark = (value) => (typeof value === "string" && look.swap[value]) || value;

  const embed = async (name, colours) => {
    const place = document.getElementById(name);
    const { spec, data: used, clickable } = specs[name];
    const copy = JSON.parse(JSON.stringify(spec), (_, value) => (colours === "dark" ? dark(value) : value));
    copy.datasets = Object.fromEntries(used.map((key) => [key, structuredClone(data[key])]));  // Vega writes into its rows
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
      place.dataset.drawn = colours;
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
  addEventListener("beforeprint", () => state.drawAll("light"));
})();
