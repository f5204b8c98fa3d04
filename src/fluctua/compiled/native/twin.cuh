// The reverse sweep of a linear twin: a batch of trajectories is a block, a trajectory a thread. Forwards once to the
// states that are kept, every `segment` steps, then backwards, each segment computed again. Besides x, `p` holds the
// twin's state x̄ and V: its slope, and its bend of order 2.

#define WIDE (2 * STATE + NORMALS)  // of a step on the way: x, x̄ and its normals

struct TwinRun {
  i64 count, steps, segment;
  const F *timed, *x, *context;  // (T, TIMED), (STATE, E), (CONTEXT, E)
  const u32* stream;             // (STREAM, E)
  F *kept, *path, *last;         // (T/segment, 2·STATE, E), (segment, WIDE, E), (2·STATE, E): X and x̄
  F *slope, *value;              // (GUESS, E), (E,) in and out: of V
  F *residual, *reward;          // (E,) in and out: Λ and λ̂
  F *direct, *correction;        // (PARAMETERS, E) in and out
  const F* bar;                  // (T,) the baseline where it depends on time alone
  const i64* edges;              // of the batches
  double* sums;                  // (batches, T): ΣΛ
  int* flags;                    // DOMINATED: one trajectory has nearly all of a weight
};

struct Pair {
  V x[STATE], p[STATE + GUESS], c[AT_LEAST_ONE(CONTEXT)];
  U stream[AT_LEAST_ONE(STREAM)];
};

INLINE void step_both(const TwinRun& run, Pair& own, i64 n, const V* z) {
  V y[STATE], ahead[STATE], g, r;
  step_rewards(c_shared, run.timed + n * TIMED, own.c, own.x, z, y, g, r, nullptr, 0);
  twin_ahead(c_shared, run.timed + n * TIMED, own.c, own.x, z, own.p, ahead);
  EACH(k, STATE) own.x[k] = y[k];
  EACH(k, STATE) own.p[k] = ahead[k];
}

INLINE void twin_forwards(const TwinRun& run) {
  const i64 index = blockIdx.x * (i64)THREADS + threadIdx.x, j = index < run.count ? index : run.count - 1;
  const bool here = index < run.count;
  Pair own;
  EACH(k, STATE) own.x[k] = own.p[k] = run.x[k * run.count + j];
  EACH(k, CONTEXT) own.c[k] = run.context[k * run.count + j];
  EACH(k, STREAM) own.stream[k] = run.stream[k * run.count + j];
  for (i64 n = 0; n < run.steps; n++) {
    if (n % run.segment == 0 && here) {
      F* at = run.kept + n / run.segment * 2 * STATE * run.count + j;
      EACH(k, STATE) at[k * run.count] = own.x[k];
      EACH(k, STATE) at[(STATE + k) * run.count] = own.p[k];
    }
    V z[AT_LEAST_ONE(NORMALS)];
    drawn(own.stream, (u32)n, z);
    step_both(run, own, n, z);
  }
  if (!here) return;
  EACH(k, STATE) run.last[k * run.count + j] = own.x[k];
  EACH(k, STATE) run.last[(STATE + k) * run.count + j] = own.p[k];
}

// COUNT sums over a block, in an order that depends on its size alone
template <int COUNT, class Of> INLINE void block_sums(double* parts, double* totals, Of value) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
#pragma unroll
  for (int from = 0; from < COUNT; from += 32) {
    constexpr int MOST = COUNT < 32 ? padded(COUNT) : 32;
    F v[MOST];
    EACH(k, MOST) v[k] = from + k < COUNT ? value(from + k) : F(0);
    const F sum = added<MOST>(v, lane);
    if (lane < MOST && from + lane < COUNT) parts[warp * COUNT + from + lane] = (double)sum;
  }
  __syncthreads();
  for (int k = threadIdx.x; k < COUNT; k += THREADS) {
    double sum = 0;
    for (int w = 0; w < THREADS / 32; w++) sum += parts[w * COUNT + k];
    totals[k] = sum;
  }
  __syncthreads();
}

#if TWIN_BASELINE == 2
#define SUMS (2 + 2 * SCORES)
#else
#define SUMS 2
#endif

