"use strict";
// Follows /changes, asks for what is shown, draws. All numbers come from this server; nothing is loaded from elsewhere.

const LEAST_PAUSE = 700; // milliseconds between two drawings
const $ = (id) => document.getElementById(id);
const state = { runs: [], ticked: [], chosen: null, histories: new Map(), versions: new Map(), zoom: null, parameters: null, thetas: new Map(), network: null, followed: true, charts: new Map(), incidents: [], devices: null, record: null };

// ------------------------------------------------------------------------------------------------ the server

async function fetchJson(path) {
  const response = await fetch(path);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error || response.statusText);
  return answer;
}

function listen() {
  const changes = new EventSource("changes");
  changes.onmessage = (event) => { status("live"); received(JSON.parse(event.data)); };
  changes.onerror = () => status("the server does not answer; what is shown is the last that came", true);
}

function status(text, lost = false) {
  const running = state.runs.filter((run) => run.state === "running").length;
  const line = lost ? text : `${text}: ${state.runs.length} run${state.runs.length === 1 ? "" : "s"}, ${running} running`;
  if ($("status").textContent !== line) $("status").textContent = line;
  $("status").classList.toggle("lost", lost);
}

function received(runs) {
  state.runs = runs;
  const known = new Set(runs.map((run) => run.number));
  state.ticked = state.ticked.filter((number) => known.has(number));
  for (const number of [...state.histories.keys()]) if (!known.has(number)) state.histories.delete(number);
  if (!known.has(state.chosen)) {
    const first = runs.find((run) => run.state === "running") || runs[0];
    choose(first ? first.number : null);
  }
  status("live");
  list();
  refresh();
}

let waiting = null, last = 0, busy = false;
function refresh() { // at most one at a time, and not more often than can be seen
  if (waiting) return;
  waiting = setTimeout(async () => {
    waiting = null;
    if (busy) return refresh();
    busy = true;
    try { await update(); } catch (error) { status(error.message, true); } finally { busy = false; last = Date.now(); }
  }, Math.max(0, last + LEAST_PAUSE - Date.now()));
}

const versionOf = (number) => (state.runs.find((run) => run.number === number) || {}).version;

async function update() {
  const range = state.zoom && $("against").value === "iteration" ? `?from=${state.zoom[0]}&to=${state.zoom[1]}` : "";
  const shown = new Set([...state.ticked, ...(state.chosen ? [state.chosen] : [])]);
  for (const number of [...state.histories.keys()]) if (!shown.has(number)) state.histories.delete(number);
  const lost = new Set();
  await Promise.all([...shown].map(async (number) => {
    const version = versionOf(number) + range, known = state.histories.get(number);
    if (known && known.version === version) return;
    try { state.histories.set(number, { version, ...(await fetchJson(`runs/${number}/history${range}`)) }); }
    catch (error) { state.histories.delete(number); lost.add(number); status(error.message, true); }
  }));
  draw();
  await details();
  if (!lost.size) status("live");
}

// ------------------------------------------------------------------------------------------------ the list of runs

function list() {
  const filter = $("filter").value.toLowerCase(), focused = document.activeElement && document.activeElement.dataset.key;
  const items = state.runs.filter((run) => run.name.toLowerCase().includes(filter)).map((run) => {
    const item = document.createElement("li");
    item.classList.toggle("chosen", run.number === state.chosen);
    const tick = Object.assign(document.createElement("input"), { type: "checkbox", checked: state.ticked.includes(run.number) });
    tick.setAttribute("aria-label", `curves of ${run.name}`);
    tick.dataset.key = `tick ${run.number}`;
    tick.onchange = () => {
      state.ticked = tick.checked ? [...state.ticked, run.number] : state.ticked.filter((n) => n !== run.number);
      list(); refresh();
    };
    const swatch = Object.assign(document.createElement("span"), { className: "swatch" });
    if (state.ticked.includes(run.number)) swatch.style.background = colour(run.number);
    const text = document.createElement("div");
    const name = Object.assign(document.createElement("button"), { className: "name", type: "button", textContent: run.name });
    name.dataset.key = `name ${run.number}`;
    name.setAttribute("aria-pressed", String(run.number === state.chosen));
    name.onclick = () => { choose(run.number); list(); refresh(); };
    const line = Object.assign(document.createElement("div"), { className: "line" });
    const badge = Object.assign(document.createElement("span"), { className: `state ${run.state}`, textContent: run.state });
    const J = run.J == null ? "" : ` · J = ${run.J.toFixed(4)}${run.J_stderr == null ? "" : ` ± ${run.J_stderr.toFixed(4)}`}`;
    const at = run.iteration == null ? "" : ` · iteration ${(run.iteration + 1).toLocaleString("en")} · ${countTrajectories(run.trajectories)}`;
    line.append(badge, `${J}${at}`);
    text.append(name, line);
    item.append(tick, swatch, text);
    return item;
  });
  if (!items.length) items.push(Object.assign(document.createElement("li"), { textContent: state.runs.length ? "none matches" : "no run yet: it appears here when it begins" }));
  $("runs").replaceChildren(...items);
  if (focused) { const same = document.querySelector(`[data-key="${focused}"]`); if (same) same.focus(); }
}

