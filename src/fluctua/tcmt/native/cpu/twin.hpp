// Further inputs of the kernels for the twin correction. Plain data only, like plan.hpp.
//
//   x̄_{n+1} = m̃_n(x̄_n)                                 the twin's noise-free path
//   q_n = ∇g̃(x̄_n)Δt + J̃_nᵀ q_{n+1},   q_T = 0           what a push at n adds to the twin's return
//   Λ_{n+1} = λ̂_{n+1} − V_{n+1}(X_{n+1}) − Σ_{k>n} q_{k+1}·r_k,   V = ν + q·(X − x̄)
//   G = Σ q_{n+1}·∂μ(X_n)Δt + Σ(Λ_{n+1} − λ̄_n)U_n
//
// V_{n+1} depends on the past of X_n alone, so everything can be summed on the way forward: Λ_{n+1} is what Λ_0 is at
// the end less what it has grown to by n+1, as λ̂_{n+1} = R − C_{n+1}. Path and adjoint are made ahead of X, a segment
// of steps at a time.
#pragma once
#include "plan.hpp"

namespace fluctua {

template <class Real> struct Twin {
  Plan<Real> plan;  // same graph, drives and ports, own numbers; harmonics = 0: no modulation

  // Where the twin's path is the same for all trajectories, one sweep tabulates it: (rows, 2·sites), at every step
  // if `full`, else at the ends of segments, with ν (rows). Null where each trajectory has its own.
  Real *path, *adjoint;
  double* value;
  bool full;

  int segment;  // steps
  // With a quadratic term, ½d†BC_kB†d, the path restarts from X at every segment, and its end is valued by
  // ν + q·d + ½d†BCB†d about the tabulated path.
  int rank;
  const Real* basis;      // B (sites, rank, 2)
  const Real* curvature;  // C at the end of each segment (segments, rank, rank, 2)
};

template <class Real> static inline std::int64_t segments(const Twin<Real>& t) {
  return (std::int64_t(t.plan.steps) + t.segment - 1) / t.segment;
}

// One block of kLanes trajectories, of which the first `lanes` count.
template <class Real> struct TwinJob {
  std::uint32_t first;
  int lanes;
  const volatile bool* stop;
  Real* workspace;
  double* returns;                  // (kLanes)
  double* gained;                   // Λ_0 (kLanes)
  Real *direct, *correction;        // (parameters, kLanes)
  double *reward_sum, *prefix_sum;  // (steps), (steps + 1): Σ over lanes of gΔt, and of Λ_0 − Λ_n, is added
  bool overflow[kLanes], twin_overflow[kLanes];
};

template <class Real> struct TwinEngine {
  std::int64_t (*workspace)(const Plan<Real>&, const Twin<Real>&, bool tabulate);
  bool (*tabulate)(const Plan<Real>&, const Twin<Real>&, Real* workspace, const volatile bool* stop);
  void (*sweep)(const Plan<Real>&, const Twin<Real>&, TwinJob<Real>&);
};

}  // namespace fluctua
