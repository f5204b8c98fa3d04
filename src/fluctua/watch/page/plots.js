"use strict";
// Plots as plain records, drawn on the page and into files alike: PNG with twice the pixels, CSV with what is drawn.
//
// plot: { name, title, quantity, x, columns, log, logX, events, legend, range, zoomable }
//   name of files; title above the picture; quantity of the values and x of the axis, as in the columns of the CSV;
//   log, logX: logarithmic axes; events: [{x, doubt}]; range: [low, high] of the values, or null.
// column: { label, colour, x, y, error, style }; style "line", "faint" (dashed), "bound" (grey, dashed) or "points";
//   error is a band about a line, and a bar through a point. null where nothing is to be drawn.

const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f"];
const PAPER = { ink: "#16191d", faint: "#5b6470", line: "#d8dce1", bad: "#b3261e", ground: "#ffffff" };
const WHOLE = Array.from({ length: 13 }, (_, k) => [1, 2, 5].map((v) => v * 10 ** k)).flat(); // between two numbers on an axis
const FONT = "system-ui, sans-serif";

// what is drawn on: colours, and pixels per pixel of the style sheet
function pageLook() {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return { ...Object.fromEntries(Object.keys(PAPER).map((name) => [name, colour(name)])), scale: 1 };
}

const formatTick = (v) => {
  if (v == null) return "";
  const size = Math.abs(v);
  return size >= 1e6 || (v && size < 1e-3) ? v.toExponential(0) : v.toLocaleString("en", { maximumFractionDigits: 5 });
};

const countTrajectories = (n) => `${n.toLocaleString("en")} ${n === 1 ? "trajectory" : "trajectories"}`;

function makeAxes(plot, look) {
  const s = look.scale, thin = { stroke: look.line, width: s };
  const style = { stroke: look.ink, grid: thin, ticks: { ...thin, size: 8 * s }, gap: 5 * s, font: `${12 * s}px ${FONT}`, labelFont: `${12 * s}px ${FONT}` };
  const values = (_, splits) => splits.map(formatTick);
  const whole = plot.x !== "time" && !plot.logX ? { incrs: WHOLE } : {};
  const label = plot.logX ? `${plot.x} + 1` : plot.x;
  return [
    { ...style, label, labelSize: 22 * s, size: 40 * s, space: 56 * s, values, ...whole },
    { ...style, size: 64 * s, space: 32 * s, ...(plot.log ? { values } : {}) },
  ];
}

