// The second pass on the device, second half: the paper's baseline (Eq. 20), as derived in columns.cpp:
//
//   λ̂⁽ʲ⁾ − λ̄⁽ʲ⁾ = (λ̂⁽ʲ⁾ − m) / (1 − U_j²/S0),   S0 = ΣU², m = Σλ̂U²/S0 over j's bin
//
// A block settles one site's two parameters and its upper bonds for some of the slots; a thread owns EACH
// trajectories. Weights go through memory to their place in the order of the bins, where a warp adds up a bin: no
// atomics, and always the same order. Follows replay.cu. Set besides: COLUMN_THREADS, EACH = ⌈count/COLUMN_THREADS⌉,
// KEEP (0 or 1: EACH is small enough to keep scores in registers), WEIGHTS_SHARED (0 or 1), Key and KEY_MAX (u32 or
// u64 of Real's size).

// Indices are 32 bits wide: the host refuses larger ensembles.
#define VALUES    4  // scores that a trajectory settles between two barriers
#define MOST_BINS 256
#if KEEP
#define EACH_OWN _Pragma("unroll")
#else
#define EACH_OWN _Pragma("unroll 1")
#endif

extern "C" {
__constant__ Settled c_settled;
}

// ---- membership ------------------------------------------------------------------------------------------------

template <class To, class From> __device__ __forceinline__ To same_bits(From v) {
  union {
    From from;
    To to;
  } u;
  u.from = v;
  return u.to;
}

// |ψ_n|² of the site's column, |ψ_n|² + |ψ_m|² of a bond's, as an integer of the same order (it is not negative).
__device__ __forceinline__ Key condition(int column, int lower, int j, int count) {
  const Quad a = c_replay.quad[(long long)lower * count + j];
  Real v = a.x * a.x + a.y * a.y;
  if (column >= N) {
    const Quad b = c_replay.quad[(long long)c_settled.upper_site[column - N] * count + j];
    v += b.x * b.x + b.y * b.y;
  }
  return same_bits<Key>(v);
}

__device__ void sort(Key* keys, int size) {  // bitonic; size a power of two
  for (int run = 2; run <= size; run *= 2)
    for (int step = run / 2; step > 0; step /= 2) {
      for (int i = threadIdx.x; i < size / 2; i += blockDim.x) {
        const int a = 2 * i - (i & (step - 1)), b = a + step;
        const Key x = keys[a], y = keys[b];
        if ((x > y) == ((a & run) == 0)) {
          keys[a] = y;
          keys[b] = x;
        }
      }
      __syncthreads();
    }
}

__device__ __forceinline__ int bin_of(Key v, const Key* edge,
                                      int bins) {  // edges not above it: equal values share a bin
  int bin = 0;
  for (int k = 0; k + 1 < bins; ++k) bin += v >= edge[k];
  return bin;
}

// One column per block, 1024 threads. `lower`: each column's lower site.
// `unfit` is set if a bin has one member, or more than `most`: bins.cu cannot settle those.
extern "C" __global__ void __launch_bounds__(1024)
    rebin(const int* lower, int count, int size, int bins, int most, int* unfit) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Key edge[MOST_BINS];
  __shared__ int start[MOST_BINS + 1];
  const int column = blockIdx.x, site = lower[column];
  Key* const keys = reinterpret_cast<Key*>(shared);  // (size), later counts (32 warps, bins)
  for (int j = threadIdx.x; j < size; j += blockDim.x)
    keys[j] = j < count ? condition(column, site, j, count) : KEY_MAX;
  __syncthreads();
  sort(keys, size);
  for (int k = threadIdx.x; k + 1 < bins; k += blockDim.x) edge[k] = keys[(int)((long long)(k + 1) * count / bins)];
  for (int k = threadIdx.x; k <= bins; k += blockDim.x) start[k] = 0;
  __syncthreads();
  for (int j = threadIdx.x; j < count; j += blockDim.x)
    atomicAdd(start + 1 + bin_of(condition(column, site, j, count), edge, bins), 1);
  __syncthreads();
  if (threadIdx.x == 0)
    for (int k = 0; k < bins; ++k) start[k + 1] += start[k];
  __syncthreads();
  for (int k = threadIdx.x; k <= bins; k += blockDim.x) {
    c_settled.offset[(long long)column * (bins + 1) + k] = start[k];
    const int members = k < bins ? start[k + 1] - start[k] : 0;
    if (members == 1 || members > most) *unfit = 1;
  }

  // Places within a bin in the order of the trajectories.
  int* const seen = reinterpret_cast<int*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, warps = blockDim.x / 32;
  for (int base = 0; base < count; base += blockDim.x) {
    for (int i = threadIdx.x; i < warps * bins; i += blockDim.x) seen[i] = 0;
    __syncthreads();
    const int j = base + threadIdx.x;
    const int bin = j < count ? bin_of(condition(column, site, j, count), edge, bins) : bins;  // bins: nowhere
    const u32 peers = __match_any_sync(0xFFFFFFFFu, bin);
    const u32 before = __popc(peers & ((1u << lane) - 1));
    if (bin < bins && before == 0) seen[warp * bins + bin] = __popc(peers);
    __syncthreads();
    for (int k = threadIdx.x; k < bins; k += blockDim.x) {
      int at = start[k];
      for (int i = 0; i < warps; ++i) {
        const int more = seen[i * bins + k];
        seen[i * bins + k] = at;
        at += more;
      }
      start[k] = at;
    }
    __syncthreads();
    if (bin < bins) {
      const u32 at = seen[warp * bins + bin] + before;
      c_settled.place[(long long)column * count + j] = at << 8 | bin;
      c_settled.order[(long long)column * count + at] = j;
    }
    __syncthreads();
  }
}