INLINE void twin_backwards(const TwinRun& run) {
  __shared__ double parts[THREADS / 32 * SUMS], totals[SUMS];
  const i64 first = run.edges[blockIdx.x], stop = run.edges[blockIdx.x + 1];
  const bool here = first + threadIdx.x < stop;
  const i64 j = here ? first + threadIdx.x : stop - 1;
  // threads without a trajectory follow the last one, and write nothing
  Pair own;
  V slope[GUESS], value = run.value[j], residual = run.residual[j], reward = run.reward[j];
  V direct[PARAMETERS], correction[PARAMETERS];
  EACH(k, CONTEXT) own.c[k] = run.context[k * run.count + j];
  EACH(k, STREAM) own.stream[k] = run.stream[k * run.count + j];
  EACH(k, GUESS) slope[k] = run.slope[k * run.count + j];
  EACH(k, PARAMETERS) direct[k] = run.direct[k * run.count + j];
  EACH(k, PARAMETERS) correction[k] = run.correction[k * run.count + j];
  const F members = (F)(stop - first);
  for (i64 begin = (run.steps - 1) / run.segment * run.segment; begin >= 0; begin -= run.segment) {
    const i64 end = begin + run.segment < run.steps ? begin + run.segment : run.steps;
    const F* at = run.kept + begin / run.segment * 2 * STATE * run.count + j;
    EACH(k, STATE) own.x[k] = at[k * run.count];
    EACH(k, STATE) own.p[k] = at[(STATE + k) * run.count];
    for (i64 n = begin; n < end; n++) {
      V z[AT_LEAST_ONE(NORMALS)];
      drawn(own.stream, (u32)n, z);
      F* to = run.path + (n - begin) * WIDE * run.count + j;
      if (here) {
        EACH(k, STATE) to[k * run.count] = own.x[k];
        EACH(k, STATE) to[(STATE + k) * run.count] = own.p[k];
        EACH(k, NORMALS) to[(2 * STATE + k) * run.count] = z[k];
      }
      step_both(run, own, n, z);
    }
    for (i64 n = end - 1; n >= begin; n--) {
      const F* from = run.path + (n - begin) * WIDE * run.count + j;
      V x[STATE], p[STATE + GUESS], z[AT_LEAST_ONE(NORMALS)], s[AT_LEAST_ONE(SCORES)], d[AT_LEAST_ONE(EXPLICITS)];
      V delta, paid, left, gain;
      EACH(k, STATE) x[k] = here ? from[k * run.count] : F(0);
      EACH(k, STATE) p[k] = here ? from[(STATE + k) * run.count] : F(0);
      EACH(k, GUESS) p[STATE + k] = slope[k];
      EACH(k, NORMALS) z[k] = here ? from[(2 * STATE + k) * run.count] : F(0);
      twin_back(c_shared, run.timed + n * TIMED, own.c, x, z, p, s, d, delta, paid, left, gain, slope);
      EACH(k, EXPLICITS) direct[EXPLICIT_OF[k]] += d[k];
      value += gain;
      reward += paid;
      residual += left;
      block_sums<SUMS>(parts, totals, [&](int k) {
        if (!here) return F(0);
        if (k < 2) return k ? delta : residual;
        const F u = s[k / 2 - 1] * s[k / 2 - 1];
        return k % 2 ? residual * u : u;
      });
#if TWIN_BASELINE == 2
      bool dominated = false;
      EACH(k, SCORES) {
        const double weight = totals[2 + 2 * k];
        const F inverse = weight > 0 ? (F)(1 / weight) : F(0),
                mean = weight > 0 ? (F)(totals[3 + 2 * k] / weight) : F(0);
        const V rest = 1 - s[k] * s[k] * inverse;
        dominated |= rest < F(0.015625);
        correction[SCORE_OF[k]] += (residual - mean) * s[k] / rest;
      }
      if (dominated && here) atomicOr(run.flags, DOMINATED);
#else
      const F mean = TWIN_BASELINE ? (F)(totals[0] / members) : run.bar[n];
      const F scale = TWIN_BASELINE ? members / (members - 1) : F(1);
      const V centred = (residual - mean) * scale;
      EACH(k, SCORES) correction[SCORE_OF[k]] += centred * s[k];
#endif
      residual += delta;
      if (threadIdx.x == 0) run.sums[blockIdx.x * run.steps + n] = totals[0] + totals[1];
    }
  }
  if (!here) return;
  EACH(k, GUESS) run.slope[k * run.count + j] = slope[k];
  run.value[j] = value;
  run.residual[j] = residual;
  run.reward[j] = reward;
  EACH(k, PARAMETERS) run.direct[k * run.count + j] = direct[k];
  EACH(k, PARAMETERS) run.correction[k * run.count + j] = correction[k];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    twin_pass(i64 count, i64 steps, i64 segment, const F* timed, const F* x, const F* context, const u32* stream,
              F* kept, F* path, F* last, F* slope, F* value, F* residual, F* reward, F* direct, F* correction,
              const F* bar, const i64* edges, double* sums, int* flags) {
  const TwinRun run = {count, steps, segment,  timed,  x,      context,    stream, kept,  path, last,
                       slope, value, residual, reward, direct, correction, bar,    edges, sums, flags};
#if PASS == TWIN_FORWARD
  twin_forwards(run);
#else
  twin_backwards(run);
#endif
}
