// The second pass on the CPU: all trajectories in lockstep, some steps at a time. Blocks of trajectories are
// replayed into a buffer [step][site][trajectory]; then every site, with its upper bonds, subtracts the binned
// baseline of those steps. Both loops run on the same threads, with a barrier in between.
#include <atomic>
#include <thread>

#include "driver.hpp"

namespace nb = nanobind;

namespace fluctua {
namespace {

constexpr std::int64_t kBufferBytes = 5 << 20;  // two steps of 1,000 trajectories of the paper's lattice: best measured
constexpr std::int64_t kMostSlots = 16;

// Threads meet here; the last to arrive resets what the next loop counts from. Spins, then yields: the loops
// between two meetings last a fraction of a millisecond.
class Meeting {
 public:
  explicit Meeting(int threads) : threads_(threads) {}
  template <class Last> void wait(Last last) {
    const int round = round_.load(std::memory_order_acquire);
    if (here_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      here_.store(0, std::memory_order_relaxed);
      last();
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins)
      if (spins > 2000) std::this_thread::yield();
  }

 private:
  const int threads_;
  std::atomic<int> here_{0}, round_{0};
};

template <class Real> struct Ensemble {
  Ensemble(const Plan<Real>& plan, const Engine<Real>& engine, std::int64_t count, int bins)
      : blocks((count + kLanes - 1) / kLanes),
        stride(blocks * kLanes + kLanes),  // one block more, so that rows do not alias in the cache
        rows(2 * std::int64_t(plan.sites)),
        slots(std::max<std::int64_t>(
            1, std::min(kMostSlots, kBufferBytes / (2 * rows * stride * std::int64_t(sizeof(Real)))))),
        columns(std::int64_t(plan.sites) + plan.bonds),
        space((engine.workspace(plan) + kLanes - 1) / kLanes * kLanes),
        workspace(space * blocks),
        psi(slots * rows * stride),
        zeta(slots * rows * stride),
        to_go(slots * stride),
        gradient((plan.sites + columns) * stride),
        c(blocks * kLanes),
        bin(columns * stride),
        members(columns * bins) {
    std::fill(psi.data, psi.data + slots * rows * stride, Real(0));
    std::fill(zeta.data, zeta.data + slots * rows * stride, Real(0));
    std::fill(to_go.data, to_go.data + slots * stride, Real(0));
    std::fill(gradient.data, gradient.data + (plan.sites + columns) * stride, Real(0));
  }
  std::int64_t blocks, stride, rows, slots, columns, space;
  Aligned<Real> workspace, psi, zeta, to_go, gradient;
  std::vector<double> c;
  std::vector<std::uint8_t> bin;
  std::vector<std::int32_t> members;
};

}  // namespace

template <class Real>
bool binned_pass(const Fields& given, const Fields& once, const Fields& out, const std::string& engine_name) {
  const Plan<Real> plan = plan_of<Real>(given);
  require_euler(plan, "the binned baseline");
  const Engine<Real>& engine = choose<Real>(engine_name);
  const Trajectories trajectories(once);
  const std::int64_t count = trajectories.count, first = trajectories.first, total = parameters(plan);
  const int threads = trajectories.threads;
  const int bins = once.number<int>("bins", 1, kMostBins);
  const int every = once.number<int>("rebin_every", 1, (std::int64_t(1) << 31) - 1);
  if (plan.rates) throw std::invalid_argument("the binned baseline has no rates");
  const double* returns = once.in<double>("first_returns", (count + kLanes - 1) / kLanes * kLanes);
  const double* centre = once.in<double>("centre", std::int64_t(plan.steps) + 1);
  double* moments = out.out<double>("moments", 3 * total);
  Real* samples = out.out<Real>("samples", length({count, total}), true);

  nb::gil_scoped_release release;
  Ensemble<Real> e(plan, engine, count, bins);
  volatile bool stop = false;
  Meeting meeting(threads);
  std::atomic<std::int64_t> next_block{0}, next_site{0};

  bool leave = false;
  const std::int64_t run_length = std::max(1, plan.sites / (4 * threads));
  const std::int64_t scratch_size = 4 * e.stride + 4 * kColumnPiece;
  Aligned<Real> scratch(threads * scratch_size);
  std::fill(scratch.data, scratch.data + threads * scratch_size, Real(0));

  auto work = [&](std::int64_t index, int) {
    std::int64_t end = 0;
    for (std::int64_t begin = 0; begin < plan.steps; begin = end) {
      end = std::min({begin + e.slots, begin / every * every + every, std::int64_t(plan.steps)});
      for (std::int64_t block; (block = next_block++) < e.blocks;) {
        const std::int64_t lane = block * kLanes;
        engine.replay(plan, {std::uint32_t(first + lane), begin, end, e.workspace.data + block * e.space, &e.c[lane],
                             returns + lane, centre, e.stride, lane, e.psi.data, e.zeta.data, e.to_go.data});
      }
      meeting.wait([&] { next_site = 0; });
      const Columns<Real> c{count,
                            e.stride,
                            bins,
                            int(end - begin),
                            begin % every == 0,
                            e.psi.data,
                            e.zeta.data,
                            e.to_go.data,
                            e.bin.data(),
                            e.members.data(),
                            e.gradient.data,
                            scratch.data + index * scratch_size};
      // Runs of neighbouring sites, whose rows are then still in this core's cache.
      for (std::int64_t run; (run = next_site++) * run_length < plan.sites;)
        for (std::int64_t site = run * run_length; site < std::min<std::int64_t>((run + 1) * run_length, plan.sites);
             ++site)
          engine.columns(plan, c, int(site));
      meeting.wait([&] {
        next_block = 0;
        leave = stop;  // one thread decides for all, or others would wait for threads that have left
      });
      if (leave) return;
    }
  };
  // As many tasks as threads, so that each thread takes one and all of them meet.
  if (!Crew::run(threads, threads, work, interrupted, stop)) return false;
  std::fill(moments, moments + 3 * total, 0.0);
  for (std::int64_t i = 0; i < total; ++i) {
    const Real* g = e.gradient.data + i * e.stride;
    Moments(count, [&](std::int64_t j) { return double(g[j]); }).add_to(moments + i, total);
    for (std::int64_t j = 0; samples && j < count; ++j) samples[j * total + i] = g[j];
  }
  return true;
}

template bool binned_pass<float>(const Fields&, const Fields&, const Fields&, const std::string&);
template bool binned_pass<double>(const Fields&, const Fields&, const Fields&, const std::string&);

}  // namespace fluctua
