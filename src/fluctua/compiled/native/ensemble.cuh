// Common parts of passes over an ensemble: noise, the beginning and end of a trajectory, and sums over the ensemble.
// Arrays have the trajectory last: component k of trajectory j is [k·E + j].
//
// A warp goes through time with 32 trajectories, then with the next. Sums over the ensemble are in double precision,
// one set per warp, in an order that depends on sizes alone; the host adds the sets.

// The pass that a module is compiled for: each compilation takes a second of the first call
#define REWARDS_SUMMED 2
#define SWEEP          3
#define WEIGHTS        4
#define TWIN_FORWARD   5
#define TWIN_BACKWARD  6

__constant__ F c_shared[AT_LEAST_ONE(SHARED)];

struct Run {
  i64 count, steps, first;  // first: the number of the first trajectory
  const F* timed;           // (T, TIMED), or of the first step alone: the same for all trajectories
  const F *x, *context;     // (STATE, E) or (STATE,), (CONTEXT, E)
  const u32* stream;        // (STREAM, E), or the key
  const F* guess;           // (E,) the return, or near it; the same for all if there is none
  F *reward, *last;         // (E,) in and out, (STATE, E) out
  F* gradient;              // (PARAMETERS, E) in and out
  const F* score;           // (PARAMETERS, E): ΣU before the first step
  const F *bar, *inverse;   // (T,) or (T, SCORES): the baseline, and 1/ΣU²; with a stop, 1/ΣW or 0
  double* sums;             // (T, warps, 2 + STOPS) or (T, warps, 2·SCORES)
  int* flags;               // DOMINATED: one trajectory has nearly all of a weight; NOT_FINITE
  F scale;                  // of what is left out: E/(E − 1) where trajectories leave themselves out
  F same;                   // the guess for all
  const F* near;            // the same on the device, in place of `same`
};
#define DOMINATED  1
#define NOT_FINITE 2
#define ALONE      (sizeof(F) == 8 ? 1e-12 : 1e-5)  // share of the other trajectories below which there are none

// ------------------------------------------------------------------------------------------ noise

#if HELPERS
// Few trajectories: they are the first warp of a block, and the other warps draw the normals of the next DEPTH steps.
#define PART  4
#define DEPTH (HELPERS * PART)
#define SIDE  32
#define KEPT  (2 * DEPTH)
#else
// Normals of BATCH steps are drawn together: they do not wait for one another.
#define SIDE THREADS
#define KEPT BATCH
#endif

#if NORMALS
__shared__ V z_kept[KEPT * NORMALS * SIDE];

INLINE V normal_of(U high, U low) {
#if NOISE64
  return (V)normal64(high, low);
#else
  return normal32(high, low);
#endif
}

// normals of the BATCH steps from n on: put(step, component, value)
template <class Put> INLINE void draw_batch(const U* stream, u32 n, Put put) {
#if WIENER == 1
#pragma unroll
  for (int b = 0; b < BATCH; b++) {
    U a = 0, c = n + b;
    threefry(stream[0], stream[1], a, c);
#pragma unroll 4
    for (int k = 0; k < NORMALS; k++) {
      U high = 0, low = NORMAL_OF[k];
      threefry(a, c, high, low);
      put(b, k, normal_of(high, low));
    }
  }
#elif WIENER == 2
  const int sites = (WIDTH + 1) / 2;
#pragma unroll
  for (int b = 0; b < BATCH; b += 2) {
#pragma unroll 4
    for (int k = 0; k < NORMALS; k++) {
      const bool is_real = NORMAL_OF[k] < sites;
      U c0 = is_real ? NORMAL_OF[k] : NORMAL_OF[k] - sites, c1 = (n + b) / 2, c2 = stream[2], c3 = 0;
      philox<PHILOX_ROUNDS>(stream[0], stream[1], c0, c1, c2, c3);
      N cosine, sine;
      box_muller(c0, c1, cosine, sine);
      put(b, k, (V)(is_real ? cosine : sine));
      box_muller(c2, c3, cosine, sine);
      put(b + 1, k, (V)(is_real ? cosine : sine));
    }
  }
#elif WIENER == 3
#pragma unroll 4
  for (int k = 0; k < NORMALS; k++) {
    N four[4];
    philox7_normals(stream, NORMAL_OF[k], n / 4, four);
#if BATCH == 4
    EACH(b, 4) put(b, k, (V)four[b]);
#else
    const u32 b = n % 4;
    put(0, k, (V)(b & 2 ? (b & 1 ? four[3] : four[2]) : b & 1 ? four[1] : four[0]));
#endif
  }
#endif
}
// the same, to where those of step n belong
INLINE void draw(const U* stream, u32 n, int slot) {
  V* mine = z_kept + slot * NORMALS * SIDE + threadIdx.x % SIDE;
  draw_batch(stream, n, [&](int b, int k, V value) { mine[(b * NORMALS + k) * SIDE] = value; });
}
#endif

