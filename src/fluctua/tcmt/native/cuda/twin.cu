// The twin correction on the device; see twin.hpp for what is summed. A block or a cluster per trajectory and a thread
// per site, as in lattice.cu; follows that and twin_path.cu.
//
// q·(X − x̄) and all that Λ is summed from are added up over the network once per step. Of one block the sum is ready
// after the step's one barrier, so each score waits a step for its weight. In a cluster a warp adds up its block during
// the next step and sends the sum to all blocks with the state: each score waits two steps.
//
// Set before this text, besides theirs (with SCORES and BASELINE 1): RANK, TWIN_BLOCKS (per multiprocessor).

#define SCORED       (2 + DEGREE)
#define WARPS        ((THREADS + 31) / 32)
#define HOLD         (CLUSTER > 1 ? 2 : 1)                 // steps that a score waits
#define SUMS_AT      (TWIN_AT + TWIN_BUFFERS * BUFFER)     // two times a number of every warp
#define TOTALS_AT    (SUMS_AT + 64 * (u32)sizeof(double))  // a number of every block, of four steps in turn
#define PROJECTED_AT (TOTALS_AT + (CLUSTER > 1 ? 4 * CLUSTER * (u32)sizeof(double) : 0))  // B†d, CB†d, B†d of blocks
#define TOTAL_BYTES  (CLUSTER * (u32)sizeof(double))

// What one thread sums, in double: −Σq·r and Σg of its sites, and its part of what Λ_0 has grown to but for q·d and
// Σq·r.
struct Grown {
  double moved, earned, base;
};

template <class T> __device__ __forceinline__ T warp_sum(T v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(0xFFFFFFFFu, v, d);
  return v;
}

// Where the sum of a warp at a step is.
__device__ __forceinline__ u32 sum_address(u32 psi, int step, int warp) {
  return psi + SUMS_AT + ((step & 1) * 32 + warp) * (u32)sizeof(double);
}

// The sums of all warps at a step, added up; every thread of the warp must come.
__device__ __forceinline__ double add_warps(u32 psi, int step) {
#if THREADS <= 256
  double total = 0;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) total += load(sum_address(psi, step, i), double());
  return total;
#else
  const int lane = threadIdx.x & 31;
  return warp_sum(lane < WARPS ? load(sum_address(psi, step, lane), double()) : 0.0);
#endif
}

// Every thread's v of the block; the last barrier before the place of `step` is used again is the caller's.
__device__ double block_sum(double v, u32 psi, int step) {
  v = warp_sum(v);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) store(sum_address(psi, step, threadIdx.x >> 5), v);
  __syncthreads();
  return add_warps(psi, step);
}

// Where the sum of a block at a step is.
__device__ __forceinline__ u32 total_address(u32 psi, int step, int rank) {
  return psi + TOTALS_AT + ((step & 3) * CLUSTER + rank) * (u32)sizeof(double);
}

// A number of this block, to all blocks: its place among the totals is that of `step`.
__device__ __forceinline__ void send_total(u32 psi, int step, u32 barrier, double v) {
#if CLUSTER > 1
  const int lane = threadIdx.x & 31;
  if (lane < CLUSTER) send(lane, total_address(psi, step, block_rank()), barrier, v);
#endif
}

__device__ __forceinline__ double add_totals(u32 psi, int step) {
  double total = 0;
#pragma unroll
  for (int i = 0; i < CLUSTER; ++i) total += load(total_address(psi, step, i), double());
  return total;
}

// Every thread's v of the trajectory. step: one whose places are free.
__device__ double trajectory_sum(double v, Post& post, u32 psi, int step) {
  const double mine = block_sum(v, psi, step);
#if CLUSTER > 1
  sync_cluster();  // all have received what was last sent for the barrier
  if (threadIdx.x < 32) send_total(psi, step, barrier_address(psi, PROJECTED), mine);
  gather(post, psi, PROJECTED, TOTAL_BYTES, threadIdx.x);
  return add_totals(psi, step);
#else
  return mine;
#endif
}

