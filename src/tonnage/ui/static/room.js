// What else fits: contexts and requests at once as a map, how the cache grows, and both as text.

import { ask, Failed, Replaced } from "./ask.js";

const heat = document.getElementById("heat");
const growth = document.getElementById("growth");
const table = document.getElementById("heat-table");
const section = document.getElementById("room");
const GIB = 2 ** 30;
const number = new Intl.NumberFormat("en");
const gib = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

let drawn = null; // what is on the map: the regions, the point of the plan
let asked = ""; // what the regions were asked with
let move = () => {};

/** Call `change({context, concurrency})` when the reader chooses a point. */
export function onMove(change) {
  move = change;
}

/**
 * Show the room around a plan.
 * @param {object} request what /api/plan was asked; null for no plan
 * @param {object} points of the cache: {growth: [[concurrency, context, bytes]], room, planned: [concurrency, context]}
 */
export async function show(request, points) {
  const judged = request !== null && (request.gpu || request.supply) && request.profile && points !== null;
  section.hidden = !judged;
  if (!judged) return;
  drawGrowth(points);
  const [concurrency, context] = points.planned;
  const others = JSON.stringify({ ...request, context: null, profile: request.profile.replace(/^c\d+/, "") });
  if (drawn !== null && asked === others && drawn.regions.concurrencies.includes(concurrency) && drawn.regions.contexts.includes(context)) {
    drawn = { ...drawn, concurrency, context };
    await drawMap();
    return;
  }
  heat.setAttribute("aria-busy", "true");
  try {
    const regions = JSON.parse(await ask("regions", "/api/regions", request));
    asked = others;
    drawn = { regions, concurrency, context };
    await drawMap();
  } catch (error) {
    if (error instanceof Replaced) return;
    if (!(error instanceof Failed)) throw error;
    drawn = null;
    table.replaceChildren();
    note(heat, error.message);
  } finally {
    heat.removeAttribute("aria-busy");
  }
}

/** Draw again what is there, in the colours of now. */
export async function redraw() {
  if (section.hidden) return;
  if (drawn !== null) await drawMap();
  if (grown !== null) drawGrowth(grown);
}

async function drawMap() {
  drawTable();
  const plotly = await library(heat);
  if (plotly === null || drawn === null) return;
  const { regions, concurrency, context } = drawn;
  const xs = regions.contexts.map((_, index) => index);
  const ys = regions.concurrencies.map((_, index) => index);
  const shown = (yes) =>
    regions.cells.map((row) => row.map(({ fits, spare_bytes }) => (fits === yes ? (yes ? spare_bytes / GIB : 1) : null)));
  const words = regions.cells.map((row, y) => row.map((_, x) => cellWords(x, y)));
  const colour = palette();
  const cells = { type: "heatmap", x: xs, y: ys, xgap: 2, ygap: 2, showscale: false, text: words, hoverinfo: "text", hoverongaps: false };
  const here = {
    type: "scatter", mode: "markers", hoverinfo: "skip",
    x: [place(regions.contexts, context)], y: [place(regions.concurrencies, concurrency)],
    marker: { size: 17, color: "rgba(0,0,0,0)", line: { width: 3, color: colour("--ink") } },
  };
  const traces = [
    { ...cells, z: shown(false), colorscale: [[0, colour("--heat-no")], [1, colour("--heat-no")]] },
    { ...cells, z: shown(true), colorscale: [[0, colour("--heat-low")], [1, colour("--heat-high")]], zmin: 0 },
    { ...here, marker: { ...here.marker, size: 22, line: { width: 2, color: colour("--surface") } } },
    here,
  ];
  const layout = frame(colour, "context, tokens", "requests at once");
  const edges = (values) => ({ range: [-0.5, values.length - 0.5], showgrid: false, zeroline: false, fixedrange: true });
  Object.assign(layout.xaxis, edges(regions.contexts), ticks(regions.contexts, short, heat.clientWidth < 420 ? 2 : 1));
  Object.assign(layout.yaxis, edges(regions.concurrencies), ticks(regions.concurrencies, String, 1));
  const plot = heat.querySelector(".plot");
  await plotly.react(plot, traces, layout, { displayModeBar: false, responsive: true });
  if (!plot.dataset.listens) {
    plot.dataset.listens = "yes";
    plot.on("plotly_click", ({ points: [point] }) => step(point.x, point.y));
  }
}

function cellWords(x, y) {
  const { regions } = drawn;
  const { fits, spare_bytes: spare } = regions.cells[y][x];
  const said = fits ? `fits, ${gib.format(spare / GIB)} GiB spare` : spare < 0 ? `short by ${gib.format(-spare / GIB)} GiB` : "refused";
  return `${number.format(regions.concurrencies[y])} x ${number.format(regions.contexts[x])} tokens: ${said}`;
}

