// Blocks of trajectories over threads, reduced in an order that does not depend on the number of threads.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "aligned.hpp"
#include "crew.hpp"
#include "passes.hpp"

namespace fluctua {

constexpr std::int64_t kGroups = 128;  // sums are kept per group of blocks, and added in the groups' order

struct Sums {
  std::vector<double> moments, reward, prefix;
  void clear(std::int64_t of_moments, std::int64_t of_reward, std::int64_t of_prefix) {
    moments.assign(of_moments, 0);
    reward.assign(of_reward, 0);
    prefix.assign(of_prefix, 0);
  }
};

// Work of one thread.
template <class Real> struct Bench {
  Bench(std::int64_t workspace, std::int64_t gradient) : workspace(workspace), gradient(gradient) {}
  Aligned<Real> workspace, gradient;
};

// Σv, Σv² and Σ(v₂ⱼ + v₂ⱼ₊₁)² of v(0) … v(count − 1).
struct Moments {
  template <class Value> Moments(std::int64_t count, Value v) {
    for (std::int64_t j = 0; j < count; ++j) {
      const double now = v(j);
      first += now;
      second += now * now;
      if (j & 1) {
        const double both = before + now;
        pairs += both * both;
      }
      before = now;
    }
  }
  // Into rows `total` apart.
  void add_to(double* to, std::int64_t total) const {
    to[0] += first;
    to[total] += second;
    to[2 * total] += pairs;
  }
  double first = 0, second = 0, pairs = 0;

 private:
  double before = 0;
};

// Whether a signal's handler has raised; holds Python's lock meanwhile.
inline bool interrupted() {
  nanobind::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

struct Sizes {  // elements: of a bench, and of the sums
  std::int64_t workspace, gradient, moments, reward, prefix;
};

// run(block, bench, sums) for every block; false from it ends its group. The sums are added up into the three arrays
// (`prefix` may be null). False if interrupted. Python's lock must be free.
template <class Real, class Run>
bool for_all_blocks(std::int64_t count, int most_threads, const Sizes& size, volatile bool& stop, Run run,
                    double* moments, double* reward, double* prefix) {
  const std::int64_t blocks = (count + kLanes - 1) / kLanes, groups = std::min(blocks, kGroups);
  const int threads = int(std::min<std::int64_t>(most_threads, groups));
  std::vector<std::unique_ptr<Bench<Real>>> benches(threads);
  std::vector<Sums> sums(groups);
  auto group = [&](std::int64_t index, int worker) {
    if (stop) return;
    auto& bench = benches[worker];
    if (!bench) bench = std::make_unique<Bench<Real>>(size.workspace, size.gradient);
    sums[index].clear(size.moments, size.reward, size.prefix);
    for (std::int64_t block = index; block < blocks && !stop; block += groups)
      if (!run(block, *bench, sums[index])) return;
  };
  if (!Crew::run(threads, groups, group, interrupted, stop)) return false;
  auto add = [](const std::vector<double>& from, double* to) {
    for (std::size_t i = 0; i < from.size(); ++i) to[i] += from[i];
  };
  std::fill(moments, moments + size.moments, 0.0);
  std::fill(reward, reward + size.reward, 0.0);
  if (prefix) std::fill(prefix, prefix + size.prefix, 0.0);
  for (const Sums& sum : sums) {
    add(sum.moments, moments);
    add(sum.reward, reward);
    if (prefix) add(sum.prefix, prefix);
  }
  return true;
}

}  // namespace fluctua