function makeSeries(plot, look) {
  const s = look.scale, series = [{ label: plot.x }], bands = [], bars = [];
  for (const { label, colour, error, style = "line", x } of plot.columns) {
    const stroke = style === "bound" ? look.faint : style === "faint" ? `${colour}99` : colour;
    const one = { label, stroke, width: (style === "line" ? 1.6 : 1.2) * s, spanGaps: true, points: { show: x.length < 3, size: 6 * s } };
    if (style === "points") Object.assign(one, { paths: () => null, points: { show: true, size: 6 * s, fill: stroke, stroke } });
    if (style === "faint" || style === "bound") one.dash = style === "bound" ? [2 * s, 4 * s] : [7 * s, 4 * s];
    const at = series.push(one) - 1;
    if (!error) continue;
    const hidden = { class: "side", stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
    series.push({ ...hidden, label: `${label} − error` }, { ...hidden, label: `${label} + error` });
    if (style === "points") bars.push({ at: at + 1, stroke });
    else bands.push({ series: [at + 2, at + 1], fill: `${colour}33` });
  }
  return { series, bands, bars };
}

function makeData(plot) {
  const positive = (values) => (plot.log ? values.map((v) => (v > 0 ? v : null)) : values);
  const tables = plot.columns.map(({ x, y, error }) => {
    const shifted = plot.logX ? x.map((v) => v + 1) : x;
    const side = (sign) => y.map((v, k) => (v == null || error[k] == null ? null : v + sign * error[k]));
    return [shifted, positive(y), ...(error ? [positive(side(-1)), positive(side(1))] : [])];
  });
  return tables.length ? uPlot.join(tables) : [[]];
}

function makeOptions(plot, look, size, box) {
  const { series, bands, bars } = makeSeries(plot, look);
  const range = () => box.plot.range;
  return {
    ...size, series, bands, axes: makeAxes(plot, look), padding: [10 * look.scale, 12 * look.scale, 0, 0],
    legend: { show: !!plot.legend && look.scale === 1 && !look.toFile, live: false },
    scales: { x: { time: false, distr: plot.logX ? 3 : 1 }, y: { distr: plot.log ? 3 : 1, ...(plot.range ? { range } : {}) } },
    cursor: look.toFile ? { show: false } : { drag: { x: !!plot.zoomable, y: false } },
    hooks: { draw: [(u) => { drawBars(u, bars, look); drawEvents(u, box.plot, look); }], ready: [() => box.ready && box.ready()] },
  };
}

function drawBars(u, bars, look) {
  u.ctx.save();
  u.ctx.lineWidth = 1.2 * look.scale * devicePixelRatio;
  for (const { at, stroke } of bars) {
    u.ctx.strokeStyle = stroke;
    u.data[0].forEach((x, k) => {
      const low = u.data[at][k], high = u.data[at + 1][k];
      if (low == null || high == null) return;
      const place = u.valToPos(x, "x", true);
      if (place < u.bbox.left || place > u.bbox.left + u.bbox.width) return;
      u.ctx.beginPath(); u.ctx.moveTo(place, u.valToPos(low, "y", true)); u.ctx.lineTo(place, u.valToPos(high, "y", true)); u.ctx.stroke();
    });
  }
  u.ctx.restore();
}

// events are dashed lines; doubts are triangles at the top, with a line where they begin
function drawEvents(u, plot, look) {
  const unit = look.scale * devicePixelRatio, { left, top, width, height } = u.bbox;
  u.ctx.save();
  u.ctx.lineWidth = unit;
  (plot.events || []).forEach((event, k, all) => {
    const place = Math.round(u.valToPos(event.x + (plot.logX ? 1 : 0), "x", true));
    if (place < left || place > left + width) return;
    const follows = event.doubt && k && all[k - 1].doubt;
    u.ctx.strokeStyle = u.ctx.fillStyle = event.doubt ? look.bad : look.faint;
    u.ctx.setLineDash([4 * unit, 4 * unit]);
    u.ctx.beginPath();
    if (!follows) { u.ctx.moveTo(place, top); u.ctx.lineTo(place, top + height); u.ctx.stroke(); }
    if (!event.doubt) return;
    u.ctx.beginPath();
    u.ctx.moveTo(place - 5 * unit, top); u.ctx.lineTo(place + 5 * unit, top); u.ctx.lineTo(place, top + 9 * unit);
    u.ctx.fill();
  });
  u.ctx.restore();
}

function describe(plot) {
  const lines = plot.columns.map(({ label, y }) => {
    const v = y.filter((value) => value != null);
    return `${label}: ${v.length} points${v.length ? `, from ${v[0].toPrecision(4)} to ${v[v.length - 1].toPrecision(4)}` : ""}`;
  });
  const doubts = (plot.events || []).filter((event) => event.doubt).length;
  if (doubts) lines.push(`${doubts} marked as doubts`);
  return lines.join("; ") || "nothing to show yet";
}

// ------------------------------------------------------------------------------------------------ files

const cleanName = (text) => text.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^-+|-+$/g, "") || "plot";

