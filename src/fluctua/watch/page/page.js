"use strict";
// Follows /changes, asks for what is shown, draws. All numbers come from this server; nothing is loaded from elsewhere.

const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f"];
const LEAST_PAUSE = 700; // milliseconds between two drawings
const OWN_AXIS = new Set(["chart-courses", "chart-device-J", "chart-guard", "chart-drift"]); // not moved by a closer look at J
const $ = (id) => document.getElementById(id);
const state = { runs: [], ticked: [], chosen: null, histories: new Map(), versions: new Map(), zoom: null, parameters: null, thetas: new Map(), network: null, followed: true, charts: new Map() };

// ------------------------------------------------------------------------------------------------ the server

async function ask(path) {
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
    try { state.histories.set(number, { version, ...(await ask(`runs/${number}/history${range}`)) }); }
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
    const at = run.iteration == null ? "" : ` · iteration ${(run.iteration + 1).toLocaleString("en")} · ${run.trajectories.toLocaleString("en")} trajectories`;
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
  Object.assign(state, { chosen: number, parameters: null, network: null, followed: true, devices: null });
  state.thetas.clear();
  if (number && !state.ticked.includes(number)) state.ticked = [...state.ticked, number];
  const run = state.runs.find((r) => r.number === number);
  document.querySelectorAll("b.chosen").forEach((b) => { b.textContent = run ? run.name : ""; });
  for (const id of ["parameters", "events", "devices"]) $(id).hidden = true;
  $("texts").replaceChildren();
}

const colour = (number) => COLOURS[state.ticked.indexOf(number) % COLOURS.length];
const nameOf = (number) => (state.runs.find((run) => run.number === number) || {}).name || "";

