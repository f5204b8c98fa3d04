"use strict";
// What is known of the chosen run: parameters with their slider, predictions, instruments, events, files.

async function details() {
  const number = state.chosen, version = versionOf(number);
  if (!number || (state.parameters && state.parameters.version === version)) return;
  const none = () => null, some = (name) => fetchJson(`runs/${number}/${name}`).catch(none);
  const [parameters, devices, record, texts] = await Promise.all([some("parameters"), some("devices"), some("record"), fetchJson(`runs/${number}/details`)]);
  if (number !== state.chosen) return;
  const incidents = JSON.stringify(state.incidents) !== JSON.stringify(texts.incidents);
  Object.assign(state, { parameters: { version, ...parameters }, devices, record, incidents: texts.incidents });
  if (incidents) draw(); // their marks
  showDevices();
  showRecord();
  showTexts(texts);
  showEvents();
  await showParameters();
}

// ------------------------------------------------------------------------------------------------ parameters

async function showParameters() {
  const p = state.parameters, some = p.records && p.records.length;
  const profiles = some ? Object.keys(p.profiles) : [], courses = some && p.courses && Object.keys(p.courses).length > 1;
  $("parameters").hidden = !(some && (p.network || profiles.length || courses));
  $("network-view").hidden = !(some && p.network);
  $("record-tools").hidden = !(some && (p.network || profiles.length));
  $("courses-view").hidden = !courses;
  if (!some) return;
  if (courses) {
    const { iterations, ...rest } = p.courses;
    chart("chart-courses", { x: "iteration", name: "parameters", legend: true, columns: Object.entries(rest).map(([label, y], k) => ({ label: shortName(label), colour: COLOURS[k % COLOURS.length], x: iterations, y })) });
  }
  if (p.network && !state.network) state.network = new Network($("network"), p.network);
  const slider = $("record");
  slider.max = p.records.length - 1;
  if (state.followed) slider.value = slider.max;
  if (p.network || profiles.length) await moved();
}

