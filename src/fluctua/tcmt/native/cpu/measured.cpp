// Scores of measured states of a device, against the network of a plan. Lanes are consecutive samples of one
// trajectory: from each of them the noise-free network goes on to the next, in `stride` steps of the plan's Δt,
//
//   r_n = ψ_{n+1} − Φ(ψ_n),   ζ = r/(2Q),   U_ω = ζ × ψ̄,   U_χ = ζ × ⟨|ψ|²ψ⟩,   U_Γ = −ζ·ψ̄,
//   U_κ = ζ_n × ψ̄_m + ζ_m × ψ̄_n,
//
// with ψ̄ the mean over those steps, so that ∂Φ = ∂μ(ψ̄)·stride·Δt up to what the network itself does meanwhile. With a
// stride of 1 that is the score of an Euler step. Compiled once per instruction set.
#include "parts.hpp"
#include "step.hpp"

namespace fluctua {
namespace FLUCTUA_ISA {

constexpr int kRow = 2 * L;  // of L + 1 samples, and room for a whole vector after the second

template <class Real> struct Samples {
  Real *window, *psi, *next, *mean, *bright, *acc, *force;
};

template <class Real> std::int64_t lay_out(const Plan<Real>& plan, Real* base, Samples<Real>& s) {
  const std::int64_t n = plan.sites;
  Real* p = base;
  s.window = carve(p, 4 * n);
  s.psi = carve(p, 2 * n);
  s.next = carve(p, 2 * n);
  s.mean = carve(p, 2 * n);
  s.bright = carve(p, 2 * n);
  s.acc = carve(p, 3 * n + plan.bonds);
  s.force = p;
  return (p - base) + (2 * n + L - 1) / L * L;
}

template <class Real> std::int64_t measured_space(const Plan<Real>& plan) {
  Samples<Real> s;
  return lay_out(plan, static_cast<Real*>(nullptr), s);
}

// ψ of L + 1 samples, those after the last as zeros; and the first L of them as the state to go on from.
template <class Real> void gather(const Plan<Real>& plan, const Samples<Real>& s, const Real* x, int lanes) {
  const std::int64_t n = plan.sites;
  for (int l = 0; l <= L; ++l) {
    const Real* from = x + l * 2 * n;
    if (l <= lanes)
      for (std::int64_t i = 0; i < n; ++i) {
        s.window[2 * i * kRow + l] = from[i];
        s.window[(2 * i + 1) * kRow + l] = from[n + i];
      }
    else
      for (std::int64_t i = 0; i < 2 * n; ++i) s.window[i * kRow + l] = 0;
  }
  for (std::int64_t i = 0; i < 2 * n; ++i)
    for (int l = 0; l < L; ++l) s.psi[i * L + l] = s.window[i * kRow + l];
}

// One noise-free step; its state is added to the means.
template <class Real> void onward(const Plan<Real>& plan, const Samples<Real>& s, bool first) {
  using S = Simd<Real>;
  using V = typename S::V;
  const Space<Real> none{};
  for (int n = 0; n < plan.sites; ++n)
    for (int u = 0; u < L; u += S::width) {
      const std::int64_t re = 2 * n * L + u, im = re + L;
      const V yr = load<V>(s.psi + re), yi = load<V>(s.psi + im), power = yr * yr + yi * yi;
      V hr, hi, dr, di;
      couple<false>(plan, none, s.psi, n, u, Real(0), hr, hi);
      drift(plan, s.force, n, yr, yi, power, hr, hi, dr, di);
      store(s.next + re, yr + dr);
      store(s.next + im, yi + di);
      store(s.mean + re, first ? yr : load<V>(s.mean + re) + yr);
      store(s.mean + im, first ? yi : load<V>(s.mean + im) + yi);
      store(s.bright + re, first ? power * yr : load<V>(s.bright + re) + power * yr);
      store(s.bright + im, first ? power * yi : load<V>(s.bright + im) + power * yi);
    }
}

// ζ/stride in place of the state: the mean is a sum until here.
template <class Real> void kicks(const Plan<Real>& plan, const Samples<Real>& s, int lanes, int stride) {
  for (std::int64_t n = 0; n < plan.sites; ++n) {
    const Real factor = plan.kick[n] > 0 ? Real(1) / (plan.kick[n] * Real(stride)) : Real(0);
    for (std::int64_t i = 2 * n; i < 2 * n + 2; ++i)
      for (int l = 0; l < L; ++l)
        s.psi[i * L + l] = l < lanes ? (s.window[i * kRow + l + 1] - s.psi[i * L + l]) * factor : Real(0);
  }
}

template <class Real, class V> FLUCTUA_INLINE void add(Real* to, V v) { store(to, load<V>(to) + v); }

// Scores of ω, χ, Γ and κ.
template <class Real> void scores(const Plan<Real>& plan, const Samples<Real>& s) {
  using S = Simd<Real>;
  using V = typename S::V;
  const std::int64_t sites = plan.sites;
  for (int n = 0; n < plan.sites; ++n)
    for (int u = 0; u < L; u += S::width) {
      const std::int64_t re = 2 * n * L + u, im = re + L;
      const V zr = load<V>(s.psi + re), zi = load<V>(s.psi + im);
      const V yr = load<V>(s.mean + re), yi = load<V>(s.mean + im);
      add(s.acc + n * L + u, cross(zr, zi, yr, yi));
      add(s.acc + (sites + n) * L + u, cross(zr, zi, load<V>(s.bright + re), load<V>(s.bright + im)));
      add(s.acc + (2 * sites + n) * L + u, -(zr * yr + zi * yi));
      for (int b = plan.upper_start[n]; b < plan.upper_start[n + 1]; ++b) {
        const std::int64_t at = 2 * plan.upper_site[b] * L + u;
        add(s.acc + (3 * sites + b) * L + u, cross(zr, zi, load<V>(s.mean + at), load<V>(s.mean + at + L)) +
                                                 cross(load<V>(s.psi + at), load<V>(s.psi + at + L), yr, yi));
      }
    }
}

template <class Real> void measured(const Plan<Real>& plan, const Measured<Real>& job) {
  Samples<Real> s;
  lay_out(plan, job.workspace, s);
  set_force(plan, 0, s.force);
  const std::int64_t total = 3 * std::int64_t(plan.sites) + plan.bonds;
  for (std::int64_t i = 0; i < total * L; ++i) s.acc[i] = 0;
  for (std::int64_t i = 0; i < 2 * plan.sites * std::int64_t(kRow); ++i) s.window[i] = 0;
  for (std::int64_t n = 0; n < job.samples; n += L) {
    const int lanes = int(job.samples - n < L ? job.samples - n : L);
    gather(plan, s, job.x + n * 2 * plan.sites, lanes);
    for (int k = 0; k < job.stride; ++k) {
      onward(plan, s, k == 0);
      Real* swap = s.psi;
      s.psi = s.next;
      s.next = swap;
    }
    kicks(plan, s, lanes, job.stride);
    scores(plan, s);
  }
  for (std::int64_t i = 0; i < total; ++i) {
    double sum = 0;
    for (int l = 0; l < L; ++l) sum += s.acc[i * L + l];
    job.sums[i] = sum;
  }
}

extern const MeasuredEngine<float> measured32;
extern const MeasuredEngine<double> measured64;
const MeasuredEngine<float> measured32 = {measured_space<float>, measured<float>};
const MeasuredEngine<double> measured64 = {measured_space<double>, measured<double>};

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
