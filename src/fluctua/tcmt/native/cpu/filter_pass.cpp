// The filter of sampled states over threads: one trajectory per task, added in their order whatever the threads.
// Gains and variances of the filter, and the gradient by the noise that they are made of, are computed here.
#include "driver.hpp"

namespace fluctua {
namespace {

constexpr std::int64_t kWidth = 16;  // whole vectors of every instruction set

std::int64_t round_up(std::int64_t n) { return (n + kWidth - 1) / kWidth * kWidth; }

// Gains K and variances S of the samples, from a state that is known:
//   S = P + R,   K = P/S,   P' = decay(1 − K)P + q,   P_0 = q;   without readout noise K = 1, S = q.
struct Gains {
  std::int64_t count, sites;
  bool noisy;
  double readout;  // R
  const double *q, *decay;
  std::vector<double> gain, inverse;  // K and 1/S (count, sites)

  Gains(std::int64_t count, std::int64_t sites, bool noisy, double readout, const double* q, const double* decay)
      : count(count),
        sites(sites),
        noisy(noisy),
        readout(readout),
        q(q),
        decay(decay),
        gain(count * sites),
        inverse(count * sites) {
    std::vector<double> p(q, q + sites);
    bool steady = false;
    for (std::int64_t t = 0; t < count; ++t) {
      double *k = gain.data() + t * sites, *r = inverse.data() + t * sites;
      if (steady) {
        std::copy_n(k - sites, sites, k);
        std::copy_n(r - sites, sites, r);
        continue;
      }
      steady = true;
      for (std::int64_t n = 0; n < sites; ++n) {
        r[n] = 1 / (noisy ? p[n] + readout : q[n]);
        k[n] = noisy ? p[n] * r[n] : 1.0;
        const double next = decay[n] * (1 - k[n]) * p[n] + q[n];
        steady = steady && next == p[n];
        p[n] = next;
      }
    }
  }

