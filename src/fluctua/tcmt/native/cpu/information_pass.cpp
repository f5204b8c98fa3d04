// Information about the numbers of a network whose drifts are sums of phase · feature on single sites,
//
//   F_pq = Re Σ_{a∈p, b∈q} (phase_a)* phase_b W[site_a, site_b] G[feature_a, feature_b],
//
// with W and G Hermitian. Rows over threads.
#include <complex>

#include "driver.hpp"

namespace fluctua {

using Complex = std::complex<double>;

bool information_pass(const Fields& terms, const Fields& job) {
  constexpr std::int64_t most = (std::int64_t(1) << 31) - 1;
  const std::int64_t numbers = terms.number<std::int64_t>("numbers", 1, most);
  const std::int64_t count = terms.number<std::int64_t>("count", 0, most);
  const std::int64_t* start = terms.in<std::int64_t>("start", numbers + 1);
  const std::int64_t* site = terms.in<std::int64_t>("site", count);
  const std::int64_t* feature = terms.in<std::int64_t>("feature", count);
  const Complex* phase = terms.in<Complex>("phase", count);
  const std::int64_t sites = job.number<std::int64_t>("sites", 1, most);
  const std::int64_t features = job.number<std::int64_t>("features", 1, most);
  const Complex* weight = job.in<Complex>("weight", length({sites, sites}));
  const Complex* gram = job.in<Complex>("gram", length({features, features}));
  double* out = job.out<double>("information", length({numbers, numbers}));
  bool good = start[0] == 0 && start[numbers] == count;
  for (std::int64_t p = 0; p < numbers; ++p) good = good && start[p] <= start[p + 1];
  for (std::int64_t a = 0; a < count; ++a)
    good = good && 0 <= site[a] && site[a] < sites && 0 <= feature[a] && feature[a] < features;
  if (!good)
    throw std::invalid_argument("terms of the drift must name sites and features that exist, number by number");

  const int threads = int(std::min<std::int64_t>(job.number<int>("threads", 1, 4096), numbers));
  volatile bool stop = false;
  nanobind::gil_scoped_release release;
  // rows p and numbers − 1 − p together: tasks are of equal size
  auto row = [&](std::int64_t p) {
    for (std::int64_t q = p; q < numbers; ++q) {
      double sum = 0;
      for (std::int64_t a = start[p]; a < start[p + 1]; ++a)
        for (std::int64_t b = start[q]; b < start[q + 1]; ++b) {
          const Complex w = weight[site[a] * sites + site[b]], g = gram[feature[a] * features + feature[b]];
          const Complex f = phase[b];
          const double re = w.real() * g.real() - w.imag() * g.imag(), im = w.real() * g.imag() + w.imag() * g.real();
          // Re of (phase_a)* phase_b (re + i im)
          sum += (phase[a].real() * f.real() + phase[a].imag() * f.imag()) * re -
                 (phase[a].real() * f.imag() - phase[a].imag() * f.real()) * im;
        }
      out[p * numbers + q] = out[q * numbers + p] = sum;
    }
  };
  auto task = [&](std::int64_t p, int) {
    row(p);
    if (numbers - 1 - p != p) row(numbers - 1 - p);
  };
  return Crew::run(threads, (numbers + 1) / 2, task, interrupted, stop);
}

}  // namespace fluctua
