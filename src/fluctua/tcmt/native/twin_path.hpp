// The twin's noise-free path and its adjoint, of one block, step by step.
#pragma once
#include "block.hpp"
#include "twin.hpp"

namespace fluctua {
namespace FLUCTUA_ISA {

// Row i of a state: a vector of lanes, or one number for all of them.
template <bool Wide, class Real> FLUCTUA_INLINE typename Simd<Real>::V row(const Real* p, std::int64_t i, int u) {
  using V = typename Simd<Real>::V;
  return Wide ? load<V>(p + i * L + u) : V{} + p[i];
}

// Σ_m (κ + δκ)Δt ψ_m at site n. Sites are visited in ascending order: the lower site of a bond leaves κ + δκ for the
// upper one.
template <bool Modulated, class Real>
FLUCTUA_INLINE void couple(const Plan<Real>& plan, const Space<Real>& s, const Real* psi, int n, int u, Real tau,
                           typename Simd<Real>::V& hr, typename Simd<Real>::V& hi) {
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
    const Real* m = psi + 2 * plan.upper_site[b] * L + u;
    V k = V{} + plan.kappa[b];
    if (Modulated) {
      const Real* c = s.poly + 3 * b * L + u;
      k += load<V>(c) + tau * (load<V>(c + L) + tau * load<V>(c + 2 * L));
      store(s.coupling + b * L + u, k);
    }
    hr += k * load<V>(m);
    hi += k * load<V>(m + L);
  }
}

// x̄_{n+1} from x̄_n.
template <bool Modulated, class Real>
void follow(const Plan<Real>& plan, const Space<Real>& s, const Real* from, Real* to, const Real* force, Real tau) {
  using S = Simd<Real>;
  using V = typename S::V;
  for (int n = 0; n < plan.sites; ++n)
    for (int u = 0; u < L; u += S::width) {
      V hr, hi;
      couple<Modulated>(plan, s, from, n, u, tau, hr, hi);
      const V yr = load<V>(from + 2 * n * L + u), yi = load<V>(from + (2 * n + 1) * L + u);
      const V omega = (yr * yr + yi * yi) * plan.chi[n] + plan.omega[n];
      store(to + 2 * n * L + u, yr + (force[2 * n] + (omega * yi + hi - yr * plan.damping[n])));
      store(to + (2 * n + 1) * L + u, yi + (force[2 * n + 1] - (omega * yr + hr + yi * plan.damping[n])));
    }
}

// q_n from q_{n+1}, at x̄_n:
//   q + Δt[iωq + iΣκq_m − Γq + 2iχ|x̄|²q − iχx̄²q*] + ∇g̃Δt
template <bool Modulated, class Real>
void pull_back(const Plan<Real>& plan, const Space<Real>& s, const Real* x, const Real* from, Real* to, Real tau,
               std::int64_t step) {
  using S = Simd<Real>;
  using V = typename S::V;
  for (int n = 0; n < plan.sites; ++n)
    for (int u = 0; u < L; u += S::width) {
      V hr, hi;
      couple<Modulated>(plan, s, from, n, u, tau, hr, hi);
      const V qr = load<V>(from + 2 * n * L + u), qi = load<V>(from + (2 * n + 1) * L + u);
      const V xr = load<V>(x + 2 * n * L + u), xi = load<V>(x + (2 * n + 1) * L + u);
      const V omega = (xr * xr + xi * xi) * (2 * plan.chi[n]) + plan.omega[n];
      const V cr = (xr * xr - xi * xi) * plan.chi[n], ci = xr * xi * (2 * plan.chi[n]);  // χx̄²
      store(to + 2 * n * L + u, qr + ((ci * qr - cr * qi) - (omega * qi + hi + qr * plan.damping[n])));
      store(to + (2 * n + 1) * L + u, qi + ((omega * qr + hr - qi * plan.damping[n]) - (cr * qr + ci * qi)));
    }
  const Real* in = plan.incoming + step * plan.incoming_stride;
  for (int p = 0; p < plan.ports; ++p) {
    const std::int64_t at = 2 * plan.port_site[p] * L;
    const Real factor = 2 * plan.weight[p] * plan.gain[p];
    for (int l = 0; l < L; ++l) {
      to[at + l] += factor * (plan.gain[p] * x[at + l] - in[2 * p]);
      to[at + L + l] += factor * (plan.gain[p] * x[at + L + l] - in[2 * p + 1]);
    }
  }
}

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

// A block's memory for the twin, behind that of the trajectories.
template <class Real> struct Trail {
  Real *path, *adjoint;            // of one segment, both ends included (segment + 1, 2·sites, lanes)
  Real *kept_path, *kept_adjoint;  // at the ends of all segments (segments + 1, 2·sites, lanes)
  Real *y, *z;                     // B†d and CB†d (2·rank, lanes)
  Real* force;                     // (sites, 2)
  std::int64_t piece;              // of the modulation, that s.poly is of
  bool finite[L];
};

template <class Real>
std::int64_t lay_out(const Plan<Real>& plan, const Twin<Real>& twin, bool keep, Real* base, Trail<Real>& t) {
  const std::int64_t n = 2 * std::int64_t(plan.sites), all = keep ? segments(twin) + 1 : 0;
  const std::int64_t here = twin.full && !keep ? 0 : twin.segment + 1;
  Real* p = base;
  t.path = carve(p, n * here);
  t.adjoint = carve(p, n * here);
  t.kept_path = carve(p, n * all);
  t.kept_adjoint = carve(p, n * all);
  t.y = carve(p, 2 * twin.rank);
  t.z = carve(p, 2 * twin.rank);
  t.force = p;
  p += (n + L - 1) / L * L;
  t.piece = -1;
  return p - base;
}

// δκ of the piece that `step` is in; the place in it.
template <class Real> Real modulate(const Plan<Real>& plan, const Space<Real>& s, Trail<Real>& t, std::int64_t step) {
  const std::int64_t m = plan.modulation_steps, piece = step / m;
  if (piece != t.piece) refresh_modulation(plan, s, piece);
  t.piece = piece;
  return Real((2.0 * double(step - piece * m) + 1.0 - double(m)) / double(m));
}

// The path of steps begin … end − 1, from t.path's first row.
template <class Real>
void path_of(const Plan<Real>& twin, const Space<Real>& s, Trail<Real>& t, std::int64_t begin, std::int64_t end) {
  const std::int64_t rows = 2 * std::int64_t(twin.sites) * L;
  for (std::int64_t step = begin; step < end; ++step) {
    Real* from = t.path + (step - begin) * rows;
    if (twin.drive_stride || step == 0) set_force(twin, step, t.force);
    if (twin.harmonics)
      follow<true>(twin, s, from, from + rows, t.force, modulate(twin, s, t, step));
    else
      follow<false>(twin, s, from, from + rows, t.force, Real(0));
  }
}

// Its adjoint, from that of `end` in its row down to that of `last` ≥ begin.
template <class Real>
void adjoint_of(const Plan<Real>& twin, const Space<Real>& s, Trail<Real>& t, std::int64_t begin, std::int64_t end,
                std::int64_t last) {
  const std::int64_t rows = 2 * std::int64_t(twin.sites) * L;
  for (std::int64_t step = end - 1; step >= last; --step) {
    Real* to = t.adjoint + (step - begin) * rows;
    const Real* x = t.path + (step - begin) * rows;
    if (twin.harmonics)
      pull_back<true>(twin, s, x, to + rows, to, modulate(twin, s, t, step), step);
    else
      pull_back<false>(twin, s, x, to + rows, to, Real(0), step);
  }
}

template <class Real> void copy(const Real* from, Real* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = from[i];
}

// Path and adjoint at the ends of all segments: once forward, and once back with every segment's path made again.
// keep(step, path, adjoint) is told those of every step, in descending order.
template <class Real, class Keep>
void sweep_twin(const Plan<Real>& twin, const Space<Real>& s, Trail<Real>& t, int segment, const volatile bool* stop,
                Keep keep) {
  const std::int64_t rows = 2 * std::int64_t(twin.sites) * L, steps = twin.steps;
  const std::int64_t count = (steps + segment - 1) / segment;
  for (std::int64_t i = 0; i < rows; ++i) t.kept_path[i] = twin.start[i / L];
  for (std::int64_t j = 0; j < count && !*stop; ++j) {
    const std::int64_t begin = j * segment, end = begin + segment < steps ? begin + segment : steps;
    copy(t.kept_path + j * rows, t.path, rows);
    path_of(twin, s, t, begin, end);
    copy(t.path + (end - begin) * rows, t.kept_path + (j + 1) * rows, rows);
  }
  for (std::int64_t i = 0; i < rows; ++i) t.kept_adjoint[count * rows + i] = 0;
  for (std::int64_t j = count - 1; j >= 0 && !*stop; --j) {
    const std::int64_t begin = j * segment, end = begin + segment < steps ? begin + segment : steps;
    copy(t.kept_path + j * rows, t.path, rows);
    path_of(twin, s, t, begin, end);
    copy(t.kept_adjoint + (j + 1) * rows, t.adjoint + (end - begin) * rows, rows);
    adjoint_of(twin, s, t, begin, end, begin);
    copy(t.adjoint, t.kept_adjoint + j * rows, rows);
    for (std::int64_t step = end - 1; step >= begin; --step)
      keep(step, t.path + (step - begin) * rows, t.adjoint + (step - begin) * rows);
  }
  for (int l = 0; l < L; ++l) t.finite[l] = true;
  for (std::int64_t i = 0; i < rows; ++i)
    t.finite[i % L] &= bool(__builtin_isfinite(t.kept_path[count * rows + i]) && __builtin_isfinite(t.kept_adjoint[i]));
}

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