/** Go to a point of the map; it is shown there at once, the plan follows. */
function step(x, y) {
  const { contexts, concurrencies } = drawn.regions;
  drawn = { ...drawn, context: contexts[x], concurrency: concurrencies[y] };
  drawMap();
  move({ context: contexts[x], concurrency: concurrencies[y] });
}

heat.addEventListener("keydown", (event) => {
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
  if (!steps || drawn === null) return;
  event.preventDefault();
  const next = (values, value, by) => {
    const at = place(values, value);
    const to = by === 0 ? Math.round(at) : by > 0 ? Math.floor(at + 1e-9) + 1 : Math.ceil(at - 1e-9) - 1;
    return Math.min(Math.max(to, 0), values.length - 1);
  };
  step(next(drawn.regions.contexts, drawn.context, steps[0]), next(drawn.regions.concurrencies, drawn.concurrency, steps[1]));
});

/** Return where a value is among ascending ones: 1.5 for half a doubling beyond the second. */
function place(values, value) {
  const after = values.findIndex((one) => one >= value);
  if (after === -1) return values.length - 1;
  if (after === 0 || values[after] === value) return after;
  const [low, high] = [values[after - 1], values[after]];
  return after - 1 + Math.log(value / low) / Math.log(high / low);
}

function drawTable() {
  const { regions, concurrency, context } = drawn;
  const head = element("tr", {}, element("th", { scope: "col", text: "requests" }));
  for (const tokens of regions.contexts) head.append(element("th", { scope: "col", text: short(tokens) }));
  const rows = regions.concurrencies.map((many, y) => {
    const row = element("tr", {}, element("th", { scope: "row", text: number.format(many) }));
    regions.contexts.forEach((tokens, x) => {
      const { fits, spare_bytes: spare } = regions.cells[y][x];
      const shown = !fits && spare >= 0 ? "refused" : gib.format(spare / GIB);
      const button = element("button", { type: "button", text: shown, "aria-label": cellWords(x, y) });
      button.className = fits ? "yes" : "no";
      if (many === concurrency && tokens === context) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => step(x, y));
      row.append(element("td", {}, button));
    });
    return row;
  });
  const caption = element("caption", { text: "GiB spare on the GPU that needs most; negative is short, refused is for another reason. Columns are contexts in tokens." });
  const grid = element("table", {}, caption, element("thead", {}, head), element("tbody", {}, ...rows));
  grid.className = "grid-table";
  const focused = [...table.querySelectorAll("button")].indexOf(document.activeElement);
  table.replaceChildren(grid);
  if (focused >= 0) table.querySelectorAll("button")[focused]?.focus();
}

let grown = null;

async function drawGrowth(points) {
  grown = points;
  const plotly = await library(growth);
  if (plotly === null || grown !== points) return;
  const colour = palette();
  const lines = new Map();
  for (const [concurrency, context, bytes] of points.growth) {
    if (!lines.has(concurrency)) lines.set(concurrency, { x: [], y: [] });
    lines.get(concurrency).x.push(context);
    lines.get(concurrency).y.push(bytes / GIB);
  }
  const [concurrency, context] = points.planned;
  const dashes = ["dot", "dash", "solid", "dashdot", "longdash"];
  const traces = [...lines].map(([many, line], index) => ({
    ...line, type: "scatter", mode: "lines", name: `${number.format(many)}`,
    line: { color: many === concurrency ? colour("--good") : colour("--line-strong"), width: many === concurrency ? 3 : 1.6, dash: many === concurrency ? "solid" : dashes[index % dashes.length] },
    hovertemplate: `${number.format(many)} x %{x:,} tokens: %{y:.2f} GiB<extra></extra>`,
  }));
  const planned = points.growth.find(([many, tokens]) => many === concurrency && tokens === context);
  if (planned) traces.push({ x: [context], y: [planned[2] / GIB], type: "scatter", mode: "markers", hoverinfo: "skip", marker: { size: 13, color: colour("--surface"), line: { width: 3, color: colour("--ink") } } });
  const layout = frame(colour, "context, tokens", "cache per GPU, GiB");
  const contexts = [...new Set(points.growth.map(([, tokens]) => tokens))];
  const most = Math.max(...points.growth.map(([, , bytes]) => bytes / GIB));
  const room = points.room === null ? null : points.room / GIB;
  const atPlan = (planned?.[2] ?? 0) / GIB;
  const above = room !== null && room > most * 2.5; // so much room that the lines would be one
  const top = above || room === null ? most * 1.2 : Math.min(Math.max(most, room) * 1.08, Math.max(room * 2.5, atPlan * 1.6, 0.05));
  layout.yaxis.range = [0, top];
  const marked = contexts.filter((_, index) => index % (growth.clientWidth < 420 ? 3 : 2) === 1);
  Object.assign(layout.xaxis, { range: [Math.min(...contexts), Math.max(...contexts)], tickmode: "array", tickvals: marked, ticktext: marked.map(short) });
  layout.margin.r = 74;
  layout.annotations = apart([...lines].map(([many, line]) => endOf(many, line, top, colour, many === concurrency)), top);
  if (room !== null) {
    const text = `room for ${gib.format(room)} GiB${above ? " ↑" : ""}`;
    const y = above ? top : room;
    if (!above) layout.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: room, y1: room, line: { color: colour("--bad"), width: 2 } }];
    layout.annotations.push({ xref: "paper", x: 0, y, xanchor: "left", yanchor: above ? "top" : "bottom", showarrow: false, xshift: 6, text, bgcolor: colour("--surface"), font: { size: 12, color: colour("--bad") } });
  }
  growth.setAttribute("aria-label", document.getElementById("growth-words").textContent);
  await plotly.react(growth.querySelector(".plot"), traces, layout, { displayModeBar: false, responsive: true });
}

