// The filter of sampled states (fluctua.tcmt.innovations): its inputs and outputs. Plain data only, because files
// compiled for different instruction sets share it.
//
// Sites lie along the vectors. Couplings are diagonals of the matrix κ: row d has κ between sites n and n + offset[d],
// so that neighbours are read as they lie. Rows of sites have `width` elements, zero beyond the last site; those that
// are read at an offset have `pad` zeros on either side.
#pragma once
#include <cstdint>

namespace fluctua {

template <class Real> struct SampledNetwork {
  std::int64_t sites, width, pad, diagonals;
  const std::int64_t* offset;  // above 0
  const Real* coupling;        // (diagonals, pad + width), the first `pad` of a row zero
  const Real *omega, *chi, *damping, *force_real, *force_imag;  // (width)
  double interval;
  int steps;  // of Runge and Kutta per interval
};

// One trajectory.
template <class Real> struct FilterRun {
  const Real* samples;  // (count + 1, 2·sites): real quadratures, then imaginary ones
  std::int64_t count;
  bool from_first_sample;               // else from rest
  bool scores;                          // whether to go back
  const Real *gain, *inverse_variance;  // K and 1/S (count, width)
  const volatile bool* stop;
  Real* workspace;

  Real* energy;                   // |e|² (count, width)
  Real* by_gain;                  // ∂ℓ/∂K (count, width), with scores
  Real* middle;                   // states in the middles of the intervals (count, sites, 2), or null
  double* lagged;                 // Σ Re e_n* e_{n+1}/2√(S_n S_{n+1}) (width)
  double *own_real, *own_imag;    // Σ λ*ψ (width)
  double* cubic;                  // Σ Im λ*|ψ|²ψ (width)
  double *pull_real, *pull_imag;  // Σ λ (width)
  double* cross;                  // Σ Im(λ_n*ψ_m + λ_m*ψ_n) (diagonals, width), m = n + offset
};

template <class Real> struct FilterEngine {
  std::int64_t (*workspace)(const SampledNetwork<Real>&, std::int64_t count);
  void (*filter)(const SampledNetwork<Real>&, const FilterRun<Real>&);
};

}  // namespace fluctua
