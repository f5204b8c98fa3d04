// The filter of one trajectory of samples and its pass back; see fluctua.tcmt.innovations for the equations.
//
//   ψ⁻ = Φ(ψ_n),   e = y_{n+1} − ψ⁻,   ψ_{n+1} = ψ⁻ + Ke,   ℓ = −Σ|e|²/2S + …
//   λ⁻ = (1 − K)λ_{n+1} + e/S,   λ_n = ∂Φᵀλ⁻,   ∂ℓ/∂K = Re λ_{n+1}*e
//
// Φ: steps of Runge and Kutta. λ in the middle of an interval is (λ_n + λ⁻)/2. Compiled once per instruction set.
#include "filter.hpp"

#include <cmath>
#include <initializer_list>

#include "drift.hpp"
#include "parts.hpp"

namespace fluctua {
namespace FLUCTUA_ISA {

constexpr std::int64_t kFlush = 64;  // intervals whose sums are added in the precision of the state

// A row of sites, complex.
template <class Real> struct Row {
  Real *re, *im;
};

template <class Real> struct FilterSpace {
  std::int64_t width;
  Row<Real> coupled, a, b, c, d, rate, total, last;  // a … d: padded
  Row<Real> pull, middle, adjoint;                   // the last two padded
  Real *own_real, *own_imag, *cubic, *pull_real, *pull_imag, *lagged, *cross;
  Real* path;   // states at the beginnings of the intervals (count, 2, width)
  Real* error;  // e (count, 2, width)
  Real* inner;  // states at the beginnings of the steps of one interval (steps, 2, width)
};

template <class Real>
std::int64_t lay_out(const SampledNetwork<Real>& net, std::int64_t count, Real* base, FilterSpace<Real>& s) {
  const std::int64_t w = net.width;
  std::int64_t used = 0;
  const auto take = [&](std::int64_t elements, std::int64_t pad = 0) {
    Real* at = base + used + pad;
    used += elements + 2 * pad;
    return at;
  };
  const auto row = [&](std::int64_t pad = 0) {
    Row<Real> r;
    r.re = take(w, pad);
    r.im = take(w, pad);
    return r;
  };
  s.width = w;
  for (Row<Real>* r : {&s.coupled, &s.rate, &s.total, &s.last, &s.pull}) *r = row();
  for (Row<Real>* r : {&s.a, &s.b, &s.c, &s.d, &s.middle, &s.adjoint}) *r = row(net.pad);
  for (Real** sum : {&s.own_real, &s.own_imag, &s.cubic, &s.pull_real, &s.pull_imag, &s.lagged}) *sum = take(w);
  s.cross = take(net.diagonals * w);
  s.inner = take(2 * net.steps * w);
  s.path = take(2 * count * w);
  s.error = take(2 * count * w);
  return used;
}

template <class Real> std::int64_t filter_space(const SampledNetwork<Real>& net, std::int64_t count) {
  FilterSpace<Real> s;
  return lay_out<Real>(net, count, nullptr, s);
}

// to = a + factor·b
template <class Real> void add_scaled(std::int64_t width, Row<Real> to, Row<Real> a, Real factor, Row<Real> b) {
#pragma GCC ivdep
  for (std::int64_t n = 0; n < width; ++n) {
    to.re[n] = a.re[n] + factor * b.re[n];
    to.im[n] = a.im[n] + factor * b.im[n];
  }
}

template <class Real> void copy_row(std::int64_t width, const Real* from, Row<Real> to) {
  for (std::int64_t n = 0; n < width; ++n) to.re[n] = from[n];
  for (std::int64_t n = 0; n < width; ++n) to.im[n] = from[width + n];
}

template <class Real> void keep_row(std::int64_t width, Row<Real> from, Real* to) {
  for (std::int64_t n = 0; n < width; ++n) to[n] = from.re[n];
  for (std::int64_t n = 0; n < width; ++n) to[width + n] = from.im[n];
}

// to = κψ, both quadratures.
template <class Real> void couple_sites(const SampledNetwork<Real>& net, Row<Real> psi, Row<Real> to) {
  const std::int64_t w = net.width;
  for (std::int64_t n = 0; n < w; ++n) to.re[n] = to.im[n] = 0;
  for (std::int64_t d = 0; d < net.diagonals; ++d) {
    const std::int64_t offset = net.offset[d];
    const Real* k = net.coupling + d * (net.pad + w) + net.pad;
#pragma GCC ivdep
    for (std::int64_t n = 0; n < w; ++n) {
      to.re[n] += k[n] * psi.re[n + offset] + k[n - offset] * psi.re[n - offset];
      to.im[n] += k[n] * psi.im[n + offset] + k[n - offset] * psi.im[n - offset];
    }
  }
}

// The drift at ψ.
template <class Real>
void drift_sites(const SampledNetwork<Real>& net, const FilterSpace<Real>& s, Row<Real> psi, Row<Real> to) {
  couple_sites(net, psi, s.coupled);
  const Row<Real> h = s.coupled;
#pragma GCC ivdep
  for (std::int64_t n = 0; n < net.width; ++n)
    drift_term(net.omega[n], net.chi[n], net.damping[n], psi.re[n], psi.im[n], h.re[n], h.im[n], net.force_real[n],
               net.force_imag[n], to.re[n], to.im[n]);
}

// Jᵀλ of the drift at ψ; λ is padded.
template <class Real>
void pull_sites(const SampledNetwork<Real>& net, const FilterSpace<Real>& s, Row<Real> psi, Row<Real> adjoint,
                Row<Real> to) {
  couple_sites(net, adjoint, s.coupled);
  const Row<Real> h = s.coupled;
#pragma GCC ivdep
  for (std::int64_t n = 0; n < net.width; ++n)
    pull_term(net.omega[n], net.chi[n], net.damping[n], psi.re[n], psi.im[n], adjoint.re[n], adjoint.im[n], h.re[n],
              h.im[n], to.re[n], to.im[n]);
}

// States of the four stages of a step that begins at s.a: b, c and d are those after it. s.total: Σ of the rates so
// far.
template <class Real> void stages(const SampledNetwork<Real>& net, const FilterSpace<Real>& s, Real h) {
  const std::int64_t w = net.width;
  drift_sites(net, s, s.a, s.total);
  add_scaled(w, s.b, s.a, h / 2, s.total);
  drift_sites(net, s, s.b, s.rate);
  add_scaled(w, s.c, s.a, h / 2, s.rate);
  add_scaled(w, s.total, s.total, Real(2), s.rate);
  drift_sites(net, s, s.c, s.rate);
  add_scaled(w, s.d, s.a, h, s.rate);
  add_scaled(w, s.total, s.total, Real(2), s.rate);
}

// One step from s.a to s.a.
template <class Real> void step_on(const SampledNetwork<Real>& net, const FilterSpace<Real>& s, Real h) {
  stages(net, s, h);
  drift_sites(net, s, s.d, s.rate);
  add_scaled(net.width, s.total, s.total, Real(1), s.rate);
  add_scaled(net.width, s.a, s.a, h / 6, s.total);
}

// λ before a step that begins at s.a, from that after it, in s.pull. s.adjoint is overwritten.
template <class Real> void step_back(const SampledNetwork<Real>& net, const FilterSpace<Real>& s, Real h) {
  const std::int64_t w = net.width;
  stages(net, s, h);
  // λ of a stage's rate is (h/6, h/3, h/3, h/6)λ and what the next stage passes on
  add_scaled(w, s.total, s.pull, Real(0), s.pull);
  const auto stage = [&](Row<Real> psi, Real share, Real passed) {
#pragma GCC ivdep
    for (std::int64_t n = 0; n < w; ++n) {
      s.adjoint.re[n] = share * s.total.re[n] + passed * s.rate.re[n];
      s.adjoint.im[n] = share * s.total.im[n] + passed * s.rate.im[n];
    }
    pull_sites(net, s, psi, s.adjoint, s.rate);
    add_scaled(w, s.pull, s.pull, Real(1), s.rate);
  };
  for (std::int64_t n = 0; n < w; ++n) s.rate.re[n] = s.rate.im[n] = 0;
  stage(s.d, h / 6, Real(0));
  stage(s.c, h / 3, h);
  stage(s.b, h / 3, h / 2);
  stage(s.a, h / 6, h / 2);
}

template <class Real> void flush(std::int64_t count, Real* from, double* to) {
  for (std::int64_t n = 0; n < count; ++n) {
    to[n] += double(from[n]);
    from[n] = 0;
  }
}

// Samples into rows of the vectors' width.
template <class Real> Row<Real> sample_at(const SampledNetwork<Real>& net, const FilterRun<Real>& run, std::int64_t n) {
  Real* from = const_cast<Real*>(run.samples) + 2 * n * net.sites;
  return {from, from + net.sites};
}

template <class Real>
void go_forward(const SampledNetwork<Real>& net, const FilterRun<Real>& run, const FilterSpace<Real>& s) {
  const std::int64_t w = net.width, sites = net.sites;
  const Real h = Real(net.interval / net.steps);
  if (run.from_first_sample) {
    const Row<Real> y = sample_at(net, run, 0);
    for (std::int64_t n = 0; n < sites; ++n) {
      s.a.re[n] = y.re[n];
      s.a.im[n] = y.im[n];
    }
  }
  for (std::int64_t t = 0; t < run.count && !*run.stop; ++t) {
    keep_row(w, s.a, s.path + 2 * t * w);
    const Row<Real> begin = {s.path + 2 * t * w, s.path + (2 * t + 1) * w};
    for (int k = 0; k < net.steps; ++k) step_on(net, s, h);
    const Row<Real> y = sample_at(net, run, t + 1);
    const Row<Real> e = {s.error + 2 * t * w, s.error + (2 * t + 1) * w};
    const Real *gain = run.gain + t * w, *inverse = run.inverse_variance + t * w;
    if (run.middle)
      for (std::int64_t n = 0; n < sites; ++n) {
        run.middle[2 * (t * sites + n)] = (begin.re[n] + s.a.re[n]) / 2;
        run.middle[2 * (t * sites + n) + 1] = (begin.im[n] + s.a.im[n]) / 2;
      }
    for (std::int64_t n = sites; n < w; ++n) e.re[n] = e.im[n] = 0;
#pragma GCC ivdep
    for (std::int64_t n = 0; n < sites; ++n) {
      e.re[n] = y.re[n] - s.a.re[n];
      e.im[n] = y.im[n] - s.a.im[n];
    }
    Real* energy = run.energy + t * w;
#pragma GCC ivdep
    for (std::int64_t n = 0; n < w; ++n) {
      energy[n] = e.re[n] * e.re[n] + e.im[n] * e.im[n];
      s.a.re[n] += gain[n] * e.re[n];
      s.a.im[n] += gain[n] * e.im[n];
    }
    if (t) {
      const Row<Real> before = {s.error + 2 * (t - 1) * w, s.error + (2 * t - 1) * w};
#pragma GCC ivdep
      for (std::int64_t n = 0; n < w; ++n)
        s.lagged[n] += (e.re[n] * before.re[n] + e.im[n] * before.im[n]) *
                       std::sqrt(inverse[n] * run.inverse_variance[(t - 1) * w + n]) / 2;
    }
    if (t % kFlush == kFlush - 1) flush(w, s.lagged, run.lagged);
  }
  flush(w, s.lagged, run.lagged);
}

// Σ λ*ψ and its kin, of one interval: λ in s.adjoint, ψ in s.middle.
template <class Real> void add_products(const SampledNetwork<Real>& net, const FilterSpace<Real>& s) {
  const std::int64_t w = net.width;
  const Row<Real> q = s.adjoint, y = s.middle;
#pragma GCC ivdep
  for (std::int64_t n = 0; n < w; ++n) {
    const Real turn = q.re[n] * y.im[n] - q.im[n] * y.re[n];
    s.own_real[n] += q.re[n] * y.re[n] + q.im[n] * y.im[n];
    s.own_imag[n] += turn;
    s.cubic[n] += turn * (y.re[n] * y.re[n] + y.im[n] * y.im[n]);
    s.pull_real[n] += q.re[n];
    s.pull_imag[n] += q.im[n];
  }
  for (std::int64_t d = 0; d < net.diagonals; ++d) {
    const std::int64_t m = net.offset[d];
    Real* to = s.cross + d * w;
#pragma GCC ivdep
    for (std::int64_t n = 0; n < w; ++n)
      to[n] += (q.re[n] * y.im[n + m] - q.im[n] * y.re[n + m]) + (q.re[n + m] * y.im[n] - q.im[n + m] * y.re[n]);
  }
}

template <class Real>
void flush_products(const SampledNetwork<Real>& net, const FilterRun<Real>& run, const FilterSpace<Real>& s) {
  const std::int64_t w = net.width;
  flush(w, s.own_real, run.own_real);
  flush(w, s.own_imag, run.own_imag);
  flush(w, s.cubic, run.cubic);
  flush(w, s.pull_real, run.pull_real);
  flush(w, s.pull_imag, run.pull_imag);
  flush(net.diagonals * w, s.cross, run.cross);
}

template <class Real>
void go_back(const SampledNetwork<Real>& net, const FilterRun<Real>& run, const FilterSpace<Real>& s) {
  const std::int64_t w = net.width;
  const Real h = Real(net.interval / net.steps);
  for (std::int64_t n = 0; n < w; ++n) s.pull.re[n] = s.pull.im[n] = 0;
  for (std::int64_t t = run.count - 1; t >= 0 && !*run.stop; --t) {
    const Row<Real> e = {s.error + 2 * t * w, s.error + (2 * t + 1) * w};
    const Real *gain = run.gain + t * w, *inverse = run.inverse_variance + t * w;
    Real* by_gain = run.by_gain + t * w;
#pragma GCC ivdep
    for (std::int64_t n = 0; n < w; ++n) {
      by_gain[n] = s.pull.re[n] * e.re[n] + s.pull.im[n] * e.im[n];
      s.pull.re[n] += e.re[n] * inverse[n] - gain[n] * s.pull.re[n];
      s.pull.im[n] += e.im[n] * inverse[n] - gain[n] * s.pull.im[n];
    }
    for (std::int64_t n = 0; n < w; ++n) {
      s.last.re[n] = s.pull.re[n];
      s.last.im[n] = s.pull.im[n];
    }
    copy_row(w, s.path + 2 * t * w, s.a);
    keep_row(w, s.a, s.inner);
    for (int k = 1; k < net.steps; ++k) {
      step_on(net, s, h);
      keep_row(w, s.a, s.inner + 2 * k * w);
    }
    for (int k = net.steps - 1; k >= 0; --k) {
      copy_row(w, s.inner + 2 * k * w, s.a);
      step_back(net, s, h);
    }
    // the middle of the interval: ψ⁻ = y − e
    const Row<Real> y = sample_at(net, run, t + 1);
    const Row<Real> begin = {s.path + 2 * t * w, s.path + (2 * t + 1) * w};
#pragma GCC ivdep
    for (std::int64_t n = 0; n < net.sites; ++n) {
      s.middle.re[n] = (begin.re[n] + (y.re[n] - e.re[n])) / 2;
      s.middle.im[n] = (begin.im[n] + (y.im[n] - e.im[n])) / 2;
    }
#pragma GCC ivdep
    for (std::int64_t n = 0; n < w; ++n) {
      s.adjoint.re[n] = (s.pull.re[n] + s.last.re[n]) / 2;
      s.adjoint.im[n] = (s.pull.im[n] + s.last.im[n]) / 2;
    }
    add_products(net, s);
    if (t % kFlush == 0) flush_products(net, run, s);
  }
}

template <class Real> void filter(const SampledNetwork<Real>& net, const FilterRun<Real>& run) {
  FilterSpace<Real> s;
  const std::int64_t used = lay_out(net, run.count, run.workspace, s);
  const std::int64_t kept = 4 * run.count * net.width;  // path and error are written before they are read
  for (std::int64_t i = 0; i < used - kept; ++i) run.workspace[i] = 0;
  go_forward(net, run, s);
  if (run.scores) go_back(net, run, s);
}

extern const FilterEngine<float> filter32;
extern const FilterEngine<double> filter64;
const FilterEngine<float> filter32 = {filter_space<float>, filter<float>};
const FilterEngine<double> filter64 = {filter_space<double>, filter<double>};

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
