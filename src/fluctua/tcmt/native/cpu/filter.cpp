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

// Rows do not overlap: iterations of the next loop are independent.
#ifdef __clang__
#define FLUCTUA_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define FLUCTUA_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace fluctua {
namespace FLUCTUA_ISA {

constexpr std::int64_t kFlush = 64;  // intervals whose sums are added in the precision of the state

// A row of sites, complex.
template <class Real> struct Row {
  Real *re, *im;
};

template <class Real> struct FilterSpace {
  Row<Real> a, b, c, d;              // states of the four stages of a step, padded
  Row<Real> total, pull, last;       // Σ of rates; λ, and λ at the end of the interval
  Row<Real> adjoint, other, middle;  // padded
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
  for (Row<Real>* r : {&s.total, &s.pull, &s.last}) *r = row();
  for (Row<Real>* r : {&s.a, &s.b, &s.c, &s.d, &s.adjoint, &s.other, &s.middle}) *r = row(net.pad);
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

template <class Real> void copy_row(std::int64_t width, const Real* from, Row<Real> to) {
  for (std::int64_t n = 0; n < width; ++n) to.re[n] = from[n];
  for (std::int64_t n = 0; n < width; ++n) to.im[n] = from[width + n];
}

template <class Real> void keep_row(std::int64_t width, Row<Real> from, Real* to) {
  for (std::int64_t n = 0; n < width; ++n) to[n] = from.re[n];
  for (std::int64_t n = 0; n < width; ++n) to[width + n] = from.im[n];
}

// Vectors of consecutive sites; at an offset they are not aligned.
template <class Real> FLUCTUA_INLINE typename Simd<Real>::V sites_at(const Real* p) {
  typename Simd<Real>::V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class Real> FLUCTUA_INLINE void put_sites(Real* p, typename Simd<Real>::V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

// κψ at a vector of sites.
template <class Real>
FLUCTUA_INLINE void couple_sites(const SampledNetwork<Real>& net, Row<Real> psi, std::int64_t n,
                                 typename Simd<Real>::V& hr, typename Simd<Real>::V& hi) {
  hr = hi = typename Simd<Real>::V{};
  const Real* k = net.coupling + net.pad + n;
  for (std::int64_t d = 0; d < net.diagonals; ++d, k += net.pad + net.width) {
    const std::int64_t above = n + net.offset[d], below = n - net.offset[d];
    const auto to_above = sites_at(k), to_below = sites_at(k - net.offset[d]);
    hr += to_above * sites_at(psi.re + above) + to_below * sites_at(psi.re + below);
    hi += to_above * sites_at(psi.im + above) + to_below * sites_at(psi.im + below);
  }
}

// each(n, real part, imaginary part) of the drift at ψ, for vectors of sites.
template <class Real, class Each>
FLUCTUA_INLINE void drift_sites(const SampledNetwork<Real>& net, Row<Real> psi, Each each) {
  using V = typename Simd<Real>::V;
  for (std::int64_t n = 0; n < net.width; n += Simd<Real>::width) {
    V hr, hi, dr, di;
    couple_sites(net, psi, n, hr, hi);
    drift_term(sites_at(net.omega + n), sites_at(net.chi + n), sites_at(net.damping + n), sites_at(psi.re + n),
               sites_at(psi.im + n), hr, hi, sites_at(net.force_real + n), sites_at(net.force_imag + n), dr, di);
    each(n, dr, di);
  }
}

// each(n, real part, imaginary part) of Jᵀλ, J that of the drift at ψ.
template <class Real, class Each>
FLUCTUA_INLINE void pull_sites(const SampledNetwork<Real>& net, Row<Real> psi, Row<Real> adjoint, Each each) {
  using V = typename Simd<Real>::V;
  for (std::int64_t n = 0; n < net.width; n += Simd<Real>::width) {
    V hr, hi, dr, di;
    couple_sites(net, adjoint, n, hr, hi);
    pull_term(sites_at(net.omega + n), sites_at(net.chi + n), sites_at(net.damping + n), sites_at(psi.re + n),
              sites_at(psi.im + n), sites_at(adjoint.re + n), sites_at(adjoint.im + n), hr, hi, dr, di);
    each(n, dr, di);
  }
}

// to = a + factor·(drift at ψ); the drift is added to s.total with a weight, or put there.
template <bool first, class Real>
void stage(const SampledNetwork<Real>& net, const FilterSpace<Real>& s, Row<Real> psi, Row<Real> to, Real factor,
           Real weight) {
  using V = typename Simd<Real>::V;
  drift_sites(net, psi, [&](std::int64_t n, V dr, V di) {
    put_sites(to.re + n, sites_at(s.a.re + n) + factor * dr);
    put_sites(to.im + n, sites_at(s.a.im + n) + factor * di);
    put_sites(s.total.re + n, first ? dr : sites_at(s.total.re + n) + weight * dr);
    put_sites(s.total.im + n, first ? di : sites_at(s.total.im + n) + weight * di);
  });
}

// States b, c and d of the stages of a step that begins at a, and the sum of the first three rates.
template <class Real> void stages(const SampledNetwork<Real>& net, const FilterSpace<Real>& s, Real h) {
  stage<true>(net, s, s.a, s.b, h / 2, Real(1));
  stage<false>(net, s, s.b, s.c, h / 2, Real(2));
  stage<false>(net, s, s.c, s.d, h, Real(2));
}

// One step from s.a to s.a.
template <class Real> void step_on(const SampledNetwork<Real>& net, const FilterSpace<Real>& s, Real h) {
  using V = typename Simd<Real>::V;
  stages(net, s, h);
  drift_sites(net, s.d, [&](std::int64_t n, V dr, V di) {
    put_sites(s.a.re + n, sites_at(s.a.re + n) + h / 6 * (sites_at(s.total.re + n) + dr));
    put_sites(s.a.im + n, sites_at(s.a.im + n) + h / 6 * (sites_at(s.total.im + n) + di));
  });
}

// λ before a step that begins at s.a, from that after it, in s.pull.
template <class Real> void step_back(const SampledNetwork<Real>& net, const FilterSpace<Real>& s, Real h) {
  using V = typename Simd<Real>::V;
  stages(net, s, h);
  // λ of a stage's rate is (h/6, h/3, h/3, h/6)λ and what the next stage passes on; s.total keeps λ
  for (std::int64_t n = 0; n < net.width; ++n) {
    s.total.re[n] = s.pull.re[n];
    s.total.im[n] = s.pull.im[n];
    s.adjoint.re[n] = h / 6 * s.pull.re[n];
    s.adjoint.im[n] = h / 6 * s.pull.im[n];
  }
  Row<Real> from = s.adjoint, to = s.other;
  const auto back = [&](Row<Real> psi, Real share, Real passed) {
    pull_sites(net, psi, from, [&](std::int64_t n, V qr, V qi) {
      put_sites(s.pull.re + n, sites_at(s.pull.re + n) + qr);
      put_sites(s.pull.im + n, sites_at(s.pull.im + n) + qi);
      put_sites(to.re + n, share * sites_at(s.total.re + n) + passed * qr);
      put_sites(to.im + n, share * sites_at(s.total.im + n) + passed * qi);
    });
    const Row<Real> swap = from;
    from = to;
    to = swap;
  };
  back(s.d, h / 3, h);
  back(s.c, h / 3, h / 2);
  back(s.b, h / 6, h / 2);
  back(s.a, Real(0), Real(0));
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
    FLUCTUA_INDEPENDENT
    for (std::int64_t n = 0; n < sites; ++n) {
      e.re[n] = y.re[n] - s.a.re[n];
      e.im[n] = y.im[n] - s.a.im[n];
    }
    Real* energy = run.energy + t * w;
    FLUCTUA_INDEPENDENT
    for (std::int64_t n = 0; n < w; ++n) {
      energy[n] = e.re[n] * e.re[n] + e.im[n] * e.im[n];
      s.a.re[n] += gain[n] * e.re[n];
      s.a.im[n] += gain[n] * e.im[n];
    }
    if (t) {
      const Row<Real> before = {s.error + 2 * (t - 1) * w, s.error + (2 * t - 1) * w};
      FLUCTUA_INDEPENDENT
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
  FLUCTUA_INDEPENDENT
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
    FLUCTUA_INDEPENDENT
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
    FLUCTUA_INDEPENDENT
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
    FLUCTUA_INDEPENDENT
    for (std::int64_t n = 0; n < net.sites; ++n) {
      s.middle.re[n] = (begin.re[n] + (y.re[n] - e.re[n])) / 2;
      s.middle.im[n] = (begin.im[n] + (y.im[n] - e.im[n])) / 2;
    }
    FLUCTUA_INDEPENDENT
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
