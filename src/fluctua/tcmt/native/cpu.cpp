// The one-pass CPU run: blocks of trajectories over threads, reduced in an order that does not depend on
// the number of threads.
#include "cpu.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

#include "aligned.hpp"
#include "crew.hpp"
#include "engines.hpp"

namespace nb = nanobind;

namespace fluctua {
namespace {

constexpr std::int64_t kGroups = 128;  // sums are kept per group of blocks, and added in the groups' order

template <class Real> struct Bench {  // what one thread works on
  Bench(std::int64_t workspace, std::int64_t gradient) : workspace(workspace), gradient(gradient) {}
  Aligned<Real> workspace, gradient;
};

struct Sums {
  std::vector<double> first, second, pairs, reward;
};

template <class Real> void reduce(const Plan<Real>& plan, const Job<Real>& job, Sums& sums) {
  const std::int64_t total = parameters(plan);
  for (std::int64_t i = 0; i < total; ++i) {
    const Real* g = job.gradient + i * kLanes;
    double first = 0, second = 0, pairs = 0;
    for (int l = 0; l < job.lanes; ++l) {
      first += double(g[l]);
      second += double(g[l]) * double(g[l]);
    }
    for (int l = 0; l + 1 < job.lanes; l += 2) {
      const double both = double(g[l]) + double(g[l + 1]);
      pairs += both * both;
    }
    sums.first[i] += first;
    sums.second[i] += second;
    sums.pairs[i] += pairs;
  }
}

}  // namespace

template <class Real> const Engine<Real>& choose(const std::string& name) {
  for (const auto& e : engines<Real>())
    if (name.empty() || name == e.name) return e;
  throw std::invalid_argument("this processor or build has no engine `" + name + "`");
}

template const Engine<float>& choose<float>(const std::string&);
template const Engine<double>& choose<double>(const std::string&);

template <class Real> Plan<Real> plan_of(const Arrays& a) {
  Plan<Real> p{};
  p.sites = a.number<int>("sites");
  p.bonds = a.number<int>("bonds");
  p.steps = a.number<int>("steps");
  p.ports = a.number<int>("ports");
  p.drives = a.number<int>("drives");
  p.harmonics = a.number<int>("harmonics");
  p.seed = a.number<std::uint64_t>("seed");
  p.noise = a.number<bool>("noise");
  p.antithetic = a.number<bool>("antithetic");
  p.rates = a.number<bool>("rates");
  p.lower_start = a.in<int>("lower_start");
  p.lower_site = a.in<int>("lower_site");
  p.lower_bond = a.in<int>("lower_bond");
  p.upper_start = a.in<int>("upper_start");
  p.upper_site = a.in<int>("upper_site");
  p.inverse_dt = Real(1 / a.number<double>("dt"));
  p.omega = a.in<Real>("omega");
  p.chi = a.in<Real>("chi");
  p.damping = a.in<Real>("damping");
  p.kappa = a.in<Real>("kappa");
  p.kick = a.in<Real>("kick");
  p.scale = a.in<Real>("scale");
  p.start = a.in<Real>("start");
  p.drive_site = a.in<int>("drive_site");
  p.drive = a.in<Real>("drive");
  p.drive_stride = a.number<std::int64_t>("drive_stride");
  p.port_site = a.in<int>("port_site");
  p.gain = a.in<Real>("gain");
  p.weight = a.in<Real>("weight");
  p.incoming = a.in<Real>("incoming");
  p.incoming_stride = a.number<std::int64_t>("incoming_stride");
  p.bar = a.in<double>("bar");
  p.reference = a.number<double>("reference");
  p.modulation_steps = a.number<int>("modulation_steps");
  p.modulation_scale = a.number<double>("modulation_scale");
  p.modulation = a.in<Real>("modulation");
  p.bond_given = a.in<int>("bond_given");
  return p;
}
template Plan<float> plan_of<float>(const Arrays&);
template Plan<double> plan_of<double>(const Arrays&);

template <class Real> bool run_cpu(const Arrays& given, const Arrays& out, const std::string& engine_name) {
  const Plan<Real> plan = plan_of<Real>(given);
  const Engine<Real>& engine = choose<Real>(engine_name);
  const std::int64_t count = given.number<std::int64_t>("count"), first = given.number<std::int64_t>("first");
  const bool scores = given.number<bool>("scores");
  const int record_every = given.number<int>("record_every");
  const std::int64_t total = scores ? parameters(plan) : 0;
  const std::int64_t blocks = (count + kLanes - 1) / kLanes, groups = std::min(blocks, kGroups);
  const int threads = int(std::max<std::int64_t>(1, std::min<std::int64_t>(given.number<int>("threads"), groups)));

  double* returns = out.out<double>("returns");
  double* moments = out.out<double>("moments");        // (3, parameters)
  double* reward_sum = out.out<double>("reward_sum");  // (steps)
  Real* samples = out.out<Real>("samples");            // (count, parameters) or null
  Real* record = out.out<Real>("record");
  std::int64_t* overflow = out.out<std::int64_t>("overflow");  // trajectory, step; −1: none
  const std::int64_t records = record_every ? plan.steps / record_every + 1 : 0;

  std::vector<std::unique_ptr<Bench<Real>>> benches(threads);
  std::vector<Sums> sums(groups);
  volatile bool stop = false;
  std::mutex mutex;
  std::int64_t bad = -1;  // first trajectory that overflowed, as far as is known

  auto make_job = [&](std::int64_t block, Bench<Real>& bench) {
    Job<Real> job{};
    job.first = std::uint32_t(first + block * kLanes);
    job.lanes = int(std::min<std::int64_t>(kLanes, count - block * kLanes));
    job.scores = scores;
    job.stop = &stop;
    job.workspace = bench.workspace.data;
    job.gradient = bench.gradient.data;
    job.record_every = record_every;
    job.records = records;
    job.record = record ? record + block * kLanes * records * plan.sites * 2 : nullptr;
    return job;
  };

  auto task = [&](std::int64_t group, int worker) {
    if (stop) return;
    auto& bench = benches[worker];
    if (!bench) bench = std::make_unique<Bench<Real>>(engine.workspace(plan), total * kLanes);
    Sums& sum = sums[group];
    sum.first.assign(total, 0);
    sum.second.assign(total, 0);
    sum.pairs.assign(total, 0);
    sum.reward.assign(plan.steps, 0);
    for (std::int64_t block = group; block < blocks && !stop; block += groups) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        if (bad >= 0 && block * kLanes > bad) return;  // the run has failed; only an earlier failure matters
      }
      double block_returns[kLanes];
      Job<Real> job = make_job(block, *bench);
      job.returns = block_returns;
      job.reward_sum = sum.reward.data();
      engine.sweep(plan, job);
      if (stop) return;
      for (int l = 0; l < job.lanes; ++l) {
        returns[block * kLanes + l] = block_returns[l];
        if (job.overflow_step[l] >= 0) {
          std::lock_guard<std::mutex> lock(mutex);
          if (bad < 0 || block * kLanes + l < bad) bad = block * kLanes + l;
        }
      }
      if (scores) reduce(plan, job, sum);
      if (samples)
        for (int l = 0; l < job.lanes; ++l)
          for (std::int64_t i = 0; i < total; ++i)
            samples[(block * kLanes + l) * total + i] = job.gradient[i * kLanes + l];
    }
  };

  nb::gil_scoped_release release;
  auto interrupted = [] {
    nb::gil_scoped_acquire acquire;
    return PyErr_CheckSignals() != 0;
  };
  if (!Crew::run(threads, groups, task, interrupted, stop)) return false;

  overflow[0] = overflow[1] = -1;
  if (bad >= 0) {  // replay its block and look after every step
    Bench<Real> bench(engine.workspace(plan), 0);
    Job<Real> job = make_job(bad / kLanes, bench);
    double block_returns[kLanes];
    std::vector<double> ignored(plan.steps, 0.0);
    job.returns = block_returns;
    job.reward_sum = ignored.data();
    job.scores = false;
    job.record_every = 0;
    job.find_overflow = true;
    engine.sweep(plan, job);
    overflow[0] = first + bad;
    overflow[1] = job.overflow_step[bad % kLanes];
    return true;
  }

  std::fill(moments, moments + 3 * total, 0.0);
  std::fill(reward_sum, reward_sum + plan.steps, 0.0);
  for (const Sums& sum : sums) {
    for (std::int64_t i = 0; i < total; ++i) {
      moments[i] += sum.first[i];
      moments[total + i] += sum.second[i];
      moments[2 * total + i] += sum.pairs[i];
    }
    for (std::int64_t n = 0; n < plan.steps; ++n) reward_sum[n] += sum.reward[n];
  }
  return true;
}

template bool run_cpu<float>(const Arrays&, const Arrays&, const std::string&);
template bool run_cpu<double>(const Arrays&, const Arrays&, const std::string&);

}  // namespace fluctua
