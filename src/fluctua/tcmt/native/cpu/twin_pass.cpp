// The twin correction on the CPU: the twin's tables, if all trajectories share them; then the blocks.
#include <array>

#include "driver.hpp"
#include "twin.hpp"

namespace nb = nanobind;

namespace fluctua {
namespace {

constexpr int kParts = 3;  // direct, correction, and the two together

template <class Real> struct Tables {  // of a twin that all trajectories share
  Tables(const Plan<Real>& plan, std::int64_t rows)
      : path(rows * 2 * plan.sites), adjoint(rows * 2 * plan.sites), value(rows) {}
  Aligned<Real> path, adjoint;
  std::vector<double> value;
};

template <class Real> Twin<Real> twin_of(const Plan<Real>& plan, const Fields& model, const Fields& tables) {
  Twin<Real> twin{};
  twin.plan = plan_of<Real>(model);
  const Plan<Real>& own = twin.plan;
  if (own.sites != plan.sites || own.bonds != plan.bonds || own.steps != plan.steps || own.heun != plan.heun ||
      own.ports != plan.ports || own.drives != plan.drives || (own.harmonics && own.harmonics != plan.harmonics))
    throw std::invalid_argument("a twin has the graph, drives, ports and steps of the network itself");
  twin.segment = tables.number<int>("segment", 1, 2 * std::int64_t(plan.steps) + 1);
  twin.rank = tables.number<int>("rank", 0, plan.sites);
  twin.full = tables.number<bool>("full");
  if (twin.rank && own.harmonics) throw std::invalid_argument("a twin with a quadratic term has no modulation");
  if (twin.full && (twin.rank || own.harmonics))
    throw std::invalid_argument("a twin that is tabulated at every step has neither modulation nor quadratic term");
  twin.basis = tables.in<Real>("basis", length({plan.sites, twin.rank, 2}), twin.rank == 0);
  twin.curvature = tables.in<Real>("curvature", length({segments(twin), twin.rank, twin.rank, 2}), twin.rank == 0);
  return twin;
}

}  // namespace

template <class Real>
bool twin_pass(const Fields& given, const Fields& once, const Fields& model, const Fields& of_twin, const Fields& out,
               const std::string& engine_name) {
  const Plan<Real> plan = plan_of<Real>(given);
  const TwinEngine<Real>& engine = *choose<Real>(engine_name).twin;
  Twin<Real> twin = twin_of(plan, model, of_twin);
  const Trajectories trajectories(once);
  const std::int64_t count = trajectories.count, first = trajectories.first, total = parameters(plan);

  double* returns = out.out<double>("returns", count);
  double* gained = out.out<double>("gained", count);  // Λ_0
  double* moments = out.out<double>("moments", kParts * 3 * total);
  double* reward_sum = out.out<double>("reward_sum", rewards(plan));
  double* prefix_sum = out.out<double>("prefix_sum", std::int64_t(plan.steps) + 1);
  Real* direct = out.out<Real>("direct", length({count, total}), true);
  Real* correction = out.out<Real>("correction", length({count, total}), !direct);
  std::int64_t* overflow = out.out<std::int64_t>("overflow", 2);  // first whose state, whose twin; −1: none

  volatile bool stop = false;
  std::unique_ptr<Tables<Real>> tables;
  if (!twin.plan.harmonics) {
    tables = std::make_unique<Tables<Real>>(plan, twin.full ? plan.steps + std::int64_t(1) : segments(twin) + 1);
    twin.path = tables->path.data;
    twin.adjoint = tables->adjoint.data;
    twin.value = tables->value.data();
  }
  std::vector<std::array<bool, 2>> bad(count);

  auto run = [&](std::int64_t block, Bench<Real>& bench, Sums& sum) {
    double block_returns[kLanes], block_gained[kLanes];
    TwinJob<Real> job{};
    job.first = std::uint32_t(first + block * kLanes);
    job.lanes = int(std::min<std::int64_t>(kLanes, count - block * kLanes));
    job.stop = &stop;
    job.workspace = bench.workspace.data;
    job.direct = bench.gradient.data;
    job.correction = bench.gradient.data + total * kLanes;
    job.returns = block_returns;
    job.gained = block_gained;
    job.reward_sum = sum.reward.data();
    job.prefix_sum = sum.prefix.data();
    engine.sweep(plan, twin, job);
    if (stop) return false;
    for (std::int64_t i = 0; i < total; ++i) {
      const Real *d = job.direct + i * kLanes, *c = job.correction + i * kLanes;
      double* to = sum.moments.data() + i;
      Moments(job.lanes, [&](std::int64_t l) { return double(d[l]); }).add_to(to, total);
      Moments(job.lanes, [&](std::int64_t l) { return double(c[l]); }).add_to(to + 3 * total, total);
      Moments(job.lanes, [&](std::int64_t l) { return double(d[l]) + double(c[l]); }).add_to(to + 6 * total, total);
    }
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
    return true;
  };

  nb::gil_scoped_release release;
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
  const Sizes size = {engine.workspace(plan, twin, false), 2 * total * kLanes, kParts * 3 * total, rewards(plan),
                      std::int64_t(plan.steps) + 1};
  if (!for_all_blocks<Real>(count, trajectories.threads, size, stop, run, moments, reward_sum, prefix_sum))
    return false;
  for (std::int64_t j = count - 1; j >= 0; --j)
    for (int which = 0; which < 2; ++which)
      if (bad[j][which]) overflow[which] = first + j;
  return true;
}

template bool twin_pass<float>(const Fields&, const Fields&, const Fields&, const Fields&, const Fields&,
                               const std::string&);
template bool twin_pass<double>(const Fields&, const Fields&, const Fields&, const Fields&, const Fields&,
                                const std::string&);

}  // namespace fluctua
