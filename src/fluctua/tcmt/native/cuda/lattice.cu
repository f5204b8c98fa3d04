// One pass on the device: a trajectory a block, a site a thread (or several, for large networks). The state is
// double-buffered in shared memory with one barrier a step; parameters and sums live in registers. Every site
// accumulates its own half of each of its bonds' scores, so no noise is exchanged; halves are added at the end.
//
// Compiled at run time for the network at hand. Set before this text: Real (float or double), Pair (its
// 2-vector), N sites, THREADS, PER = ⌈N/THREADS⌉, DEGREE (slots a site; unused ones have κ = 0 and point to the
// site itself), BONDS, PORTS, DRIVES, HARMONICS, INVERSE_DT, BLOCKS (a multiprocessor), and 0 or 1 for SCORES, RATES, NOISE,
// ANTITHETIC, BASELINE, DRIVE_TABLE, INCOMING_TABLE, RECORD, WAVES_SHARED. Follows device.cuh and noise.cuh.

struct Inputs {
  const Real *omega, *chi, *damping, *kick, *variance, *start;  // (ROWS), start (ROWS, 2); rates × Δt
  const int* neighbour;                                                 // (DEGREE, ROWS)
  const Real* kappa;                                                    // (DEGREE, ROWS); × Δt
  const int *bond, *bond_given;                                         // (DEGREE, ROWS) → bond or −1; (BONDS)
  const Real *drive, *incoming;                                         // (steps, ROWS, 2), (steps, PORTS, 2)
  const Real* bar;                                                      // R' − λ̄_n (steps, padded to even)
  const Real* modulation;                                               // (pieces, 2·HARMONICS, 4): c0, c1, c2, 0
};

struct Outputs {
  Real* raw;           // (count, KINDS, N): sums per site
  double* returns;     // (count)
  double* reward_sum;  // (blocks, steps), added to: one writer each, so the sums do not depend on who comes first
  Pair* record;        // (count, records, N)
  int* overflow;       // (count)
  Real* waves;         // (blocks, 2·HARMONICS, BONDS) if not in shared memory
};

// Everything that does not change during a launch, in constant memory: the host writes these as bytes.
extern "C" {
__constant__ Inputs c_in;
__constant__ Outputs c_out;
__constant__ Real c_gain[PORTS + 1], c_weight[PORTS + 1], c_incoming[2 * PORTS + 2];  // √(2γ_e), wΔt, s⁺
__constant__ u32 c_port[PORTS + 1];                                                   // port's site · sizeof(Pair)
__constant__ Real c_force[2 * DRIVES + 2];  // fΔt of drives that do not change in time
__constant__ int c_drive[DRIVES + 1];       // and their sites
}

#if DEGREE <= 8
#define EACH_SLOT _Pragma("unroll")
#else
#define EACH_SLOT _Pragma("unroll 1")  // sums in local memory: slower, but any degree compiles
#endif

#define KINDS (SCORES ? 2 + DEGREE + (RATES ? 4 : 0) : 0)

#define ROWS (PER * THREADS)              // sites, and idle rows that fill the last warp: no branch in the loop
#define BUFFER (ROWS * (u32)sizeof(Pair))  // bytes of one state
#define REWARDS (2 * BUFFER)               // where the rewards of up to 32 steps wait to be added up

__device__ __forceinline__ Real cross(Real ar, Real ai, Pair b) { return ar * b.y - ai * b.x; }

// ã cos φ and ã sin φ, times σ_κΔt, of bond b. Same law as on the host.
__device__ void draw_modulation(u32 stream, int b, int given, Real scale, Real* waves) {
  Real norm = 0;
  for (int k = 0; k < HARMONICS; ++k) {
    u32 w[4];
    philox(stream, 0x80000000u + (u32)given * HARMONICS + k, 0xFFFFFFFFu, w);
    Real a, unused;
    box_muller(w[0], w[1], (Real)1, a, unused);  // any scale: ã = a/‖a‖
    Real sine, cosine;
    sincospi(((Real)(int)w[2] + (Real)0.5) * (Real)4.656612873077393e-10, &sine, &cosine);
    norm += a * a;
    waves[(2 * k) * BONDS + b] = a * cosine;
    waves[(2 * k + 1) * BONDS + b] = a * sine;
  }
  const Real factor = scale / sqrt(norm);
  for (int k = 0; k < 2 * HARMONICS; ++k) waves[k * BONDS + b] *= factor;
}

