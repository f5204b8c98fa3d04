// The pass itself; `forward`, `finish` and `backward` of the process are above.

extern __shared__ __align__(16) unsigned char shared[];

// ------------------------------------------------------------------------------------------ noise

#if NOISE64
INLINE V normal_of(U high, U low) { return (V)normal64(high, low); }
#else
INLINE V normal_of(U high, U low) { return normal32(high, low); }
#endif

// the normals of step n, and for Philox of the steps that share its blocks; the team shares the components
INLINE void draw(const U* stream, u32 n, V* z) {
#if WIENER == 1
  U a = 0, c = n;
  threefry(stream[0], stream[1], a, c);
#pragma unroll 2
  for (int k = team; k < NORMALS; k += TEAM) {
    U high = 0, low = k;
    threefry(a, c, high, low);
    z[k * BLOCKS] = normal_of(high, low);
  }
#elif WIENER == 2
  const int sites = (WIDTH + 1) / 2;
  for (int k = team; k < sites; k += TEAM) {
    U c0 = k, c1 = n / 2, c2 = stream[2], c3 = 0;
    philox<PHILOX_ROUNDS>(stream[0], stream[1], c0, c1, c2, c3);
    N cosine[2], sine[2];
    box_muller(c0, c1, cosine[0], sine[0]);
    box_muller(c2, c3, cosine[1], sine[1]);
    EACH(b, 2) {
      z[(b * WIDTH + k) * BLOCKS] = (V)cosine[b];
      if (k + sites < WIDTH) z[(b * WIDTH + k + sites) * BLOCKS] = (V)sine[b];
    }
  }
#elif WIENER == 3
#pragma unroll 2
  for (int k = team; k < NORMALS; k += TEAM) {
    N four[4];
    philox7_normals(stream, k, n / 4, four);
    EACH(b, 4) z[(b * WIDTH + k) * BLOCKS] = (V)four[b];
  }
#endif
}

// ------------------------------------------------------------------------------------------ the pass

// States and rewards of a later step, which are on their way while the step before it is worked on.
#define AHEAD (STATE <= 8 * TEAM ? (STATE + TEAM - 1) / TEAM : 0)