const shortName = (name) => name.replace(/^theta\//, "");

async function theta(record) {
  if (!state.thetas.has(record)) {
    if (state.thetas.size > 60) state.thetas.delete(state.thetas.keys().next().value);
    state.thetas.set(record, await fetchJson(`runs/${state.chosen}/theta/${record}`));
  }
  return state.thetas.get(record);
}

// the slider was moved, or there are further records
async function moved() {
  const p = state.parameters, number = state.chosen, place = () => Math.min(Number($("record").value), p.records.length - 1);
  const position = place();
  const [now, start] = await Promise.all([theta(p.records[position]), theta(p.records[0])]);
  if (number !== state.chosen || p !== state.parameters || position !== place()) return;
  Object.assign(p, { now, start, iteration: p.iterations[position] });
  $("at").textContent = p.iteration.toLocaleString("en");
  if (p.network) showNetwork();
  showProfiles();
}

const showsChange = () => document.querySelector("[name=drawn]:checked").value === "change";

function showNetwork() {
  const p = state.parameters, { now, start } = p, change = showsChange();
  const family = (tree, name) => tree[name] || tree[Object.keys(tree).find((key) => key.endsWith(name))] || [];
  const zeros = (name, size) => { const v = family(now, name); return v.length ? v : new Array(size).fill(0); };
  const shown = { omega: zeros("omega", p.network.positions.length), kappa: zeros("kappa", p.network.bonds.length), chi: zeros("chi", p.network.positions.length) };
  const reach = (name) => { const key = Object.keys(p.ranges).find((k) => k.endsWith(name)); return key ? p.ranges[key] : [0, 0]; };
  const most = (name) => Math.max(Math.abs(reach(name)[0]), Math.abs(reach(name)[1]), 1e-9);
  const scale = { omega: most("omega"), kappa: [Math.min(...reach("kappa").map(Math.abs)), most("kappa")], chi: most("chi"), kappaChange: Math.max(reach("kappa")[1] - reach("kappa")[0], 1e-9) };
  if (change) for (const name of Object.keys(shown)) { const first = family(start, name); shown[name] = shown[name].map((v, k) => v - (first[k] || 0)); }
  const largest = state.network.draw(shown, scale, change);
  const d = change ? "Δ" : "";
  p.drawn = { ...shown, d };
  $("network-text").textContent = `Triangle: input, star: output. Radius |${d}ω| up to ${largest.omega.toPrecision(3)}, width and colour of bonds |${d}κ| up to ${largest.kappa.toPrecision(3)}, colour of disks ${d}χ up to ±${largest.chi.toPrecision(3)}, at iteration ${p.iteration}.`;
}

function exportNetwork() {
  const p = state.parameters;
  if (!p || !p.drawn) return null;
  const { omega, kappa, chi, d } = p.drawn, { positions, bonds } = p.network;
  const rows = [
    ["element", "site", "other site", "x", "y", `${d}omega`, `${d}chi`, `${d}kappa`],
    ...positions.map(([x, y], k) => ["resonator", k, "", x, y, omega[k], chi[k], ""]),
    ...bonds.map(([a, b], k) => ["bond", a, b, "", "", "", "", kappa[k]]),
  ];
  const title = `Network of ${nameOf(state.chosen)}. ${$("network-text").textContent}`;
  return { name: `${nameOf(state.chosen)}-network-${p.iteration}`, csv: () => makeCsv(rows), png: () => svgPng($("network"), title) };
}

async function svgPng(svg, title) {
  const { width, height } = svg.viewBox.baseVal, shown = { width: 900, height: Math.min(Math.round((900 * height) / width), 900) };
  const copy = svg.cloneNode(true);
  for (const [key, value] of Object.entries({ width: 2 * shown.width, height: 2 * shown.height, xmlns: SVG, style: `color: ${PAPER.ink}` })) copy.setAttribute(key, value);
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  await image.decode();
  return makeSheet(title, shown.width, shown.height, [], (context, top) => { context.drawImage(image, 0, top, shown.width, shown.height); });
}

// ------------------------------------------------------------------------------------------------ profiles

const MOST_LINES = COLOURS.length; // rows of an array that are drawn as lines; more are an image

function clearProfiles() {
  [...$("profiles").children].forEach((figure) => removeChart(figure.querySelector(".chart").id));
  $("profiles").replaceChildren();
}

function showProfiles() {
  const p = state.parameters, names = (p.now && Object.keys(p.profiles)) || [];
  names.forEach((name, k) => {
    const id = `chart-profile-${k}`, figure = $(id) ? $(id).closest("figure") : makeProfile(id, shortName(name));
    figure.querySelector("figcaption").textContent = `${shortName(name)} at iteration ${p.iteration.toLocaleString("en")}${showsChange() ? ": change since the start" : ""}`;
    const knots = arrangeKnots(name, p);
    if (knots.rows.length > MOST_LINES) drawImage(id, knots);
    else chart(id, { name: `${shortName(name)}-${p.iteration}`, x: knots.times ? "time" : "knot", ...profilePlot(name, knots, p) });
  });
}

function makeProfile(id, name) {
  const figure = document.createElement("figure");
  const host = Object.assign(document.createElement("div"), { id, className: "chart tall" });
  host.setAttribute("role", "img");
  figure.append(document.createElement("figcaption"), host);
  $("profiles").append(figure);
  addExports(figure, name, () => (host.image ? exportImage(host) : exportChart(id)));
  return figure;
}

// an array as rows along its longest axis: { times, x, rows: [{label, now, start, low, high}] }
function arrangeKnots(name, p) {
  const shape = p.arrays[name], about = p.profiles[name];
  const axis = shape.indexOf(Math.max(...shape)), count = shape[axis], size = p.now[name].length;
  const stride = shape.slice(axis + 1).reduce((a, b) => a * b, 1);
  const times = about.times && about.times.length === count ? about.times : null;
  const pick = (values, row) => {
    if (!values) return null;
    if (values.length === 1) return new Array(count).fill(values[0]);
    const first = Math.floor(row / stride) * stride * count + (row % stride);
    return Array.from({ length: count }, (_, k) => values[first + k * stride]);
  };
  const other = shape.filter((_, k) => k !== axis);
  const label = (row) => { const at = []; let rest = row; for (const n of [...other].reverse()) { at.unshift(rest % n); rest = Math.floor(rest / n); } at.splice(axis, 0, ":"); return at.join(", "); };
  const rows = Array.from({ length: size / count }, (_, row) => ({
    label: other.length ? `${shortName(name)}[${label(row)}]` : shortName(name),
    now: pick(p.now[name], row), start: pick(p.start[name], row), low: pick(about.low, row), high: pick(about.high, row),
  }));
  return { times, x: times || Array.from({ length: count }, (_, k) => k), rows };
}

const subtract = (a, b) => a.map((v, k) => (v == null || b[k] == null ? null : v - b[k]));

function profilePlot(name, { x, rows }, p) {
  const change = showsChange();
  const columns = rows.map(({ label, now, start }, k) => ({ label, colour: COLOURS[k], x, y: change ? subtract(now, start) : now }));
  if (change) return { columns, legend: rows.length > 1, range: null };
  columns.push(...rows.map(({ label, start }, k) => ({ label: `${label} at the start`, colour: COLOURS[k], x, y: start, style: "faint" })));
  const [least, most] = p.ranges[name], wide = Math.max(most - least, 1e-9);
  const near = (bound) => bound && bound.every((v) => v != null && v >= least - 2 * wide && v <= most + 2 * wide);
  for (const side of ["low", "high"]) {
    const same = rows.every((row) => JSON.stringify(row[side]) === JSON.stringify(rows[0][side]));
    for (const row of same ? rows.slice(0, 1) : rows) if (near(row[side])) columns.push({ label: same ? `${side === "low" ? "lower" : "upper"} bound` : `${row.label} ${side}`, colour: PAPER.faint, x, y: row[side], style: "bound" });
  }
  const shown = columns.flatMap((c) => c.y).filter((v) => v != null);
  const low = shown.reduce((a, b) => Math.min(a, b), least), high = shown.reduce((a, b) => Math.max(a, b), most), margin = 0.06 * Math.max(high - low, 1e-9);
  return { columns, legend: true, range: [low - margin, high + margin] };
}

// ------------------------------------------------------------------------------------------------ images

const SEQUENCE = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

function drawImage(id, knots) {
  const host = $(id), change = showsChange();
  const rows = knots.rows.map(({ now, start }) => (change ? subtract(now, start) : now));
  const values = rows.flat().filter((v) => v != null), extremes = [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
  const signed = extremes[0] < 0 && extremes[1] > 0, reach = Math.max(-extremes[0], extremes[1]);
  const [low, high] = signed ? [-reach, reach] : extremes;
  const canvas = host.querySelector("canvas") || host.appendChild(document.createElement("canvas"));
  [canvas.width, canvas.height] = [rows[0].length, rows.length];
  const context = canvas.getContext("2d"), colours = signed ? KERR : SEQUENCE;
  rows.forEach((row, j) => row.forEach((v, k) => {
    context.fillStyle = v == null ? "#888" : mixed(colours, (v - low) / Math.max(high - low, 1e-12));
    context.fillRect(k, j, 1, 1);
  }));
  const text = host.querySelector("p") || host.appendChild(Object.assign(document.createElement("p"), { className: "hint" }));
  const along = knots.times ? `time ${formatTick(knots.x[0])} to ${formatTick(knots.x[knots.x.length - 1])}` : `knots 0 to ${knots.x.length - 1}`;
  text.textContent = `Across: ${along}; down: ${knots.rows[0].label} to ${knots.rows[rows.length - 1].label}. Colours from ${low.toPrecision(3)} (${signed ? "blue" : "violet"}) to ${high.toPrecision(3)} (${signed ? "red" : "yellow"}).`;
  host.setAttribute("aria-label", text.textContent);
  host.image = { canvas, knots, rows, text: text.textContent };
}

function exportImage(host) {
  const { canvas, knots, rows, text } = host.image, caption = captionOf(host);
  const table = [[knots.times ? "time" : "knot", ...knots.rows.map((row) => row.label)], ...knots.x.map((x, k) => [x, ...rows.map((row) => row[k])])];
  const paint = (context, top) => { context.imageSmoothingEnabled = false; context.drawImage(canvas, 20, top, 860, 400); };
  return { name: `${nameOf(state.chosen)}-${caption}`, csv: () => makeCsv(table), png: () => makeSheet(`${caption}. ${text}`, 900, 410, [], paint) };
}

// ------------------------------------------------------------------------------------------------ predictions

const COVERED = 2; // standard errors within which a prediction is right, as in fluctua.learn.predictions

function showPredictions(chosen, common, events) {
  const of = (name) => (chosen && chosen.columns[name]) || [];
  const J = of("J"), size = of("ensemble"), expected = of("expected"), measuredAt = size.map((n) => n > 0);
  const any = (values) => values.some((v) => v != null);
  const some = any(expected) || any(of("score_chi2")) || measuredAt.some((v) => !v);
  $("predictions").hidden = !some;
  if (!some) return;
  const x = of(common.x), where = (values, kept) => values.map((v, k) => (kept[k] ? v : null));
  const columns = [];
  if (measuredAt.some((v) => !v)) columns.push({ label: "model, nothing measured", colour: COLOURS[7], x, y: where(J, measuredAt.map((v) => !v)) });
  if (any(expected)) columns.push({ label: "expected before the measurement", colour: COLOURS[1], x, y: expected, error: of("expected_error"), style: "points" });
  columns.push({ label: "measured", colour: COLOURS[0], x, y: where(J, measuredAt), error: where(of("J_stderr"), measuredAt), style: "points" });
  chart("chart-predicted", { ...common, name: "predictions", quantity: "J", columns, events, legend: true });
  const records = any(of("record_chi2")), chi2 = of(records ? "record_chi2" : "score_chi2");
  $("chi2-view").hidden = !any(chi2);
  if (any(chi2)) {
    $("chi2-of").textContent = records ? "χ² per sample of each record against the noise of the model" : "χ² per degree of freedom of the score of new trajectories";
    const y = x.map(() => 1), one = { label: "1 expected", colour: PAPER.faint, x, y, style: "bound" };
    chart("chart-chi2", { ...common, name: "chi2", quantity: "χ²", columns: [{ label: records ? "records" : "score", colour: COLOURS[2], x, y: chi2, style: "points" }, one], log: true });
  }
  $("covered").textContent = countCovered(expected, of("expected_error"), J, of("J_stderr"));
}

function countCovered(expected, errors, J, J_errors) {
  const places = expected.map((_, k) => k).filter((k) => expected[k] != null && errors[k] != null && J[k] != null);
  const later = places.slice(Math.floor(places.length / 2));
  if (!later.length) return "The model is the calibrated one after the measurements so far; where something was measured, J is of the device.";
  const right = later.filter((k) => Math.abs(expected[k] - J[k]) <= COVERED * Math.hypot(errors[k] || 0, J_errors[k] || 0));
  return `Of the later half of the predictions shown ${right.length} of ${later.length} are within two standard errors of the measurement; 95 % are expected.`;
}

function showRecord() {
  const record = state.record, some = record && record.components.length, appears = $("record-view").hidden === !!some;
  $("record-view").hidden = !some;
  if (appears) draw(); // its neighbour has another width now
  if (!some) return;
  const choice = $("port"), names = record.components.map((component) => component.name);
  if ([...choice.options].map((o) => o.value).join() !== names.join()) choice.replaceChildren(...names.map((name) => Object.assign(document.createElement("option"), { value: name, textContent: name })));
  const { expected, stderr, measured } = record.components[choice.selectedIndex], x = record.times;
  const two = stderr.map((v) => (v == null ? null : COVERED * v));
  const inside = measured.filter((v, k) => Math.abs(v - expected[k]) <= two[k]).length;
  $("record-at").textContent = record.iteration.toLocaleString("en");
  chart("chart-record", {
    x: "time", name: `record-${choice.value}-${record.iteration}`, quantity: choice.value, legend: true,
    columns: [
      { label: "measured", colour: COLOURS[0], x, y: measured },
      { label: "expected before the measurement", colour: COLOURS[1], x, y: expected, error: two, errorName: "two standard deviations" },
    ],
  });
  $("inside").textContent = `${((100 * inside) / x.length).toFixed(0)} % of the ${x.length} samples are within two standard deviations of the noise; 95 % are expected, on average over records.`;
}

// ------------------------------------------------------------------------------------------------ instruments

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
  const lines = (name, error) => answer.devices.map((device, k) => ({ label: `device ${device.name}`, colour: COLOURS[k % COLOURS.length], x: answer.iterations, y: device.columns[name] || answer.iterations.map(() => null), ...(error ? { error: device.columns[error] } : {}) }));
  const legend = answer.devices.length > 1, x = "iteration";
  $("device-J").hidden = !answer.devices.some((device) => device.columns.J.some((v) => v != null));
  if (!$("device-J").hidden) chart("chart-device-J", { x, quantity: "J", columns: lines("J"), legend });
  chart("chart-guard", { x, quantity: "noise over that at calibration", columns: lines("guard") });
  chart("chart-drift", { x, quantity: `rms change of ${choice.value}`, columns: lines(`drift ${choice.value}`) });
}

// ------------------------------------------------------------------------------------------------ events and files

function showTexts(answer) {
  const open = new Set([...document.querySelectorAll("#texts details[open]")].map((d) => d.dataset.name));
  $("texts").replaceChildren(...Object.entries(answer.texts).map(([name, text]) => {
    const box = document.createElement("details");
    box.dataset.name = name; box.open = open.has(name);
    box.append(Object.assign(document.createElement("summary"), { textContent: name }), Object.assign(document.createElement("pre"), { textContent: text }));
    return box;
  }));
}

function showEvents() {
  const history = state.histories.get(state.chosen);
  const rows = [
    ...(history ? history.events.map((e) => ({ iteration: e.iteration, text: e.event, doubt: isDoubt(e.event) })) : []),
    ...state.incidents.map((i) => ({ iteration: i.iteration, text: `${i.kind}${Number(i.trajectories) ? ` (${countTrajectories(Number(i.trajectories))})` : ""}: ${i.text || i.message || i.reason || ""} ${i.time || ""}`.trim(), doubt: i.kind === "doubt" })),
  ];
  $("events").hidden = !rows.length;
  const doubts = rows.filter((row) => row.doubt), first = doubts[0];
  $("doubt").hidden = !first;
  if (first) $("doubt").textContent = `In doubt since iteration ${first.iteration} (${doubts.length} time${doubts.length === 1 ? "" : "s"}): ${first.text.replace(/^.*?doubt[^:]*: /, "")}`;
  $("event-rows").replaceChildren(...[...rows].reverse().map(({ iteration, text, doubt }) => {
    const row = document.createElement("tr");
    row.classList.toggle("doubt", doubt);
    for (const cell of [iteration, text]) row.append(Object.assign(document.createElement("td"), { textContent: String(cell) }));
    return row;
  }));
}
