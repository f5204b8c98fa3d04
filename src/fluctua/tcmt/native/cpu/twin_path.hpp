// The twin's noise-free path and its adjoint, of one block, step by step.
#pragma once
#include "step.hpp"
#include "twin.hpp"

namespace fluctua {
namespace FLUCTUA_ISA {

// x̄_{n+1} from x̄_n.
template <bool Modulated, class Real>
void follow(const Plan<Real>& plan, const Space<Real>& s, const Real* from, Real* to, const Real* force, Real tau) {
  using S = Simd<Real>;
  using V = typename S::V;
  for (int n = 0; n < plan.sites; ++n)
    for (int u = 0; u < L; u += S::width) {
      V hr, hi, dr, di;
      couple<Modulated>(plan, s, from, n, u, tau, hr, hi);
      const V yr = load<V>(from + 2 * n * L + u), yi = load<V>(from + (2 * n + 1) * L + u);
      drift(plan, force, n, yr, yi, yr * yr + yi * yi, hr, hi, dr, di);
      store(to + 2 * n * L + u, yr + dr);
      store(to + (2 * n + 1) * L + u, yi + di);
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
  const std::int64_t piece = step / plan.modulation_steps;
  if (piece != t.piece) refresh_modulation(plan, s, piece);
  t.piece = piece;
  return place_in_piece(plan, step);
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
