// One pass on the device: a block or a cluster of blocks per trajectory, a thread per site (or per several, for large
// networks). The state is double-buffered in shared memory with one barrier per step; parameters and sums live in
// registers. Every site accumulates its own half of each of its bonds' scores, so no noise is exchanged; halves are
// added at the end.
//
// In a cluster every block adds up the same rewards from its copies of the ports, and draws the noise of the next two
// steps while messages to it are on their way.
//
// Set before this text, besides those of step.cuh: BLOCKS (per multiprocessor), and 0 or 1 for ANTITHETIC, BASELINE,
// RECORD, WAVES_SHARED. Follows heun.cuh.

template <int odd>
__device__ __forceinline__ void advance(Site& s, int n, u32 psi, u32 first, u32 second, Real w, Real tau, int step,
                                        Quad* keep = nullptr) {
  constexpr u32 from = odd ? BUFFER : 0, to = odd ? 0 : BUFFER;
  const Pair y = load(s.self + from, Pair());
  Real zr = 0, zi = 0;
#if NOISE
  box_muller(first, second, s.variance, zr, zi);  // ζ = r/(2Q)
#endif
  const Pair h = couple<(HARMONICS > 0)>(s, from, tau, [&](int d, Pair m) {
#if SCORES
    const Real u = cross(zr, zi, m);
    s.weighted[2 + d] += w * u;
    s.plain[2 + d] += u;
#endif
  });
  const Real power = y.x * y.x + y.y * y.y;
#if SCORES
  const Real u = cross(zr, zi, y);
  s.weighted[0] += w * u;
  s.plain[0] += u;
  s.weighted[1] += w * (power * u);
  s.plain[1] += power * u;
#endif
  const Pair f = force(n, step, c_in.drive, c_force);
#if RATES
  const Rates rates = rates_of(s, y, zr, zi, f);
  s.rate[0] += w * rates.drag;
  s.rate[1] += rates.drag;
  s.rate[2] += w * rates.spread;
  s.rate[3] += rates.spread;
  s.rate[4] += w * rates.push;
  s.rate[5] += rates.push;
  add_gain(s.rate[6], n, y, step);
#endif
  const Pair small = drift(s, y, h, f, power);
  Pair next;
  next.x = y.x + (small.x + s.kick * zr);
  next.y = y.y + (small.y + s.kick * zi);
  publish(s, n, psi, to, next, step + 1);
  if (keep) *keep = {y.x, y.y, zr, zi};
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

struct Clock {     // the same for all threads of a trajectory
  Real sum, base;  // C = base + sum
  Real tau;        // where in the chunk, in (−1, 1): what the modulation's quadratics are in
};

template <int odd>
__device__ __forceinline__ void step_all(Site (&site)[PER], const u32 (&w)[PER][4], Clock& c, u32 psi, u32 half_turn,
                                         Post& post, int row, int step, int chunk, Real bar, int j, int steps,
                                         Real tau_step, int record_every) {
#if RECORD
  if (step % record_every == 0)
    for (int n = row, at = threadIdx.x; n < N && at < LOCAL; n += THREADS, at += THREADS)
      c_out.record[((long long)j * (steps / record_every + 1) + step / record_every) * N + n] =
          load(psi + odd * BUFFER + at * (u32)sizeof(Pair), Pair());
#endif
#if HEUN
  const Real g = reward(psi, odd * BUFFER, step) * trapezoid(step, steps);
#else
  const Real g = reward(psi, odd * BUFFER, step);
#endif
  c.sum += g;
  if (threadIdx.x == 0) store(psi + REWARDS + (step - chunk) * (u32)sizeof(Real), g);
  const Real weight = bar - c.base - c.sum;  // R' − λ̄_n − C_{n+1}: the reward of step n precedes the kick
#if HEUN
  Held held[PER];
#pragma unroll
  for (int i = 0; i < PER; ++i)
    held[i] = predict(site[i], row + i * THREADS, psi, odd * BUFFER, w[i][2 * odd], w[i][2 * odd + 1] ^ half_turn,
                      c.tau, step);
  gather(post, psi, STAGE, (SCORES ? 2 : 1) * post.mirrors, threadIdx.x);
#pragma unroll
  for (int i = 0; i < PER; ++i)
    correct<odd>(site[i], row + i * THREADS, psi, held[i], weight, c.tau + tau_step, step, trapezoid(step, steps));
#else
#pragma unroll
  for (int i = 0; i < PER; ++i)
    advance<odd>(site[i], row + i * THREADS, psi, w[i][2 * odd], w[i][2 * odd + 1] ^ half_turn, weight, c.tau, step);
#endif
  c.tau += tau_step;
}

__device__ __forceinline__ Pair bars(int step) {
#if BASELINE
  return reinterpret_cast<const Pair*>(c_in.bar)[step >> 1];
#else
  return Pair();
#endif
}

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, BLOCKS)
    one_pass(u32 first, int count, int steps, int chunk_steps, Real wave_scale, double reference, int record_every) {
  extern __shared__ __align__(16) unsigned char shared[];  // two buffers of ψ, then the modulation's
  const u32 psi = shared_address(shared);
  Real* const rewards = reinterpret_cast<Real*>(shared + REWARDS);
  Real* const poly = reinterpret_cast<Real*>(shared + WAVES);
#if WAVES_SHARED
  Real* const waves = poly + 3 * BONDS;
#else
  Real* const waves = c_out.waves + (long long)blockIdx.x * 2 * HARMONICS * BONDS;
#endif
  const int rank = block_rank(), row = rank * LOCAL + threadIdx.x, blocks = gridDim.x / CLUSTER;
  const int block = blockIdx.x / CLUSTER;  // the trajectory's: a cluster counts as one
  Site site[PER];
  Post post;
  open_post(post, psi, threadIdx.x);

  for (int j = block; j < count; j += blocks) {
    const u32 trajectory = first + j;
    const u32 stream = ANTITHETIC ? trajectory & ~1u : trajectory;
    const u32 half_turn = ANTITHETIC ? trajectory << 31 : 0;
    sync_cluster();  // the last trajectory's state is still being read
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const int n = row + i * THREADS;
      open_site(site[i], n, psi);
      Pair start;
      start.x = c_in.start[2 * n];
      start.y = c_in.start[2 * n + 1];
      publish(site[i], n, psi, 0, start, 0);
    }
#if HARMONICS
    for (int b = threadIdx.x; b < BONDS; b += THREADS)
      draw_modulation(stream, b, c_in.bond_given[rank * BONDS + b], wave_scale, waves);
#endif
    u32 w[PER][4] = {};
    if (CLUSTER > 1) draw(row, w, stream, 0);
    gather<0>(post, psi);

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
      for (int i = 0; i < PER; ++i) take_modulation(site[i], row + i * THREADS, c_in.kappa, poly);
      c.tau = (Real)(1 - chunk_steps) / chunk_steps;
#endif
      const int end = min(chunk + chunk_steps, steps & ~1);
#pragma unroll 1
      for (int step = chunk; step < end; step += 2) {
        if (CLUSTER == 1) draw(row, w, stream, step);
        const Pair bar = bars(step);
        step_all<0>(site, w, c, psi, half_turn, post, row, step, chunk, bar.x, j, steps, tau_step, record_every);
        gather<1>(post, psi);
        step_all<1>(site, w, c, psi, half_turn, post, row, step + 1, chunk, bar.y, j, steps, tau_step, record_every);
        if (CLUSTER > 1) draw(row, w, stream, step + 2);
        gather<0>(post, psi);
      }
      if ((steps & 1) && steps - chunk <= chunk_steps) {  // the last step of an odd number
        if (CLUSTER == 1) draw(row, w, stream, end);
        step_all<0>(site, w, c, psi, half_turn, post, row, end, chunk, bars(end).x, j, steps, tau_step, record_every);
        gather<1>(post, psi);
      }
      if (rank == 0 && threadIdx.x < chunk_steps && chunk + threadIdx.x < steps)
        atomicAdd(c_out.reward_sum + (long long)block * (steps + HEUN) + chunk + threadIdx.x,
                  (double)rewards[threadIdx.x]);
      __syncthreads();  // before the next chunk's rewards and modulation
      const Real more = c.sum + lost, after = c.base + more;
      lost = more - (after - c.base);
      c.base = after;
      c.sum = 0;
    }

    double total = (double)c.base + (double)lost;
