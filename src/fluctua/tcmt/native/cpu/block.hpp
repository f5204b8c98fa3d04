// Preparation of a block of trajectories, for all kernels: memory, noise, modulation, drive. Included
// once per instruction set, in whose namespace everything lives; includes no header with inline functions that
// another file could share.
#pragma once
#include "normal.hpp"
#include "plan.hpp"

namespace fluctua {
namespace FLUCTUA_ISA {

constexpr int L = kLanes;

template <class Real> struct Space {
  Real *psi, *next, *zeta[2], *acc, *w, *wave, *poly, *coupling, *force;
  Real *ahead, *eta;  // of Heun's step: ψ̃ and η
  SiteWords* site;
  int sums;  // per parameter
};

template <class Real> Real* carve(Real*& p, std::int64_t rows) {
  Real* here = p;
  p += rows * L;
  return here;
}

template <class Real> std::int64_t lay_out(const Plan<Real>& plan, Real* base, Space<Real>& s, int sums) {
  const std::int64_t n = plan.sites, b = plan.bonds;
  Real* p = base;
  s.sums = sums;
  s.psi = carve(p, 2 * n);
  s.next = carve(p, 2 * n);
  s.zeta[0] = carve(p, 2 * n);
  s.zeta[1] = carve(p, 2 * n);
  s.acc = carve(p, sums * parameters(plan));
  s.w = carve(p, 1);
  s.wave = carve(p, plan.harmonics ? 2 * plan.harmonics * b : 0);
  s.poly = carve(p, plan.harmonics ? 3 * b : 0);
  s.coupling = carve(p, plan.harmonics ? b : 0);
  s.ahead = carve(p, plan.heun ? 2 * n : 0);
  s.eta = carve(p, plan.heun ? 2 * n : 0);
  s.force = p;  // (sites, 2), the same for all lanes
  p += (2 * n + L - 1) / L * L;
  s.site = reinterpret_cast<SiteWords*>(p);
  return (p - base) + (n * std::int64_t(sizeof(SiteWords)) + sizeof(Real) - 1) / sizeof(Real);
}

FLUCTUA_INLINE std::uint32_t stream_of(std::uint32_t trajectory, bool antithetic) {
  return antithetic ? trajectory & ~1u : trajectory;  // a pair shares the words of its even member
}

// The per-lane parts of the generator for one vector's worth of trajectories.
template <class Real> struct Lane {
  LaneWords half[Simd<Real>::halves];
  typename Simd<Real>::V sign;
};

template <class Real> Lane<Real> lane_of(const Plan<Real>& plan, std::uint32_t first) {
  using S = Simd<Real>;
  Lane<Real> lane;
  for (int h = 0; h < S::halves; ++h) {
    U64 id;
    for (int i = 0; i < kBytes / 8; ++i) id[i] = stream_of(first + std::uint32_t(S::halves * i + h), plan.antithetic);
    lane.half[h] = lane_words(id);
  }
  for (int i = 0; i < S::width; ++i) lane.sign[i] = plan.antithetic && ((first + i) & 1u) ? Real(-1) : Real(1);
  return lane;
}

FLUCTUA_INLINE void draw(const SiteWords& site, const Lane<float>& lane, const PairWords* pair, const Keys& keys,
                         U32 w[4]) {
  U64 even[4], odd[4];
  words(site, lane.half[0], pair[0], keys, even);
  words(site, lane.half[1], pair[1], keys, odd);
  collect(even, odd, w);
}
FLUCTUA_INLINE void draw(const SiteWords& site, const Lane<double>& lane, const PairWords* pair, const Keys& keys,
                         U64 w[4]) {
  U64 all[4];
  words(site, lane.half[0], pair[0], keys, all);
  collect(all, w);
}

// ζ of all sites for the two steps of a pair.
template <class Real>
void noise(const Plan<Real>& plan, const Space<Real>& s, const Lane<Real>* lanes, const Keys& keys,
           std::uint32_t pair) {
  using S = Simd<Real>;
  using V = typename S::V;
  for (int u = 0; u < L / S::width; ++u) {
    const Lane<Real> lane = lanes[u];
    PairWords pw[S::halves];
    for (int h = 0; h < S::halves; ++h) pw[h] = pair_words(lane.half[h], pair, keys);
    Real* even = s.zeta[0] + u * S::width;
    Real* odd = s.zeta[1] + u * S::width;
    for (int n = 0; n < plan.sites; ++n) {
      typename S::U w[4];
      draw(s.site[n], lane, pw, keys, w);
      const V scale = lane.sign * plan.scale[n];
      V re, im;
      box_muller(w[0], w[1], scale, re, im);
      store(even + (2 * n) * L, re);
      store(even + (2 * n + 1) * L, im);
      box_muller(w[2], w[3], scale, re, im);
      store(odd + (2 * n) * L, re);
      store(odd + (2 * n + 1) * L, im);
    }
  }
}

// ã cos φ and ã sin φ, times σ_κΔt, of every bond and harmonic; the law of the draw is that of the noise, with
// site 2³¹ + b·N_dyn + k and pair 2³² − 1, which no resonator and no step reaches.
template <class Real>
void draw_modulation(const Plan<Real>& plan, const Space<Real>& s, const Lane<Real>* lanes, const Keys& keys) {
  using S = Simd<Real>;
  using V = typename S::V;
  const int h = plan.harmonics;
  for (int u = 0; u < L / S::width; ++u) {
    PairWords pw[S::halves];
    for (int i = 0; i < S::halves; ++i) pw[i] = pair_words(lanes[u].half[i], 0xFFFFFFFFu, keys);
    for (int b = 0; b < plan.bonds; ++b) {
      Real* wave = s.wave + std::int64_t(b) * h * 2 * L + u * S::width;
      V norm = {};
      for (int k = 0; k < h; ++k) {
        typename S::U w[4];
        draw(site_words(0x80000000u + std::uint32_t(plan.bond_given[b]) * h + k, keys), lanes[u], pw, keys, w);
        V a, unused, c, sine;
        box_muller(w[0], w[1], V{} + Real(1), a, unused);
        turn(w[2], c, sine);
        const Real half = Real(7.314590396335798e-10);  // φ = 2π(w + ½)2⁻³²: turned on by half a word
        norm += a * a;
        store(wave + 2 * k * L, a * (c - sine * half));
        store(wave + (2 * k + 1) * L, a * (sine + c * half));
      }
      const V factor = Real(plan.modulation_scale) / root(norm);
      for (int k = 0; k < 2 * h; ++k) store(wave + k * L, load<V>(wave + k * L) * factor);
    }
  }
}

template <class Real> void refresh_modulation(const Plan<Real>& plan, const Space<Real>& s, std::int64_t piece) {
  using S = Simd<Real>;
  using V = typename S::V;
  const int h2 = 2 * plan.harmonics;
  const Real* m = plan.modulation + piece * 3 * h2;
  for (int b = 0; b < plan.bonds; ++b)
    for (int u = 0; u < L; u += S::width) {
      const Real* wave = s.wave + std::int64_t(b) * h2 * L + u;
      V c0 = {}, c1 = {}, c2 = {};
      for (int k = 0; k < h2; ++k) {
        const V x = load<V>(wave + k * L);
        c0 += x * m[k];
        c1 += x * m[h2 + k];
        c2 += x * m[2 * h2 + k];
      }
      Real* out = s.poly + std::int64_t(b) * 3 * L + u;
      store(out, c0);
      store(out + L, c1);
      store(out + 2 * L, c2);
    }
}

template <class Real> void set_force(const Plan<Real>& plan, std::int64_t step, Real* force) {
  const Real* f = plan.drive + step * plan.drive_stride;
  for (int i = 0; i < 2 * plan.sites; ++i) force[i] = 0;
  for (int d = 0; d < 2 * plan.drives; ++d) force[2 * plan.drive_site[d / 2] + d % 2] += f[d];
}

// The generator's constants for a block's lanes.
template <class Real> struct Source {
  Source(const Plan<Real>& plan, std::uint32_t first) : keys(schedule(plan.seed)) {
    for (int u = 0; u < L / Simd<Real>::width; ++u)
      lanes[u] = lane_of(plan, first + std::uint32_t(u * Simd<Real>::width));
  }
  Keys keys;
  Lane<Real> lanes[L / Simd<Real>::width];
};

template <class Real> void start(const Plan<Real>& plan, const Space<Real>& s, const Source<Real>& source) {
  const std::int64_t sites = plan.sites;
  for (int n = 0; n < sites; ++n) s.site[n] = site_words(std::uint32_t(n), source.keys);
  for (std::int64_t i = 0; i < 2 * sites; ++i)
    for (int l = 0; l < L; ++l) s.psi[i * L + l] = plan.start[i];
  for (std::int64_t i = 0; i < 2 * sites * L; ++i) s.zeta[0][i] = s.zeta[1][i] = 0;
  for (std::int64_t i = 0; i < s.sums * parameters(plan) * L; ++i) s.acc[i] = 0;
  if (plan.harmonics) draw_modulation(plan, s, source.lanes, source.keys);
}

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