  // Gradients by ln of the noise amplitudes (sites) and of the readout, q ∝ a² and R = r², from those by K and S.
  double pull(const double* by_gain, const double* by_variance, double* by_noise) const {
    std::vector<double> by_q(sites, 0.0), by_p(sites, 0.0);  // by_p: by P of the sample after
    std::vector<double> by_readout(sites, 0.0);
    for (std::int64_t t = count - 1; t >= 0; --t) {
      const double *k = gain.data() + t * sites, *r = inverse.data() + t * sites;
      const double *to_k = by_gain + t * sites, *to_s = by_variance + t * sites;
      for (std::int64_t n = 0; n < sites; ++n) {
        by_q[n] += noisy ? by_p[n] : to_s[n];
        // P = KS, and K = P/S: what comes by P of the sample after goes through K as well
        const double to_gain = to_k[n] - by_p[n] * decay[n] * k[n] / r[n];
        const double to_variance = to_s[n] - to_gain * k[n] * r[n];
        by_p[n] = noisy ? by_p[n] * decay[n] * (1 - k[n]) + to_gain * r[n] + to_variance : 0.0;
        by_readout[n] += to_variance;
      }
    }
    double total = 0;
    for (std::int64_t n = 0; n < sites; ++n) {
      by_noise[n] = 2 * q[n] * (by_q[n] + by_p[n]);
      total += by_readout[n];
    }
    return noisy ? 2 * readout * total : 0.0;
  }
};

template <class Real> std::vector<Real> padded(const Real* from, std::int64_t sites, std::int64_t width) {
  std::vector<Real> row(width, Real(0));
  std::copy(from, from + sites, row.begin());
  return row;
}

// The arrays of a `SampledNetwork`.
template <class Real> struct NetworkRows {
  NetworkRows(const Fields& given, std::int64_t sites, std::int64_t diagonals)
      : width(round_up(sites)), offset(given.in<std::int64_t>("offsets", diagonals)) {
    for (std::int64_t d = 0; d < diagonals; ++d) {
      if (offset[d] < 1 || offset[d] >= sites)
        throw std::invalid_argument("`offsets` must lie between 1 and the number of sites");
      pad = std::max(pad, round_up(offset[d]));
    }
    const Real* diagonal = given.in<Real>("diagonals", length({diagonals, sites}));
    coupling.assign(diagonals * (pad + width), Real(0));
    for (std::int64_t d = 0; d < diagonals; ++d)  // beyond the last bond of a diagonal nothing is coupled
      std::copy(diagonal + d * sites, diagonal + (d + 1) * sites - offset[d],
                coupling.begin() + d * (pad + width) + pad);
    const char* names[] = {"omega", "chi", "damping", "force_real", "force_imag"};
    for (int i = 0; i < 5; ++i) rows[i] = padded(given.in<Real>(names[i], sites), sites, width);
  }
  std::int64_t width, pad = 0;
  const std::int64_t* offset;
  std::vector<Real> coupling, rows[5];
};

// What one trajectory adds.
template <class Real> struct FilterSums {
  FilterSums(std::int64_t count, std::int64_t width, std::int64_t diagonals, bool scores)
      : energy(count * width), by_gain(scores ? count * width : 0), sums((6 + diagonals) * width) {}
  std::vector<Real> energy, by_gain;
  std::vector<double> sums;  // lagged, own (2), cubic, pull (2), cross
};

}  // namespace

template <class Real> bool filter_pass(const Fields& given, const Fields& job, const std::string& engine_name) {
  const FilterEngine<Real>& engine = *choose<Real>(engine_name).filter;
  constexpr std::int64_t most = (std::int64_t(1) << 31) - 1;
  const std::int64_t sites = given.number<std::int64_t>("sites", 1, most);
  const std::int64_t diagonals = given.number<std::int64_t>("diagonal_count", 0, most);
  const NetworkRows<Real> rows(given, sites, diagonals);
  const std::int64_t width = rows.width;
  SampledNetwork<Real> net{sites,
                           width,
                           rows.pad,
                           diagonals,
                           rows.offset,
                           rows.coupling.data(),
                           rows.rows[0].data(),
                           rows.rows[1].data(),
                           rows.rows[2].data(),
                           rows.rows[3].data(),
                           rows.rows[4].data(),
                           given.number<double>("interval"),
                           given.number<int>("steps", 1, most)};

  const std::int64_t trajectories = job.number<std::int64_t>("trajectories", 1, most);
  const std::int64_t count = job.number<std::int64_t>("intervals", 1, most);
  const int most_threads = job.number<int>("threads", 1, 4096);
  const bool noisy = job.number<bool>("noisy"), scores = job.number<bool>("scores");
  const Real* samples = job.in<Real>("samples", length({trajectories, count + 1, 2, sites}));
  const Gains gains(count, sites, noisy, job.number<double>("readout"), job.in<double>("variance", sites),
                    job.in<double>("decay", sites));
  Real* middle = job.out<Real>("middle", length({trajectories, count, sites, 2}), true);
  double* squares = job.out<double>("squares", sites);
  double* lagged = job.out<double>("lagged", sites);
  double* products = scores ? job.out<double>("products", (5 + diagonals) * sites) : nullptr;
  double* by_noise = scores ? job.out<double>("by_noise", sites) : nullptr;
  double* by_readout = scores ? job.out<double>("by_readout", 1) : nullptr;

  nanobind::gil_scoped_release release;
  std::vector<Real> gain(count * width, Real(0)), inverse(count * width, Real(0));
  for (std::int64_t t = 0; t < count; ++t)
    for (std::int64_t n = 0; n < sites; ++n) {
      gain[t * width + n] = Real(gains.gain[t * sites + n]);
      inverse[t * width + n] = Real(gains.inverse[t * sites + n]);
    }
  const int threads = int(std::min<std::int64_t>(most_threads, trajectories));
  std::vector<FilterSums<Real>> each;
  std::vector<std::unique_ptr<Aligned<Real>>> spaces(threads);
  for (int i = 0; i < threads; ++i) each.emplace_back(count, width, diagonals, scores);
  std::vector<double> energy(count * sites, 0.0), by_gain(scores ? count * sites : 0, 0.0);
  std::vector<double> total((6 + diagonals) * width, 0.0);
  volatile bool stop = false;
  for (std::int64_t begin = 0; begin < trajectories; begin += threads) {
    const std::int64_t now = std::min<std::int64_t>(threads, trajectories - begin);
    auto task = [&](std::int64_t index, int) {
      auto& space = spaces[index];
      if (!space) space = std::make_unique<Aligned<Real>>(engine.workspace(net, count));
      FilterSums<Real>& own = each[index];
      std::fill(own.sums.begin(), own.sums.end(), 0.0);
      double* sum = own.sums.data();
      FilterRun<Real> run{};
      run.samples = samples + (begin + index) * (count + 1) * 2 * sites;
      run.count = count;
      run.from_first_sample = !noisy;
      run.scores = scores;
      run.gain = gain.data();
      run.inverse_variance = inverse.data();
      run.stop = &stop;
      run.workspace = space->data;
      run.energy = own.energy.data();
      run.by_gain = own.by_gain.data();
      run.middle = middle ? middle + (begin + index) * count * sites * 2 : nullptr;
      for (double** to : {&run.lagged, &run.own_real, &run.own_imag, &run.cubic, &run.pull_real, &run.pull_imag}) {
        *to = sum;
        sum += width;
      }
      run.cross = sum;
      engine.filter(net, run);
    };
    if (!Crew::run(int(now), now, task, interrupted, stop)) return false;
    for (std::int64_t index = 0; index < now; ++index) {
      const FilterSums<Real>& own = each[index];
      for (std::size_t i = 0; i < total.size(); ++i) total[i] += own.sums[i];
      for (std::int64_t t = 0; t < count; ++t)
        for (std::int64_t n = 0; n < sites; ++n) {
          energy[t * sites + n] += own.energy[t * width + n];
          if (scores) by_gain[t * sites + n] += own.by_gain[t * width + n];
        }
    }
  }

  const double innovations = double(trajectories) * double(count);
  std::fill_n(squares, sites, 0.0);
  for (std::int64_t t = 0; t < count; ++t)
    for (std::int64_t n = 0; n < sites; ++n) squares[n] += energy[t * sites + n] * gains.inverse[t * sites + n];
  for (std::int64_t n = 0; n < sites; ++n) {
    squares[n] /= 2 * innovations;
    lagged[n] = total[n] / (double(trajectories) * double(count - 1));
  }
  if (!scores) return true;
  for (std::int64_t row = 0; row < 5 + diagonals; ++row)
    std::copy_n(total.data() + (row + 1) * width, sites, products + row * sites);
  for (std::size_t i = 0; i < energy.size(); ++i) {  // ∂ℓ/∂S of ℓ = −|e|²/2S − ln S
    const double r = gains.inverse[i];
    energy[i] = (energy[i] * r / 2 - double(trajectories)) * r;
  }
  by_readout[0] = gains.pull(by_gain.data(), energy.data(), by_noise);
  return true;
}

template bool filter_pass<float>(const Fields&, const Fields&, const std::string&);
template bool filter_pass<double>(const Fields&, const Fields&, const std::string&);

}  // namespace fluctua
