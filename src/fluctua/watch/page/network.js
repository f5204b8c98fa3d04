"use strict";
// The network of a run as SVG: disk radius |ω|, disk colour χ, bond width and colour |κ|, as in the figures of the paper.

const SVG = "http://www.w3.org/2000/svg";
const KERR = [[5, 48, 97], [67, 147, 195], [247, 247, 247], [214, 96, 77], [103, 0, 31]];
const COUPLING = [[204, 178, 221], [140, 140, 140], [0, 90, 40]];

function mixed(colours, u) {
  const place = Math.min(Math.max(u, 0), 1) * (colours.length - 1);
  const k = Math.min(Math.floor(place), colours.length - 2);
  return `rgb(${colours[k].map((c, i) => Math.round(c + (colours[k + 1][i] - c) * (place - k))).join(",")})`;
}

function element(name, attributes, parent) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return parent.appendChild(node);
}

function polygon(corners, x, y, size, inner) {
  const points = [];
  for (let k = 0; k < corners * (inner ? 2 : 1); k++) {
    const angle = (Math.PI * k) / (inner ? corners : corners / 2) - Math.PI / 2;
    const radius = inner && k % 2 ? size * inner : size;
    points.push(`${x + radius * Math.cos(angle)},${y + radius * Math.sin(angle)}`);
  }
  return points.join(" ");
}

// Built once a network; `draw` only changes attributes, so that a slider moves smoothly.
function Network(svg, network) {
  svg.replaceChildren();
  const xs = network.positions.map((p) => p[0]), ys = network.positions.map((p) => p[1]);
  const low = [Math.min(...xs), Math.min(...ys)], high = [Math.max(...xs), Math.max(...ys)];
  svg.setAttribute("viewBox", `${low[0] - 1.3} ${low[1] - 1.3} ${high[0] - low[0] + 2.6} ${high[1] - low[1] + 2.6}`);
  const at = (site) => [xs[site], high[1] + low[1] - ys[site]];
  const centre = [(low[0] + high[0]) / 2, (low[1] + high[1]) / 2];
  const bonds = network.bonds.map(([a, b]) => {
    const [p, q] = [at(a), at(b)];
    return element("line", { x1: p[0], y1: p[1], x2: q[0], y2: q[1], "stroke-linecap": "round" }, svg);
  });
  network.lead_sites.forEach((site, k) => {
    const [x, y] = at(site), away = Math.hypot(x - centre[0], y - centre[1]) || 1;
    const [mx, my] = [x + (0.85 * (x - centre[0])) / away, y + (0.85 * (y - centre[1])) / away];
    element("line", { x1: x, y1: y, x2: mx, y2: my, stroke: "currentColor", "stroke-width": 0.04 }, svg);
    const mark = k === 0 ? polygon(3, mx, my, 0.3) : polygon(5, mx, my, 0.34, 0.45);
    const lead = element("polygon", { points: mark, fill: k === 0 ? "#009e73" : "#0072b2" }, svg);
    element("title", {}, lead).textContent = k === 0 ? "input" : "output";
  });
  const disks = network.positions.map((_, site) => {
    const [x, y] = at(site);
    const disk = element("circle", { cx: x, cy: y, stroke: "currentColor", "stroke-width": 0.03 }, svg);
    element("title", {}, disk);
    return disk;
  });
  const titles = bonds.map((bond) => element("title", {}, bond));
  const largest = (values) => values.reduce((most, v) => Math.max(most, Math.abs(v)), 0);

  // theta: {omega, kappa, chi}; scale: largest |ω|, range of |κ|, largest |χ|; change: whether these are differences
  this.draw = (theta, scale, change) => {
    bonds.forEach((bond, k) => {
      const v = theta.kappa[k];
      const u = change ? 0.5 + v / (2 * scale.kappaChange) : curved(Math.abs(v), scale.kappa);
      bond.setAttribute("stroke", change ? mixed(KERR, u) : mixed(COUPLING, u));
      bond.setAttribute("stroke-width", change ? 0.04 + 0.22 * Math.abs(2 * u - 1) : 0.03 + 0.25 * u);
      titles[k].textContent = `bond ${network.bonds[k].join("–")}: ${change ? "Δκ" : "κ"} = ${v.toPrecision(3)}`;
    });
    disks.forEach((disk, site) => {
      const w = theta.omega[site], c = theta.chi[site];
      disk.setAttribute("r", 0.12 + 0.26 * Math.min(1, Math.abs(w) / (scale.omega || 1)));
      disk.setAttribute("fill", mixed(KERR, 0.5 + c / (2 * (scale.chi || 1))));
      const d = change ? "Δ" : "";
      disk.firstChild.textContent = `resonator ${site}: ${d}ω = ${w.toPrecision(3)}, ${d}χ = ${c.toPrecision(3)}`;
    });
    return { omega: largest(theta.omega), kappa: largest(theta.kappa), chi: largest(theta.chi) };
  };
  // square-root scales on both sides of κ = 1, so that a few strong bonds do not hide the weak ones
  function curved(v, [weakest, strongest]) {
    if (v < 1) return 0.5 - 0.5 * Math.sqrt((1 - v) / Math.max(1 - weakest, 0.01));
    return 0.5 + 0.5 * Math.sqrt((v - 1) / Math.max(strongest - 1, 0.01));
  }
}