function choose(number) {
  if (number === state.chosen) return;
  Object.assign(state, { chosen: number, parameters: null, network: null, followed: true, devices: null, record: null, incidents: [] });
  state.thetas.clear();
  if (number && !state.ticked.includes(number)) state.ticked = [...state.ticked, number];
  const run = state.runs.find((r) => r.number === number);
  document.querySelectorAll("b.chosen").forEach((b) => { b.textContent = run ? run.name : ""; });
  for (const id of ["parameters", "predictions", "events", "devices", "doubt"]) $(id).hidden = true;
  $("texts").replaceChildren();
  clearProfiles();
}

const colour = (number) => COLOURS[state.ticked.indexOf(number) % COLOURS.length];
const nameOf = (number) => (state.runs.find((run) => run.number === number) || {}).name || "";

// ------------------------------------------------------------------------------------------------ curves

// draw a plot (plots.js) into the figure of this id; it is made anew only where something else than its numbers changed
function chart(id, plot) {
  const host = $(id), look = pageLook();
  plot = { title: captionOf(host), name: id.replace("chart-", ""), quantity: "", events: [], ...plot };
  const lines = plot.columns.map((c) => [c.label, c.colour, c.style, !!c.error]);
  const signature = JSON.stringify([lines, plot.log, plot.logX, plot.x, plot.legend, !!plot.range, document.documentElement.dataset.theme, host.clientWidth]);
  host.setAttribute("aria-label", describe(plot));
  const held = state.charts.get(id), data = makeData(plot), still = state.zoom && plot.zoomed;
  if (held && held.signature === signature) {
    held.box.plot = plot;
    held.plot.setData(data, !still);
    if (still) held.plot.redraw();
    return;
  }
  if (held) held.plot.destroy();
  const height = Number(host.dataset.height) || host.clientHeight;
  if (plot.legend && height) { host.dataset.height = height; host.style.height = "auto"; } // the height of the style is without the legend
  const box = { plot }, options = makeOptions(plot, look, { width: host.clientWidth || 600, height }, box);
  if (plot.zoomable) options.hooks.setSelect = [(u) => { if (u.select.width > 4) zoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")); }];
  state.charts.set(id, { plot: new uPlot(options, data, host), signature, box });
}

function removeChart(id) {
  if (state.charts.has(id)) state.charts.get(id).plot.destroy();
  state.charts.delete(id);
}

// text of a caption; a choice within it counts as what is chosen
function captionOf(host) {
  const copy = host.closest("figure").querySelector("figcaption").cloneNode(true);
  copy.querySelectorAll("select").forEach((select) => select.replaceWith($(select.id).selectedOptions[0]?.textContent || ""));
  return copy.textContent.trim();
}

function exportChart(id) {
  const held = state.charts.get(id);
  if (!held || $(id).closest("[hidden]")) return null;
  const plot = { ...held.box.plot };
  if (state.zoom && plot.zoomed) plot.shown = { min: held.plot.scales.x.min, max: held.plot.scales.x.max };
  return { name: `${nameOf(state.chosen)}-${plot.name}`, png: () => plotPng(plot), csv: () => plotCsv(plot) };
}

function zoom(low, high) {
  const shift = $("log-x").checked ? 1 : 0;
  state.zoom = low == null ? null : [low - shift, high - shift];
  $("whole").hidden = !state.zoom;
  if (!state.zoom) state.charts.forEach(({ plot }) => plot.setData(plot.data, true));
  refresh();
}

const isDoubt = (text) => /(^|; |\d )doubt\b/.test(text);

// events of the chosen run on the axis that is shown: [{x, doubt}]
function placeEvents(chosen, xs) {
  const iterations = chosen.columns.iteration;
  const nearest = (iteration) => { let k = iterations.findIndex((v) => v >= iteration); if (k < 0) k = iterations.length - 1; return xs[k]; };
  const doubts = state.incidents.filter((i) => i.kind === "doubt" && i.iteration !== "" && Number.isFinite(Number(i.iteration)));
  const events = [
    ...chosen.events.map((e) => ({ x: nearest(e.iteration), doubt: isDoubt(e.event) })),
    ...doubts.map((i) => ({ x: nearest(Number(i.iteration)), doubt: true })),
  ];
  const seen = new Set();
  return events.filter(({ x, doubt }) => { const key = `${x} ${doubt}`; return x != null && !seen.has(key) && seen.add(key); }).sort((a, b) => a.x - b.x);
}

function draw() {
  const against = $("against").value, logX = $("log-x").checked;
  const of = (number, name) => (state.histories.get(number) || { columns: {} }).columns[name] || [];
  const ticked = state.ticked.filter((number) => state.histories.has(number));
  const columns = (name, error) => ticked.map((number) => ({ label: nameOf(number), colour: colour(number), x: of(number, against), y: of(number, name), ...(error ? { error: of(number, error) } : {}) }));
  const chosen = state.histories.get(state.chosen);
  const xs = chosen ? chosen.columns[against] : [], events = chosen ? placeEvents(chosen, xs) : [];
  const common = { x: against, logX, zoomed: true };
  chart("chart-J", { ...common, name: "J", quantity: "J", columns: columns("J", "J_stderr"), log: $("log-y").checked, events, zoomable: true });
  const sizes = columns("ensemble"), alone = sizes.some(({ y }) => y.includes(0)); // iterations of a model alone have no trajectories
  $("counted").textContent = alone ? "measured iteration" : "iteration";
  const measured = sizes.map((column) => ({ ...column, y: column.y.map((n) => n || null) }));
  chart("chart-ensemble", { ...common, name: "trajectories", quantity: `trajectories per ${$("counted").textContent}`, columns: measured, events });
  chart("chart-norm", { ...common, name: "gradient", quantity: "norm of the gradient", columns: columns("gradient_norm"), log: true });
  const families = chosen ? Object.keys(chosen.columns).filter((name) => name.endsWith(" norm")).map((name) => name.slice(0, -5)) : [];
  $("signal").hidden = !families.length;
  if (families.length) {
    const ratio = (name) => of(state.chosen, `${name} norm`).map((v, k) => { const e = of(state.chosen, `${name} error`)[k]; return v == null || !e ? null : v / e; });
    chart("chart-signal", { ...common, quantity: "signal-to-noise ratio of the gradient", columns: families.map((name, k) => ({ label: name, colour: COLOURS[k % COLOURS.length], x: xs, y: ratio(name) })), log: true, legend: true });
  }
  const link = $("data");
  if (state.chosen) { link.href = `runs/${state.chosen}/history.csv`; link.setAttribute("aria-label", `history of ${nameOf(state.chosen)} as CSV`); }
  showPredictions(chosen, common, events);
  if (state.devices) showDevices();
  if (state.parameters) showProfiles();
  if (state.zoom) state.charts.forEach(({ plot, box }) => { if (box.plot.zoomed) plot.setScale("x", { min: state.zoom[0] + (logX ? 1 : 0), max: state.zoom[1] + (logX ? 1 : 0) }); });
}

// ------------------------------------------------------------------------------------------------ controls

function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = dark ? "Light" : "Dark";
  $("theme").setAttribute("aria-pressed", String(dark));
  draw();
}

for (const id of ["against", "log-x", "log-y"]) $(id).onchange = () => { if (state.zoom) zoom(null); draw(); };
$("drift-of").onchange = showDevices;
$("port").onchange = showRecord;
document.querySelectorAll("figure[data-what]").forEach((figure) => addExports(figure, figure.dataset.what, () => exportChart(figure.querySelector(".chart").id)));
addExports($("network-view"), "Network", exportNetwork);
$("filter").oninput = list;
$("whole").onclick = () => zoom(null);
$("theme").onclick = () => theme(document.documentElement.dataset.theme !== "dark");
$("record").oninput = () => { state.followed = Number($("record").value) === Number($("record").max); moved(); };
document.querySelectorAll("[name=drawn]").forEach((radio) => { radio.onchange = moved; });
let resizing = null;
window.onresize = () => { clearTimeout(resizing); resizing = setTimeout(draw, 150); };
theme(matchMedia("(prefers-color-scheme: dark)").matches);
listen();