// count, steps, first: as in `Run` of ensemble.cuh. size: trajectories per batch. piece: trajectories that are summed
// by one block. path: states (T + 1, STATE, TRAJECTORIES), then collected rewards (T, TRAJECTORIES), per block of the
// grid. sums: (pieces, SUMS + T · PER_STEP); without them, of a pilot, only rewards are collected, and the path has no
// states.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    batch_pass(i64 count, i64 steps, i64 first, i64 size, i64 piece, i64 pieces, const F* numbers, const F* timed,
               const F* start, const F* context, const u32* words, const F* bar, F* reward, F* last, F* path, F* sums) {
  V* const x = (F*)shared + lane;
  V* const y = x + STATE * BLOCKS;
  V* const drawn = y + STATE * BLOCKS;
  V* const c = drawn + DRAWN * NORMALS * BLOCKS;
  V* const g = c + CONTEXT * BLOCKS;
  V* const r = g + BLOCKS;
  V* const weight = r + BLOCKS;
  V* const once = weight + BLOCKS;
  V* const work = once + BLOCKS;
  F* const fixed = (F*)shared + OWN * BLOCKS;
  for (int k = threadIdx.x; k < NUMBERS; k += THREADS) fixed[k] = numbers[k];
  const i64 kept = sums ? (steps + 1) * STATE : 0;
  F* const states = path + blockIdx.x * (kept + steps) * TRAJECTORIES + lane;
  F* const collected = states + kept * TRAJECTORIES;
  const i64 per_batch = (size + piece - 1) / piece;
  for (i64 p = blockIdx.x; p < pieces; p += gridDim.x) {
    const i64 begin = p / per_batch * size + p % per_batch * piece;
    const i64 batch_end = (p / per_batch + 1) * size, piece_end = begin + piece;
    const i64 end = batch_end < piece_end ? batch_end : piece_end, stop = end < count ? end : count;
    __syncthreads();
    F* const row = sums + p * (SUMS + steps * PER_STEP);
    F* const totals = SUMS_IN_BLOCK ? fixed + NUMBERS : row;
    if (sums) {
      for (int k = threadIdx.x; k < SUMS; k += THREADS) totals[k] = 0;
      for (i64 k = threadIdx.x; k < steps * PER_STEP; k += THREADS) row[SUMS + k] = 0;
    }
    for (i64 group = begin; group < stop; group += TRAJECTORIES) {
      const bool here = group + lane < stop;
      const i64 j = here ? group + lane : stop - 1;
      U stream[AT_LEAST_ONE(STREAM)];
      V total = 0;
#if BEGINS
      for (int k = team; k < STATE; k += TEAM) x[k * BLOCKS] = start[k];
#if WIENER == 1
      stream[0] = 0, stream[1] = (u32)(first + j);
      threefry(words[0], words[1], stream[0], stream[1]);
#elif WIENER >= 2
      stream[0] = words[0], stream[1] = words[1], stream[2] = (u32)(first + j);
#endif
#else
      for (int k = team; k < STATE; k += TEAM) x[k * BLOCKS] = start[k * count + j];
      for (int k = team; k < CONTEXT; k += TEAM) c[k * BLOCKS] = context[k * count + j];
      EACH(k, STREAM) stream[k] = words[k * count + j];
      total = reward[j];
#endif
      if (sums)
        for (int k = team; k < STATE; k += TEAM) states[k * TRAJECTORIES] = x[k * BLOCKS];
      V *from = x, *to = y;
#pragma unroll 1
      for (i64 n = 0; n < steps; n++) {
        if (n % DRAWN == 0) draw(stream, (u32)n, drawn);
        __syncthreads();
        forward(FIXED, timed + n * TIMED, c, from, drawn + n % DRAWN * NORMALS * BLOCKS, to, g, r, 0, work);
        total += *g;
        if (team == 0) collected[n * TRAJECTORIES] = total;  // the running reward at n precedes the kick
        total += *r;
        if (sums)
          for (int k = team; k < STATE; k += TEAM) states[((n + 1) * STATE + k) * TRAJECTORIES] = to[k * BLOCKS];
        V* const before = from;
        from = to;
        to = before;
      }
      __syncthreads();
      finish(FIXED, c, from, g, work);
      total += *g;
      if (here) {
        if (team == 0) reward[j] = total;
        for (int k = team; k < STATE; k += TEAM) last[k * count + j] = from[k * BLOCKS];
      }
      if (!sums) continue;
      if (team == 0) *once = here;
      to = from == x ? y : x;
      V ahead[AT_LEAST_ONE(AHEAD)];
      EACH(i, AHEAD) if (team + i * TEAM < STATE) {
        ahead[i] = states[((steps - 1) * STATE + team + i * TEAM) * TRAJECTORIES];
      }
      V reached = collected[(steps - 1) * TRAJECTORIES];
#pragma unroll 1
      for (i64 n = steps - 1; n >= 0; n--) {  // backwards: the last states are still in the cache
        const i64 next = n > 0 ? n - 1 : 0;
        if (team == 0) *weight = here ? total - reached - bar[n] : F(0);
        reached = collected[next * TRAJECTORIES];
        if (AHEAD) {
          EACH(i, AHEAD) if (team + i * TEAM < STATE) {
            to[(team + i * TEAM) * BLOCKS] = ahead[i];
            ahead[i] = states[(next * STATE + team + i * TEAM) * TRAJECTORIES];
          }
        } else {
          for (int k = team; k < STATE; k += TEAM) to[k * BLOCKS] = states[(n * STATE + k) * TRAJECTORIES];
        }
        __syncthreads();
        backward(FIXED, timed + n * TIMED, c, to, from, weight, once, 0, totals, totals, row + SUMS + n * PER_STEP,
                 work, 0);
        V* const before = from;
        from = to;
        to = before;
      }
    }
    __syncthreads();
    if (SUMS_IN_BLOCK && sums)
      for (int k = threadIdx.x; k < SUMS; k += THREADS) row[k] = totals[k];
  }
}

// Mean and variance of one trajectory, skewness and excess kurtosis of batches, in table (4, SUMS); as
// `compare_batches` of core/estimate.py has them, where there are no sums of steps. per_batch: pieces of a batch.
extern "C" __global__ void compare_batches(i64 count, i64 size, i64 batches, i64 per_batch, const F* sums,
                                           double* table) {
  const i64 k = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (k >= SUMS) return;
  double all = 0;
  for (i64 p = 0; p < batches * per_batch; p++) all += (double)sums[p * SUMS + k];
  const double mean = all / count;
  double square = 0, cube = 0, fourth = 0;
  for (i64 b = 0; b < batches; b++) {
    double sum = 0;
    for (i64 p = b * per_batch; p < (b + 1) * per_batch; p++) sum += (double)sums[p * SUMS + k];
    const double number = (double)(b + 1 < batches ? size : count - size * b);
    const double off = (sum / number - mean) * sqrt(number), squared = off * off;
    square += squared;
    cube += squared * off;
    fourth += squared * squared;
  }
  const double unit = square / batches;
  table[k] = mean;
  table[SUMS + k] = square / (batches - 1);
  table[2 * SUMS + k] = unit > 0 ? cube / batches / (unit * sqrt(unit)) : 0;
  table[3 * SUMS + k] = unit > 0 ? fourth / batches / (unit * unit) - 3 : 0;
}