#if HEUN
    const Real last_reward = reward(psi, (steps & 1) * BUFFER, steps) * trapezoid(steps, steps);
    total += (double)last_reward;
    if (rank == 0 && threadIdx.x == 0)
      atomicAdd(c_out.reward_sum + (long long)block * (steps + 1) + steps, (double)last_reward);
#endif
    bool finite = true;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const int n = row + i * THREADS;
      if (n < N) {
        const Pair last = load(site[i].self + (steps & 1) * BUFFER, Pair());
#if HEUN && RATES
        add_part_of_gain(site[i], n, last, steps, trapezoid(steps, steps));
#endif
        close_site(site[i], n, (Real)(total - reference), c_out.raw + (long long)j * KINDS * N);
        finite = finite && isfinite(last.x) && isfinite(last.y);
#if RECORD
        if (steps % record_every == 0)
          c_out.record[((long long)j * (steps / record_every + 1) + steps / record_every) * N + n] = last;
#endif
      }
    }
    const int bad = __syncthreads_or(!finite);
    if (threadIdx.x == 0) {
      if (rank == 0) c_out.returns[j] = total;
      c_out.overflow[(long long)j * CLUSTER + rank] = bad;
    }
  }
}

// Moments of the gradients over trajectories, (parts, 3, P): Σv, Σv², Σ(v₂ⱼ + v₂ⱼ₊₁)². Column p is the sum of the
// raw columns a[p] and b[p] (b < 0: none). Fixed order, in double. Optionally the samples themselves.
extern "C" __global__ void moments(const Real* raw, long long stride, const int* a, const int* b, int columns,
                                   int count, double* out, Real* samples) {
  const int p = blockIdx.x * blockDim.x + threadIdx.x;
  if (p >= columns) return;
  const int parts = gridDim.y, pairs = (count + 1) / 2;
  const int from = (int)((long long)pairs * blockIdx.y / parts) * 2,
            to = min(count, (int)((long long)pairs * (blockIdx.y + 1) / parts) * 2);
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
