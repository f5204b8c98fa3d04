#pragma once
#include "plan.hpp"
#include "simd.hpp"

namespace fluctua {
namespace FLUCTUA_ISA {

// Adds Σ_slots (λ̂ − λ̄)U of a site's ω and χ and of its upper bonds' κ to the gradients; see columns.cpp.
void columns(const Plan<float>& plan, const Columns<float>& c, int site);
void columns(const Plan<double>& plan, const Columns<double>& c, int site);

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