#if RANK
// What V is at the end of a segment whose path started from X: q' = q + BCB†d in q, for d = x − x̄; returns this
// thread's part of ν + q·d + ½d†BCB†d.
__device__ double bend(TwinSite (&site)[PER], const Pair (&x)[PER], Pair (&q)[PER], Post& post, u32 psi, int segment,
                       int end, unsigned char* shared) {
  Pair* const y = reinterpret_cast<Pair*>(shared + PROJECTED_AT);
  Pair* const z = y + RANK;
  const Pair* const d = reinterpret_cast<const Pair*>(shared + TWIN_AT);
  const int row = first_row() + threadIdx.x, lane = threadIdx.x & 31, rank = block_rank();
  double value = rank == 0 && threadIdx.x == 0 ? c_trail.value[segment + 1] - c_trail.value[0] : 0;
  sync_cluster();
  for (int i = 0; i < PER; ++i) {
    const int n = row + i * THREADS;
    const Pair at = c_trail.path[end * (long long)ROWS + n];
    q[i] = c_trail.adjoint[end * (long long)ROWS + n];
    const Pair away = pair(x[i].x - at.x, x[i].y - at.y);
    store(site[i].self, away);
    value += (double)(q[i].x * away.x + q[i].y * away.y);
  }
  __syncthreads();
  for (int a = threadIdx.x / 32; a < RANK; a += WARPS) {
    Pair sum = Pair();
    for (int n = lane; n < LOCAL; n += 32) {  // B is 0 in idle rows
      const Pair b = c_trail.basis[a * (long long)ROWS + first_row() + n], v = d[n];
      sum.x += b.x * v.x + b.y * v.y;
      sum.y += b.x * v.y - b.y * v.x;
    }
    sum = pair(warp_sum(sum.x), warp_sum(sum.y));
#if CLUSTER > 1
    const u32 there = psi + PROJECTED_AT + ((2 + rank) * RANK + a) * (u32)sizeof(Pair);
    if (lane < CLUSTER) send(lane, there, barrier_address(psi, PROJECTED), sum);
#else
    if (lane == 0) y[a] = sum;
#endif
  }
#if CLUSTER > 1
  gather(post, psi, PROJECTED, CLUSTER * RANK * (u32)sizeof(Pair), threadIdx.x);
  for (int a = threadIdx.x; a < RANK; a += THREADS) {
    Pair sum = Pair();
    for (int block = 0; block < CLUSTER; ++block) {
      const Pair part = y[(2 + block) * RANK + a];
      sum = pair(sum.x + part.x, sum.y + part.y);
    }
    y[a] = sum;
  }
#endif
  __syncthreads();
  for (int a = threadIdx.x; a < RANK; a += THREADS) {
    const Pair* c = c_trail.curvature + ((long long)segment * RANK + a) * RANK;
    Pair sum = Pair();
    for (int e = 0; e < RANK; ++e) {
      sum.x += c[e].x * y[e].x - c[e].y * y[e].y;
      sum.y += c[e].x * y[e].y + c[e].y * y[e].x;
    }
    z[a] = sum;
    if (rank == 0) value += 0.5 * (double)(sum.x * y[a].x + sum.y * y[a].y);
  }
  __syncthreads();
  for (int i = 0; i < PER; ++i)
    for (int a = 0; a < RANK; ++a) {
      const Pair b = c_trail.basis[a * (long long)ROWS + row + i * THREADS];
      q[i].x += b.x * z[a].x - b.y * z[a].y;
      q[i].y += b.x * z[a].y + b.y * z[a].x;
    }
  return value;
}
#endif

struct Score {  // besides Site's two sums: the scores with q for ζ, and those of steps whose weight is not known yet
  Real direct[SCORED], held[HOLD][SCORED];
#if RATES
  Real direct_rate[2], held_rate[HOLD][3];  // damping and drive; and ln Q
#endif
};

