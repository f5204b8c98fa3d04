// Heun's step on the device; see cpu/heun.hpp for the equations. Besides the two buffers of ψ there are ψ̃ and ζ of all
// sites, and one exchange more per step: between the stages. Follows drift.cuh.
#if HEUN

#define AHEAD (2 * BUFFER)  // ψ̃
#define KICKS (3 * BUFFER)  // ζ

struct Held {  // what a thread keeps of a site between the stages
  Pair small, zeta;
};

// The part of a reward that the trapezoid rule counts.
__device__ __forceinline__ Real trapezoid(int step, int steps) {
  return step == 0 || step == steps ? (Real)0.5 : (Real)1;
}

// ψ̃ = ψ + Δtμ(ψ, t), and ζ.
__device__ __forceinline__ Held predict(const Site& s, int n, u32 psi, u32 from, u32 first, u32 second, Real tau,
                                        int step) {
  const Pair y = load(s.self + from, Pair());
  Real zr = 0, zi = 0;
#if NOISE
  box_muller(first, second, s.variance, zr, zi);
#endif
  const Pair h = couple<(HARMONICS > 0)>(s, from, tau, [](int, Pair) {});
  const Pair small = drift(s, y, h, force(n, step, c_in.drive, c_force), y.x * y.x + y.y * y.y);
  share(s, psi, AHEAD, barrier_address(psi, STAGE), pair(y.x + small.x, y.y + small.y));
#if SCORES
  share(s, psi, KICKS, barrier_address(psi, STAGE), pair(zr, zi));
#endif
  return {small, pair(zr, zi)};
}

#if RATES
__device__ __forceinline__ void add_part_of_gain(Site& s, int n, Pair y, int step, Real part) {
  Real sum = 0;
  add_gain(sum, n, y, step);
  s.rate[6] += part * sum;
}
#endif

#if SCORES
__device__ __forceinline__ void add_score(Site& s, int i, Real u, Real w) {
  s.weighted[i] += w * u;
  s.plain[i] += u;
}
#endif

// The rest of the step, and its scores: Euler's of (ψ, η/2) and (ψ̃, ζ/2). tau: at t + Δt. part: of the reward. The new
// state is sent last: others write ψ̃ again once they have it.
template <int odd>
__device__ __forceinline__ void correct(Site& s, int n, u32 psi, const Held& held, Real w, Real tau, int step,
                                        Real part) {
  constexpr u32 from = odd ? BUFFER : 0, to = odd ? 0 : BUFFER;
  const Pair y = load(s.self + from, Pair()), a = load(s.self + AHEAD, Pair()), z = held.zeta;
  const Pair f = force(n, step + 1, c_in.drive, c_force);
  const Pair h = couple<(HARMONICS > 0)>(s, AHEAD, tau, [](int, Pair) {});
  const Real power = a.x * a.x + a.y * a.y, half = (Real)0.5;
  const Pair small = drift(s, a, h, f, power);
  const Pair next = pair(y.x + (half * (held.small.x + small.x) + s.kick * z.x),
                         y.y + (half * (held.small.y + small.y) + s.kick * z.y));
#if SCORES
  const Pair e = pull_back(s, a, power, z, couple<(HARMONICS > 0)>(s, KICKS, tau, [](int, Pair) {}));
  const Real now = half * cross(e.x, e.y, y), then = half * cross(z.x, z.y, a);
  add_score(s, 0, now + then, w);
  add_score(s, 1, (y.x * y.x + y.y * y.y) * now + power * then, w);
  EACH_SLOT
  for (int d = 0; d < DEGREE; ++d) {
    const Pair m = load(s.neighbour[d] + from, Pair()), m_ahead = load(s.neighbour[d] + AHEAD, Pair());
    add_score(s, 2 + d, half * (cross(e.x, e.y, m) + cross(z.x, z.y, m_ahead)), w);
  }
#if RATES
  const Rates first = rates_of(s, y, e.x, e.y, force(n, step, c_in.drive, c_force));
  const Rates second = rates_of(s, a, z.x, z.y, f);
  const Real drag = half * (first.drag + second.drag), push = half * (first.push + second.push);
  s.rate[0] += w * drag;
  s.rate[1] += drag;
  s.rate[2] += w * second.spread;
  s.rate[3] += second.spread;
  s.rate[4] += w * push;
  s.rate[5] += push;
  add_part_of_gain(s, n, y, step, part);
#endif
#endif
  publish(s, n, psi, to, next, step + 1);
}

#endif
