// The twin correction on the device; see twin.hpp for what is summed. One block per trajectory and one thread per site,
// as in lattice.cu; follows that and twin_path.cu.
//
// q·(X − x̄) and all that Λ is summed from are added up over the block once per step; the sum is ready after the step's
// one barrier, so each score waits a step for its weight.
//
// Set before this text, besides theirs (with SCORES and BASELINE 1): RANK, TWIN_BLOCKS (per multiprocessor).

#define SCORED       (2 + DEGREE)
#define WARPS        ((THREADS + 31) / 32)
#define SUMS_AT      (TWIN_AT + 2 * BUFFER)                // two times a number of every warp
#define PROJECTED_AT (SUMS_AT + 64 * (u32)sizeof(double))  // B†d, then CB†d

// What one thread sums, in double: −Σq·r and Σg of its sites, and its part of what Λ_0 has grown to but for q·d.
struct Grown {
  double moved, earned, grown;
};

#if RANK
// What V is at the end of a segment whose path started from X: q' = q + BCB†d in q, for d = x − x̄; returns this
// thread's part of ν + q·d + ½d†BCB†d.
__device__ double bend(TwinSite (&site)[PER], const Pair (&x)[PER], Pair (&q)[PER], int segment, int end,
                       unsigned char* shared) {
  Pair* const y = reinterpret_cast<Pair*>(shared + PROJECTED_AT);
  Pair* const z = y + RANK;
  const Pair* const d = reinterpret_cast<const Pair*>(shared + TWIN_AT);
  double value = threadIdx.x == 0 ? c_trail.value[segment + 1] - c_trail.value[0] : 0;
  __syncthreads();
  for (int i = 0; i < PER; ++i) {
    const int n = threadIdx.x + i * THREADS;
    const Pair at = c_trail.path[end * (long long)ROWS + n];
    q[i] = c_trail.adjoint[end * (long long)ROWS + n];
    Pair away;
    away.x = x[i].x - at.x;
    away.y = x[i].y - at.y;
    store(site[i].self, away);
    value += (double)(q[i].x * away.x + q[i].y * away.y);
  }
  __syncthreads();
  for (int a = threadIdx.x; a < RANK; a += THREADS) {
    Pair sum = Pair();
    for (int n = 0; n < N; ++n) {
      const Pair b = c_trail.basis[a * (long long)ROWS + n], v = d[n];
      sum.x += b.x * v.x + b.y * v.y;
      sum.y += b.x * v.y - b.y * v.x;
    }
    y[a] = sum;
  }
  __syncthreads();
  for (int a = threadIdx.x; a < RANK; a += THREADS) {
    const Pair* c = c_trail.curvature + ((long long)segment * RANK + a) * RANK;
    Pair sum = Pair();
    for (int e = 0; e < RANK; ++e) {
      sum.x += c[e].x * y[e].x - c[e].y * y[e].y;
      sum.y += c[e].x * y[e].y + c[e].y * y[e].x;
    }
    z[a] = sum;
    value += 0.5 * (double)(sum.x * y[a].x + sum.y * y[a].y);
  }
  __syncthreads();
  for (int i = 0; i < PER; ++i)
    for (int a = 0; a < RANK; ++a) {
      const Pair b = c_trail.basis[a * (long long)ROWS + threadIdx.x + i * THREADS];
      q[i].x += b.x * z[a].x - b.y * z[a].y;
      q[i].y += b.x * z[a].y + b.y * z[a].x;
    }
  return value;
}
#endif

struct Score {  // besides Site's two sums: the scores with q for ζ, and those of the last step, whose weight is not
                // known yet
  Real direct[SCORED], held[SCORED];
#if RATES
  Real direct_rate[2], held_rate[3];  // damping and drive; and ln Q
#endif
};

__device__ __forceinline__ void settle(Site& s, const Score& a, Real w) {
  EACH_SLOT
  for (int i = 0; i < SCORED; ++i) s.weighted[i] += w * a.held[i];
#if RATES
#pragma unroll
  for (int i = 0; i < 3; ++i) s.rate[2 * i] += w * a.held_rate[i];
#endif
}

template <class T> __device__ __forceinline__ T warp_sum(T v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(0xFFFFFFFFu, v, d);
  return v;
}