/** Return the name of a line at its right end, or where it leaves the chart. */
function endOf(many, line, top, colour, isPlanned) {
  const out = line.y.findIndex((value) => value > top);
  const last = line.x.length - 1;
  const share = out > 0 ? (top - line.y[out - 1]) / (line.y[out] - line.y[out - 1]) : 1;
  const x = out > 0 ? line.x[out - 1] + share * (line.x[out] - line.x[out - 1]) : out === 0 ? line.x[0] : line.x[last];
  const leaves = out >= 0;
  return {
    x, y: leaves ? top : line.y[last], text: number.format(many) + (isPlanned ? " requests" : ""), showarrow: false,
    xanchor: leaves ? "center" : "left", yanchor: leaves ? "bottom" : "middle", xshift: leaves ? 0 : 4,
    font: { size: 11, color: isPlanned ? colour("--good") : colour("--soft") },
  };
}

/** Return the names that can be read beside each other, that of the plan before all others. */
function apart(names, top) {
  const kept = [];
  const byWeight = [...names].sort((one, other) => other.text.length - one.text.length || other.y - one.y);
  for (const name of byWeight) {
    const free = (one) => one.yanchor !== name.yanchor || name.yanchor === "bottom" || Math.abs(one.y - name.y) > top * 0.06;
    if (kept.every(free)) kept.push(name);
  }
  return kept;
}

function frame(colour, x, y) {
  const axis = (title) => ({
    title: { text: title, font: { size: 12, color: colour("--soft") }, standoff: 8 }, fixedrange: true, automargin: true,
    color: colour("--soft"), gridcolor: colour("--line"), zerolinecolor: colour("--line"), tickfont: { size: 11 },
  });
  return {
    margin: { l: 48, r: 12, t: 18, b: 44 }, showlegend: false, dragmode: false, hovermode: "closest",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--ink") },
    hoverlabel: { bgcolor: colour("--surface"), bordercolor: colour("--line-strong"), font: { color: colour("--ink") } },
    xaxis: axis(x), yaxis: axis(y),
  };
}

function ticks(values, words, every) {
  const kept = values.map((_, index) => index).filter((index) => index % every === 0);
  return { tickmode: "array", tickvals: kept, ticktext: kept.map((index) => words(values[index])), tickangle: 0 };
}

function short(tokens) {
  const [unit, letter] = tokens >= 2 ** 20 ? [2 ** 20, "M"] : [1024, "K"];
  const value = tokens / unit;
  return tokens < 1024 ? String(tokens) : `${Number.isInteger(value) ? value : value.toFixed(1)}${letter}`;
}

/** Return a reader of the page's colours as they are now; Plotly knows none by name. */
function palette() {
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  return (name) => {
    probe.style.color = `var(${name})`;
    const found = getComputedStyle(probe).color;
    queueMicrotask(() => probe.remove());
    return found;
  };
}

let loading = null;

/** Return Plotly, fetched when the first chart is drawn; null where it cannot be had, which the chart says. */
async function library(chart) {
  loading ??= new Promise((resolve) => {
    // Plotly writes no style sheet where these two are there already: the page allows none but its own.
    for (const [id, kind] of [["plotly.js-style-global", "no-inline-styles"], ["9f215cf04c5486422605d13261cb87401f4e7763b6296af81e98efbc0130da53", ""]]) {
      const stand = document.createElement("template");
      stand.id = id;
      stand.className = kind;
      document.head.append(stand);
    }
    const script = document.createElement("script");
    script.src = "/static/plotly.min.js";
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => resolve(null));
    document.head.append(script);
  });
  const plotly = await loading;
  note(chart, plotly === null ? "The chart cannot be drawn; the table has the same." : "");
  return plotly;
}

function note(chart, text) {
  const place = chart.querySelector(".chart-note");
  place.textContent = text;
  place.hidden = text === "";
  if (text !== "") window.Plotly?.purge(chart.querySelector(".plot"));
}

function element(name, { text, ...attributes } = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  made.append(...children);
  return made;
}
