// The one-pass run on the CPU, and the conversion of a plan from Python.
#include "driver.hpp"
#include "engines.hpp"

namespace nb = nanobind;

namespace fluctua {
namespace {

void check_indices(const char* name, const int* index, std::int64_t count, std::int64_t below) {
  for (std::int64_t i = 0; i < count; ++i)
    if (index[i] < 0 || index[i] >= below)
      throw std::invalid_argument(std::string("`") + name + "` must hold indices below " + std::to_string(below) +
                                  "; got " + std::to_string(index[i]));
}

// Offsets of consecutive ranges: from 0 up to `total`.
void check_ranges(const char* name, const int* start, std::int64_t count, std::int64_t total) {
  bool good = start[0] == 0 && start[count] == total;
  for (std::int64_t i = 0; i < count; ++i) good = good && start[i] <= start[i + 1];
  if (!good) throw std::invalid_argument(std::string("`") + name + "` must ascend from 0 to " + std::to_string(total));
}

}  // namespace

std::vector<std::string> plan_fields() {
  std::vector<std::string> names;
#define NUMBER(type, name)        names.emplace_back(#name);
#define ARRAY(type, name, length) names.emplace_back(#name);
  FLUCTUA_PLAN_NUMBERS(NUMBER)
  FLUCTUA_PLAN_ARRAYS(ARRAY)
#undef NUMBER
#undef ARRAY
  return names;
}

template <class Real> const Engine<Real>& choose(const std::string& name) {
  for (const auto& e : engines<Real>())
    if (name.empty() || name == e.name) return e;
  throw std::invalid_argument("this processor or build has no engine `" + name + "`");
}

template const Engine<float>& choose<float>(const std::string&);
template const Engine<double>& choose<double>(const std::string&);

template <class Real> Plan<Real> plan_of(const Fields& record) {
  Plan<Real> p{};
#define NUMBER(type, name) p.name = record.number<type>(#name);
  FLUCTUA_PLAN_NUMBERS(NUMBER)
#undef NUMBER
  constexpr std::int64_t most = (std::int64_t(1) << 31) - 1;
  for (const char* name : {"sites", "steps", "drive_rows", "incoming_rows", "modulation_steps"})
    record.number<int>(name, 1, most);
  for (const char* name : {"bonds", "ports", "drives", "harmonics"}) record.number<int>(name, 0, most);
  const std::int64_t sites = p.sites, bonds = p.bonds, steps = p.steps, ports = p.ports, drives = p.drives;
  const std::int64_t drive_rows = p.drive_rows, incoming_rows = p.incoming_rows, harmonics = p.harmonics;
  const std::int64_t times = rewards(p);  // at which the drift is evaluated: with Heun's step also at the end
  if ((drive_rows != 1 && drive_rows != times) || (incoming_rows != 1 && incoming_rows != times))
    throw std::invalid_argument("`drive_rows` and `incoming_rows` must be 1 or " + std::to_string(times));
  const std::int64_t pieces = (times + p.modulation_steps - 1) / p.modulation_steps;
  length({drives, drive_rows, 2});  // these products fit, and so do those of the list
  length({ports, incoming_rows, 2});
  length({pieces, harmonics, 6});
  const auto is_optional = [](const char* name) { return std::string(name) == "bar"; };
#define ARRAY(type, name, length) p.name = record.in<type>(#name, length, is_optional(#name));
  FLUCTUA_PLAN_ARRAYS(ARRAY)
#undef ARRAY
  check_ranges("lower_start", p.lower_start, sites, bonds);
  check_ranges("upper_start", p.upper_start, sites, bonds);
  check_indices("lower_site", p.lower_site, bonds, sites);
  check_indices("lower_bond", p.lower_bond, bonds, bonds);
  check_indices("upper_site", p.upper_site, bonds, sites);
  check_indices("bond_given", p.bond_given, bonds, bonds);
  check_indices("drive_site", p.drive_site, drives, sites);
  check_indices("port_site", p.port_site, ports, sites);
  p.inverse_dt = Real(1 / p.dt);
  p.drive_stride = drive_rows > 1 ? 2 * drives : 0;
  p.incoming_stride = incoming_rows > 1 ? 2 * ports : 0;
  return p;
}
template Plan<float> plan_of<float>(const Fields&);
template Plan<double> plan_of<double>(const Fields&);

template <class Real>
bool one_pass(const Fields& given, const Fields& once, const Fields& out, const std::string& engine_name) {
  const Plan<Real> plan = plan_of<Real>(given);
  const Engine<Real>& engine = choose<Real>(engine_name);
  const Trajectories trajectories(once);
  const std::int64_t count = trajectories.count, first = trajectories.first;
  const bool scores = once.number<bool>("scores");
  const int record_every = once.number<int>("record_every", 0, (std::int64_t(1) << 31) - 1);
  const std::int64_t total = scores ? parameters(plan) : 0;
  const std::int64_t records = record_every ? plan.steps / record_every + 1 : 0;

  double* returns = out.out<double>("returns", count);
  double* moments = out.out<double>("moments", 3 * total);
  double* reward_sum = out.out<double>("reward_sum", rewards(plan));
  Real* samples = out.out<Real>("samples", length({count, total}), true);
  Real* record = out.out<Real>("record", length({count, records, plan.sites, 2}), records == 0);
  std::int64_t* overflow = out.out<std::int64_t>("overflow", 2);  // trajectory, step; −1: none

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

  auto run = [&](std::int64_t block, Bench<Real>& bench, Sums& sum) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (bad >= 0 && block * kLanes > bad) return false;  // the run has failed; only an earlier failure matters
    }
    double block_returns[kLanes];
    Job<Real> job = make_job(block, bench);
    job.returns = block_returns;
    job.reward_sum = sum.reward.data();
    engine.sweep(plan, job);
    if (stop) return false;
    for (int l = 0; l < job.lanes; ++l) {
      returns[block * kLanes + l] = block_returns[l];
      if (job.overflow_step[l] >= 0) {
        std::lock_guard<std::mutex> lock(mutex);
        if (bad < 0 || block * kLanes + l < bad) bad = block * kLanes + l;
      }
    }
    for (std::int64_t i = 0; i < total; ++i) {
      const Real* g = job.gradient + i * kLanes;
      Moments(job.lanes, [&](std::int64_t l) { return double(g[l]); }).add_to(sum.moments.data() + i, total);
    }
    if (samples)
      for (int l = 0; l < job.lanes; ++l)
        for (std::int64_t i = 0; i < total; ++i)
          samples[(block * kLanes + l) * total + i] = job.gradient[i * kLanes + l];
    return true;
  };

  nb::gil_scoped_release release;
  const Sizes size = {engine.workspace(plan), total * kLanes, 3 * total, rewards(plan), 0};
  if (!for_all_blocks<Real>(count, trajectories.threads, size, stop, run, moments, reward_sum, nullptr)) return false;
  overflow[0] = overflow[1] = -1;
  if (bad < 0) return true;

  // Replay its block and look after every step.
  Bench<Real> bench(size.workspace, 0);
  Job<Real> job = make_job(bad / kLanes, bench);
  double block_returns[kLanes];
  std::vector<double> ignored(rewards(plan), 0.0);
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

template bool one_pass<float>(const Fields&, const Fields&, const Fields&, const std::string&);
template bool one_pass<double>(const Fields&, const Fields&, const Fields&, const std::string&);

}  // namespace fluctua