INLINE void drawn(const U* stream, u32 n, V* z) {
#if NORMALS
#if !HELPERS
  if (n % BATCH == 0) draw(stream, n, 0);
#endif
  EACH(k, NORMALS) z[k] = z_kept[(n % KEPT * NORMALS + k) * SIDE + threadIdx.x % SIDE];
#endif
}

#if HELPERS
#define FIRST_WARP (threadIdx.x < 32)
// the share of a helper in the normals of DEPTH steps
INLINE void help(const U* stream, i64 chunk) {
  const int share = PART * (threadIdx.x / 32 - 1), slot = chunk / DEPTH % 2 * DEPTH + share;
  for (int b = 0; b < PART; b += BATCH) draw(stream, (u32)chunk + share + b, slot + b);
}
// Whether it is this thread's turn to take steps: the normals of the chunk are there, and the other half is free.
INLINE bool turn_of(const U* stream, i64 chunk, i64 steps) {
  if (chunk == 0 && !FIRST_WARP) help(stream, 0);
  __syncthreads();
  if (!FIRST_WARP && chunk + DEPTH < steps) help(stream, chunk + DEPTH);
  return FIRST_WARP;
}
#define TOGETHER __syncthreads();
#else
#define FIRST_WARP true
#define TOGETHER
#endif

// step(n, z) for all steps. Several of a short program at once (UNROLLED): what they load does not wait for the state.
template <class Step> INLINE void each_step(const U* stream, i64 steps, Step step) {
#if HELPERS
  for (i64 chunk = 0; chunk < steps; chunk += DEPTH)
    if (turn_of(stream, chunk, steps)) {
      i64 n = chunk;
#if UNROLLED
      for (; n + PART <= chunk + DEPTH && n + PART <= steps; n += PART) EACH(b, PART) {
          V z[AT_LEAST_ONE(NORMALS)];
          drawn(stream, (u32)(n + b), z);
          step(n + b, z);
        }
#endif
      for (; n < steps && n < chunk + DEPTH; n++) {
        V z[AT_LEAST_ONE(NORMALS)];
        drawn(stream, (u32)n, z);
        step(n, z);
      }
    }
#else
  i64 n = 0;
#if UNROLLED
  for (; n + BATCH <= steps; n += BATCH) {
    V z[BATCH * NORMALS];
    draw_batch(stream, (u32)n, [&](int b, int k, V value) { z[b * NORMALS + k] = value; });
    EACH(b, BATCH) step(n + b, z + b * NORMALS);
  }
#endif
  for (; n < steps; n++) {
    V z[AT_LEAST_ONE(NORMALS)];
    drawn(stream, (u32)n, z);
    step(n, z);
  }
#endif
}

// ------------------------------------------------------------------------------------------ one trajectory

struct Trajectory {
  V x[STATE], c[AT_LEAST_ONE(CONTEXT)], reward;
  U stream[AT_LEAST_ONE(STREAM)];
};