// Every thread's v, added up; the last barrier before `sums` is used again is the caller's.
__device__ double block_sum(double v, double* sums) {
  v = warp_sum(v);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = v;
  __syncthreads();
  double total = 0;
  for (int i = 0; i < WARPS; ++i) total += sums[i];
  return total;
}

// One site's step: X_{n+1}, scores with ζ and with q = q_{n+1}; returns q·(X − x̄)_{n+1}. w: the last step's weight.
__device__ __forceinline__ Real corrected(Site& s, Score& a, Grown& sum, int n, u32 from, u32 to, u32 first, u32 second,
                                          Real w, Real tau, int step, Pair q, Pair path_now, Pair path_next) {
  const Pair y = load(s.self + from, Pair());
  Real zr, zi;
  box_muller(first, second, s.variance, zr, zi);
  settle(s, a, w);
  const Pair h = couple<(HARMONICS > 0)>(s, from, tau, [&](int d, Pair m) {
    a.held[2 + d] = cross(zr, zi, m);
    s.plain[2 + d] += a.held[2 + d];
    a.direct[2 + d] += cross(q.x, q.y, m);
  });
  const Real power = y.x * y.x + y.y * y.y;
  a.held[0] = cross(zr, zi, y);
  a.held[1] = power * a.held[0];
  s.plain[0] += a.held[0];
  s.plain[1] += a.held[1];
  const Real along = cross(q.x, q.y, y);
  a.direct[0] += along;
  a.direct[1] += power * along;
  const Pair f = force(n, step, c_in.drive, c_force);
#if RATES
  const Rates rates = rates_of(s, y, zr, zi, f);
  a.held_rate[0] = rates.drag;
  a.held_rate[1] = rates.spread;
  a.held_rate[2] = rates.push;
#pragma unroll
  for (int i = 0; i < 3; ++i) s.rate[2 * i + 1] += a.held_rate[i];
  a.direct_rate[0] -= q.x * y.x + q.y * y.y;
  a.direct_rate[1] += (q.x * f.x + q.y * f.y) * (Real)INVERSE_DT;
  add_gain(s.rate[6], n, y, step);
#endif
  const Real rr = s.kick * zr, ri = s.kick * zi;
  const Pair small = drift(s, y, h, f, power);
  Pair next;
  next.x = y.x + (small.x + rr);
  next.y = y.y + (small.y + ri);
  store(s.self + to, next);
  const double g = own_reward(n, y, step), noise = (double)(q.x * rr + q.y * ri);
  sum.earned += g;
  sum.moved -= noise;
  sum.grown += (g - twin_reward(n, path_now, step)) - noise;
  return q.x * (next.x - path_next.x) + q.y * (next.y - path_next.y);
}

