#pragma once
#include <string>

#include "arrays.hpp"
#include "plan.hpp"

namespace fluctua {

// The plan that `given` describes, and the engine of that name ("" for the best).
template <class Real> Plan<Real> plan_of(const Arrays& given);
template <class Real> const Engine<Real>& choose(const std::string& engine);

// One pass over `count` trajectories. `given` holds the plan
// (see Plan), `out` the arrays to fill. False if interrupted. Throws nothing but std exceptions.
template <class Real> bool run_cpu(const Arrays& given, const Arrays& out, const std::string& engine);

// The second pass, with the binned baseline: `given` also holds the returns of the first.
template <class Real> bool run_binned(const Arrays& given, const Arrays& out, const std::string& engine);

// One pass with the twin correction: `twin` describes its network as `given` does the trajectories'.
template <class Real> bool run_twin(const Arrays& given, const Arrays& twin, const Arrays& out, const std::string& engine);

}  // namespace fluctua