// The scores that were held longest, with their weight.
template <int slot> __device__ __forceinline__ void settle(Site& s, const Score& a, Real w) {
  EACH_SLOT
  for (int i = 0; i < SCORED; ++i) s.weighted[i] += w * a.held[slot][i];
#if RATES
#pragma unroll
  for (int i = 0; i < 3; ++i) s.rate[2 * i] += w * a.held_rate[slot][i];
#endif
}

template <int slot> __device__ __forceinline__ void hold(Site& s, Score& a, int i, Real u, Real direct) {
  a.held[slot][i] = u;
  s.plain[i] += u;
  a.direct[i] += direct;
}

#if RATES
template <int slot>
__device__ __forceinline__ void hold_rates(Site& s, Score& a, Real drag, Real spread, Real push, Real direct_drag,
                                           Real direct_push) {
  a.held_rate[slot][0] = drag;
  a.held_rate[slot][1] = spread;
  a.held_rate[slot][2] = push;
#pragma unroll
  for (int i = 0; i < 3; ++i) s.rate[2 * i + 1] += a.held_rate[slot][i];
  a.direct_rate[0] += direct_drag;
  a.direct_rate[1] += direct_push;
}
#endif

struct Rows {  // of the twin, at a site: x̄_n, x̄_{n+1} and q_{n+1}
  Pair now, next, q;
};

// g − g̃ of a time, of a site with a port.
__device__ __forceinline__ void count_reward(Grown& sum, int n, Pair y, Pair path, int step, Real part) {
#pragma unroll
  for (int p = 0; p < PORTS; ++p)
    if (is_port(p, n)) {  // all ports of the site at once
      const double g = own_reward(n, y, step) * (double)part;
      sum.earned += g;
      sum.base += g - twin_reward(n, path, step) * (double)part;
      break;
    }
}

// What X_{n+1} and the kick add to the sums; returns q·(X − x̄)_{n+1}.
__device__ __forceinline__ Real count_step(Grown& sum, const Rows& twin, Pair next, Real rr, Real ri) {
  sum.moved -= (double)(twin.q.x * rr + twin.q.y * ri);
  return twin.q.x * (next.x - twin.next.x) + twin.q.y * (next.y - twin.next.y);
}

#if HEUN

#define ADJOINT TWIN_AT  // q_{n+1} of all sites: the twin's buffers are free while X moves

// Both stages as in heun.cuh.
template <int slot>
__device__ __forceinline__ Real correct_with_twin(Site& s, Score& a, Grown& sum, int n, u32 psi, u32 from, u32 to,
                                                  const Held& held, Real tau, int step, int steps, const Rows& twin) {
  const Pair y = load(s.self + from, Pair()), b = load(s.self + AHEAD, Pair()), z = held.zeta, q = twin.q;
  const Pair f = force(n, step + 1, c_in.drive, c_force);
  const Pair h = couple<(HARMONICS > 0)>(s, AHEAD, tau, [](int, Pair) {});
  const Real power = squared(b), before = squared(y), half = (Real)0.5;
  const Pair small = drift(s, b, h, f, power);
  const Real rr = s.kick * z.x, ri = s.kick * z.y;
  const Pair next = pair(y.x + (half * (held.small.x + small.x) + rr), y.y + (half * (held.small.y + small.y) + ri));
  const Pair e = pull_back(s, b, power, z, couple<(HARMONICS > 0)>(s, KICKS, tau, [](int, Pair) {}));
  const Pair eq = pull_back(s, b, power, q, couple<(HARMONICS > 0)>(s, ADJOINT, tau, [](int, Pair) {}));
  const Real now = half * cross(e.x, e.y, y), then = half * cross(z.x, z.y, b);
  const Real now_q = half * cross(eq.x, eq.y, y), then_q = half * cross(q.x, q.y, b);
  hold<slot>(s, a, 0, now + then, now_q + then_q);
  hold<slot>(s, a, 1, before * now + power * then, before * now_q + power * then_q);
  EACH_SLOT
  for (int d = 0; d < DEGREE; ++d) {
    const Pair m = load(s.neighbour[d] + from, Pair()), ahead = load(s.neighbour[d] + AHEAD, Pair());
    hold<slot>(s, a, 2 + d, half * (cross(e.x, e.y, m) + cross(z.x, z.y, ahead)),
               half * (cross(eq.x, eq.y, m) + cross(q.x, q.y, ahead)));
  }
  count_reward(sum, n, y, twin.now, step, trapezoid(step, steps));
#if RATES
  const Pair f_now = force(n, step, c_in.drive, c_force);
  const Rates first = rates_of(s, y, e.x, e.y, f_now), second = rates_of(s, b, z.x, z.y, f);
  hold_rates<slot>(s, a, half * (first.drag + second.drag), second.spread, half * (first.push + second.push),
                   -half * (eq.x * y.x + eq.y * y.y + q.x * b.x + q.y * b.y),
                   half * (eq.x * f_now.x + eq.y * f_now.y + q.x * f.x + q.y * f.y) * (Real)INVERSE_DT);
  add_part_of_gain(s, n, y, step, trapezoid(step, steps));
#endif
  publish(s, n, psi, to, next, step + 1);
  return count_step(sum, twin, next, rr, ri);
}