// (3, KINDS, N): direct, correction, and both.
__device__ void close_corrected(const Site& s, const Score& a, int n, Real excess, Real* raw) {
  const auto put = [&](int kind, Real direct, Real correction) {
    raw[kind * N + n] = direct;
    raw[(KINDS + kind) * N + n] = correction;
    raw[(2 * KINDS + kind) * N + n] = direct + correction;
  };
  const Real dt = (Real)(1 / INVERSE_DT);
  EACH_SLOT
  for (int i = 0; i < SCORED; ++i) put(i, a.direct[i] * dt, s.weighted[i] + excess * s.plain[i]);
#if RATES
  put(SCORED, a.direct_rate[0] * dt, s.rate[0] + excess * s.rate[1]);
  put(SCORED + 1, 0, s.rate[2] + excess * s.rate[3]);
  put(SCORED + 2, a.direct_rate[1] * dt, s.rate[4] + excess * s.rate[5]);
  put(SCORED + 3, s.rate[6], 0);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, TWIN_BLOCKS)
    twin_pass(u32 first, int count, int steps, int segment, int piece_steps, Real wave_scale, double reference) {
  extern __shared__ __align__(16) unsigned char shared[];
  const u32 psi = shared_address(shared);
  Real* const poly = reinterpret_cast<Real*>(shared + REWARDS) + 32;
#if WAVES_SHARED
  Real* const waves = poly + 3 * BONDS;
#else
  Real* const waves = c_out.waves + (long long)blockIdx.x * 2 * HARMONICS * BONDS;
#endif
  double* const sums = reinterpret_cast<double*>(shared + SUMS_AT);
  const int segments = (steps + segment - 1) / segment;
  const long long row = ROWS, block = blockIdx.x;
#if OWN || RANK
  Pair* const own = c_trail.own + block * (2 * (segment + 1) + (OWN ? 2 * (segments + 1) : 0)) * row;
  Pair *const path = own, *const adjoint = own + (segment + 1) * row;
#endif
#if OWN
  Pair *const kept_path = own + 2 * (segment + 1) * row, *const kept_adjoint = kept_path + (segments + 1) * row;
#endif
  double* const prefix_sum = c_trail.prefix_sum + block * (steps + 1);
  double* const reward_sum = c_out.reward_sum + block * steps;
  Site site[PER];
  Score score[PER];

  for (int j = blockIdx.x; j < count; j += gridDim.x) {
    const u32 trajectory = first + j;
    const u32 stream = ANTITHETIC ? trajectory & ~1u : trajectory;
    const u32 half_turn = ANTITHETIC ? trajectory << 31 : 0;
    __syncthreads();  // the last trajectory's state is still being read
#if HARMONICS
    for (int b = threadIdx.x; b < BONDS; b += THREADS)
      draw_modulation(stream, b, c_in.bond_given[b], wave_scale, waves);
#endif
    __syncthreads();

    bool twin_finite = true;
#if OWN
    {  // the twin's path, and back: both at the ends of segments
      TwinSite twin[PER];
      Pair x[PER];
      Wave wave = {-1, piece_steps, poly, waves};
      start_twin(twin, x, psi + TWIN_AT);
      for (int k = 0; k < segments; ++k) {
        for (int i = 0; i < PER; ++i) kept_path[k * row + threadIdx.x + i * THREADS] = x[i];
        path_of(twin, x, wave, k * segment, min((k + 1) * segment, steps), path);
      }
      for (int i = 0; i < PER; ++i) {
        twin_finite = twin_finite && isfinite(x[i].x) && isfinite(x[i].y);
        x[i] = Pair();
      }
      for (int k = segments - 1; k >= 0; --k) {
        Pair begin[PER];
        for (int i = 0; i < PER; ++i) {
          kept_adjoint[(k + 1) * row + threadIdx.x + i * THREADS] = x[i];
          begin[i] = kept_path[k * row + threadIdx.x + i * THREADS];
        }
        path_of(twin, begin, wave, k * segment, min((k + 1) * segment, steps), path);
        adjoint_of(twin, x, wave, k * segment, min((k + 1) * segment, steps), k * segment, path, adjoint);
      }
      for (int i = 0; i < PER; ++i) twin_finite = twin_finite && isfinite(x[i].x) && isfinite(x[i].y);
      __syncthreads();
    }
#endif

#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const int n = threadIdx.x + i * THREADS;
      open_site(site[i], n, psi);
      Pair start;
      start.x = c_in.start[2 * n];
      start.y = c_in.start[2 * n + 1];
      store(site[i].self, start);
      score[i] = Score();
    }
    __syncthreads();

    Grown sum = {};
    Real weight = 0;
    for (int k = 0; k < segments; ++k) {
      const int begin = k * segment, end = min(begin + segment, steps);
#if OWN || RANK
      {  // the segment's path and adjoint, ahead of X
        TwinSite twin[PER];
        Pair x[PER], q[PER];
        Wave wave = {-1, piece_steps, poly, waves};
        start_twin(twin, x, psi + TWIN_AT);
        for (int i = 0; i < PER; ++i) {
#if RANK
          x[i] = load(site[i].self + (begin & 1) * BUFFER, Pair());
#else
          x[i] = kept_path[k * row + threadIdx.x + i * THREADS];
          q[i] = kept_adjoint[(k + 1) * row + threadIdx.x + i * THREADS];
#endif
        }
        path_of(twin, x, wave, begin, end, path);
#if RANK
        sum.grown = sum.earned + sum.moved + bend(twin, x, q, k, end, shared);
        for (int i = 0; i < PER; ++i) {
          const int n = threadIdx.x + i * THREADS;
          for (int p = 0; p < PORTS; ++p)
            if (is_port(p, n)) {
              for (int step = begin; step < end; ++step)
                sum.grown += twin_reward(n, path[(step - begin) * row + n], step);
              break;
            }
        }
#endif
        adjoint_of(twin, q, wave, begin, end, begin + 1, path, adjoint);
      }
      const Pair *const x_rows = path - begin * row, *const q_rows = adjoint - begin * row;
#else
      const Pair *const x_rows = c_trail.path, *const q_rows = c_trail.adjoint;
#endif
      Pair x_now[PER], x_next[PER], q_next[PER];
#pragma unroll
      for (int i = 0; i < PER; ++i) {
        const long long n = threadIdx.x + i * THREADS;
        x_now[i] = x_rows[begin * row + n];
        x_next[i] = x_rows[(begin + 1) * row + n];
        q_next[i] = q_rows[(begin + 1) * row + n];
      }
      u32 w[PER][4] = {};
      if (begin & 1) draw(threadIdx.x, w, stream, begin);
      Real tau = 0;
#if HARMONICS
      int piece = -1;
#endif
#pragma unroll 1
      for (int step = begin; step < end; ++step) {
#if HARMONICS
        if (step / piece_steps != piece) {
          piece = step / piece_steps;
          __syncthreads();
          refresh_modulation(threadIdx.x, c_in.modulation + (long long)piece * 8 * HARMONICS, waves, poly);
          __syncthreads();
#pragma unroll
          for (int i = 0; i < PER; ++i) take_modulation(site[i], threadIdx.x + i * THREADS, c_in.kappa, poly);
        }
        tau = (Real)(2 * (step - piece * piece_steps) + 1 - piece_steps) / (Real)piece_steps;
#endif
        const bool odd = step & 1;
        if (!odd) draw(threadIdx.x, w, stream, step);
        const u32 from = odd ? BUFFER : 0, to = odd ? 0 : BUFFER;
        const long long later = (step + 2 <= end ? step + 2 : end) * row + threadIdx.x;  // fetched a step ahead
        const Real bar = c_in.bar[step];
        if (threadIdx.x == 0) atomicAdd(reward_sum + step, (double)reward(psi, from, step));
        Real ahead = 0;
#pragma unroll
        for (int i = 0; i < PER; ++i) {
          const Pair q = q_next[i], before = x_now[i], after = x_next[i];
          x_now[i] = after;
          x_next[i] = x_rows[later + i * THREADS];
          q_next[i] = q_rows[later + i * THREADS];
          ahead += corrected(site[i], score[i], sum, threadIdx.x + i * THREADS, from, to, odd ? w[i][2] : w[i][0],
                             (odd ? w[i][3] : w[i][1]) ^ half_turn, weight, tau, step, q, before, after);
        }
        const Real part = warp_sum((Real)(sum.grown + (double)ahead));
        double* const here = sums + (odd ? 32 : 0);
        if ((threadIdx.x & 31) == 0) here[threadIdx.x >> 5] = (double)part;
        __syncthreads();
        double grown = 0;  // Λ_0 − Λ_{n+1}
#pragma unroll
        for (int i = 0; i < WARPS; ++i) grown += here[i];
        weight = (Real)((double)bar - grown);
        if (threadIdx.x == 0) atomicAdd(prefix_sum + step + 1, grown);
      }
    }

    const double gained = block_sum(sum.grown, sums), total = block_sum(sum.earned, sums);
    bool finite = true;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const int n = threadIdx.x + i * THREADS;
      settle(site[i], score[i], weight);
      if (n < N) {
        close_corrected(site[i], score[i], n, (Real)(gained - reference), c_out.raw + (long long)j * 3 * KINDS * N);
        const Pair last = load(site[i].self + (steps & 1) * BUFFER, Pair());
        finite = finite && isfinite(last.x) && isfinite(last.y);
      }
    }
    const int bad = __syncthreads_or(!finite), twin_bad = __syncthreads_or(!twin_finite);
    if (threadIdx.x == 0) {
      c_out.returns[j] = total;
      c_trail.gained[j] = gained;
      c_out.overflow[j] = (bad ? 1 : 0) + (twin_bad ? 2 : 0);
    }
  }
}