INLINE void begun(Trajectory& own, const Run& run, i64 j) {
#if BEGINS  // one start, no context: streams are made of the key
  EACH(k, STATE) own.x[k] = run.x[k];
  own.reward = 0;
#if WIENER == 1
  U a = 0, b = (u32)(run.first + j);
  threefry(run.stream[0], run.stream[1], a, b);
  own.stream[0] = a, own.stream[1] = b;
#elif WIENER >= 2
  own.stream[0] = run.stream[0], own.stream[1] = run.stream[1], own.stream[2] = (u32)(run.first + j);
#endif
#else
  EACH(k, STATE) own.x[k] = run.x[k * run.count + j];
  EACH(k, CONTEXT) own.c[k] = run.context[k * run.count + j];
  EACH(k, STREAM) own.stream[k] = run.stream[k * run.count + j];
  own.reward = run.reward[j];
#endif
}
INLINE void ended(const Trajectory& own, const Run& run, i64 j) {
  EACH(k, STATE) run.last[k * run.count + j] = own.x[k];
  run.reward[j] = own.reward;
}

// The numbers of step n that all trajectories share. On a uniform grid they may be those of the first (STEADY): read
// once, they need not be waited for.
#if STEADY
#define SHARED_BY_STEPS          \
  F steady[AT_LEAST_ONE(TIMED)]; \
  EACH(k, TIMED) steady[k] = run.timed[k];
#define STEP_NUMBERS(n) steady
#else
#define SHARED_BY_STEPS
#define STEP_NUMBERS(n) (run.timed + (n) * TIMED)
#endif

// ------------------------------------------------------------------------------------------ sums over the ensemble

// `group`: the first trajectory of a warp
#if HELPERS
#define OWN_WARP ((i64)blockIdx.x)
#define WARPS    ((i64)gridDim.x)
#else
#define OWN_WARP (blockIdx.x * (i64)(THREADS / 32) + threadIdx.x / 32)
#define WARPS    (gridDim.x * (i64)(THREADS / 32))
#endif
#define ALL_TRAJECTORIES for (i64 group = OWN_WARP * 32; group < run.count; group += WARPS * 32)

INLINE F exchanged(F v, int distance) { return __shfl_xor_sync(0xFFFFFFFFu, v, distance); }

// SIZE values of every thread, a power of two up to 32: lane l ends with the sum of value l % SIZE over the warp
template <int SIZE> INLINE F added(F* v, int lane) {
#pragma unroll
  for (int half = SIZE / 2; half > 0; half /= 2) {
    const bool upper = lane & half;
#pragma unroll
    for (int k = 0; k < half; k++) {
      const F kept = upper ? v[k + half] : v[k], sent = upper ? v[k] : v[k + half];
      v[k] = kept + exchanged(sent, half);
    }
  }
  F total = v[0];
#pragma unroll
  for (int distance = SIZE; distance < 32; distance *= 2) total += exchanged(total, distance);
  return total;
}

constexpr __device__ int padded(int n) { return n <= 1 ? 1 : n <= 2 ? 2 : n <= 4 ? 4 : n <= 8 ? 8 : n <= 16 ? 16 : 32; }

// add COUNT values of every thread to the sums of this warp at step n
template <int COUNT, class Of> INLINE void summed(double* sums, i64 n, Of value) {
  const int lane = threadIdx.x & 31;
  double* row = sums + (n * WARPS + OWN_WARP) * COUNT;  // warps are near one another in time, and in memory
#pragma unroll
  for (int from = 0; from < COUNT; from += 32) {
    constexpr int MOST = COUNT < 32 ? padded(COUNT) : 32;
    F v[MOST];
    EACH(k, MOST) v[k] = from + k < COUNT ? value(from + k) : F(0);
    const F total = added<MOST>(v, lane);
    // this warp alone writes here: atomic only because that does not wait for the sum before
    if (lane < MOST && from + lane < COUNT) atomicAdd(row + from + lane, (double)total);
  }
}