#else

// One site's step: X_{n+1}, scores with ζ and with q = q_{n+1}; returns q·(X − x̄)_{n+1}.
template <int slot>
__device__ __forceinline__ Real advance_with_twin(Site& s, Score& a, Grown& sum, int n, u32 psi, u32 from, u32 to,
                                                  u32 first, u32 second, Real tau, int step, const Rows& twin) {
  const Pair y = load(s.self + from, Pair()), q = twin.q;
  Real zr, zi;
  box_muller(first, second, s.variance, zr, zi);
  const Pair h = couple<(HARMONICS > 0)>(
      s, from, tau, [&](int d, Pair m) { hold<slot>(s, a, 2 + d, cross(zr, zi, m), cross(q.x, q.y, m)); });
  const Real power = squared(y), u = cross(zr, zi, y), along = cross(q.x, q.y, y);
  hold<slot>(s, a, 0, u, along);
  hold<slot>(s, a, 1, power * u, power * along);
  const Pair f = force(n, step, c_in.drive, c_force);
  count_reward(sum, n, y, twin.now, step, 1);
#if RATES
  const Rates rates = rates_of(s, y, zr, zi, f);
  hold_rates<slot>(s, a, rates.drag, rates.spread, rates.push, -(q.x * y.x + q.y * y.y),
                   (q.x * f.x + q.y * f.y) * (Real)INVERSE_DT);
  add_gain(s.rate[6], n, y, step);
#endif
  const Real rr = s.kick * zr, ri = s.kick * zi;
  const Pair small = drift(s, y, h, f, power);
  const Pair next = pair(y.x + (small.x + rr), y.y + (small.y + ri));
  publish(s, n, psi, to, next, step + 1);
  return count_step(sum, twin, next, rr, ri);
}

#endif

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

struct Track {  // of the trajectory that a block or cluster runs
  u32 psi, half_turn;
  int steps;
  Real bar;  // R' − λ̄ of the step whose weight is next
};

// Adds to a row of sums per block, (blocks, length): the same thread does all of it.
__device__ __forceinline__ void add_to_row(double* sums, int length, int at, double v) {
  if (block_rank() == 0 && threadIdx.x == 0) atomicAdd(sums + (long long)(blockIdx.x / CLUSTER) * length + at, v);
}

