// What the kernels are given: a resonator network with diagonal diffusion, flat, scaled by Δt, and with
// the bonds sorted by their lower site. Plain data only, because files compiled for different instruction
// sets share it.
#pragma once
#include <cstdint>

namespace fluctua {

constexpr int kLanes = 16;  // trajectories a block: state and sums of the paper's lattice stay in L2

template <class Real> struct Plan {
  int sites, bonds, steps, ports, drives, harmonics;
  std::uint64_t seed;
  bool noise, antithetic, rates;  // rates: also the scores of damping, diffusion and drive

  // Neighbours of site n below it, [lower_start[n], lower_start[n+1]), and above it. The position in the
  // list of upper neighbours is the bond's index throughout the kernels.
  const int *lower_start, *lower_site, *lower_bond, *upper_start, *upper_site;

  Real inverse_dt;
  const Real *omega, *chi, *damping, *kappa;  // times Δt
  const Real *kick;                           // 2Q_n
  const Real *scale;                          // √Δt/a_n: ζ = scale·z = r/(2Q), the noise as the scores need it
  const Real *start;                          // (sites, 2)

  const int* drive_site;
  const Real* drive;  // times Δt, (steps or 1, drives, 2)
  std::int64_t drive_stride;

  const int* port_site;
  const Real *gain, *weight;  // √(2γ_e); w·Δt
  const Real* incoming;       // s⁺, (steps or 1, ports, 2)
  std::int64_t incoming_stride;

  const double* bar;  // λ̄_n (steps), or null
  double reference;   // R' near R: limits what has to cancel in (R' − C − λ̄)U + (R − R')U

  // δκ_b(t)Δt on `modulation_steps` steps at a time as a quadratic in τ ∈ [−1, 1], whose coefficients are
  // linear in (ã cos φ, ã sin φ): modulation (pieces, 3, 2·harmonics).
  int modulation_steps;
  double modulation_scale;  // σ_κΔt
  const Real* modulation;
  const int* bond_given;  // index of each bond in the caller's order, which keys its draw
};

// One block of kLanes trajectories, of which the first `lanes` count.
template <class Real> struct Job {
  std::uint32_t first;
  int lanes;
  bool scores;
  const volatile bool* stop;

  Real* workspace;
  double* returns;     // (kLanes)
  Real* gradient;      // (parameters, kLanes) or null
  double* reward_sum;  // (steps): Σ over lanes of gΔt is added
  int record_every;
  Real* record;          // (kLanes, records, sites, 2), first lane's
  std::int64_t records;  // ⌊steps / record_every⌋ + 1
  bool find_overflow;    // look for it after every step: slow
  std::int64_t overflow_step[kLanes];  // −1: none
};

// ω, χ and κ; with `rates` also, per site, damping and diffusion, per drive its amplitude, per port its gain.
// Static: a definition shared between instruction sets could end up as the widest one's.
template <class Real> static inline std::int64_t parameters(const Plan<Real>& p) {
  return 2 * std::int64_t(p.sites) + p.bonds + (p.rates ? 2 * std::int64_t(p.sites) + p.drives + p.ports : 0);
}

// A replay of some steps of one block, after the returns are known. State stays in `workspace` between calls.
// Rows of the outputs are `stride` apart, and the block's lanes start at `lane` in each.
template <class Real> struct Replay {
  std::uint32_t first;
  std::int64_t begin, end;  // steps; begin = 0 starts afresh
  Real* workspace;
  double* c;               // C so far (kLanes)
  const double* returns;   // R (kLanes)
  const double* centre;    // mean return-to-go (steps + 1), subtracted from λ̂ to keep it small
  std::int64_t stride, lane;
  Real *psi, *zeta;  // (end − begin, 2·sites, stride): ψ before the kick, ζ
  Real* to_go;       // (end − begin, stride): λ̂_{n+1} − centre
};

// The binned baseline on those outputs: site n's own two parameters and its upper bonds.
template <class Real> struct Columns {
  std::int64_t count, stride;
  int bins, slots;
  bool rebin;  // membership from |ψ|² at the first slot
  const Real *psi, *zeta, *to_go;
  std::uint8_t* bin;      // (sites + bonds, stride)
  std::int32_t* members;  // (sites + bonds, bins)
  Real* gradient;         // (2·sites + bonds, stride), added to
  Real* scratch;          // 4·stride + 4·kColumnPiece, of one thread
};
constexpr int kColumnPiece = 512;
constexpr int kMostBins = 256;

template <class Real> struct TwinEngine;  // twin.hpp

// A function per instruction set and precision.
template <class Real> struct Engine {
  std::int64_t (*workspace)(const Plan<Real>&);  // elements of Real
  void (*sweep)(const Plan<Real>&, Job<Real>&);
  void (*replay)(const Plan<Real>&, const Replay<Real>&);
  void (*columns)(const Plan<Real>&, const Columns<Real>&, int site);
  const TwinEngine<Real>* twin;
  const char* name;
};

}  // namespace fluctua