// The quadratic that stands for δκΔt on the steps of one piece; see `modulation_pieces`.
__device__ void refresh_modulation(int thread, const Real* __restrict__ m, const Real* waves, Real* poly) {
  for (int b = thread; b < BONDS; b += THREADS) {
    Real c0 = 0, c1 = 0, c2 = 0;
#pragma unroll 4
    for (int k = 0; k < 2 * HARMONICS; ++k) {
      const Real x = waves[k * BONDS + b];
      c0 += x * m[4 * k];
      c1 += x * m[4 * k + 1];
      c2 += x * m[4 * k + 2];
    }
    poly[b] = c0;
    poly[BONDS + b] = c1;
    poly[2 * BONDS + b] = c2;
  }
}

struct Site {
  Real omega, chi, damping, kick, variance;
  Real kappa[DEGREE];
  u32 self, neighbour[DEGREE];  // addresses in the first buffer
#if HARMONICS
  Real slope[DEGREE], bend[DEGREE];  // κ(t) = kappa + τ(slope + τ·bend)
#endif
#if SCORES
  Real weighted[2 + DEGREE], plain[2 + DEGREE];  // Σ(R' − C − λ̄)U and ΣU: ω, χ, bonds
#if RATES
  Real rate[7];  // the same two of damping, ln Q and drive; explicit gain
#endif
#endif
};

// C_{n+1} − C of the chunk's start; every thread computes it, which is cheaper than to share it.
__device__ __forceinline__ Real reward(u32 now, int step) {
  Real g = 0;
#pragma unroll
  for (int p = 0; p < PORTS; ++p) {
    const Pair y = load(now + c_port[p], Pair());
#if INCOMING_TABLE
    const Real sr = c_in.incoming[(step * (long long)PORTS + p) * 2], si = c_in.incoming[(step * (long long)PORTS + p) * 2 + 1];
#else
    const Real sr = c_incoming[2 * p], si = c_incoming[2 * p + 1];
#endif
    const Real a = c_gain[p] * y.x - sr, b = c_gain[p] * y.y - si;
    g += c_weight[p] * (a * a + b * b);
  }
  return g;
}

struct __align__(16) Quad {
  Real x, y, zr, zi;  // ψ before the kick, and ζ
};