// Λ_0 − Λ_{n+1} of the step that was held longest, as a weight; `step` is the one that begins. 0 before there is one.
__device__ __forceinline__ Real next_weight(Track& t, int step) {
  const int of = step - HOLD;
  const Real bar = t.bar;
  t.bar = c_in.bar[max(0, min(of + 1, t.steps - 1))];  // a step ahead
  if (of < 0) return 0;
#if CLUSTER > 1
  const double grown = add_totals(t.psi, of);
#else
  const double grown = add_warps(t.psi, of);
#endif
  add_to_row(c_trail.prefix_sum, t.steps + 1, of + 1, grown);
  return (Real)((double)bar - grown);
}

// slot: where scores are held.
template <int slot>
__device__ __forceinline__ void twin_step(Site (&site)[PER], Score (&score)[PER], Grown& sum, const Rows (&twin)[PER],
                                          const u32 (&w)[PER][4], Track& t, Post& post, Real tau, Real tau_step,
                                          int step) {
  const bool odd = HOLD > 1 ? slot : step & 1;
  const u32 from = odd ? BUFFER : 0, to = odd ? 0 : BUFFER;
  const int row = first_row() + threadIdx.x;
  const u32 psi = t.psi;
  const Real weight = next_weight(t, step);
#if CLUSTER > 1
  if (threadIdx.x / 32 == WARPS - 1)
    send_total(psi, step - 1, barrier_address(psi, odd ? EVEN : ODD), step ? add_warps(psi, step - 1) : 0.0);
#endif
  if (block_rank() == 0 && threadIdx.x == 0)
    add_to_row(c_out.reward_sum, t.steps + HEUN, step,
               (double)(reward(psi, from, step) * part_of_reward(step, t.steps)));
  Real ahead = 0;
#if HEUN
  Held held[PER];
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    settle<slot>(site[i], score[i], weight);
    share(site[i], psi, ADJOINT, barrier_address(psi, STAGE), twin[i].q);
    held[i] = predict(site[i], row + i * THREADS, psi, from, odd ? w[i][2] : w[i][0],
                      (odd ? w[i][3] : w[i][1]) ^ t.half_turn, tau, step);
  }
  gather(post, psi, STAGE, 3 * post.mirrors, threadIdx.x);
#pragma unroll
  for (int i = 0; i < PER; ++i)
    ahead += correct_with_twin<slot>(site[i], score[i], sum, row + i * THREADS, psi, from, to, held[i], tau + tau_step,
                                     step, t.steps, twin[i]);
#else
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    settle<slot>(site[i], score[i], weight);
    ahead += advance_with_twin<slot>(site[i], score[i], sum, row + i * THREADS, psi, from, to, odd ? w[i][2] : w[i][0],
                                     (odd ? w[i][3] : w[i][1]) ^ t.half_turn, tau, step, twin[i]);
  }
#endif
  const Real part = warp_sum((Real)(sum.base + sum.moved + (double)ahead));
  if ((threadIdx.x & 31) == 0) store(sum_address(psi, odd, threadIdx.x >> 5), (double)part);
}

// The weights of the last steps, which no further step waits for.
__device__ __forceinline__ void settle_last(Site (&site)[PER], Score (&score)[PER], Track& t, Post& post) {
  const int steps = t.steps;
  const auto settle_all = [&](int odd, Real weight) {
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      if (odd)
        settle<HOLD - 1>(site[i], score[i], weight);
      else
        settle<0>(site[i], score[i], weight);
    }
  };
#if CLUSTER > 1
  settle_all(steps & 1, next_weight(t, steps));
  const double last = add_warps(t.psi, steps - 1);
  if (threadIdx.x < 32) send_total(t.psi, steps - 1, barrier_address(t.psi, PROJECTED), last);
  gather(post, t.psi, PROJECTED, TOTAL_BYTES, threadIdx.x);
  settle_all((steps + 1) & 1, next_weight(t, steps + 1));
#else
  settle_all(0, next_weight(t, steps));