function saveFile(name, blob) {
  const address = URL.createObjectURL(blob);
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

const cell = (v) => { const text = v == null ? "" : String(v); return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text; };
const makeCsv = (rows) => rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";

function plotCsv(plot) {
  const tables = plot.columns.map(({ x, y, error }) => [x, y, ...(error ? [error] : [])]);
  const data = tables.length ? uPlot.join(tables) : [[]];
  const named = (label, what) => (what ? `${label}: ${what}` : label);
  const names = plot.columns.flatMap(({ label, error, errorName = "standard error" }) => [
    named(label, plot.quantity), ...(error ? [named(label, plot.quantity ? `${errorName} of ${plot.quantity}` : errorName)] : []),
  ]);
  return makeCsv([[plot.x, ...names], ...data[0].map((_, k) => data.map((column) => column[k]))]);
}

// a white sheet with a title, a picture and a legend; sizes in pixels of the style sheet, twice as many in the file
function makeSheet(title, width, height, columns, paint) {
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
  const wrapped = (text, font) => {
    context.font = font;
    const lines = [""];
    for (const word of text.split(/\s+/)) {
      const longer = `${lines[lines.length - 1]} ${word}`.trim();
      if (context.measureText(longer).width > width - 40 && lines[lines.length - 1]) lines.push(word);
      else lines[lines.length - 1] = longer;
    }
    return lines;
  };
  const heading = `600 15px ${FONT}`, small = `13px ${FONT}`;
  const titles = wrapped(title, heading), entries = [];
  context.font = small;
  let [x, row] = [20, 0];
  for (const { label, colour, style } of columns) {
    const wide = 40 + context.measureText(label).width;
    if (x + wide > width - 10 && x > 20) [x, row] = [20, row + 1];
    entries.push({ label, x, row, colour: style === "bound" ? PAPER.faint : colour, dash: style === "faint" || style === "bound", point: style === "points" });
    x += wide;
  }
  const above = 16 + 20 * titles.length, below = entries.length ? 14 + 20 * (row + 1) : 10;
  [canvas.width, canvas.height] = [2 * width, 2 * (above + height + below)];
  context.scale(2, 2);
  context.fillStyle = PAPER.ground; context.fillRect(0, 0, width, above + height + below);
  context.fillStyle = PAPER.ink; context.font = heading;
  titles.forEach((line, k) => context.fillText(line, 20, 22 + 20 * k));
  paint(context, above);
  context.font = small;
  for (const entry of entries) {
    const y = above + height + 16 + 20 * entry.row;
    context.strokeStyle = context.fillStyle = entry.colour; context.lineWidth = 2; context.setLineDash(entry.dash ? [5, 3] : []);
    context.beginPath();
    if (entry.point) { context.arc(entry.x + 11, y - 4, 3.5, 0, 7); context.fill(); }
    else { context.moveTo(entry.x, y - 4); context.lineTo(entry.x + 22, y - 4); context.stroke(); }
    context.fillStyle = PAPER.ink; context.fillText(entry.label, entry.x + 28, y);
  }
  return new Promise((done) => { canvas.toBlob(done, "image/png"); });
}

// uPlot draws as many pixels as the screen has per pixel of the style sheet: the rest is by larger letters and lines
async function plotPng(plot, size = { width: 900, height: 420 }) {
  const scale = 2 / devicePixelRatio, look = { ...PAPER, scale, toFile: true };
  const box = { plot }, drawn = new Promise((done) => { box.ready = done; });
  const sized = { width: Math.round(size.width * scale), height: Math.round(size.height * scale) };
  const made = new uPlot(makeOptions(plot, look, sized, box), makeData(plot), document.createElement("div"));
  await drawn;
  if (plot.shown) made.setScale("x", plot.shown);
  made.redraw(false);
  await new Promise((done) => { setTimeout(done, 0); });
  const blob = await makeSheet(plot.title, size.width, size.height, plot.columns, (context, top) => {
    context.drawImage(made.ctx.canvas, 0, top, size.width, size.height);
  });
  made.destroy();
  return blob;
}

// two buttons beside a caption; exporter() gives { name, png: () => Promise<Blob>, csv: () => text }, or null
function addExports(figure, what, exporter) {
  const buttons = Object.assign(document.createElement("span"), { className: "exports" });
  const add = (kind, save) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: kind });
    button.setAttribute("aria-label", `${what} as ${kind}`);
    button.onclick = async () => { const made = exporter(); if (made) saveFile(`${cleanName(made.name)}.${kind.toLowerCase()}`, await save(made)); };
    buttons.append(button);
  };
  add("PNG", (made) => made.png());
  add("CSV", (made) => new Blob([made.csv()], { type: "text/csv" }));
  const caption = Object.assign(document.createElement("div"), { className: "caption" });
  figure.prepend(caption);
  caption.append(figure.querySelector("figcaption"), buttons);
}
