// A browser lets no script read other files of a disk: results of a search there have no extracts.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// Equations within a sentence do not break: those wider than the text scroll by themselves.
function markWideEquations() {
  for (const equation of document.querySelectorAll("span.math")) {
    equation.classList.remove("wide");
    const text = equation.closest("p, li, td, dd") ?? document.body;
    equation.classList.toggle("wide", equation.offsetWidth > text.clientWidth);
  }
}

// A browser may break a line between an equation and the comma or bracket beside it.
function joinPunctuation() {
  for (const equation of document.querySelectorAll("span.math")) {
    const before = equation.previousSibling?.data?.match(/[([]+$/)?.[0] ?? "";
    const after = equation.nextSibling?.data?.match(/^[,.;:)\]]+/)?.[0] ?? "";
    if (!before && !after) continue;
    const group = document.createElement("span");
    group.className = "joined";
    if (before) equation.previousSibling.data = equation.previousSibling.data.slice(0, -before.length);
    if (after) equation.nextSibling.data = equation.nextSibling.data.slice(after.length);
    equation.replaceWith(group);
    group.append(before, equation, after);
  }
}
addEventListener("DOMContentLoaded", joinPunctuation);
addEventListener("load", () => window.MathJax?.startup?.promise.then(markWideEquations));
addEventListener("resize", markWideEquations);