#endif
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, TWIN_BLOCKS)
    twin_pass(u32 first, int count, int steps, int segment, int piece_steps, Real wave_scale, double reference) {
  extern __shared__ __align__(16) unsigned char shared[];
  const u32 psi = shared_address(shared);
  Real* const poly = reinterpret_cast<Real*>(shared + WAVES);
#if WAVES_SHARED
  Real* const waves = poly + 3 * BONDS;
#else
  Real* const waves = c_out.waves + (long long)blockIdx.x * 2 * HARMONICS * BONDS;
#endif
  const int segments = (steps + segment - 1) / segment;
  const int rank = block_rank(), blocks = gridDim.x / CLUSTER, local = rank * LOCAL + threadIdx.x;
  const long long row = ROWS, block = blockIdx.x / CLUSTER;  // of the trajectory: a cluster counts as one
#if OWN || RANK
  Pair* const own = c_trail.own + block * (2 * (segment + 1) + (OWN ? 2 * (segments + 1) : 0)) * row;
  Pair *const path = own, *const adjoint = own + (segment + 1) * row;
#endif
#if OWN
  Pair *const kept_path = own + 2 * (segment + 1) * row, *const kept_adjoint = kept_path + (segments + 1) * row;
#endif
  Track track = {psi, 0, steps, 0};
  Site site[PER];
  Score score[PER];
  Post post;
  open_post(post, psi, threadIdx.x);

  for (int j = block; j < count; j += blocks) {
    const u32 trajectory = first + j;
    const u32 stream = ANTITHETIC ? trajectory & ~1u : trajectory;
    track.half_turn = ANTITHETIC ? trajectory << 31 : 0;
    sync_cluster();  // the last trajectory's state is still being read
#if HARMONICS
    for (int b = threadIdx.x; b < BONDS; b += THREADS)
      draw_modulation(stream, b, c_in.bond_given[rank * BONDS + b], wave_scale, waves);
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
        for (int i = 0; i < PER; ++i) kept_path[k * row + local + i * THREADS] = x[i];
        path_of(twin, x, wave, post, psi, k * segment, min((k + 1) * segment, steps), path);
      }
      for (int i = 0; i < PER; ++i) {
        twin_finite = twin_finite && isfinite(x[i].x) && isfinite(x[i].y);
        x[i] = last_adjoint(local + i * THREADS, x[i], steps);
      }
      for (int k = segments - 1; k >= 0; --k) {
        Pair begin[PER];
        for (int i = 0; i < PER; ++i) {
          kept_adjoint[(k + 1) * row + local + i * THREADS] = x[i];
          begin[i] = kept_path[k * row + local + i * THREADS];
        }
        const int end = min((k + 1) * segment, steps);
        path_of(twin, begin, wave, post, psi, k * segment, end, path);
        adjoint_of(twin, x, wave, post, psi, k * segment, end, k * segment, steps, path, adjoint);
      }
      for (int i = 0; i < PER; ++i) twin_finite = twin_finite && isfinite(x[i].x) && isfinite(x[i].y);
      __syncthreads();
    }
#endif

#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const int n = local + i * THREADS;
      open_site(site[i], n, psi);
      publish(site[i], n, psi, 0, pair(c_in.start[2 * n], c_in.start[2 * n + 1]), 0);
      score[i] = Score();
    }
    gather<0>(post, psi);

    Grown sum = {};
    Rows twin_rows[PER];
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
          x[i] = kept_path[k * row + local + i * THREADS];
          q[i] = kept_adjoint[(k + 1) * row + local + i * THREADS];
#endif
        }
        path_of(twin, x, wave, post, psi, begin, end, path);
#if RANK
        sum.base = sum.earned + bend(twin, x, q, post, psi, k, end, shared);
        for (int i = 0; i < PER; ++i) {
          const int n = local + i * THREADS;
          for (int p = 0; p < PORTS; ++p)
            if (is_port(p, n)) {
              for (int step = begin; step < end; ++step)
                sum.base += twin_reward(n, path[(step - begin) * row + n], step) * (double)part_of_reward(step, steps);
              break;
            }
        }
