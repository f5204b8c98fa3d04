// Parts of the engine of one instruction set: columns.cpp, twin.cpp, measured.cpp, filter.cpp.
#pragma once
#include "simd.hpp"
#include "twin.hpp"

namespace fluctua {
namespace FLUCTUA_ISA {

// Adds Σ_slots (λ̂ − λ̄)U of a site's ω and χ and of its upper bonds' κ to the gradients.
void columns(const Plan<float>& plan, const Columns<float>& c, int site);
void columns(const Plan<double>& plan, const Columns<double>& c, int site);

extern const TwinEngine<float> twin32;
extern const TwinEngine<double> twin64;
extern const MeasuredEngine<float> measured32;
extern const MeasuredEngine<double> measured64;
extern const FilterEngine<float> filter32;
extern const FilterEngine<double> filter64;

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