// ---- the baseline ----------------------------------------------------------------------------------------------

struct Table {  // of one value: a bin's m and 1/S0
  Real mean[MOST_BINS], inverse[MOST_BINS];
};

__device__ __forceinline__ Real cross(const Quad& noise, const Quad& state) {
  return noise.zr * state.y - noise.zi * state.x;
}

// The scores of trajectory j. Site: ω and χ at slots s and s + 1. Bond: κ at slots s … s + 3.
template <bool bond>
__device__ __forceinline__ void scores(int n, int m, int j, int count, int slot, int end, Real (&u)[VALUES],
                                       Real (&l)[VALUES]) {
#pragma unroll
  for (int v = 0; v < VALUES; ++v) u[v] = l[v] = 0;
#pragma unroll
  for (int v = 0; v < VALUES; ++v) {
    const int s = bond ? slot + v : slot + v / 2;
    if (s >= end || (!bond && (v & 1))) continue;
    const Quad a = c_replay.quad[(u32)((s * N + n) * count + j)];
    const Real to_go = c_replay.to_go[(u32)(s * count + j)];
    l[v] = to_go;
    if (bond) {
      const Quad b = c_replay.quad[(u32)((s * N + m) * count + j)];
      u[v] = cross(a, b) + cross(b, a);
    } else {
      u[v] = cross(a, a);
      u[(v + 1) % VALUES] = (a.x * a.x + a.y * a.y) * u[v];
      l[(v + 1) % VALUES] = to_go;
    }
  }
}

// m and 1/S0 of every bin and value: eight lanes each. Lanes without a task go along, with nothing to add.
__device__ void add_up(const Weight* weights, const int* start, int bins, int count, Table* table) {
  const int lane = threadIdx.x & 7, group = threadIdx.x / 8, groups = blockDim.x / 8, tasks = VALUES * bins;
  for (int first = 0; first < tasks; first += groups) {
    const int task = min(first + group, tasks - 1), v = task / bins, k = task - v * bins;
    Real s0 = 0, s1 = 0;
    const Weight* end = weights + v * count + start[k + 1];
#pragma unroll 1
    for (const Weight* w = weights + v * count + start[k] + lane; w < end; w += 8) {
      s0 += w->s0;
      s1 += w->s1;
    }
#pragma unroll
    for (int d = 4; d > 0; d /= 2) {
      s0 += __shfl_xor_sync(0xFFFFFFFFu, s0, d);
      s1 += __shfl_xor_sync(0xFFFFFFFFu, s1, d);
    }
    if (lane == 0 && first + group < tasks) {
      const Real inverse = s0 > 0 ? quotient((Real)1, s0) : (Real)0;
      table[v].mean[k] = s1 * inverse;
      table[v].inverse[k] = inverse;
    }
  }
}

// λ̂ − λ̄ by the definition: sums over the others of the bin, or over all others for one alone in its bin; their plain
// mean if all their scores vanish. For the rare trajectory that holds nearly all of its bin's weight.
__device__ __noinline__ Real by_definition(const Weight* weights, const int* start, int bins, int count, int place,
                                           int bin, Real own, const Real* to_go, const u32* places) {
  const bool single = start[bin + 1] - start[bin] == 1;
  const int from = single ? 0 : start[bin], to = single ? count : start[bin + 1];
  double s0 = 0, s1 = 0, plain = 0;
#pragma unroll 1
  for (int i = from; i < to; ++i)
    if (i != place) {
      s0 += weights[i].s0;
      s1 += weights[i].s1;
    }
  if (s0 > 0) return own - (Real)(s1 / s0);
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int at = places[i] >> 8;
    if (at != place && at >= from && at < to) plain += to_go[i];
  }
  return own - (Real)(plain / (to - from - 1));
}