// ------------------------------------------------------------------------------------------------ curves

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function axes(label, log) {
  const style = { stroke: css("--ink"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
  const values = (_, splits) => splits.map((v) => (v == null ? "" : Math.abs(v) >= 1e6 || (v && Math.abs(v) < 1e-3) ? v.toExponential(0) : v.toLocaleString("en", { maximumFractionDigits: 5 })));
  return { x: { ...style, label, labelSize: 22, size: 40, values }, y: { ...style, size: 64, ...(log ? { values } : {}) } };
}

// columns: [{label, colour, x, y, error?}] on one pair of axes; null where nothing is to be drawn
function chart(id, columns, { log = false, label = "", events = [], legend = false } = {}) {
  const host = $(id), logX = $("log-x").checked && !label;
  const signature = JSON.stringify([columns.map((c) => [c.label, c.colour, !!c.error]), log, logX, label, document.documentElement.dataset.theme, host.clientWidth]);
  const positive = (values, on) => (on ? values.map((v) => (v > 0 ? v : null)) : values);
  const tables = columns.map((c) => {
    const x = logX ? c.x.map((v) => v + 1) : c.x;
    const bounds = c.error ? [c.y.map((v, k) => (v == null || c.error[k] == null ? null : v - c.error[k])), c.y.map((v, k) => (v == null || c.error[k] == null ? null : v + c.error[k]))] : [];
    return [x, positive(c.y, log), ...bounds.map((b) => positive(b, log))];
  });
  const data = tables.length ? uPlot.join(tables) : [[]];
  host.setAttribute("aria-label", columns.map((c) => { const v = c.y.filter((y) => y != null); return `${c.label}: ${v.length} points${v.length ? `, from ${v[0].toPrecision(4)} to ${v[v.length - 1].toPrecision(4)}` : ""}`; }).join("; ") || "nothing to show yet");
  let held = state.charts.get(id);
  if (held && held.signature === signature) { held.events.list = events; held.plot.setData(data, !state.zoom); if (state.zoom) held.plot.redraw(); return; }
  if (held) held.plot.destroy();
  const series = [{ label: label || "iteration" }], bands = [];
  for (const c of columns) {
    series.push({ label: c.label, stroke: c.colour, width: 1.6, spanGaps: true, points: { show: c.x.length < 3 } });
    if (c.error) {
      const at = series.length;
      for (const side of ["−", "+"]) series.push({ label: `${c.label} ${side} error`, stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
      bands.push({ series: [at + 1, at], fill: `${c.colour}33` });
    }
  }
  const height = Number(host.dataset.height) || host.clientHeight;
  if (legend && height) { host.dataset.height = height; host.style.height = "auto"; } // what the style says is without the legend
  const box = { list: events };
  const { x, y } = axes(label || (logX ? `${$("against").value} + 1` : $("against").value), log);
  const plot = new uPlot({
    width: host.clientWidth || 600, height, axes: [x, y], series, bands, legend: { show: legend, live: false },
    scales: { x: { time: false, distr: logX ? 3 : 1 }, y: { distr: log ? 3 : 1 } },
    cursor: { drag: { x: id === "chart-J", y: false } },
    hooks: {
      draw: [(u) => marks(u, box.list, logX)],
      setSelect: [(u) => { if (u.select.width > 4) zoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")); }],
    },
  }, data, host);
  state.charts.set(id, { plot, signature, events: box });
}

function marks(u, events, logX) {
  u.ctx.save();
  u.ctx.strokeStyle = css("--faint"); u.ctx.setLineDash([4, 4]); u.ctx.lineWidth = 1;
  for (const event of events) {
    const place = Math.round(u.valToPos(event.x + (logX ? 1 : 0), "x", true));
    if (place < u.bbox.left || place > u.bbox.left + u.bbox.width) continue;
    u.ctx.beginPath(); u.ctx.moveTo(place, u.bbox.top); u.ctx.lineTo(place, u.bbox.top + u.bbox.height); u.ctx.stroke();
  }
  u.ctx.restore();
}

function zoom(low, high) {
  const shift = $("log-x").checked ? 1 : 0;
  state.zoom = low == null ? null : [low - shift, high - shift];
  $("whole").hidden = !state.zoom;
  if (!state.zoom) state.charts.forEach(({ plot }) => plot.setData(plot.data, true));
  refresh();
}

function draw() {
  const against = $("against").value;
  const of = (number, name) => (state.histories.get(number) || { columns: {} }).columns[name] || [];
  const ticked = state.ticked.filter((number) => state.histories.has(number));
  const columns = (name, error) => ticked.map((number) => ({ label: nameOf(number), colour: colour(number), x: of(number, against), y: of(number, name), ...(error ? { error: of(number, error) } : {}) }));
  const chosen = state.histories.get(state.chosen);
  const iterations = chosen ? chosen.columns.iteration : [], xs = chosen ? chosen.columns[against] : [];
  const nearest = (iteration) => { let k = iterations.findIndex((v) => v >= iteration); if (k < 0) k = iterations.length - 1; return xs[k]; };
  const events = chosen ? chosen.events.map((e) => ({ x: nearest(e.iteration) })) : [];
  chart("chart-J", columns("J", "J_stderr"), { log: $("log-y").checked, events });
  chart("chart-ensemble", columns("ensemble"), { events });
  chart("chart-norm", columns("gradient_norm"), { log: true });
  const families = chosen ? Object.keys(chosen.columns).filter((name) => name.endsWith(" norm")).map((name) => name.slice(0, -5)) : [];
  $("signal").hidden = !families.length;
  if (families.length) {
    const ratio = (name) => of(state.chosen, `${name} norm`).map((v, k) => { const e = of(state.chosen, `${name} error`)[k]; return v == null || !e ? null : v / e; });
    chart("chart-signal", families.map((name, k) => ({ label: name, colour: COLOURS[k % COLOURS.length], x: xs, y: ratio(name) })), { log: true, legend: true });
  }
  const link = $("data");
  if (state.chosen) { link.href = `runs/${state.chosen}/history.csv`; link.setAttribute("aria-label", `history of ${nameOf(state.chosen)} as CSV`); }
  if (state.devices) showDevices();
  if (state.zoom) state.charts.forEach(({ plot }, id) => { if (!OWN_AXIS.has(id)) plot.setScale("x", { min: state.zoom[0] + ($("log-x").checked ? 1 : 0), max: state.zoom[1] + ($("log-x").checked ? 1 : 0) }); });
}

// ------------------------------------------------------------------------------------------------ the chosen run

async function details() {
  const number = state.chosen, version = versionOf(number);
  if (!number || (state.parameters && state.parameters.version === version)) return;
  const none = () => null;
  const [parameters, texts, devices] = await Promise.all([ask(`runs/${number}/parameters`).catch(none), ask(`runs/${number}/details`), ask(`runs/${number}/devices`).catch(none)]);
  if (number !== state.chosen) return;
  state.parameters = { version, ...parameters };
  state.devices = devices;
  showDevices();
  showTexts(texts);
  showEvents(texts.incidents);
  const some = parameters && parameters.records.length;
  $("parameters").hidden = !some;
  $("network-view").hidden = !(some && parameters.network);
  $("courses-view").hidden = !(some && parameters.courses);
  if (some && parameters.network) await showNetwork();
  if (some && parameters.courses) {
    const { iterations, ...rest } = parameters.courses;
    chart("chart-courses", Object.entries(rest).map(([label, y], k) => ({ label, colour: COLOURS[k % COLOURS.length], x: iterations, y })), { label: "iteration", legend: true });
  }
}

async function showNetwork() {
  const p = state.parameters, slider = $("record");
  if (!state.network) state.network = new Network($("network"), p.network);
  slider.max = p.records.length - 1;
  if (state.followed) slider.value = slider.max;
  await moved();
}

async function theta(record) {
  if (!state.thetas.has(record)) {
    if (state.thetas.size > 60) state.thetas.delete(state.thetas.keys().next().value);
    state.thetas.set(record, await ask(`runs/${state.chosen}/theta/${record}`));
  }
  return state.thetas.get(record);
}

async function moved() {
  const p = state.parameters, place = Math.min(Number($("record").value), p.records.length - 1), number = state.chosen;
  const change = document.querySelector("[name=drawn]:checked").value === "change";
  const [now, start] = await Promise.all([theta(p.records[place]), theta(p.records[0])]);
  if (number !== state.chosen || place !== Math.min(Number($("record").value), p.records.length - 1)) return;
  const family = (tree, name) => tree[name] || tree[Object.keys(tree).find((key) => key.endsWith(name))] || [];
  const zeros = (name, size) => { const v = family(now, name); return v.length ? v : new Array(size).fill(0); };
  const shown = { omega: zeros("omega", p.network.positions.length), kappa: zeros("kappa", p.network.bonds.length), chi: zeros("chi", p.network.positions.length) };
  const reach = (name) => { const key = Object.keys(p.ranges).find((k) => k.endsWith(name)); return key ? p.ranges[key] : [0, 0]; };
  const most = (name) => Math.max(Math.abs(reach(name)[0]), Math.abs(reach(name)[1]), 1e-9);
  const scale = { omega: most("omega"), kappa: [Math.min(...reach("kappa").map(Math.abs)), most("kappa")], chi: most("chi"), kappaChange: Math.max(reach("kappa")[1] - reach("kappa")[0], 1e-9) };
  if (change) for (const name of Object.keys(shown)) { const first = family(start, name); shown[name] = shown[name].map((v, k) => v - (first[k] || 0)); }
  $("at").textContent = p.iterations[place].toLocaleString("en");
  const largest = state.network.draw(shown, scale, change);
  const d = change ? "Δ" : "";
  $("network-text").textContent = `Triangle: input, star: output. Radius |${d}ω| up to ${largest.omega.toPrecision(3)}, width and colour of bonds |${d}κ| up to ${largest.kappa.toPrecision(3)}, colour of disks ${d}χ up to ±${largest.chi.toPrecision(3)}, at iteration ${p.iterations[place]}.`;
}

function showDevices() {
  const answer = state.devices, some = answer && answer.devices.length && answer.iterations.length;
  $("devices").hidden = !some;
  if (!some) return;
  const last = (device, name) => { const v = device.columns[name] || []; return v.length ? v[v.length - 1] : null; };
  const shown = (v, digits) => (v == null ? "–" : v.toLocaleString("en", { maximumFractionDigits: digits }));
  const J = (device) => { const v = last(device, "J"), e = last(device, "error"); return v == null ? "–" : `${v.toFixed(4)}${e == null ? "" : ` ± ${e.toFixed(4)}`}`; };
  $("device-rows").replaceChildren(...answer.devices.map((device) => {
    const row = document.createElement("tr"), up = last(device, "up");
    const badge = Object.assign(document.createElement("span"), { className: `state ${up ? "running" : "killed"}`, textContent: up ? "answers" : "silent" });
    for (const cell of [device.name, badge, J(device), shown(last(device, "trajectories"), 0), shown(last(device, "lost"), 0), shown(last(device, "failures"), 0), shown(last(device, "rate"), 2), shown(last(device, "guard"), 2)]) {
      const place = document.createElement("td");
      place.append(cell); row.append(place);
    }
    return row;
  }));
  const families = [...new Set(answer.devices.flatMap((device) => Object.keys(device.columns).filter((name) => name.startsWith("drift ") && device.columns[name].some((v) => v)).map((name) => name.slice(6))))];
  const choice = $("drift-of"), wanted = choice.value || families.find((name) => name === "omega_offset");
  if ([...choice.options].map((o) => o.value).join() !== families.join()) {
    choice.replaceChildren(...families.map((name) => Object.assign(document.createElement("option"), { value: name, textContent: name.replaceAll("_", " ") })));
    if (families.includes(wanted)) choice.value = wanted;
  }
  const lines = (name) => answer.devices.map((device, k) => ({ label: `device ${device.name}`, colour: COLOURS[k % COLOURS.length], x: answer.iterations, y: device.columns[name] || answer.iterations.map(() => null) }));
  const legend = answer.devices.length > 1;
  $("device-J").hidden = !answer.devices.some((device) => device.columns.J.some((v) => v != null));
  if (!$("device-J").hidden) chart("chart-device-J", lines("J"), { label: "iteration", legend });
  chart("chart-guard", lines("guard"), { label: "iteration" });
  chart("chart-drift", lines(`drift ${choice.value}`), { label: "iteration" });
}

function showTexts(answer) {
  const open = new Set([...document.querySelectorAll("#texts details[open]")].map((d) => d.dataset.name));
  $("texts").replaceChildren(...Object.entries(answer.texts).map(([name, text]) => {
    const box = document.createElement("details");
    box.dataset.name = name; box.open = open.has(name);
    box.append(Object.assign(document.createElement("summary"), { textContent: name }), Object.assign(document.createElement("pre"), { textContent: text }));
    return box;
  }));
}

function showEvents(incidents) {
  const history = state.histories.get(state.chosen);
  const rows = [...(history ? history.events.map((e) => [e.iteration, e.event]) : []), ...incidents.map((i) => [i.iteration, `${i.kind}${Number(i.trajectories) ? ` (${i.trajectories} trajectories)` : ""}: ${i.text || i.message || i.reason || ""} ${i.time || ""}`.trim()])];
  $("events").hidden = !rows.length;
  $("event-rows").replaceChildren(...rows.reverse().map((cells) => {
    const row = document.createElement("tr");
    for (const cell of cells) row.append(Object.assign(document.createElement("td"), { textContent: String(cell) }));
    return row;
  }));
}

// ------------------------------------------------------------------------------------------------ controls

function picture() {
  const canvas = $("chart-J").querySelector("canvas");
  if (!canvas) return;
  const out = document.createElement("canvas");
  [out.width, out.height] = [canvas.width, canvas.height];
  const context = out.getContext("2d");
  context.fillStyle = css("--ground"); context.fillRect(0, 0, out.width, out.height); context.drawImage(canvas, 0, 0);
  Object.assign(document.createElement("a"), { href: out.toDataURL("image/png"), download: "fluctua-J.png" }).click();
}

function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = dark ? "Light" : "Dark";
  $("theme").setAttribute("aria-pressed", String(dark));
  draw();
}

for (const id of ["against", "log-x", "log-y"]) $(id).onchange = () => { if (state.zoom) zoom(null); draw(); };
$("drift-of").onchange = showDevices;
$("filter").oninput = list;
$("whole").onclick = () => zoom(null);
$("picture").onclick = picture;
$("theme").onclick = () => theme(document.documentElement.dataset.theme !== "dark");
$("record").oninput = () => { state.followed = Number($("record").value) === Number($("record").max); moved(); };
document.querySelectorAll("[name=drawn]").forEach((radio) => { radio.onchange = moved; });
let resizing = null;
window.onresize = () => { clearTimeout(resizing); resizing = setTimeout(draw, 150); };
theme(matchMedia("(prefers-color-scheme: dark)").matches);
listen();