template <int odd>
__device__ __forceinline__ void advance(Site& s, int n, u32 psi, u32 first, u32 second, Real w, Real tau, int step,
                                        Quad* keep = nullptr) {
  constexpr u32 from = odd ? BUFFER : 0, to = odd ? 0 : BUFFER;
  const Pair y = load(s.self + from, Pair());
  Real zr = 0, zi = 0;
#if NOISE
  box_muller(first, second, s.variance, zr, zi);  // ζ = r/(2Q)
#endif
  Real hr = 0, hi = 0;
EACH_SLOT
  for (int d = 0; d < DEGREE; ++d) {
    const Pair m = load(s.neighbour[d] + from, Pair());
#if HARMONICS
    const Real k = s.kappa[d] + tau * (s.slope[d] + tau * s.bend[d]);
#else
    const Real k = s.kappa[d];
#endif
    hr += k * m.x;
    hi += k * m.y;
#if SCORES
    const Real u = cross(zr, zi, m);
    s.weighted[2 + d] += w * u;
    s.plain[2 + d] += u;
#endif
  }
  const Real power = y.x * y.x + y.y * y.y, omega = s.omega + s.chi * power;
#if SCORES
  const Real u = cross(zr, zi, y);
  s.weighted[0] += w * u;
  s.plain[0] += u;
  s.weighted[1] += w * (power * u);
  s.plain[1] += power * u;
#endif
  Real fr = 0, fi = 0;
#if DRIVE_TABLE
  fr = c_in.drive[(step * (long long)ROWS + n) * 2];
  fi = c_in.drive[(step * (long long)ROWS + n) * 2 + 1];
#else
#pragma unroll
  for (int d = 0; d < DRIVES; ++d)
    if (n == c_drive[d]) {
      fr += c_force[2 * d];
      fi += c_force[2 * d + 1];
    }
#endif
#if RATES
  const Real two_over = s.variance > 0 ? (Real)0.6931471805599453 / s.variance : (Real)0;  // 1/(2·variance of z)
  const Real drag = -(zr * y.x + zi * y.y), spread = (zr * zr + zi * zi) * two_over - 1;
  const Real push = (zr * fr + zi * fi) * (Real)INVERSE_DT;  // f without Δt
  s.rate[0] += w * drag;
  s.rate[1] += drag;
  s.rate[2] += w * spread;
  s.rate[3] += spread;
  s.rate[4] += w * push;
  s.rate[5] += push;
  for (int p = 0; p < PORTS; ++p)
    if (psi + c_port[p] == s.self) {
      const Real sr = INCOMING_TABLE ? c_in.incoming[(step * (long long)PORTS + p) * 2] : c_incoming[2 * p];
      const Real si = INCOMING_TABLE ? c_in.incoming[(step * (long long)PORTS + p) * 2 + 1] : c_incoming[2 * p + 1];
      s.rate[6] += 2 * c_weight[p] * ((c_gain[p] * y.x - sr) * y.x + (c_gain[p] * y.y - si) * y.y);
    }
#endif
  // ψ + (small), with the drive inside (small): see sweep.cpp on rounding.
  Pair next;
  next.x = y.x + ((fr + (omega * y.y + hi - s.damping * y.x)) + s.kick * zr);
  next.y = y.y + ((fi - (omega * y.x + hr + s.damping * y.y)) + s.kick * zi);
  store(s.self + to, next);
  if (keep) *keep = {y.x, y.y, zr, zi};
}

__device__ void open_site(Site& s, int n, u32 psi) {
  s.self = fixed(psi + n * (u32)sizeof(Pair));
  s.omega = c_in.omega[n];
  s.chi = c_in.chi[n];
  s.damping = c_in.damping[n];
  s.kick = c_in.kick[n];
  s.variance = c_in.variance[n];
EACH_SLOT
  for (int d = 0; d < DEGREE; ++d) {
    s.kappa[d] = c_in.kappa[d * ROWS + n];
    s.neighbour[d] = fixed(psi + c_in.neighbour[d * ROWS + n] * (u32)sizeof(Pair));
  }
#if SCORES
EACH_SLOT
  for (int i = 0; i < 2 + DEGREE; ++i) s.weighted[i] = s.plain[i] = 0;
#if RATES
#pragma unroll
  for (int i = 0; i < 7; ++i) s.rate[i] = 0;
#endif
#endif
}

__device__ void close_site(const Site& s, int n, Real excess, Real* raw) {  // excess: R − R'
#if SCORES
EACH_SLOT
  for (int i = 0; i < 2 + DEGREE; ++i) raw[i * N + n] = s.weighted[i] + excess * s.plain[i];
#if RATES
#pragma unroll
  for (int i = 0; i < 3; ++i) raw[(2 + DEGREE + i) * N + n] = s.rate[2 * i] + excess * s.rate[2 * i + 1];
  raw[(5 + DEGREE) * N + n] = s.rate[6];
#endif
#endif
}

