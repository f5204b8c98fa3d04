// One block of trajectories from start to end: simulate, accumulate returns and scores. Compiled once per
// instruction set; includes no header with inline functions that another file could share.
//
//   ψ' = ψ + Δt[−i(ω + χ|ψ|²)ψ − iΣ(κ + δκ)ψ_m − Γψ + f] + 2Qζ,     ζ = r/(2Q) = √Δt z/a
//   U_ω = ζ_re ψ_im − ζ_im ψ_re,  U_χ = |ψ|²U_ω,  U_κ = (ζ_n × ψ_m) + (ζ_m × ψ_n)
//   G = Σ(R' − C_{n+1} − λ̄_n)U_n + (R − R')ΣU_n                      (two sums a parameter, one pass)
#include "block.hpp"
#include "columns.hpp"
#include "twin_engine.hpp"

namespace fluctua {
namespace FLUCTUA_ISA {

constexpr int kSums = 2;  // ΣwU and ΣU

template <class Real> std::int64_t workspace(const Plan<Real>& plan) {
  Space<Real> s;
  return lay_out(plan, static_cast<Real*>(nullptr), s, kSums);
}

// C_{n+1} and the weight R' − C_{n+1} − λ̄_n of step n's scores; returns Σ gΔt over the first `lanes`. C is kept in double: it is one number a
// trajectory, and 20,000 roundings of float would show in a small advantage.
template <class Real>
double reward(const Plan<Real>& plan, const Space<Real>& s, int lanes, double* c, std::int64_t step) {
  double g[L] = {};
  const Real* in = plan.incoming + step * plan.incoming_stride;
  for (int p = 0; p < plan.ports; ++p) {
    const Real* re = s.psi + 2 * plan.port_site[p] * L;
    const Real* im = re + L;
    for (int l = 0; l < L; ++l) {
      const Real a = plan.gain[p] * re[l] - in[2 * p], b = plan.gain[p] * im[l] - in[2 * p + 1];
      g[l] += plan.weight[p] * (a * a + b * b);
    }
  }
  double sum = 0;
  const double start = plan.reference - (plan.bar ? plan.bar[step] : 0.0);
  for (int l = 0; l < L; ++l) {
    c[l] += g[l];
    s.w[l] = Real(start - c[l]);
    sum += l < lanes ? g[l] : 0.0;
  }
  return sum;
}

template <class V, class Real> FLUCTUA_INLINE void add(Real* acc, V w, V u) {
  store(acc, load<V>(acc) + w * u);
  store(acc + L, load<V>(acc + L) + u);
}

// One step of all sites: drift, kick and scores.
template <class Real, bool Scores, bool Modulated>
void advance(const Plan<Real>& plan, const Space<Real>& s, const Real* zeta, Real tau) {
  using S = Simd<Real>;
  using V = typename S::V;
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
      V hr = {}, hi = {};
      for (int e = plan.lower_start[n]; e < plan.lower_start[n + 1]; ++e) {
        const Real* m = psi + 2 * plan.lower_site[e] * L;
        const int b = plan.lower_bond[e];
        const V k = Modulated ? load<V>(s.coupling + b * L + u) : V{} + plan.kappa[b];
        hr += k * load<V>(m);
        hi += k * load<V>(m + L);
      }
      for (int b = plan.upper_start[n]; b < plan.upper_start[n + 1]; ++b) {
        const std::int64_t at = 2 * plan.upper_site[b] * L;
        const V mr = load<V>(psi + at), mi = load<V>(psi + at + L);
        V k = V{} + plan.kappa[b];
        if (Modulated) {
          const Real* c = s.poly + 3 * b * L + u;
          k += load<V>(c) + tau * (load<V>(c + L) + tau * load<V>(c + 2 * L));
          store(s.coupling + b * L + u, k);  // the upper site comes later and reads it
        }
        hr += k * mr;
        hi += k * mi;
        if (Scores)
          add(bond_acc + 2 * b * L + u, w, zr * mi - zi * mr + (load<V>(z + at) * yi - load<V>(z + at + L) * yr));
      }
      const V power = yr * yr + yi * yi;
      const V omega = power * plan.chi[n] + plan.omega[n];
      if (Scores) {
        const V score = zr * yi - zi * yr;
        add(site_acc + 2 * n * L + u, w, score);
        add(site_acc + 2 * (sites + n) * L + u, w, power * score);
      }
      // ψ + (small), never (1 − ΓΔt)ψ: the rounding of 1 − ΓΔt would act as a loss of its own. And the drive is
      // part of (small): added to ψ alone, a constant would be rounded the same way at every step.
      const V dr = s.force[2 * n] + (omega * yi + hi - yr * plan.damping[n]);
      const V di = s.force[2 * n + 1] - (omega * yr + hr + yi * plan.damping[n]);
      store(s.next + u + 2 * n * L, yr + (dr + zr * plan.kick[n]));
      store(s.next + u + (2 * n + 1) * L, yi + (di + zi * plan.kick[n]));
    }
}

// Scores of Γ_n at fixed Q, −ζ·ψ; of ln Q_n, |z|²/2 − 1; of each drive's scale, ζ·f; and ∂g/∂gain, which is
// no score: it is explicit in G.
template <class Real> void rates(const Plan<Real>& plan, const Space<Real>& s, const Real* zeta, std::int64_t step) {
  using S = Simd<Real>;
  using V = typename S::V;
  const std::int64_t sites = plan.sites;
  Real* acc = s.acc + 2 * (2 * sites + plan.bonds) * L;
  for (int u = 0; u < L; u += S::width) {
    const V w = load<V>(s.w + u);
    for (int n = 0; n < sites; ++n) {
      const Real *y = s.psi + 2 * n * L + u, *z = zeta + 2 * n * L + u;
      const V zr = load<V>(z), zi = load<V>(z + L);
      add(acc + 2 * n * L + u, w, -(zr * load<V>(y) + zi * load<V>(y + L)));
      const Real inverse = plan.scale[n] > 0 ? 1 / (plan.scale[n] * plan.scale[n]) : Real(0);
      add(acc + 2 * (sites + n) * L + u, w, (zr * zr + zi * zi) * (inverse / 2) - 1);
    }
    const Real* f = plan.drive + step * plan.drive_stride;
    for (int d = 0; d < plan.drives; ++d) {
      const Real* z = zeta + 2 * plan.drive_site[d] * L + u;
      const Real re = f[2 * d] * plan.inverse_dt, im = f[2 * d + 1] * plan.inverse_dt;
      add(acc + 2 * (2 * sites + d) * L + u, w, load<V>(z) * re + load<V>(z + L) * im);
    }
    const Real* in = plan.incoming + step * plan.incoming_stride;
    for (int p = 0; p < plan.ports; ++p) {
      const Real* y = s.psi + 2 * plan.port_site[p] * L + u;
      const V re = load<V>(y), im = load<V>(y + L);
      const V out_re = re * plan.gain[p] - in[2 * p], out_im = im * plan.gain[p] - in[2 * p + 1];
      Real* a = acc + 2 * (2 * sites + plan.drives + p) * L + u;
      store(a, load<V>(a) + (out_re * re + out_im * im) * (2 * plan.weight[p]));
    }
  }
}

template <class Real> void record(const Plan<Real>& plan, const Space<Real>& s, Job<Real>& job, std::int64_t step) {
  for (int l = 0; l < job.lanes; ++l) {
    Real* out = job.record + (l * job.records + step / job.record_every) * plan.sites * 2;
    for (std::int64_t i = 0; i < 2 * std::int64_t(plan.sites); ++i) out[i] = s.psi[i * L + l];
  }
}

template <class Real> void look_for_overflow(const Plan<Real>& plan, const Space<Real>& s, Job<Real>& job, std::int64_t step) {
  for (int l = 0; l < job.lanes; ++l) {
    bool finite = true;
    for (std::int64_t i = 0; i < 2 * std::int64_t(plan.sites); ++i) finite &= bool(__builtin_isfinite(s.psi[i * L + l]));
    if (!finite && job.overflow_step[l] < 0) job.overflow_step[l] = step;
  }
}

// Noise, drive and modulation of a step; the place in the modulation's piece.
template <class Real>
Real prepare(const Plan<Real>& plan, const Space<Real>& s, const Source<Real>& source, std::int64_t step) {
  if (!(step & 1) && plan.noise) noise(plan, s, source.lanes, source.keys, std::uint32_t(step / 2));
  if (plan.drive_stride || step == 0) set_force(plan, step, s.force);
  if (!plan.harmonics) return 0;
  const std::int64_t m = plan.modulation_steps, piece = step / m;
  if (step == piece * m) refresh_modulation(plan, s, piece);
  return Real((2.0 * double(step - piece * m) + 1.0 - double(m)) / double(m));
}

template <class Real, bool Scores>
void advance(const Plan<Real>& plan, Space<Real>& s, std::int64_t step, Real tau) {
  const Real* zeta = s.zeta[step & 1];
  plan.harmonics ? advance<Real, Scores, true>(plan, s, zeta, tau) : advance<Real, Scores, false>(plan, s, zeta, tau);
  Real* swap = s.psi;
  s.psi = s.next;
  s.next = swap;
}

template <class Real> void sweep(const Plan<Real>& plan, Job<Real>& job) {
  Space<Real> s;
  lay_out(plan, job.workspace, s, kSums);
  const Source<Real> source(plan, job.first);
  start(plan, s, source);
  for (int l = 0; l < L; ++l) job.overflow_step[l] = -1;

  double c[L] = {};
  for (std::int64_t step = 0; step < plan.steps; ++step) {
    if (!(step & 255) && *job.stop) return;
    if (job.record_every && step % job.record_every == 0) record(plan, s, job, step);
    const Real tau = prepare(plan, s, source, step);
    job.reward_sum[step] += reward(plan, s, job.lanes, c, step);
    if (job.scores && plan.rates) rates(plan, s, s.zeta[step & 1], step);
    job.scores ? advance<Real, true>(plan, s, step, tau) : advance<Real, false>(plan, s, step, tau);
    if (job.find_overflow) look_for_overflow(plan, s, job, step + 1);
  }
  if (job.record_every && plan.steps % job.record_every == 0) record(plan, s, job, plan.steps);
  if (!job.find_overflow) look_for_overflow(plan, s, job, plan.steps);
  for (int l = 0; l < L; ++l) job.returns[l] = c[l];
  if (job.scores) {
    const std::int64_t total = parameters(plan);
    const std::int64_t explicit_from = total - (plan.rates ? plan.ports : 0);
    for (std::int64_t i = 0; i < total; ++i)
      for (int l = 0; l < L; ++l)
        job.gradient[i * L + l] =
            s.acc[2 * i * L + l] + (i < explicit_from ? Real(c[l] - plan.reference) * s.acc[(2 * i + 1) * L + l] : Real(0));
  }
}

template <class Real> void replay(const Plan<Real>& plan, const Replay<Real>& r) {
  using V = typename Simd<Real>::V;
  Space<Real> s;
  lay_out(plan, r.workspace, s, kSums);
  const Source<Real> source(plan, r.first);
  if (r.begin == 0) {
    start(plan, s, source);
    for (int l = 0; l < L; ++l) r.c[l] = 0;
  }
  if (r.begin & 1) {  // buffers swap at every step
    Real* swap = s.psi;
    s.psi = s.next;
    s.next = swap;
  }
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
    for (int l = 0; l < L; ++l) r.to_go[slot * r.stride + r.lane + l] = Real(r.returns[l] - r.c[l] - r.centre[step + 1]);
    advance<Real, false>(plan, s, step, tau);
  }
}

extern const Engine<float> engine32;
extern const Engine<double> engine64;
#define FLUCTUA_NAME_(x) #x
#define FLUCTUA_NAME(x) FLUCTUA_NAME_(x)
const Engine<float> engine32 = {workspace<float>, sweep<float>, replay<float>, columns, &twin32, FLUCTUA_NAME(FLUCTUA_ISA)};
const Engine<double> engine64 = {workspace<double>, sweep<double>, replay<double>, columns, &twin64, FLUCTUA_NAME(FLUCTUA_ISA)};

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
