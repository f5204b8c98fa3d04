#pragma once
#include "arrays.hpp"

namespace fluctua {

// One pass over `count` trajectories with the engine of that name ("" for the best). `given` holds the plan
// (see Plan), `out` the arrays to fill. False if interrupted. Throws nothing but std exceptions.
template <class Real> bool run_cpu(const Arrays& given, const Arrays& out, const std::string& engine);

}  // namespace fluctua