#if HARMONICS
// κ(t) of the piece that begins, for every slot of a site.
__device__ void take_modulation(Site& s, int n, const Real* poly) {
EACH_SLOT
  for (int d = 0; d < DEGREE; ++d) {
    const int b = c_in.bond[d * ROWS + n];
    s.kappa[d] = c_in.kappa[d * ROWS + n] + (b < 0 ? (Real)0 : poly[b]);
    s.slope[d] = b < 0 ? (Real)0 : poly[BONDS + b];
    s.bend[d] = b < 0 ? (Real)0 : poly[2 * BONDS + b];
  }
}
#endif

struct Clock {  // what all threads of a block agree on
  Real sum, base;  // C = base + sum
  Real tau;        // where in the chunk, in (−1, 1): what the modulation's quadratics are in
};

template <int odd>
__device__ __forceinline__ void step_all(Site (&site)[PER], const u32 (&w)[PER][4], Clock& c, u32 psi, u32 half_turn, int step, int chunk, Real bar, int j,
                                         int steps, Real tau_step, int record_every) {
#if RECORD
  if (step % record_every == 0)
    for (int n = threadIdx.x; n < N; n += THREADS)
      c_out.record[((long long)j * (steps / record_every + 1) + step / record_every) * N + n] =
          load(psi + odd * BUFFER + n * (u32)sizeof(Pair), Pair());
#endif
  const Real g = reward(psi + odd * BUFFER, step);
  c.sum += g;
  if (threadIdx.x == 0) store(psi + REWARDS + (step - chunk) * (u32)sizeof(Real), g);
  const Real weight = bar - c.base - c.sum;  // R' − λ̄_n − C_{n+1}: the reward of step n precedes the kick
#pragma unroll
  for (int i = 0; i < PER; ++i)
    advance<odd>(site[i], threadIdx.x + i * THREADS, psi, w[i][2 * odd], w[i][2 * odd + 1] ^ half_turn, weight, c.tau, step);
  c.tau += tau_step;
  __syncthreads();
}

__device__ __forceinline__ void draw(int thread, u32 (&w)[PER][4], u32 stream, int step) {
#if NOISE
#pragma unroll
  for (int i = 0; i < PER; ++i) philox(stream, thread + i * THREADS, step >> 1, w[i]);
#endif
}

