// The drift of a resonator lattice and its derivative, site by site, for all kernels of the CPU:
//
//   μ = −i(ω + χ|ψ|²)ψ − iΣ_m(κ + δκ)ψ_m − Γψ + f
//   Jᵀq = i(ω + 2χ|ψ|²)q + iΣ_m(κ + δκ)q_m − Γq − iχψ²q*,     J = ∂μ/∂ψ
//
// In JAX it is `fluctua.tcmt.drift`, on the device cuda/drift.cuh.
#pragma once
#include "block.hpp"

namespace fluctua {
namespace FLUCTUA_ISA {

struct Nothing {
  template <class... Any> FLUCTUA_INLINE void operator()(Any...) const {}
};

// Σ_m (κ + δκ)Δt ψ_m at site n. Sites are visited in ascending order: the lower site of a bond leaves κ + δκ for the
// upper one. upper(b, place of ψ_m, ψ_m) is called for the upper neighbours.
template <bool Modulated, class Real, class Upper = Nothing>
FLUCTUA_INLINE void couple(const Plan<Real>& plan, const Space<Real>& s, const Real* psi, int n, int u, Real tau,
                           typename Simd<Real>::V& hr, typename Simd<Real>::V& hi, Upper upper = {}) {
  using V = typename Simd<Real>::V;
  hr = hi = V{};
  for (int e = plan.lower_start[n]; e < plan.lower_start[n + 1]; ++e) {
    const Real* m = psi + 2 * plan.lower_site[e] * L + u;
    const int b = plan.lower_bond[e];
    const V k = Modulated ? load<V>(s.coupling + b * L + u) : V{} + plan.kappa[b];
    hr += k * load<V>(m);
    hi += k * load<V>(m + L);
  }
  for (int b = plan.upper_start[n]; b < plan.upper_start[n + 1]; ++b) {
    const std::int64_t at = 2 * plan.upper_site[b] * L + u;
    const V mr = load<V>(psi + at), mi = load<V>(psi + at + L);
    V k = V{} + plan.kappa[b];
    if (Modulated) {
      const Real* c = s.poly + 3 * b * L + u;
      k += load<V>(c) + tau * (load<V>(c + L) + tau * load<V>(c + 2 * L));
      store(s.coupling + b * L + u, k);
    }
    hr += k * mr;
    hi += k * mi;
    upper(b, at, mr, mi);
  }
}

// (κ + δκ)Δt of every bond.
template <class Real> void set_couplings(const Plan<Real>& plan, const Space<Real>& s, Real tau) {
  using S = Simd<Real>;
  using V = typename S::V;
  for (int b = 0; b < plan.bonds; ++b)
    for (int u = 0; u < L; u += S::width) {
      const Real* c = s.poly + 3 * std::int64_t(b) * L + u;
      const V delta = load<V>(c) + tau * (load<V>(c + L) + tau * load<V>(c + 2 * L));
      store(s.coupling + std::int64_t(b) * L + u, delta + plan.kappa[b]);
    }
}

// each(κ + δκ, place of ψ_m) of site n's bonds, times Δt.
template <bool Modulated, class Real, class Each>
FLUCTUA_INLINE void each_bond(const Plan<Real>& plan, const Space<Real>& s, int n, int u, Each each) {
  using V = typename Simd<Real>::V;
  const auto strength = [&](int b) {
    return Modulated ? load<V>(s.coupling + std::int64_t(b) * L + u) : V{} + plan.kappa[b];
  };
  for (int e = plan.lower_start[n]; e < plan.lower_start[n + 1]; ++e)
    each(strength(plan.lower_bond[e]), 2 * std::int64_t(plan.lower_site[e]) * L + u);
  for (int b = plan.upper_start[n]; b < plan.upper_start[n + 1]; ++b)
    each(strength(b), 2 * std::int64_t(plan.upper_site[b]) * L + u);
}

// Δtμ of site n. h: Σ_m(κ + δκ)Δt ψ_m. It is added to ψ as ψ + (small), never as (1 − ΓΔt)ψ: the rounding of 1 − ΓΔt
// would act as an additional loss. The drive is part of (small): added to ψ alone, a constant would be rounded the
// same way at every step.
template <class Real, class V>
FLUCTUA_INLINE void drift(const Plan<Real>& plan, const Real* force, int n, V yr, V yi, V power, V hr, V hi, V& dr,
                          V& di) {
  const V omega = power * plan.chi[n] + plan.omega[n];
  dr = force[2 * n] + (omega * yi + hi - yr * plan.damping[n]);
  di = force[2 * n + 1] - (omega * yr + hr + yi * plan.damping[n]);
}

// q + ΔtJᵀq of site n, at the state y. h: Σ_m(κ + δκ)Δt q_m.
template <class Real, class V>
FLUCTUA_INLINE void pull_back(const Plan<Real>& plan, int n, V yr, V yi, V power, V qr, V qi, V hr, V hi, V& to_r,
                              V& to_i) {
  const V omega = power * (2 * plan.chi[n]) + plan.omega[n];
  const V cr = (yr * yr - yi * yi) * plan.chi[n], ci = yr * yi * (2 * plan.chi[n]);  // χψ²
  to_r = qr + ((ci * qr - cr * qi) - (omega * qi + hi + qr * plan.damping[n]));
  to_i = qi + ((omega * qr + hr - qi * plan.damping[n]) - (cr * qr + ci * qi));
}

// The same two where sites lie along the vectors and nothing is scaled by Δt: μ, and Jᵀq. h: Σ_mκψ_m, Σ_mκq_m.
template <class Real>
FLUCTUA_INLINE void drift_term(Real omega, Real chi, Real damping, Real re, Real im, Real hr, Real hi, Real force_re,
                               Real force_im, Real& to_re, Real& to_im) {
  const Real frequency = omega + chi * (re * re + im * im);
  to_re = frequency * im + hi - damping * re + force_re;
  to_im = force_im - (frequency * re + hr + damping * im);
}
template <class Real>
FLUCTUA_INLINE void pull_term(Real omega, Real chi, Real damping, Real re, Real im, Real qr, Real qi, Real hr, Real hi,
                              Real& to_re, Real& to_im) {
  const Real frequency = omega + (chi + chi) * (re * re + im * im);
  const Real cr = chi * (re * re - im * im), ci = (chi + chi) * re * im;  // χψ²
  to_re = (ci * qr - cr * qi) - (frequency * qi + hi + damping * qr);
  to_im = (frequency * qr + hr - damping * qi) - (cr * qr + ci * qi);
}

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
