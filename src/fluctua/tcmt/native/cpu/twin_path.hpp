// The twin's noise-free path and its adjoint, of one block, step by step.
#pragma once
#include "heun.hpp"
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

// q + ΔtJᵀq at x, of one Euler step.
template <bool Modulated, class Real>
void pull_back(const Plan<Real>& plan, const Space<Real>& s, const Real* x, const Real* from, Real* to, Real tau) {
  using S = Simd<Real>;
  using V = typename S::V;
  for (int n = 0; n < plan.sites; ++n)
    for (int u = 0; u < L; u += S::width) {
      V hr, hi, to_r, to_i;
      couple<Modulated>(plan, s, from, n, u, tau, hr, hi);
      const V qr = load<V>(from + 2 * n * L + u), qi = load<V>(from + (2 * n + 1) * L + u);
      const V xr = load<V>(x + 2 * n * L + u), xi = load<V>(x + (2 * n + 1) * L + u);
      pull_back(plan, n, xr, xi, xr * xr + xi * xi, qr, qi, hr, hi, to_r, to_i);
      store(to + 2 * n * L + u, to_r);
      store(to + (2 * n + 1) * L + u, to_i);
    }
}

// ∇g̃Δt at x̄_n is added to q. part: of the reward that counts.
template <class Real>
void add_reward_gradient(const Plan<Real>& plan, const Real* x, Real* to, std::int64_t step, Real part = 1) {
  const Real* in = plan.incoming + step * plan.incoming_stride;
  for (int p = 0; p < plan.ports; ++p) {
    const std::int64_t at = 2 * plan.port_site[p] * L;
    const Real factor = 2 * part * plan.weight[p] * plan.gain[p];
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
  Real* eta;                       // of Heun's step: of a trajectory, η with q for ζ (2·sites, lanes)
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
  t.eta = carve(p, plan.heun ? n : 0);
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

// to = (from + to)/2. Heun's step is the mean of where it starts and of two of Euler's: x' = ½[x + e(e(x))], with e(x)
// = x + Δtμ(x), the second at t + Δt; and so is its adjoint, q ↦ ½[q + E_x(E_x̃(q))] with E_x(q) = q + ΔtJ(x)ᵀq, x̃ =
// e(x).
template <class Real> void halve(const Real* from, Real* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = (from[i] + to[i]) * Real(0.5);
}

// x̄_{n+1}, or with Heun's step and no `to` x̄̃ alone, which is left in s.ahead.
template <bool Modulated, class Real>
void follow_step(const Plan<Real>& twin, const Space<Real>& s, Trail<Real>& t, const Real* from, Real* to, Real tau,
                 std::int64_t step) {
  if (twin.drive_stride || step == 0) set_force(twin, step, t.force);
  if (!twin.heun) return follow<Modulated>(twin, s, from, to, t.force, tau);
  follow<Modulated>(twin, s, from, s.ahead, t.force, tau);
  if (!to) return;
  if (twin.drive_stride) set_force(twin, step + 1, t.force);
  follow<Modulated>(twin, s, s.ahead, to, t.force, tau + tau_of_a_step(twin));
  halve(from, to, 2 * std::int64_t(twin.sites) * L);
}

// q_n from q_{n+1}, at x̄_n.
template <bool Modulated, class Real>
void adjoint_step(const Plan<Real>& twin, const Space<Real>& s, Trail<Real>& t, const Real* x, const Real* from,
                  Real* to, Real tau, std::int64_t step) {
  if (!twin.heun) {
    pull_back<Modulated>(twin, s, x, from, to, tau);
    return add_reward_gradient(twin, x, to, step);
  }
  follow_step<Modulated>(twin, s, t, x, static_cast<Real*>(nullptr), tau, step);
  pull_back<Modulated>(twin, s, s.ahead, from, s.eta, tau + tau_of_a_step(twin));
  pull_back<Modulated>(twin, s, x, s.eta, to, tau);
  halve(from, to, 2 * std::int64_t(twin.sites) * L);
  add_reward_gradient(twin, x, to, step, Real(trapezoid(twin, step)));
}

// The path of steps begin … end − 1, from t.path's first row.
template <class Real>
void path_of(const Plan<Real>& twin, const Space<Real>& s, Trail<Real>& t, std::int64_t begin, std::int64_t end) {
  const std::int64_t rows = 2 * std::int64_t(twin.sites) * L;
  for (std::int64_t step = begin; step < end; ++step) {
    Real* from = t.path + (step - begin) * rows;
    if (twin.harmonics)
      follow_step<true>(twin, s, t, from, from + rows, modulate(twin, s, t, step), step);
    else
      follow_step<false>(twin, s, t, from, from + rows, Real(0), step);
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
      adjoint_step<true>(twin, s, t, x, to + rows, to, modulate(twin, s, t, step), step);
    else
      adjoint_step<false>(twin, s, t, x, to + rows, to, Real(0), step);
  }
}

template <class Real> void copy(const Real* from, Real* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = from[i];
}

// Path and adjoint at the ends of all segments: once forward, and once back with every segment's path made again.
// keep(step, path, adjoint) is called for every step, in descending order.
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
  if (twin.heun)
    add_reward_gradient(twin, t.kept_path + count * rows, t.kept_adjoint + count * rows, steps,
                        Real(trapezoid(twin, steps)));
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
