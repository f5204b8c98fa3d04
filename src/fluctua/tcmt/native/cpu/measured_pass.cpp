// Scores of measured states over threads: pieces of trajectories, added in their order whatever the threads.
#include "driver.hpp"

namespace fluctua {

constexpr std::int64_t kPiece = 1024;  // samples

template <class Real> bool measured_pass(const Fields& given, const Fields& states, const std::string& engine_name) {
  const Plan<Real> plan = plan_of<Real>(given);
  require_euler(plan, "the score of measured states");
  const MeasuredEngine<Real>& engine = *choose<Real>(engine_name).measured;
  if (plan.harmonics || plan.drive_rows != 1)
    throw std::invalid_argument("measured states are scored for a network without modulation and a constant drive");
  constexpr std::int64_t most = std::int64_t(1) << 31;
  const std::int64_t count = states.number<std::int64_t>("count", 1, most);
  const std::int64_t samples = states.number<std::int64_t>("samples", 1, most);
  const int stride = states.number<int>("stride", 1, most - 1), most_threads = states.number<int>("threads", 1, 4096);
  const std::int64_t row = 2 * std::int64_t(plan.sites), total = 3 * std::int64_t(plan.sites) + plan.bonds;
  const Real* x = states.in<Real>("x", length({count, samples + 1, row}));
  double* sums = states.out<double>("sums", total);

  const std::int64_t pieces = (samples + kPiece - 1) / kPiece, tasks = count * pieces;
  const int threads = int(std::min<std::int64_t>(most_threads, tasks));
  volatile bool stop = false;
  nanobind::gil_scoped_release release;
  std::vector<double> each(length({tasks, total}));
  std::vector<std::unique_ptr<Aligned<Real>>> spaces(threads);
  auto task = [&](std::int64_t index, int worker) {
    if (stop) return;
    if (!spaces[worker]) spaces[worker] = std::make_unique<Aligned<Real>>(engine.workspace(plan));
    const std::int64_t begin = index % pieces * kPiece;
    Measured<Real> job{};
    job.x = x + (index / pieces * (samples + 1) + begin) * row;
    job.samples = std::min(kPiece, samples - begin);
    job.stride = stride;
    job.workspace = spaces[worker]->data;
    job.sums = each.data() + index * total;
    engine.scores(plan, job);
  };
  if (!Crew::run(threads, tasks, task, interrupted, stop)) return false;
  std::fill(sums, sums + total, 0.0);
  for (std::int64_t index = 0; index < tasks; ++index)
    for (std::int64_t i = 0; i < total; ++i) sums[i] += each[index * total + i];
  return true;
}

template bool measured_pass<float>(const Fields&, const Fields&, const std::string&);
template bool measured_pass<double>(const Fields&, const Fields&, const std::string&);

}  // namespace fluctua