__device__ __forceinline__ Pair bars(int step) {
#if BASELINE
  return reinterpret_cast<const Pair*>(c_in.bar)[step >> 1];
#else
  return Pair();
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    one_pass(u32 first, int count, int steps, int chunk_steps, Real wave_scale, double reference,
             int record_every) {
  extern __shared__ __align__(16) unsigned char shared[];  // two buffers of ψ, then the modulation's
  const u32 psi = shared_address(shared);
  Real* const rewards = reinterpret_cast<Real*>(shared + REWARDS);
  Real* const poly = rewards + 32;
#if WAVES_SHARED
  Real* const waves = poly + 3 * BONDS;
#else
  Real* const waves = c_out.waves + (long long)blockIdx.x * 2 * HARMONICS * BONDS;
#endif
  Site site[PER];

  for (int j = blockIdx.x; j < count; j += gridDim.x) {
    const u32 trajectory = first + j;
    const u32 stream = ANTITHETIC ? trajectory & ~1u : trajectory;
    const u32 half_turn = ANTITHETIC ? trajectory << 31 : 0;
    __syncthreads();  // the last trajectory's state is still being read
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const int n = threadIdx.x + i * THREADS;
      open_site(site[i], n, psi);
      Pair start;
      start.x = c_in.start[2 * n];
      start.y = c_in.start[2 * n + 1];
      store(site[i].self, start);
    }
#if HARMONICS
    for (int b = threadIdx.x; b < BONDS; b += THREADS) draw_modulation(stream, b, c_in.bond_given[b], wave_scale, waves);
#endif
    __syncthreads();

    // C is summed over a chunk at a time (an even number of steps, at most 32), and those sums with their
    // rounding error carried along. A chunk is also a piece of the modulation.
    Clock c = {};
    Real lost = 0;
    const Real tau_step = (Real)2 / chunk_steps;
    for (int chunk = 0; chunk < steps; chunk += chunk_steps) {
#if HARMONICS
      refresh_modulation(threadIdx.x, c_in.modulation + (long long)(chunk / chunk_steps) * 8 * HARMONICS, waves, poly);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < PER; ++i) take_modulation(site[i], threadIdx.x + i * THREADS, poly);
      c.tau = (Real)(1 - chunk_steps) / chunk_steps;
#endif
      const int end = min(chunk + chunk_steps, steps & ~1);
#pragma unroll 1
      for (int step = chunk; step < end; step += 2) {
        u32 w[PER][4] = {};
        draw(threadIdx.x, w, stream, step);
        const Pair bar = bars(step);
        step_all<0>(site, w, c, psi, half_turn, step, chunk, bar.x, j, steps, tau_step, record_every);
        step_all<1>(site, w, c, psi, half_turn, step + 1, chunk, bar.y, j, steps, tau_step, record_every);
      }
      if ((steps & 1) && steps - chunk <= chunk_steps) {  // the last step of an odd number
        u32 w[PER][4] = {};
        draw(threadIdx.x, w, stream, steps - 1);
        step_all<0>(site, w, c, psi, half_turn, steps - 1, chunk, bars(steps - 1).x, j, steps, tau_step,
                    record_every);
      }
      if (threadIdx.x < chunk_steps && chunk + threadIdx.x < steps)
        atomicAdd(c_out.reward_sum + (long long)blockIdx.x * steps + chunk + threadIdx.x, (double)rewards[threadIdx.x]);
      __syncthreads();  // before the next chunk's rewards and modulation
      const Real more = c.sum + lost, after = c.base + more;
      lost = more - (after - c.base);
      c.base = after;
      c.sum = 0;
    }

    const double total = (double)c.base + (double)lost;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const int n = threadIdx.x + i * THREADS;
      if (n < N) {
        close_site(site[i], n, (Real)(total - reference), c_out.raw + (long long)j * KINDS * N);
        const Pair last = load(site[i].self + (steps & 1) * BUFFER, Pair());
        finite = finite && isfinite(last.x) && isfinite(last.y);
#if RECORD
        if (steps % record_every == 0)
          c_out.record[((long long)j * (steps / record_every + 1) + steps / record_every) * N + n] = last;
#endif
      }
    }
    const int bad = __syncthreads_or(!finite);
    if (threadIdx.x == 0) {
      c_out.returns[j] = total;
      c_out.overflow[j] = bad;
    }
  }
}

// Moments of the gradients over trajectories, (parts, 3, P): Σv, Σv², Σ(v₂ⱼ + v₂ⱼ₊₁)². Column p is the sum of the
// raw columns a[p] and b[p] (b < 0: none). Fixed order, in double. Optionally the samples themselves.
extern "C" __global__ void moments(const Real* raw, long long stride, const int* a, const int* b, int columns, int count,
                                   double* out, Real* samples) {
  const int p = blockIdx.x * blockDim.x + threadIdx.x;
  if (p >= columns) return;
  const int parts = gridDim.y, pairs = (count + 1) / 2;
  const int from = (int)((long long)pairs * blockIdx.y / parts) * 2, to = min(count, (int)((long long)pairs * (blockIdx.y + 1) / parts) * 2);
  const int ia = a[p], ib = b[p];
  double first = 0, second = 0, paired = 0, held = 0;
  for (int j = from; j < to; ++j) {
    const Real* row = raw + j * stride;
    const Real v = row[ia] + (ib < 0 ? (Real)0 : row[ib]);
    if (samples) samples[(long long)j * columns + p] = v;
    first += v;
    second += (double)v * v;
    if (j & 1) paired += (held + v) * (held + v);
    held = v;
  }
  double* o = out + (long long)blockIdx.y * 3 * columns + p;
  o[0] = first;
  o[columns] = second;
  o[2 * columns] = paired;
}