#endif
        adjoint_of(twin, q, wave, post, psi, begin, end, begin + 1, steps, path, adjoint);
        sync_cluster();  // its buffers are those of q with Heun's step
      }
      const Pair *const x_rows = path - begin * row, *const q_rows = adjoint - begin * row;
#else
      const Pair *const x_rows = c_trail.path, *const q_rows = c_trail.adjoint;
#endif
      Pair x_now[PER], x_next[PER], q_next[PER];
#pragma unroll
      for (int i = 0; i < PER; ++i) {
        const long long n = local + i * THREADS;
        x_now[i] = x_rows[begin * row + n];
        x_next[i] = x_rows[(begin + 1) * row + n];
        q_next[i] = q_rows[(begin + 1) * row + n];
      }
      u32 w[PER][4] = {};
      if (CLUSTER > 1 || (begin & 1)) draw(local, w, stream, begin);
      Real tau = 0, tau_step = 0;
#if HARMONICS
      int piece = -1;
      tau_step = (Real)2 / (Real)piece_steps;
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
          for (int i = 0; i < PER; ++i) take_modulation(site[i], local + i * THREADS, c_in.kappa, poly);
        }
        tau = (Real)(2 * (step - piece * piece_steps) + 1 - piece_steps) / (Real)piece_steps;
#endif
        const bool odd = step & 1;
        if (CLUSTER == 1 && !odd) draw(local, w, stream, step);
        const long long later = (step + 2 <= end ? step + 2 : end) * row + local;  // fetched a step ahead
#pragma unroll
        for (int i = 0; i < PER; ++i) {
          twin_rows[i] = {x_now[i], x_next[i], q_next[i]};
          x_now[i] = x_next[i];
          x_next[i] = x_rows[later + i * THREADS];
          q_next[i] = q_rows[later + i * THREADS];
        }
        if (HOLD > 1 && odd)
          twin_step<HOLD - 1>(site, score, sum, twin_rows, w, track, post, tau, tau_step, step);
        else
          twin_step<0>(site, score, sum, twin_rows, w, track, post, tau, tau_step, step);
        if (CLUSTER > 1 && odd) draw(local, w, stream, step + 1);  // while messages are on their way
        gather(post, psi, odd ? EVEN : ODD, state_bytes(post) + TOTAL_BYTES, threadIdx.x);
      }
    }

    settle_last(site, score, track, post);
    const u32 end_buffer = (steps & 1) * BUFFER;
#if HEUN
    for (int i = 0; i < PER; ++i) {  // the reward of the end
      const Pair last = load(site[i].self + end_buffer, Pair());
      count_reward(sum, local + i * THREADS, last, twin_rows[i].next, steps, trapezoid(steps, steps));
#if RATES
      add_part_of_gain(site[i], local + i * THREADS, last, steps, trapezoid(steps, steps));
#endif
    }
    if (rank == 0 && threadIdx.x == 0)
      add_to_row(c_out.reward_sum, steps + 1, steps,
                 (double)(reward(psi, end_buffer, steps) * trapezoid(steps, steps)));
#endif
    const double gained = trajectory_sum(sum.base + sum.moved, post, psi, steps);
    const double total = trajectory_sum(sum.earned, post, psi, steps + 1);
    bool finite = true;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const int n = local + i * THREADS;
      if (n < N) {
        close_corrected(site[i], score[i], n, (Real)(gained - reference), c_out.raw + (long long)j * 3 * KINDS * N);
        const Pair last = load(site[i].self + end_buffer, Pair());
        finite = finite && isfinite(last.x) && isfinite(last.y);
      }
    }
    const int bad = __syncthreads_or(!finite), twin_bad = __syncthreads_or(!twin_finite);
    if (threadIdx.x == 0) {
      if (rank == 0) {
        c_out.returns[j] = total;
        c_trail.gained[j] = gained;
      }
      c_out.overflow[(long long)j * CLUSTER + rank] = (bad ? 1 : 0) + (twin_bad ? 2 : 0);
    }
  }
}
