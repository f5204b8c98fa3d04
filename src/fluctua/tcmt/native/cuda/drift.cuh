// The drift of a resonator lattice and its derivative on the device, of one site. See cpu/drift.hpp for the equations.
// S: `Site`, or the twin's `TwinSite`. Follows step.cuh.

__device__ __forceinline__ Pair pair(Real x, Real y) {
  Pair p;
  p.x = x;
  p.y = y;
  return p;
}

// Σ(κ + δκ)Δt ψ_m of a site's neighbours in the buffer at `from`; each(slot, ψ_m) is called for them.
template <bool modulated, class S, class Each>
__device__ __forceinline__ Pair couple(const S& s, u32 from, Real tau, Each each) {
  Pair h = Pair();
  EACH_SLOT
  for (int d = 0; d < DEGREE; ++d) {
    const Pair m = load(s.neighbour[d] + from, Pair());
    Real k = s.kappa[d];
    if constexpr (modulated) k = s.kappa[d] + tau * (s.slope[d] + tau * s.bend[d]);
    h.x += k * m.x;
    h.y += k * m.y;
    each(d, m);
  }
  return h;
}

// Δtμ, to be added as ψ + (small), with the drive inside (small): see cpu/drift.hpp on rounding.
template <class S> __device__ __forceinline__ Pair drift(const S& s, Pair y, Pair h, Pair f, Real power) {
  const Real omega = s.omega + s.chi * power;
  Pair small;
  small.x = f.x + (omega * y.y + h.y - s.damping * y.x);
  small.y = f.y - (omega * y.x + h.x + s.damping * y.y);
  return small;
}

// q + ΔtJᵀq at the state y. h: Σ(κ + δκ)Δt q_m.
template <class S> __device__ __forceinline__ Pair pull_back(const S& s, Pair y, Real power, Pair q, Pair h) {
  const Real omega = s.omega + 2 * s.chi * power;
  const Real cr = s.chi * (y.x * y.x - y.y * y.y), ci = 2 * s.chi * y.x * y.y;  // χψ²
  return pair(q.x + ((ci * q.x - cr * q.y) - (omega * q.y + h.y + s.damping * q.x)),
              q.y + ((omega * q.x + h.x - s.damping * q.y) - (cr * q.x + ci * q.y)));
}
