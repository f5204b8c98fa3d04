// The resonators' step and its scores, for trajectories and for the twin's path alike, with the drift μ of drift.hpp:
//
//   ψ' = ψ + Δtμ(ψ) + 2Qζ,     ζ = r/(2Q) = √Δt z/a
//   U_ω = ζ_re ψ_im − ζ_im ψ_re,  U_χ = |ψ|²U_ω,  U_κ = (ζ_n × ψ_m) + (ζ_m × ψ_n)
#pragma once
#include "drift.hpp"

namespace fluctua {
namespace FLUCTUA_ISA {

// Row i of a state: a vector of lanes, or one number for all of them.
template <bool Wide, class Real> FLUCTUA_INLINE typename Simd<Real>::V row(const Real* p, std::int64_t i, int u) {
  using V = typename Simd<Real>::V;
  return Wide ? load<V>(p + i * L + u) : V{} + p[i];
}

template <class V> FLUCTUA_INLINE V cross(V ar, V ai, V br, V bi) { return ar * bi - ai * br; }

// g of a state, times Δt.
template <bool Wide, class Real> void powers(const Plan<Real>& plan, const Real* x, std::int64_t step, double* g) {
  for (int l = 0; l < L; ++l) g[l] = 0;
  const Real* in = plan.incoming + step * plan.incoming_stride;
  for (int p = 0; p < plan.ports; ++p) {
    const std::int64_t at = 2 * plan.port_site[p];
    for (int l = 0; l < L; ++l) {
      const Real re = Wide ? x[at * L + l] : x[at], im = Wide ? x[(at + 1) * L + l] : x[at + 1];
      const Real a = plan.gain[p] * re - in[2 * p], b = plan.gain[p] * im - in[2 * p + 1];
      g[l] += plan.weight[p] * (a * a + b * b);
    }
  }
}

// Where scores go: ΣwU and ΣU of a parameter.
template <class Real> struct Plain {
  using V = typename Simd<Real>::V;
  static constexpr int sums = 2;
  FLUCTUA_INLINE V q(std::int64_t, int) const { return V{}; }
  FLUCTUA_INLINE void add(Real* acc, V w, V u, V) const {
    store(acc, load<V>(acc) + w * u);
    store(acc + L, load<V>(acc + L) + u);
  }
};

// And, with a twin, the scores with q for ζ.
template <class Real, bool Wide> struct Twinned {
  using V = typename Simd<Real>::V;
  static constexpr int sums = 3;
  const Real* adjoint;
  FLUCTUA_INLINE V q(std::int64_t i, int u) const { return row<Wide>(adjoint, i, u); }
  FLUCTUA_INLINE void add(Real* acc, V w, V u, V direct) const {
    store(acc, load<V>(acc) + w * u);
    store(acc + L, load<V>(acc + L) + u);
    store(acc + 2 * L, load<V>(acc + 2 * L) + direct);
  }
};

// Where the rates' sums begin: damping, diffusion (a site each), drives, gains.
template <class Real, class Scores> Real* rate_sums(const Plan<Real>& plan, const Space<Real>& s, const Scores&) {
  return s.acc + Scores::sums * (2 * std::int64_t(plan.sites) + plan.bonds) * L;
}

// Scores of Γ_n at fixed Q, −ζ·ψ, and of each drive's scale, ζ·f; of half of ζ and q with `Halved`.
template <bool Halved, class Real, class Scores>
void rates_of_drift(const Plan<Real>& plan, const Space<Real>& s, const Scores& scores, const Real* psi,
                    const Real* zeta, std::int64_t step) {
  using S = Simd<Real>;
  using V = typename S::V;
  constexpr int sums = Scores::sums;
  constexpr Real part = Halved ? Real(0.5) : Real(1);
  const std::int64_t sites = plan.sites;
  Real* acc = rate_sums(plan, s, scores);
  for (int u = 0; u < L; u += S::width) {
    const V w = load<V>(s.w + u);
    for (int n = 0; n < sites; ++n) {
      const V yr = load<V>(psi + 2 * n * L + u), yi = load<V>(psi + (2 * n + 1) * L + u);
      const V zr = part * load<V>(zeta + 2 * n * L + u), zi = part * load<V>(zeta + (2 * n + 1) * L + u);
      const V qr = part * scores.q(2 * n, u), qi = part * scores.q(2 * n + 1, u);
      scores.add(acc + sums * n * L + u, w, -(zr * yr + zi * yi), -(qr * yr + qi * yi));
    }
    const Real* f = plan.drive + step * plan.drive_stride;
    for (int d = 0; d < plan.drives; ++d) {
      const std::int64_t at = 2 * plan.drive_site[d];
      const Real re = f[2 * d] * plan.inverse_dt, im = f[2 * d + 1] * plan.inverse_dt;
      const V u_zeta = part * load<V>(zeta + at * L + u) * re + part * load<V>(zeta + (at + 1) * L + u) * im;
      scores.add(acc + sums * (2 * sites + d) * L + u, w, u_zeta,
                 part * scores.q(at, u) * re + part * scores.q(at + 1, u) * im);
    }
  }
}

// Scores of ln Q_n, |z|²/2 − 1, where a twin's V, linear in the kick, has no part of its own.
template <class Real, class Scores>
void rates_of_noise(const Plan<Real>& plan, const Space<Real>& s, const Scores& scores, const Real* zeta) {
  using S = Simd<Real>;
  using V = typename S::V;
  Real* acc = rate_sums(plan, s, scores) + Scores::sums * std::int64_t(plan.sites) * L;
  for (int u = 0; u < L; u += S::width) {
    const V w = load<V>(s.w + u);
    for (int n = 0; n < plan.sites; ++n) {
      const V zr = load<V>(zeta + 2 * n * L + u), zi = load<V>(zeta + (2 * n + 1) * L + u);
      const Real inverse = plan.scale[n] > 0 ? 1 / (plan.scale[n] * plan.scale[n]) : Real(0);
      scores.add(acc + Scores::sums * n * L + u, w, (zr * zr + zi * zi) * (inverse / 2) - 1, V{});
    }
  }
}

// ∂g/∂gain, which is no score: it is explicit in G. part: of the reward that counts.
template <class Real, class Scores>
void explicit_gains(const Plan<Real>& plan, const Space<Real>& s, const Scores& scores, std::int64_t step,
                    Real part = 1) {
  using S = Simd<Real>;
  using V = typename S::V;
  Real* acc = rate_sums(plan, s, scores) + Scores::sums * (2 * std::int64_t(plan.sites) + plan.drives) * L;
  for (int u = 0; u < L; u += S::width) {
    const Real* in = plan.incoming + step * plan.incoming_stride;
    for (int p = 0; p < plan.ports; ++p) {
      const Real* y = s.psi + 2 * plan.port_site[p] * L + u;
      const V re = load<V>(y), im = load<V>(y + L);
      const V out_re = re * plan.gain[p] - in[2 * p], out_im = im * plan.gain[p] - in[2 * p + 1];
      Real* a = acc + Scores::sums * p * L + u;
      store(a, load<V>(a) + (out_re * re + out_im * im) * (2 * part * plan.weight[p]));
    }
  }
}

template <class Real, class Scores>
void rates(const Plan<Real>& plan, const Space<Real>& s, const Scores& scores, const Real* zeta, std::int64_t step) {
  rates_of_drift<false>(plan, s, scores, s.psi, zeta, step);
  rates_of_noise(plan, s, scores, zeta);
  explicit_gains(plan, s, scores, step);
}

// Where a step is in its piece of the modulation, in (−1, 1).
template <class Real> Real place_in_piece(const Plan<Real>& plan, std::int64_t step) {
  const std::int64_t m = plan.modulation_steps, piece = step / m;
  return Real((2.0 * double(step - piece * m) + 1.0 - double(m)) / double(m));
}

template <class Real> void swap_buffers(Space<Real>& s) {
  Real* swap = s.psi;
  s.psi = s.next;
  s.next = swap;
}

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
