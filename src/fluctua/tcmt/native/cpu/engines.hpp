// The engine for this processor: the widest instruction set that was built and that it has.
#pragma once
#include <vector>

#include "plan.hpp"

namespace fluctua {

// Best first; never empty.
template <class Real> const std::vector<Engine<Real>>& engines();

}  // namespace fluctua
