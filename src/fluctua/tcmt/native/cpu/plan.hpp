// Inputs of the kernels: a resonator network with diagonal diffusion, flat, scaled by Δt, and with
// the bonds sorted by their lower site. Plain data only, because files compiled for different instruction
// sets share it.
#pragma once
#include <cstdint>

#include "filter.hpp"

namespace fluctua {

constexpr int kLanes = 16;  // trajectories per block: state and sums of the paper's lattice stay in L2

// The list of fields: numbers, then arrays with their lengths. The struct, the reading and checking of a Python
// `Plan` (passes.hpp) and the comparison with its fields (kernel/layout.py) are made from it.
//
// Neighbours of site n below it are [lower_start[n], lower_start[n+1]), those above it alike. The position in the list
// of upper neighbours is the bond's index throughout the kernels.
#define FLUCTUA_PLAN_NUMBERS(NUMBER)                                                                       \
  NUMBER(int, sites)                                                                                       \
  NUMBER(int, bonds)                                                                                       \
  NUMBER(int, steps)                                                                                       \
  NUMBER(int, ports)                                                                                       \
  NUMBER(int, drives)                                                                                      \
  NUMBER(int, harmonics)                                                                                   \
  NUMBER(std::uint64_t, seed)                                                                              \
  NUMBER(bool, noise)                                                                                      \
  NUMBER(bool, antithetic)                                                                                 \
  NUMBER(bool, rates) /* also the scores of damping, diffusion, drive */                                   \
  NUMBER(bool, heun)  /* Heun's step in place of Euler's */                                                \
  NUMBER(double, dt)                                                                                       \
  NUMBER(int, drive_rows)          /* 1 if constant, or one a step; Heun's also that of the end */         \
  NUMBER(int, incoming_rows)       /* the same */                                                          \
  NUMBER(double, reference)        /* R' near R: limits what has to cancel in (R' − C − λ̄)U + (R − R')U */ \
  NUMBER(int, modulation_steps)    /* δκ_b(t)Δt is quadratic in τ ∈ [−1, 1] on so many steps */            \
  NUMBER(double, modulation_scale) /* σ_κΔt */

#define FLUCTUA_PLAN_ARRAYS(ARRAY)                                                           \
  ARRAY(int, lower_start, sites + 1)                                                         \
  ARRAY(int, lower_site, bonds)                                                              \
  ARRAY(int, lower_bond, bonds)                                                              \
  ARRAY(int, upper_start, sites + 1)                                                         \
  ARRAY(int, upper_site, bonds)                                                              \
  ARRAY(int, bond_given, bonds) /* index in the caller's order, which keys its draw */       \
  ARRAY(Real, omega, sites)     /* times Δt, as chi, damping and kappa */                    \
  ARRAY(Real, chi, sites)                                                                    \
  ARRAY(Real, damping, sites)                                                                \
  ARRAY(Real, kappa, bonds)                                                                  \
  ARRAY(Real, kick, sites)  /* 2Q_n */                                                       \
  ARRAY(Real, scale, sites) /* √Δt/a_n: ζ = scale·z = r/(2Q), the noise as scores need it */ \
  ARRAY(Real, start, 2 * sites)                                                              \
  ARRAY(int, drive_site, drives)                                                             \
  ARRAY(Real, drive, 2 * drives * drive_rows) /* times Δt */                                 \
  ARRAY(int, port_site, ports)                                                               \
  ARRAY(Real, gain, ports)                         /* √(2γ_e) */                             \
  ARRAY(Real, weight, ports)                       /* w·Δt */                                \
  ARRAY(Real, incoming, 2 * ports * incoming_rows) /* s⁺ */                                  \
  ARRAY(double, bar, steps)                        /* λ̄_n, or null */                        \
  ARRAY(Real, modulation, pieces * 6 * harmonics)  /* linear in (ã cos φ, ã sin φ): (pieces, 3, 2·harmonics) */

template <class Real> struct Plan {
#define NUMBER(type, name)        type name;
#define ARRAY(type, name, length) const type* name;
  FLUCTUA_PLAN_NUMBERS(NUMBER)
  FLUCTUA_PLAN_ARRAYS(ARRAY)
#undef NUMBER
#undef ARRAY
  Real inverse_dt;
  std::int64_t drive_stride, incoming_stride;  // between two steps
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
  double* reward_sum;  // (rewards): Σ over lanes of gΔt is added
  int record_every;
  Real* record;                        // (kLanes, records, sites, 2), first lane's
  std::int64_t records;                // ⌊steps / record_every⌋ + 1
  bool find_overflow;                  // look for it after every step: slow
  std::int64_t overflow_step[kLanes];  // −1: none
};

// ω, χ and κ; with `rates` also, per site, damping and diffusion, per drive its amplitude, per port its gain.
// Static: a definition shared between instruction sets could end up as the widest one's.
template <class Real> static inline std::int64_t parameters(const Plan<Real>& p) {
  return 2 * std::int64_t(p.sites) + p.bonds + (p.rates ? 2 * std::int64_t(p.sites) + p.drives + p.ports : 0);
}

// Times at which a reward is counted: at the start of every step, and by the trapezoid rule of Heun's at the end too.
template <class Real> static inline std::int64_t rewards(const Plan<Real>& p) { return std::int64_t(p.steps) + p.heun; }

// A replay of some steps of one block, after the returns are known. State stays in `workspace` between calls.
// Rows of the outputs are `stride` apart, and the block's lanes start at `lane` in each.
template <class Real> struct Replay {
  std::uint32_t first;
  std::int64_t begin, end;  // steps; begin = 0 restarts
  Real* workspace;
  double* c;              // C so far (kLanes)
  const double* returns;  // R (kLanes)
  const double* centre;   // mean return-to-go (steps + 1), subtracted from λ̂ to keep it small
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

// Consecutive samples of one measured trajectory, `stride` steps apart, and the one after them.
template <class Real> struct Measured {
  const Real* x;  // (samples + 1, 2·sites): real quadratures, then imaginary ones
  std::int64_t samples;
  int stride;
  Real* workspace;
  double* sums;  // scores of ω, χ, Γ (sites each) and κ (bonds)
};

template <class Real> struct MeasuredEngine {
  std::int64_t (*workspace)(const Plan<Real>&);
  void (*scores)(const Plan<Real>&, const Measured<Real>&);
};

// A function per instruction set and precision.
template <class Real> struct Engine {
  std::int64_t (*workspace)(const Plan<Real>&);  // elements of Real
  void (*sweep)(const Plan<Real>&, Job<Real>&);
  void (*replay)(const Plan<Real>&, const Replay<Real>&);
  void (*columns)(const Plan<Real>&, const Columns<Real>&, int site);
  const TwinEngine<Real>* twin;
  const MeasuredEngine<Real>* measured;
  const FilterEngine<Real>* filter;
  const char* name;
};

}  // namespace fluctua
