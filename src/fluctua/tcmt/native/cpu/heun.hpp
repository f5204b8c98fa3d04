// Heun's step. Its mean is m = ψ + Δt/2[μ(ψ, t) + μ(ψ̃, t + Δt)] with ψ̃ = ψ + Δtμ(ψ, t), and its score
//
//   U = ½[∂θμ(ψ, t)·η + ∂θμ(ψ̃, t + Δt)·ζ],     η = ζ + ΔtJ(ψ̃)ᵀζ
//
// is Euler's of two pairs of a state and a kick, (ψ, η/2) and (ψ̃, ζ/2). Drive and couplings of the second stage are
// those of the next step's first: `force` and `coupling` are set between the two.
#pragma once
#include "step.hpp"

namespace fluctua {
namespace FLUCTUA_ISA {

// The part of a reward that counts: by the trapezoid rule the first and the last one half.
template <class Real> double trapezoid(const Plan<Real>& plan, std::int64_t step) {
  return plan.heun && (step == 0 || step == plan.steps) ? 0.5 : 1.0;
}

// How far a step goes in its piece of the modulation, whose quadratics hold to the end of its last step.
template <class Real> Real tau_of_a_step(const Plan<Real>& plan) { return Real(2.0 / double(plan.modulation_steps)); }

// Drive and couplings at t_step.
template <class Real> void set_fields(const Plan<Real>& plan, const Space<Real>& s, std::int64_t step) {
  if (plan.drive_stride || step == 0) set_force(plan, step, s.force);
  if (!plan.harmonics) return;
  if (step % plan.modulation_steps == 0) refresh_modulation(plan, s, step / plan.modulation_steps);
  set_couplings(plan, s, place_in_piece(plan, step));
}

// ψ̃ of all sites, and in `next` the first part of the step: Δtμ/2 and the kick.
template <class Real, bool Modulated> void predict(const Plan<Real>& plan, const Space<Real>& s, const Real* zeta) {
  using S = Simd<Real>;
  using V = typename S::V;
  for (int n = 0; n < plan.sites; ++n)
    for (int u = 0; u < L; u += S::width) {
      const std::int64_t at = 2 * std::int64_t(n) * L + u;
      const V yr = load<V>(s.psi + at), yi = load<V>(s.psi + at + L);
      V hr = {}, hi = {}, dr, di;
      each_bond<Modulated>(plan, s, n, u, [&](V k, std::int64_t m) {
        hr += k * load<V>(s.psi + m);
        hi += k * load<V>(s.psi + m + L);
      });
      drift(plan, s.force, n, yr, yi, yr * yr + yi * yi, hr, hi, dr, di);
      store(s.ahead + at, yr + dr);
      store(s.ahead + at + L, yi + di);
      store(s.next + at, dr * Real(0.5) + load<V>(zeta + at) * plan.kick[n]);
      store(s.next + at + L, di * Real(0.5) + load<V>(zeta + at + L) * plan.kick[n]);
    }
}

// The rest of the step, and its scores. Bonds are scored at their upper site, when η of both ends is known.
template <class Real, bool Scored, bool Modulated>
void correct(const Plan<Real>& plan, const Space<Real>& s, const Real* zeta) {
  using S = Simd<Real>;
  using V = typename S::V;
  constexpr Real half = Real(0.5);
  const Plain<Real> scores;
  const std::int64_t sites = plan.sites;
  Real* const site_acc = s.acc;
  Real* const bond_acc = s.acc + 4 * sites * L;
  for (int n = 0; n < sites; ++n)
    for (int u = 0; u < L; u += S::width) {
      const std::int64_t at = 2 * std::int64_t(n) * L + u;
      const V yr = load<V>(s.psi + at), yi = load<V>(s.psi + at + L);
      const V ar = load<V>(s.ahead + at), ai = load<V>(s.ahead + at + L);
      V hr = {}, hi = {}, gr = {}, gi = {}, dr, di;
      each_bond<Modulated>(plan, s, n, u, [&](V k, std::int64_t m) {
        hr += k * load<V>(s.ahead + m);
        hi += k * load<V>(s.ahead + m + L);
        if (Scored) {
          gr += k * load<V>(zeta + m);
          gi += k * load<V>(zeta + m + L);
        }
      });
      const V power = ar * ar + ai * ai;
      drift(plan, s.force, n, ar, ai, power, hr, hi, dr, di);
      store(s.next + at, yr + (load<V>(s.next + at) + dr * half));
      store(s.next + at + L, yi + (load<V>(s.next + at + L) + di * half));
      if (!Scored) continue;
      const V zr = load<V>(zeta + at), zi = load<V>(zeta + at + L), w = load<V>(s.w + u);
      V er, ei;
      pull_back(plan, n, ar, ai, power, zr, zi, gr, gi, er, ei);
      store(s.eta + at, er);
      store(s.eta + at + L, ei);
      const V first = cross(er, ei, yr, yi) * half, second = cross(zr, zi, ar, ai) * half;
      scores.add(site_acc + 2 * n * L + u, w, first + second, V{});
      scores.add(site_acc + 2 * (sites + n) * L + u, w, (yr * yr + yi * yi) * first + power * second, V{});
      for (int e = plan.lower_start[n]; e < plan.lower_start[n + 1]; ++e) {
        const std::int64_t m = 2 * std::int64_t(plan.lower_site[e]) * L + u;
        const V now = cross(er, ei, load<V>(s.psi + m), load<V>(s.psi + m + L)) +
                      cross(load<V>(s.eta + m), load<V>(s.eta + m + L), yr, yi);
        const V then = cross(zr, zi, load<V>(s.ahead + m), load<V>(s.ahead + m + L)) +
                       cross(load<V>(zeta + m), load<V>(zeta + m + L), ar, ai);
        scores.add(bond_acc + 2 * std::int64_t(plan.lower_bond[e]) * L + u, w, (now + then) * half, V{});
      }
    }
}

template <class Real, bool Scored, bool Modulated>
void advance_by_heun(const Plan<Real>& plan, const Space<Real>& s, std::int64_t step) {
  const Real* zeta = s.zeta[step & 1];
  predict<Real, Modulated>(plan, s, zeta);
  set_fields(plan, s, step + 1);
  correct<Real, Scored, Modulated>(plan, s, zeta);
  if (!Scored || !plan.rates) return;
  const Plain<Real> scores;
  rates_of_drift<true>(plan, s, scores, s.psi, s.eta, step);
  rates_of_drift<true>(plan, s, scores, s.ahead, zeta, step + 1);
  rates_of_noise(plan, s, scores, zeta);
}

template <class Real, bool Scored> void advance_by_heun(const Plan<Real>& plan, Space<Real>& s, std::int64_t step) {
  plan.harmonics ? advance_by_heun<Real, Scored, true>(plan, s, step)
                 : advance_by_heun<Real, Scored, false>(plan, s, step);
  swap_buffers(s);
}

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
