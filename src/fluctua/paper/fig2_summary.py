"""Figure 2 in numbers, beside the paper's."""

from __future__ import annotations

from fluctua.paper.properties import Properties, at


def rows(found: Properties) -> list[tuple[str, str, str, str]]:
    """(panel, quantity, here, paper)."""
    table: list[tuple[str, str, str, str]] = []
    for name, one in zip("ab", found.convergence, strict=True):
        what = f"∂J/∂ω_{one.site}, σ_κ = {one.sigma_kappa:g}"
        table += [
            (name, f"{what}: {one.running.trajectories[-1]:,} trajectories", str(one.estimate), ""),
            (name, f"{what}: common-noise difference", str(one.difference), ""),
            (name, f"{what}: z, in standard errors of both", f"{one.z:+.2f}", "converges"),
        ]
    for (sigma, name), curve in found.variance.items():
        plain = "with baseline" if name == "binned" else "without"
        paper = "0" if name == "binned" and sigma == 0 else "−2"
        told = str(curve.law.exponent) if curve.law else "–"
        table.append(("c", f"exponent of Var(G), σ_κ = {sigma:g}, {plain}", told, paper))
    for sigma in found.bias:
        gain = at(found.variance[sigma, "none"], found.operating).value
        gain /= at(found.variance[sigma, "binned"], found.operating).value
        table.append(("c", f"variance, without over with, σ_κ = {sigma:g}, σ_W = {found.operating:g}", f"{gain:.3g}",
                      "several orders" if sigma == 0 else ""))  # fmt: skip
    for sigma, curve in found.bias.items():
        here = f"σ_κ = {sigma:g}"
        told = str(curve.law.exponent) if curve.law else "–"
        table.append(("d", f"exponent of ΔJ, {here}", told, "2"))
        value = str(at(curve, found.operating))
        table.append(("d", f"ΔJ at σ_W = {found.operating:g}, {here}", value, "0.01" if sigma == 0 else ""))
    for sigma, curve in found.spread.items():
        if curve.law is not None:
            table.append(("d", f"exponent of std of the return, σ_κ = {sigma:g}", str(curve.law.exponent), "1"))
    for sigma, where in found.crossover.items():
        table.append(("d", f"σ_W where noise overtakes modulation, σ_κ = {sigma:g}", str(where), "crossover"))
    return table


def summary(found: Properties) -> str:
    """As text, with what was measured on above the table."""
    told = found.told
    lines = [
        f"panel {name}: " + "; ".join(dict.fromkeys(told[name]["lattices"])) for name in "abcd"
    ]  # fmt: skip
    a, c, d = told["a"], told["c"], told["d"]
    lines += [
        f"{a['sites']} resonators, T = {a['horizon']:g}, Δt = {a['dt']:g}, seed {a['seed']}; bins sorted every "
        f"{a['every']} steps, in groups of {a['group']:,} (a, b) and {c['variance']:,} (c)",
        f"difference of {a['difference']:,} trajectories a leg; c {c['variance']:,} and d {d['bias']:,} (in pairs of "
        f"opposite noise) a point; exponents: σ_W ≤ {c['fit_to'] / 10:g} in c, ≤ {d['fit_to']:g} in d",
        "",
    ]
    body = [("", "", "here", "paper"), *rows(found)]
    width = [max(len(row[k]) for row in body) for k in range(4)]
    lines += [
        f"{p:<{width[0]}}  {what:<{width[1]}}  {here:>{width[2]}}  {paper}".rstrip() for p, what, here, paper in body
    ]
    return "\n".join(lines) + "\n"
