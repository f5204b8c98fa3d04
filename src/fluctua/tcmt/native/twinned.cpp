// The twin correction on the CPU: the twin's tables, if all trajectories share them; then blocks of trajectories over
// threads, reduced in an order that does not depend on the number of threads.
#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "aligned.hpp"
#include "cpu.hpp"
#include "crew.hpp"
#include "twin.hpp"

namespace nb = nanobind;

namespace fluctua {
namespace {

constexpr std::int64_t kGroups = 128;  // sums are kept per group of blocks, and added in the groups' order
constexpr int kParts = 3;              // direct, correction, and the two together

template <class Real> struct Bench {  // what one thread works on
  Bench(std::int64_t workspace, std::int64_t gradient) : workspace(workspace), direct(gradient), correction(gradient) {}
  Aligned<Real> workspace, direct, correction;
};

struct Sums {
  std::vector<double> moments, reward, prefix;  // (kParts, 3, parameters): Σv, Σv², Σ(v₂ⱼ + v₂ⱼ₊₁)²
};

template <class Real> void reduce(std::int64_t total, const TwinJob<Real>& job, std::vector<double>& moments) {
  for (std::int64_t i = 0; i < total; ++i) {
    double v[kParts][kLanes];
    for (int l = 0; l < kLanes; ++l) {
      v[0][l] = double(job.direct[i * kLanes + l]);
      v[1][l] = double(job.correction[i * kLanes + l]);
      v[2][l] = v[0][l] + v[1][l];
    }
    for (int part = 0; part < kParts; ++part) {
      double first = 0, second = 0, pairs = 0;
      for (int l = 0; l < job.lanes; ++l) {
        first += v[part][l];
        second += v[part][l] * v[part][l];
        if (l & 1) pairs += (v[part][l - 1] + v[part][l]) * (v[part][l - 1] + v[part][l]);
      }
      double* m = moments.data() + part * 3 * total + i;
      m[0] += first;
      m[total] += second;
      m[2 * total] += pairs;
    }
  }
}

template <class Real> struct Tables {  // of a twin that all trajectories share
  Tables(const Plan<Real>& plan, std::int64_t rows)
      : path(rows * 2 * plan.sites), adjoint(rows * 2 * plan.sites), value(rows) {}
  Aligned<Real> path, adjoint;
  std::vector<double> value;
};

}  // namespace

template <class Real>
bool run_twin(const Arrays& given, const Arrays& of_twin, const Arrays& out, const std::string& engine_name) {
  const Plan<Real> plan = plan_of<Real>(given);
  const TwinEngine<Real>& engine = *choose<Real>(engine_name).twin;
  Twin<Real> twin{};
  twin.plan = plan_of<Real>(of_twin);
  twin.segment = of_twin.number<int>("segment");
  twin.rank = of_twin.number<int>("rank");
  twin.full = of_twin.number<bool>("full");
  twin.basis = of_twin.in<Real>("basis");
  twin.curvature = of_twin.in<Real>("curvature");

  const std::int64_t count = given.number<std::int64_t>("count"), first = given.number<std::int64_t>("first");
  const std::int64_t total = parameters(plan), blocks = (count + kLanes - 1) / kLanes, groups = std::min(blocks, kGroups);
  const int threads = int(std::max<std::int64_t>(1, std::min<std::int64_t>(given.number<int>("threads"), groups)));
  double* returns = out.out<double>("returns");
  double* gained = out.out<double>("gained");          // Λ_0
  double* moments = out.out<double>("moments");        // (kParts, 3, parameters)
  double* reward_sum = out.out<double>("reward_sum");  // (steps)
  double* prefix_sum = out.out<double>("prefix_sum");  // (steps + 1)
  Real *direct = out.out<Real>("direct"), *correction = out.out<Real>("correction");  // (count, parameters) or null
  std::int64_t* overflow = out.out<std::int64_t>("overflow");  // first trajectory whose state, whose twin; −1: none

  volatile bool stop = false;
  std::unique_ptr<Tables<Real>> tables;
  if (!twin.plan.harmonics) {
    tables = std::make_unique<Tables<Real>>(plan, twin.full ? plan.steps + 1 : segments(twin) + 1);
    twin.path = tables->path.data;
    twin.adjoint = tables->adjoint.data;
    twin.value = tables->value.data();
  }
  std::vector<std::unique_ptr<Bench<Real>>> benches(threads);
  std::vector<Sums> sums(groups);
  std::vector<std::array<bool, 2>> bad(count);

  auto task = [&](std::int64_t group, int worker) {
    if (stop) return;
    auto& bench = benches[worker];
    if (!bench) bench = std::make_unique<Bench<Real>>(engine.workspace(plan, twin, false), total * kLanes);
    Sums& sum = sums[group];
    sum.moments.assign(kParts * 3 * total, 0);
    sum.reward.assign(plan.steps, 0);
    sum.prefix.assign(plan.steps + 1, 0);
    for (std::int64_t block = group; block < blocks && !stop; block += groups) {
      double block_returns[kLanes], block_gained[kLanes];
      TwinJob<Real> job{};
      job.first = std::uint32_t(first + block * kLanes);
      job.lanes = int(std::min<std::int64_t>(kLanes, count - block * kLanes));
      job.stop = &stop;
      job.workspace = bench->workspace.data;
      job.direct = bench->direct.data;
      job.correction = bench->correction.data;
      job.returns = block_returns;
      job.gained = block_gained;
      job.reward_sum = sum.reward.data();
      job.prefix_sum = sum.prefix.data();
      engine.sweep(plan, twin, job);
      if (stop) return;
      reduce(total, job, sum.moments);
      for (int l = 0; l < job.lanes; ++l) {
        const std::int64_t j = block * kLanes + l;
        returns[j] = block_returns[l];
        gained[j] = block_gained[l];
        bad[j] = {job.overflow[l], job.twin_overflow[l]};
        for (std::int64_t i = 0; direct && i < total; ++i) {
          direct[j * total + i] = job.direct[i * kLanes + l];
          correction[j * total + i] = job.correction[i * kLanes + l];
        }
      }
    }
  };

  nb::gil_scoped_release release;
  auto interrupted = [] {
    nb::gil_scoped_acquire acquire;
    return PyErr_CheckSignals() != 0;
  };
  overflow[0] = overflow[1] = -1;
  if (tables) {
    bool finite = true;
    auto fill = [&](std::int64_t, int) {
      Aligned<Real> workspace(engine.workspace(plan, twin, true));
      finite = engine.tabulate(plan, twin, workspace.data, &stop);
    };
    if (!Crew::run(1, 1, fill, interrupted, stop)) return false;
    if (!finite) {
      overflow[1] = first;
      return true;
    }
  }
  if (!Crew::run(threads, groups, task, interrupted, stop)) return false;

  for (std::int64_t j = count - 1; j >= 0; --j)
    for (int which = 0; which < 2; ++which)
      if (bad[j][which]) overflow[which] = first + j;
  std::fill(moments, moments + kParts * 3 * total, 0.0);
  std::fill(reward_sum, reward_sum + plan.steps, 0.0);
  std::fill(prefix_sum, prefix_sum + plan.steps + 1, 0.0);
  for (const Sums& sum : sums) {
    for (std::int64_t i = 0; i < kParts * 3 * total; ++i) moments[i] += sum.moments[i];
    for (std::int64_t n = 0; n < plan.steps; ++n) reward_sum[n] += sum.reward[n];
    for (std::int64_t n = 0; n <= plan.steps; ++n) prefix_sum[n] += sum.prefix[n];
  }
  return true;
}

template bool run_twin<float>(const Arrays&, const Arrays&, const Arrays&, const std::string&);
template bool run_twin<double>(const Arrays&, const Arrays&, const Arrays&, const std::string&);

}  // namespace fluctua
