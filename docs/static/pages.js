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
addEventListener("load", () => window.MathJax?.startup?.promise.then(markWideEquations));
addEventListener("resize", markWideEquations);