template <bool bond>
__device__ void settle_column(int n, int m, int column, int parameter, int begin, int end, int count, int bins,
                              Weight* weights, Table* table, int* start, Real* gradient) {
  const u32* places = c_settled.place + (long long)column * count;
  for (int k = threadIdx.x; k <= bins; k += blockDim.x) start[k] = c_settled.offset[(long long)column * (bins + 1) + k];
#if KEEP
  Real g[EACH][2];
  u32 place[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int j = threadIdx.x + e * COLUMN_THREADS;
    g[e][0] = g[e][1] = 0;
    place[e] = j < count ? places[j] : 0;
  }
#endif
  const int stride = bond ? VALUES : VALUES / 2;
  for (int slot = begin; slot < end; slot += stride) {
#if KEEP
    Real u[EACH][VALUES], l[EACH][VALUES];
#else
    Real u[1][VALUES], l[1][VALUES];
#endif
    EACH_OWN
    for (int e = 0; e < EACH; ++e) {
      const int j = threadIdx.x + e * COLUMN_THREADS, i = KEEP ? e : 0;
      if (j >= count) continue;
      scores<bond>(n, m, j, count, slot, end, u[i], l[i]);
#if KEEP
      const int at = place[e] >> 8;
#else
      const int at = places[j] >> 8;
#endif
#pragma unroll
      for (int v = 0; v < VALUES; ++v) {
        const Real w = u[i][v] * u[i][v];
        weights[v * count + at] = {w, w * l[i][v]};
      }
    }
    __syncthreads();
    add_up(weights, start, bins, count, table);
    __syncthreads();
    EACH_OWN
    for (int e = 0; e < EACH; ++e) {
      const int j = threadIdx.x + e * COLUMN_THREADS, i = KEEP ? e : 0;
      if (j >= count) continue;
#if KEEP
      const u32 here = place[e];
#else
      const u32 here = places[j];
      Real g[1][2] = {};
      scores<bond>(n, m, j, count, slot, end, u[0], l[0]);
#endif
      const int bin = here & 255;
#pragma unroll
      for (int v = 0; v < VALUES; ++v) {
        const Real others = 1 - u[i][v] * u[i][v] * table[v].inverse[bin];  // share of the weight that is not its own
        Real advantage = quotient(l[i][v] - table[v].mean[bin], others);
        if (others < (Real)(1.0 / 1024)) {
          const int s = bond ? slot + v : slot + v / 2;
          advantage = by_definition(weights + v * count, start, bins, count, here >> 8, bin, l[i][v],
                                    c_replay.to_go + (long long)s * count, places);
        }
        g[i][bond ? 0 : v & 1] += advantage * u[i][v];
      }
#if !KEEP
      gradient[(u32)(parameter * count + j)] += g[0][0];
      if (!bond) gradient[(u32)((N + parameter) * count + j)] += g[0][1];
#endif
    }
    __syncthreads();  // weights and table are written again
  }
#if KEEP
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int j = threadIdx.x + e * COLUMN_THREADS;
    if (j >= count) continue;
    gradient[(u32)(parameter * count + j)] += g[e][0];
    if (!bond) gradient[(u32)((N + parameter) * count + j)] += g[e][1];
  }
#endif
}

// Grid: (sites, copies). Each copy has its share of the slots and its own gradients.
extern "C" __global__ void __launch_bounds__(COLUMN_THREADS, 1024 / COLUMN_THREADS)
    columns(int count, int slots, int bins) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Table table[VALUES];
  __shared__ int start[MOST_BINS + 1];
  const int n = blockIdx.x, copies = gridDim.y;
  const int begin = slots * blockIdx.y / copies, end = slots * (blockIdx.y + 1) / copies;
#if WEIGHTS_SHARED
  Weight* const weights = reinterpret_cast<Weight*>(shared);
#else
  Weight* const weights = c_settled.weights + (long long)(blockIdx.y * gridDim.x + n) * VALUES * count;
#endif
  Real* const gradient = c_settled.gradient + (long long)blockIdx.y * (2 * N + BONDS) * count;
  settle_column<false>(n, n, n, n, begin, end, count, bins, weights, table, start, gradient);
  for (int b = c_settled.upper_start[n]; b < c_settled.upper_start[n + 1]; ++b) {
    __syncthreads();  // `start` of the last column may still be read
    settle_column<true>(n, c_settled.upper_site[b], N + b, 2 * N + b, begin, end, count, bins, weights, table, start,
                        gradient);
  }
}
