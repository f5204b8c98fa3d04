// One block of trajectories from start to end: simulate, accumulate returns and scores. Compiled once per
// instruction set; includes no header with inline functions that another file could share.
//
//   G = Σ(R' − C_{n+1} − λ̄_n)U_n + (R − R')ΣU_n                      (two sums per parameter, one pass)
#include "heun.hpp"
#include "parts.hpp"

namespace fluctua {
namespace FLUCTUA_ISA {

template <class Real> std::int64_t workspace(const Plan<Real>& plan) {
  Space<Real> s;
  return lay_out(plan, static_cast<Real*>(nullptr), s, Plain<Real>::sums);
}

// C_{n+1} and the weight R' − C_{n+1} − λ̄_n of step n's scores; returns Σ gΔt over the first `lanes`. C is kept in
// double: it is one number per trajectory, and 20,000 roundings of float would be visible in a small advantage.
// part: of the reward that counts.
template <class Real>
double reward(const Plan<Real>& plan, const Space<Real>& s, int lanes, double* c, std::int64_t step, double part = 1) {
  double g[L];
  powers<true>(plan, s.psi, step, g);
  double sum = 0;
  const double start = plan.reference - (plan.bar && step < plan.steps ? plan.bar[step] : 0.0);
  for (int l = 0; l < L; ++l) {
    g[l] *= part;
    c[l] += g[l];
    s.w[l] = Real(start - c[l]);
    sum += l < lanes ? g[l] : 0.0;
  }
  return sum;
}

// One step of all sites: drift, kick and scores.
template <class Real, bool Scored, bool Modulated>
void advance(const Plan<Real>& plan, const Space<Real>& s, const Real* zeta, Real tau) {
  using S = Simd<Real>;
  using V = typename S::V;
  const Plain<Real> scores;
  const std::int64_t sites = plan.sites;
  Real* const site_acc = s.acc;
  Real* const bond_acc = s.acc + 4 * sites * L;
  for (int n = 0; n < sites; ++n)
    for (int u = 0; u < L; u += S::width) {
      const Real* psi = s.psi + u;
      const Real* z = zeta + u;
      const V yr = load<V>(psi + 2 * n * L), yi = load<V>(psi + (2 * n + 1) * L);
      const V zr = load<V>(z + 2 * n * L), zi = load<V>(z + (2 * n + 1) * L);
      const V w = load<V>(s.w + u);
      V hr, hi, dr, di;
      couple<Modulated>(plan, s, s.psi, n, u, tau, hr, hi, [&](int b, std::int64_t at, V mr, V mi) {
        if (Scored)
          scores.add(bond_acc + 2 * b * L + u, w,
                     cross(zr, zi, mr, mi) + cross(load<V>(zeta + at), load<V>(zeta + at + L), yr, yi), V{});
      });
      const V power = yr * yr + yi * yi;
      if (Scored) {
        const V score = cross(zr, zi, yr, yi);
        scores.add(site_acc + 2 * n * L + u, w, score, V{});
        scores.add(site_acc + 2 * (sites + n) * L + u, w, power * score, V{});
      }
      drift(plan, s.force, n, yr, yi, power, hr, hi, dr, di);
      store(s.next + u + 2 * n * L, yr + (dr + zr * plan.kick[n]));
      store(s.next + u + (2 * n + 1) * L, yi + (di + zi * plan.kick[n]));
    }
}

template <class Real> void record(const Plan<Real>& plan, const Space<Real>& s, Job<Real>& job, std::int64_t step) {
  for (int l = 0; l < job.lanes; ++l) {
    Real* out = job.record + (l * job.records + step / job.record_every) * plan.sites * 2;
    for (std::int64_t i = 0; i < 2 * std::int64_t(plan.sites); ++i) out[i] = s.psi[i * L + l];
  }
}

template <class Real>
void look_for_overflow(const Plan<Real>& plan, const Space<Real>& s, Job<Real>& job, std::int64_t step) {
  for (int l = 0; l < job.lanes; ++l) {
    bool finite = true;
    for (std::int64_t i = 0; i < 2 * std::int64_t(plan.sites); ++i)
      finite &= bool(__builtin_isfinite(s.psi[i * L + l]));
    if (!finite && job.overflow_step[l] < 0) job.overflow_step[l] = step;
  }
}

// Noise, drive and modulation of a step; the place in the modulation's piece.
template <class Real>
Real prepare(const Plan<Real>& plan, const Space<Real>& s, const Source<Real>& source, std::int64_t step) {
  if (!(step & 1) && plan.noise) noise(plan, s, source.lanes, source.keys, std::uint32_t(step / 2));
  if (plan.drive_stride || step == 0) set_force(plan, step, s.force);
  if (!plan.harmonics) return 0;
  if (step % plan.modulation_steps == 0) refresh_modulation(plan, s, step / plan.modulation_steps);
  return place_in_piece(plan, step);
}

template <class Real, bool Scored> void advance(const Plan<Real>& plan, Space<Real>& s, std::int64_t step, Real tau) {
  const Real* zeta = s.zeta[step & 1];
  plan.harmonics ? advance<Real, Scored, true>(plan, s, zeta, tau) : advance<Real, Scored, false>(plan, s, zeta, tau);
  swap_buffers(s);
}

// A step of Euler's: noise, reward, scores, state.
template <class Real>
void step_by_euler(const Plan<Real>& plan, Space<Real>& s, const Source<Real>& source, Job<Real>& job, double* c,
                   std::int64_t step) {
  const Real tau = prepare(plan, s, source, step);
  job.reward_sum[step] += reward(plan, s, job.lanes, c, step);
  if (job.scores && plan.rates) rates(plan, s, Plain<Real>(), s.zeta[step & 1], step);
  job.scores ? advance<Real, true>(plan, s, step, tau) : advance<Real, false>(plan, s, step, tau);
}

template <class Real>
void reward_by_trapezoid(const Plan<Real>& plan, const Space<Real>& s, Job<Real>& job, double* c, std::int64_t step) {
  const double part = trapezoid(plan, step);
  job.reward_sum[step] += reward(plan, s, job.lanes, c, step, part);
  if (job.scores && plan.rates) explicit_gains(plan, s, Plain<Real>(), step, Real(part));
}

template <class Real>
void step_by_heun(const Plan<Real>& plan, Space<Real>& s, const Source<Real>& source, Job<Real>& job, double* c,
                  std::int64_t step) {
  if (step == 0) set_fields(plan, s, step);
  if (!(step & 1) && plan.noise) noise(plan, s, source.lanes, source.keys, std::uint32_t(step / 2));
  reward_by_trapezoid(plan, s, job, c, step);
  job.scores ? advance_by_heun<Real, true>(plan, s, step) : advance_by_heun<Real, false>(plan, s, step);
}

template <class Real> void sweep(const Plan<Real>& plan, Job<Real>& job) {
  Space<Real> s;
  lay_out(plan, job.workspace, s, Plain<Real>::sums);
  const Source<Real> source(plan, job.first);
  start(plan, s, source);
  for (int l = 0; l < L; ++l) job.overflow_step[l] = -1;

  double c[L] = {};
  for (std::int64_t step = 0; step < plan.steps; ++step) {
    if (!(step & 255) && *job.stop) return;
    if (job.record_every && step % job.record_every == 0) record(plan, s, job, step);
    plan.heun ? step_by_heun(plan, s, source, job, c, step) : step_by_euler(plan, s, source, job, c, step);
    if (job.find_overflow) look_for_overflow(plan, s, job, step + 1);
  }
  if (plan.heun) reward_by_trapezoid(plan, s, job, c, plan.steps);
  if (job.record_every && plan.steps % job.record_every == 0) record(plan, s, job, plan.steps);
  if (!job.find_overflow) look_for_overflow(plan, s, job, plan.steps);
  for (int l = 0; l < L; ++l) job.returns[l] = c[l];
  if (job.scores) {
    const std::int64_t total = parameters(plan);
    const std::int64_t explicit_from = total - (plan.rates ? plan.ports : 0);
    for (std::int64_t i = 0; i < total; ++i)
      for (int l = 0; l < L; ++l)
        job.gradient[i * L + l] =
            s.acc[2 * i * L + l] +
            (i < explicit_from ? Real(c[l] - plan.reference) * s.acc[(2 * i + 1) * L + l] : Real(0));
  }
}

template <class Real> void replay(const Plan<Real>& plan, const Replay<Real>& r) {
  using V = typename Simd<Real>::V;
  Space<Real> s;
  lay_out(plan, r.workspace, s, Plain<Real>::sums);
  const Source<Real> source(plan, r.first);
  if (r.begin == 0) {
    start(plan, s, source);
    for (int l = 0; l < L; ++l) r.c[l] = 0;
  }
  if (r.begin & 1) swap_buffers(s);  // as at every step before
  const std::int64_t rows = 2 * std::int64_t(plan.sites);
  for (std::int64_t step = r.begin; step < r.end; ++step) {
    const Real tau = prepare(plan, s, source, step);
    reward(plan, s, L, r.c, step);
    const std::int64_t slot = step - r.begin;
    const Real* zeta = s.zeta[step & 1];
    for (std::int64_t i = 0; i < rows; ++i)
      for (int u = 0; u < L; u += Simd<Real>::width) {
        const std::int64_t to = (slot * rows + i) * r.stride + r.lane + u;
        store(r.psi + to, load<V>(s.psi + i * L + u));
        store(r.zeta + to, load<V>(zeta + i * L + u));
      }
    for (int l = 0; l < L; ++l)
      r.to_go[slot * r.stride + r.lane + l] = Real(r.returns[l] - r.c[l] - r.centre[step + 1]);
    advance<Real, false>(plan, s, step, tau);
  }
}

extern const Engine<float> engine32;
extern const Engine<double> engine64;
#define FLUCTUA_NAME_(x) #x
#define FLUCTUA_NAME(x)  FLUCTUA_NAME_(x)
const Engine<float> engine32 = {workspace<float>, sweep<float>, replay<float>, columns,
                                &twin32,          &measured32,  &filter32,     FLUCTUA_NAME(FLUCTUA_ISA)};
const Engine<double> engine64 = {workspace<double>, sweep<double>, replay<double>, columns,
                                 &twin64,           &measured64,   &filter64,      FLUCTUA_NAME(FLUCTUA_ISA)};

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
