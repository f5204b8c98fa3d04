// The twin correction, one block of trajectories from start to end; see twin.hpp. Compiled once per instruction set.
//
// A step has two loops over the sites: the first moves X and adds up q_{n+1}·(X − x̄)_{n+1} and q_{n+1}·r_n, which
// the weight of the second, the scores, needs. Three sums per parameter: ΣwU and ΣU, and the scores with q for ζ.
#include "parts.hpp"
#include "twin_path.hpp"

namespace fluctua {
namespace FLUCTUA_ISA {
namespace {

constexpr int kTwinSums = Twinned<float, true>::sums;

template <class Real> std::int64_t twin_workspace(const Plan<Real>& plan, const Twin<Real>& twin, bool tabulate) {
  Space<Real> s;
  Trail<Real> t;
  std::int64_t size = lay_out(plan, static_cast<Real*>(nullptr), s, kTwinSums);
  size = (size + L - 1) / L * L;
  return size + lay_out(plan, twin, tabulate || !twin.path, static_cast<Real*>(nullptr), t);
}

template <class Real>
void open(const Plan<Real>& plan, const Twin<Real>& twin, bool keep, Real* base, Space<Real>& s, Trail<Real>& t) {
  const std::int64_t size = (lay_out(plan, base, s, kTwinSums) + L - 1) / L * L;
  lay_out(plan, twin, keep, base + size, t);
}

// X_{n+1}, and on the way q_{n+1}·(X_{n+1} − x̄_{n+1}) and q_{n+1}·r_n of every lane.
template <bool Modulated, bool Wide, class Real>
void kick(const Plan<Real>& plan, const Space<Real>& s, const Real* zeta, Real tau, const Real* path,
          const Real* adjoint, Real* ahead, Real* noise) {
  using S = Simd<Real>;
  using V = typename S::V;
  V qd[L / S::width] = {}, qr[L / S::width] = {};
  for (int n = 0; n < plan.sites; ++n)
    for (int u = 0; u < L; u += S::width) {
      V hr, hi, dr, di;
      couple<Modulated>(plan, s, s.psi, n, u, tau, hr, hi);
      const V yr = load<V>(s.psi + 2 * n * L + u), yi = load<V>(s.psi + (2 * n + 1) * L + u);
      const V rr = load<V>(zeta + 2 * n * L + u) * plan.kick[n],
              ri = load<V>(zeta + (2 * n + 1) * L + u) * plan.kick[n];
      drift(plan, s.force, n, yr, yi, yr * yr + yi * yi, hr, hi, dr, di);
      const V xr = yr + (dr + rr), xi = yi + (di + ri);
      store(s.next + 2 * n * L + u, xr);
      store(s.next + (2 * n + 1) * L + u, xi);
      const V ar = row<Wide>(adjoint, 2 * n, u), ai = row<Wide>(adjoint, 2 * n + 1, u);
      qd[u / S::width] += ar * (xr - row<Wide>(path, 2 * n, u)) + ai * (xi - row<Wide>(path, 2 * n + 1, u));
      qr[u / S::width] += ar * rr + ai * ri;
    }
  for (int u = 0; u < L; u += S::width) {
    store(ahead + u, qd[u / S::width]);
    store(noise + u, qr[u / S::width]);
  }
}

// The same with Heun's step: `predict` and `correct` move X.
template <bool Modulated, bool Wide, class Real>
void kick_by_heun(const Plan<Real>& plan, const Space<Real>& s, const Real* zeta, Real tau, std::int64_t step,
                  const Real* path, const Real* adjoint, Real* ahead, Real* noise) {
  using S = Simd<Real>;
  using V = typename S::V;
  if (Modulated) set_couplings(plan, s, tau);
  predict<Real, Modulated>(plan, s, zeta);
  if (plan.drive_stride) set_force(plan, step + 1, s.force);
  if (Modulated) set_couplings(plan, s, tau + tau_of_a_step(plan));
  correct<Real, false, Modulated>(plan, s, zeta);
  for (int u = 0; u < L; u += S::width) {
    V qd = {}, qr = {};
    for (std::int64_t i = 0; i < 2 * std::int64_t(plan.sites); ++i) {
      const V a = row<Wide>(adjoint, i, u);
      qd += a * (load<V>(s.next + i * L + u) - row<Wide>(path, i, u));
      qr += a * (load<V>(zeta + i * L + u) * plan.kick[i / 2]);
    }
    store(ahead + u, qd);
    store(noise + u, qr);
  }
}

// The scores of ω, χ and κ at ψ, with ζ and with q, or with half of both.
template <bool Halved, class Real, class Scores>
void score(const Plan<Real>& plan, const Space<Real>& s, const Scores& scores, const Real* state, const Real* zeta) {
  using S = Simd<Real>;
  using V = typename S::V;
  constexpr int sums = Scores::sums;
  const std::int64_t sites = plan.sites;
  Real* const site_acc = s.acc;
  Real* const bond_acc = s.acc + 2 * sums * sites * L;
  constexpr Real part = Halved ? Real(0.5) : Real(1);
  for (int n = 0; n < sites; ++n)
    for (int u = 0; u < L; u += S::width) {
      const Real *psi = state + u, *z = zeta + u;
      const V yr = load<V>(psi + 2 * n * L), yi = load<V>(psi + (2 * n + 1) * L);
      const V zr = load<V>(z + 2 * n * L), zi = load<V>(z + (2 * n + 1) * L);
      const V qr = scores.q(2 * n, u), qi = scores.q(2 * n + 1, u);
      const V w = load<V>(s.w + u);
      for (int b = plan.upper_start[n]; b < plan.upper_start[n + 1]; ++b) {
        const std::int64_t m = 2 * std::int64_t(plan.upper_site[b]);
        const V mr = load<V>(psi + m * L), mi = load<V>(psi + (m + 1) * L);
        scores.add(bond_acc + sums * b * L + u, w,
                   part * (cross(zr, zi, mr, mi) + cross(load<V>(z + m * L), load<V>(z + (m + 1) * L), yr, yi)),
                   part * (cross(qr, qi, mr, mi) + cross(scores.q(m, u), scores.q(m + 1, u), yr, yi)));
      }
      const V power = yr * yr + yi * yi, u_zeta = part * cross(zr, zi, yr, yi), u_q = part * cross(qr, qi, yr, yi);
      scores.add(site_acc + sums * n * L + u, w, u_zeta, u_q);
      scores.add(site_acc + sums * (sites + n) * L + u, w, power * u_zeta, power * u_q);
    }
}

// What V is at the end of a segment whose path started from X: with d the path's departure from the tabulated one,
// q' = q + BCB†d in the segment's last row, and ν + q·d + ½d†BCB†d.
template <class Real>
void bend(const Twin<Real>& twin, const Trail<Real>& t, std::int64_t segment, std::int64_t length, double* value) {
  using S = Simd<Real>;
  using V = typename S::V;
  const int sites = twin.plan.sites, rank = twin.rank;
  const std::int64_t rows = 2 * std::int64_t(sites);
  const Real* x = t.path + length * rows * L;
  const Real *path = twin.path + (segment + 1) * rows, *adjoint = twin.adjoint + (segment + 1) * rows;
  Real* d = t.adjoint + length * rows * L;  // d first, and q' in its place at the end
  alignas(64) Real sum[L];
  for (int u = 0; u < L; u += S::width) {
    V linear = {}, square = {};
    for (std::int64_t i = 0; i < rows; ++i) {
      const V departure = load<V>(x + i * L + u) - path[i];
      linear += adjoint[i] * departure;
      store(d + i * L + u, departure);
    }
    for (int a = 0; a < rank; ++a) {
      V yr = {}, yi = {};
      for (int n = 0; n < sites; ++n) {
        const Real* b = twin.basis + (std::int64_t(n) * rank + a) * 2;
        const V dr = load<V>(d + 2 * n * L + u), di = load<V>(d + (2 * n + 1) * L + u);
        yr += b[0] * dr + b[1] * di;
        yi += b[0] * di - b[1] * dr;
      }
      store(t.y + 2 * a * L + u, yr);
      store(t.y + (2 * a + 1) * L + u, yi);
    }
    for (int a = 0; a < rank; ++a) {
      const Real* c = twin.curvature + (segment * rank + a) * rank * 2;
      V zr = {}, zi = {};
      for (int e = 0; e < rank; ++e) {
        const V yr = load<V>(t.y + 2 * e * L + u), yi = load<V>(t.y + (2 * e + 1) * L + u);
        zr += c[2 * e] * yr - c[2 * e + 1] * yi;
        zi += c[2 * e] * yi + c[2 * e + 1] * yr;
      }
      store(t.z + 2 * a * L + u, zr);
      store(t.z + (2 * a + 1) * L + u, zi);
      square += zr * load<V>(t.y + 2 * a * L + u) + zi * load<V>(t.y + (2 * a + 1) * L + u);
    }
    for (int n = 0; n < sites; ++n) {
      V qr = V{} + adjoint[2 * n], qi = V{} + adjoint[2 * n + 1];
      const Real* b = twin.basis + std::int64_t(n) * rank * 2;
      for (int a = 0; a < rank; ++a) {
        const V zr = load<V>(t.z + 2 * a * L + u), zi = load<V>(t.z + (2 * a + 1) * L + u);
        qr += b[2 * a] * zr - b[2 * a + 1] * zi;
        qi += b[2 * a] * zi + b[2 * a + 1] * zr;
      }
      store(d + 2 * n * L + u, qr);
      store(d + (2 * n + 1) * L + u, qi);
    }
    store(sum + u, linear + square * Real(0.5));
  }
  for (int l = 0; l < L; ++l) value[l] = twin.value[segment + 1] + double(sum[l]);
}

struct Running {                          // of each lane, in double: Λ is a small difference of what it is summed from
  double reward[L], gained[L], noise[L];  // C; what Λ_0 has grown to, but for q·d and the Σq·r
};

// Path and adjoint of the segment that begins, ahead of X.
template <class Real>
void look_ahead(const Twin<Real>& twin, const Space<Real>& s, Trail<Real>& t, std::int64_t segment, Running& sum) {
  const std::int64_t rows = 2 * std::int64_t(twin.plan.sites) * L, begin = segment * twin.segment;
  const std::int64_t end = begin + twin.segment < twin.plan.steps ? begin + twin.segment : twin.plan.steps;
  if (twin.rank) {
    copy(s.psi, t.path, rows);
    path_of(twin.plan, s, t, begin, end);
    double value[L], g[L];
    bend(twin, t, segment, end - begin, value);
    adjoint_of(twin.plan, s, t, begin, end, begin + 1);
    for (std::int64_t step = begin; step < end; ++step) {
      powers<true>(twin.plan, t.path + (step - begin) * rows, step, g);
      for (int l = 0; l < L; ++l) value[l] += g[l] * trapezoid(twin.plan, step);
    }
    for (int l = 0; l < L; ++l) sum.gained[l] = sum.reward[l] + value[l] - twin.value[0];
    return;
  }
  Real* last = t.adjoint + (end - begin) * rows;
  if (!twin.path) {
    copy(t.kept_path + segment * rows, t.path, rows);
    copy(t.kept_adjoint + (segment + 1) * rows, last, rows);
  } else
    for (std::int64_t i = 0; i < rows; ++i) {
      t.path[i] = twin.path[(segment * rows + i) / L];
      last[i] = twin.adjoint[((segment + 1) * rows + i) / L];
    }
  path_of(twin.plan, s, t, begin, end);
  adjoint_of(twin.plan, s, t, begin, end, begin + 1);
}

// The scores of Heun's step: those at ψ with η for ζ, and at ψ̃. adjoint: q_{n+1}.
template <bool Modulated, bool Wide, class Real>
void score_by_heun(const Plan<Real>& plan, const Space<Real>& s, const Trail<Real>& t, const Real* adjoint,
                   const Real* zeta, Real tau, std::int64_t step) {
  const Real* q = adjoint;
  if (!Wide) {
    for (std::int64_t i = 0; i < 2 * std::int64_t(plan.sites) * L; ++i) s.eta[i] = adjoint[i / L];
    q = s.eta;
  }
  pull_back<Modulated>(plan, s, s.ahead, q, t.eta, tau + tau_of_a_step(plan));
  pull_back<Modulated>(plan, s, s.ahead, zeta, s.eta, tau + tau_of_a_step(plan));
  const Twinned<Real, true> first = {t.eta};
  const Twinned<Real, Wide> second = {adjoint};
  score<true>(plan, s, first, s.psi, s.eta);
  score<true>(plan, s, second, s.ahead, zeta);
  if (!plan.rates) return;
  rates_of_drift<true>(plan, s, first, s.psi, s.eta, step);
  rates_of_drift<true>(plan, s, second, s.ahead, zeta, step + 1);
  rates_of_noise(plan, s, second, zeta);
  explicit_gains(plan, s, second, step, Real(trapezoid(plan, step)));
}

// g − g̃ of a time, into the sums. path: x̄.
template <bool Wide, class Real>
void count_reward(const Plan<Real>& plan, const Twin<Real>& twin, const Space<Real>& s, std::int64_t step,
                  const Real* path, Running& sum, TwinJob<Real>& job) {
  double g[L], g_twin[L];
  powers<true>(plan, s.psi, step, g);
  powers<Wide>(twin.plan, path, step, g_twin);
  const double part = trapezoid(plan, step);
  for (int l = 0; l < L; ++l) {
    sum.reward[l] += g[l] * part;
    sum.gained[l] += (g[l] - g_twin[l]) * part;
    if (l < job.lanes) job.reward_sum[step] += g[l] * part;
  }
}

// path, adjoint: x̄_n and q_n; the row after them is that of n + 1.
template <bool Wide, class Real>
void step_once(const Plan<Real>& plan, const Twin<Real>& twin, Space<Real>& s, Trail<Real>& t,
               const Source<Real>& source, std::int64_t step, const Real* path, const Real* adjoint, Running& sum,
               TwinJob<Real>& job) {
  const std::int64_t next = 2 * std::int64_t(plan.sites) * (Wide ? L : 1);
  if (!(step & 1)) noise(plan, s, source.lanes, source.keys, std::uint32_t(step / 2));
  if (plan.drive_stride || step == 0) set_force(plan, step, s.force);
  const Real* zeta = s.zeta[step & 1];
  count_reward<Wide>(plan, twin, s, step, path, sum, job);
  alignas(64) Real ahead[L], kicked[L];
  const Real tau = plan.harmonics ? modulate(plan, s, t, step) : Real(0);
  const Real *path_then = path + next, *q = adjoint + next;
  if (plan.heun)
    plan.harmonics ? kick_by_heun<true, Wide>(plan, s, zeta, tau, step, path_then, q, ahead, kicked)
                   : kick_by_heun<false, Wide>(plan, s, zeta, tau, step, path_then, q, ahead, kicked);
  else
    plan.harmonics ? kick<true, Wide>(plan, s, zeta, tau, path_then, q, ahead, kicked)
                   : kick<false, Wide>(plan, s, zeta, tau, path_then, q, ahead, kicked);
  const double start = plan.reference - (plan.bar ? plan.bar[step] : 0.0);
  for (int l = 0; l < L; ++l) {
    sum.noise[l] += double(kicked[l]);
    const double grown = sum.gained[l] + double(ahead[l]) - sum.noise[l];  // Λ_0 − Λ_{n+1}
    s.w[l] = Real(start - grown);
    if (l < job.lanes) job.prefix_sum[step + 1] += grown;
  }
  if (plan.heun) {
    plan.harmonics ? score_by_heun<true, Wide>(plan, s, t, q, zeta, tau, step)
                   : score_by_heun<false, Wide>(plan, s, t, q, zeta, tau, step);
  } else {
    const Twinned<Real, Wide> scores = {q};
    score<false>(plan, s, scores, s.psi, zeta);
    if (plan.rates) rates(plan, s, scores, zeta, step);
  }
  swap_buffers(s);
}

template <class Real>
void finish(const Plan<Real>& plan, const Space<Real>& s, const Running& sum, TwinJob<Real>& job) {
  const std::int64_t total = parameters(plan), explicit_from = total - (plan.rates ? plan.ports : 0);
  for (int l = 0; l < L; ++l) {
    job.returns[l] = sum.reward[l];
    job.gained[l] = sum.gained[l] - sum.noise[l];
    job.overflow[l] = false;
  }
  for (std::int64_t i = 0; i < 2 * std::int64_t(plan.sites) * L; ++i)
    job.overflow[i % L] |= !__builtin_isfinite(s.psi[i]);
  const Real dt = 1 / plan.inverse_dt;
  for (std::int64_t i = 0; i < total; ++i)
    for (int l = 0; l < L; ++l) {
      const Real* acc = s.acc + kTwinSums * i * L + l;
      const bool is_explicit = i >= explicit_from;
      job.direct[i * L + l] = is_explicit ? acc[0] : acc[2 * L] * dt;
      job.correction[i * L + l] = is_explicit ? Real(0) : acc[0] + Real(job.gained[l] - plan.reference) * acc[L];
    }
}

template <class Real> void twin_sweep(const Plan<Real>& plan, const Twin<Real>& twin, TwinJob<Real>& job) {
  Space<Real> s;
  Trail<Real> t;
  open(plan, twin, !twin.path, job.workspace, s, t);
  const Source<Real> source(plan, job.first);
  start(plan, s, source);
  for (int l = 0; l < L; ++l) t.finite[l] = true;
  if (!twin.path) sweep_twin(twin.plan, s, t, twin.segment, job.stop, [](std::int64_t, const Real*, const Real*) {});
  for (int l = 0; l < L; ++l) job.twin_overflow[l] = !t.finite[l];

  Running sum = {};
  const std::int64_t rows = 2 * std::int64_t(plan.sites);
  for (std::int64_t step = 0; step < plan.steps; ++step) {
    const std::int64_t segment = step / twin.segment, place = step % twin.segment;
    if (place == 0) {
      if (*job.stop) return;
      if (!twin.full) look_ahead(twin, s, t, segment, sum);
    }
    if (twin.full)
      step_once<false>(plan, twin, s, t, source, step, twin.path + step * rows, twin.adjoint + step * rows, sum, job);
    else
      step_once<true>(plan, twin, s, t, source, step, t.path + place * rows * L, t.adjoint + place * rows * L, sum,
                      job);
  }
  if (plan.heun) {  // the reward of the end
    if (twin.full)
      count_reward<false>(plan, twin, s, plan.steps, twin.path + plan.steps * rows, sum, job);
    else
      count_reward<true>(plan, twin, s, plan.steps, t.path + ((plan.steps - 1) % twin.segment + 1) * rows * L, sum,
                         job);
    if (plan.rates)
      explicit_gains(plan, s, Twinned<Real, true>{nullptr}, plan.steps, Real(trapezoid(plan, plan.steps)));
  }
  finish(plan, s, sum, job);
}

// The tables of a twin that is the same for all trajectories. False if its path or adjoint overflowed.
template <class Real>
bool tabulate(const Plan<Real>& plan, const Twin<Real>& twin, Real* workspace, const volatile bool* stop) {
  Space<Real> s;
  Trail<Real> t;
  open(plan, twin, true, workspace, s, t);
  const std::int64_t rows = 2 * std::int64_t(plan.sites), steps = plan.steps, count = segments(twin);
  double value = 0;
  const auto reward_at = [&](std::int64_t step, const Real* path) {
    double g[L];
    powers<true>(twin.plan, path, step, g);
    return g[0] * trapezoid(plan, step);
  };
  const Real* const last = t.kept_path + count * rows * L;
  auto keep = [&](std::int64_t step, const Real* path, const Real* adjoint) {
    if (step < steps) {
      if (plan.heun && step == steps - 1) value = reward_at(steps, last);
      value += reward_at(step, path);
    }
    if (!twin.full && step < steps && step % twin.segment) return;
    const std::int64_t at = twin.full ? step : (step + twin.segment - 1) / twin.segment;
    twin.value[at] = value;
    for (std::int64_t i = 0; i < rows; ++i) {
      twin.path[at * rows + i] = path[i * L];
      twin.adjoint[at * rows + i] = adjoint[i * L];
    }
  };
  sweep_twin(twin.plan, s, t, twin.segment, stop, keep);
  value = plan.heun ? reward_at(steps, last) : 0;
  keep(steps, last, t.kept_adjoint + count * rows * L);
  return t.finite[0];
}

}  // namespace

const TwinEngine<float> twin32 = {twin_workspace<float>, tabulate<float>, twin_sweep<float>};
const TwinEngine<double> twin64 = {twin_workspace<double>, tabulate<double>, twin_sweep<double>};

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
