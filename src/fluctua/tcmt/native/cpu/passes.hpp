// The passes over an ensemble, as Python calls them. False if interrupted. Throws nothing but std exceptions.
#pragma once
#include <string>
#include <vector>

#include "arrays.hpp"
#include "plan.hpp"

namespace fluctua {

// Names of the plan's fields, in order.
std::vector<std::string> plan_fields();

// The plan that a Python object describes, all of it checked; and the engine of that name ("" for the best).
template <class Real> Plan<Real> plan_of(const Fields& plan);
template <class Real> const Engine<Real>& choose(const std::string& engine);

// Refuses Heun's step for a pass that has Euler's alone.
template <class Real> void require_euler(const Plan<Real>& plan, const char* pass) {
  if (plan.heun) throw std::invalid_argument(std::string(pass) + " has no Heun's step");
}

// Range of trajectories, and number of threads.
struct Trajectories {
  explicit Trajectories(const Fields& once)
      : count(once.number<std::int64_t>("count", 1, std::int64_t(1) << 32)),
        first(once.number<std::int64_t>("first", 0, (std::int64_t(1) << 32) - count)),
        threads(once.number<int>("threads", 1, 4096)) {}
  std::int64_t count, first;
  int threads;
};

// One pass: `once` is a Python `Pass`, `out` the arrays to fill.
template <class Real>
bool one_pass(const Fields& plan, const Fields& once, const Fields& out, const std::string& engine);

// The second pass, with the binned baseline: `once` also holds the returns of the first.
template <class Real>
bool binned_pass(const Fields& plan, const Fields& once, const Fields& out, const std::string& engine);

// One pass with the twin correction: `model` describes the twin's network as `plan` does the trajectories'.
template <class Real>
bool twin_pass(const Fields& plan, const Fields& once, const Fields& model, const Fields& tables, const Fields& out,
               const std::string& engine);

// Sums of scores of measured states: `states` holds them, how they were sampled, and the sums to fill.
template <class Real> bool measured_pass(const Fields& plan, const Fields& states, const std::string& engine);

// The filter of sampled states and its pass back: `network` is a Python `SampledNetwork`, `job` has the samples and
// the arrays to fill.
template <class Real> bool filter_pass(const Fields& network, const Fields& job, const std::string& engine);

// Information about the numbers of a network: `terms` are those of its drift, `job` has W, G and the array to fill.
bool information_pass(const Fields& terms, const Fields& job);

}  // namespace fluctua
