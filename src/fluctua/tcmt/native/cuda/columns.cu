// The second pass on the device, second half: the paper's baseline (Eq. 20), as derived in columns.cpp:
//
//   λ̂⁽ʲ⁾ − λ̄⁽ʲ⁾ = (λ̂⁽ʲ⁾ − m) / (1 − U_j²/S0),   S0 = ΣU², m = Σλ̂U²/S0 over j's bin
//
// A block settles one site's two parameters and its upper bonds for some of the slots; a thread owns EACH
// trajectories. Weights go through memory to their place in the order of the bins, where a warp adds up a bin: no
// atomics, and always the same order. Follows replay.cu. Set besides: COLUMN_THREADS, EACH = ⌈count/COLUMN_THREADS⌉,
// KEEP (0 or 1: EACH is small enough to keep scores in registers), WEIGHTS_SHARED (0 or 1), Key and KEY_MAX (u32 or
// u64 of Real's size), ALL_BONDS, ITEMS (a site with two of its upper bonds, or further two), and of the sorting
// SORT_THREADS with KEYS trajectories each, powers of two.

// Indices are 32 bits wide: the host refuses larger ensembles.
#define VALUES    4  // scores that a trajectory settles between two barriers
#define MOST_BINS 256
#define PADDED(i) ((i) + (i) / 32)  // rows of a thread in different banks
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
  Real v = c_replay.power[(u32)(lower * count + j)];
  if (column >= N) v += c_replay.power[(u32)(c_settled.upper_site[column - N] * count + j)];
  return same_bits<Key>(v);
}

// Key r of thread t is number t·KEYS + r. Bitonic: what is less than KEYS apart is compared in registers, what is in
// the same warp by shuffles, and only the rest of a large ensemble through shared memory.
__device__ void sort(Key (&key)[KEYS], Key* exchanged) {
  const int thread = threadIdx.x;
#pragma unroll 1
  for (int run = 2; run <= KEYS * SORT_THREADS; run *= 2) {
#pragma unroll 1
    for (int step = run / 2; step >= KEYS; step /= 2) {
      const int apart = step / KEYS;
      const bool smaller = (((thread * KEYS) & step) == 0) == (((thread * KEYS) & run) == 0);
      if (apart >= 32) {
        __syncthreads();
#pragma unroll
        for (int r = 0; r < KEYS; ++r) exchanged[r * SORT_THREADS + thread] = key[r];
        __syncthreads();
      }
#pragma unroll
      for (int r = 0; r < KEYS; ++r) {
        const Key other =
            apart < 32 ? __shfl_xor_sync(0xFFFFFFFFu, key[r], apart) : exchanged[r * SORT_THREADS + (thread ^ apart)];
        key[r] = smaller ? min(key[r], other) : max(key[r], other);
      }
    }
#pragma unroll
    for (int step = KEYS / 2; step > 0; step /= 2) {
      if (step >= run) continue;
#pragma unroll
      for (int r = 0; r < KEYS; ++r) {
        if (r & step) continue;
        const bool up = ((thread * KEYS + r) & run) == 0;
        const Key low = min(key[r], key[r + step]), high = max(key[r], key[r + step]);
        key[r] = up ? low : high;
        key[r + step] = up ? high : low;
      }
    }
  }
}

// The first of `count` ascending keys that is not below `v`.
__device__ int find_first(const Key* keys, int count, Key v) {
  int from = 0, to = count;
  while (from < to) {
    const int middle = (from + to) / 2;
    if (keys[PADDED(middle)] < v)
      from = middle + 1;
    else
      to = middle;
  }
  return from;
}

// The number of edges that are not above `v`: equal values share a bin.
__device__ __forceinline__ int find_bin(Key v, const Key* edge, int edges) {
  int bin = 0;
#pragma unroll
  for (int more = MOST_BINS / 2; more > 0; more /= 2)
    if (bin + more <= edges && edge[bin + more - 1] <= v) bin += more;
  return bin;
}

// One column per block. `lower`: each column's lower site. `unfit` is set if a bin has one member, or more than `most`:
// bins.cu cannot settle those. places: whether columns.cu needs each trajectory's place too.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    rebin(const int* lower, int count, int bins, int most, int* unfit, int places) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Key edge[MOST_BINS];
  __shared__ int start[MOST_BINS + 1];
  const int column = blockIdx.x, site = lower[column], thread = threadIdx.x;
  const int warp = thread / 32, lane = thread & 31;
  Key* const keys = reinterpret_cast<Key*>(shared);  // padded; later `next`
  int* const next = reinterpret_cast<int*>(shared);  // (warps, bins): the next place of a bin
  Key own[KEYS], key[KEYS];                          // of trajectories (warp·KEYS + r)·32 + lane; sorted
#pragma unroll
  for (int r = 0; r < KEYS; ++r) {
    const int j = (warp * KEYS + r) * 32 + lane;
    key[r] = own[r] = j < count ? condition(column, site, j, count) : KEY_MAX;
  }
  sort(key, keys);
  __syncthreads();
#pragma unroll
  for (int r = 0; r < KEYS; ++r) keys[PADDED(thread * KEYS + r)] = key[r];
  __syncthreads();
  for (int k = thread; k <= bins; k += SORT_THREADS) {
    int first = k == bins ? count : 0;
    if (k > 0 && k < bins) {
      edge[k - 1] = keys[PADDED((int)((long long)k * count / bins))];
      first = find_first(keys, count, edge[k - 1]);
    }
    start[k] = first;
    c_settled.offset[(long long)column * (bins + 1) + k] = first;
  }
  __syncthreads();
  for (int k = thread; k < bins; k += SORT_THREADS) {
    const int members = start[k + 1] - start[k];
    if (members == 1 || members > most) *unfit = 1;
  }

  // Places within a bin in the order of the trajectories.
  for (int i = thread; i < SORT_THREADS / 32 * bins; i += SORT_THREADS) next[i] = i < bins ? start[i] : 0;
  __syncthreads();
  const auto each_own = [&](auto put) {
#pragma unroll
    for (int r = 0; r < KEYS; ++r) {
      const int j = (warp * KEYS + r) * 32 + lane;
      const int bin = j < count ? find_bin(own[r], edge, bins - 1) : bins;  // bins: nowhere
      const u32 peers = __match_any_sync(0xFFFFFFFFu, bin);
      const int before = __popc(peers & ((1u << lane) - 1));
      if (bin < bins) put(j, bin, before, next[warp * bins + bin]);
      __syncwarp();
      if (bin < bins && before == 0) next[warp * bins + bin] += __popc(peers);
      __syncwarp();
    }
  };
#if SORT_THREADS > 32
  each_own([](int, int, int, int) {});
  __syncthreads();
  for (int k = thread; k < bins; k += SORT_THREADS) {  // numbers of members become first places
    int at = start[k];
    for (int i = 0; i < SORT_THREADS / 32; ++i) {
      const int members = next[i * bins + k] - (i ? 0 : start[k]);
      next[i * bins + k] = at;
      at += members;
    }
  }
  __syncthreads();
#endif
  each_own([&](int j, int bin, int before, int first) {
    c_settled.order[(long long)column * count + first + before] = j;
    if (places) c_settled.place[(long long)column * count + j] = (first + before) << 8 | bin;
  });
}

// ---- the baseline ----------------------------------------------------------------------------------------------

struct Table {  // of one value: a bin's m and 1/S0
  Real mean[MOST_BINS], inverse[MOST_BINS];
};

// The scores of trajectory j. Site: ω and χ at slots s and s + 1. Bond: κ at slots s … s + 3; `second` of the item.
template <bool bond>
__device__ __forceinline__ void scores(int item, bool second, int j, int count, int slot, int end, Real (&u)[VALUES],
                                       Real (&l)[VALUES]) {
#pragma unroll
  for (int v = 0; v < VALUES; ++v) u[v] = l[v] = 0;
#pragma unroll
  for (int v = 0; v < VALUES; ++v) {
    const int s = bond ? slot + v : slot + v / 2;
    if (s >= end || (!bond && (v & 1))) continue;
    const Quad a = step_quads(s, count)[quad_place(item, j)];
    const Real to_go = c_replay.to_go[(u32)(s * count + j)];
    l[v] = to_go;
    if (bond) {
      u[v] = second ? a.second : a.first;
    } else {
      u[v] = a.score;
      u[(v + 1) % VALUES] = a.power * a.score;
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
__device__ void settle_column(int item, bool second, int column, int parameter, int begin, int end, int count, int bins,
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
      scores<bond>(item, second, j, count, slot, end, u[i], l[i]);
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
      scores<bond>(item, second, j, count, slot, end, u[0], l[0]);
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
  Real* const gradient = c_settled.gradient + (long long)blockIdx.y * (2 * N + ALL_BONDS) * count;
  const int item = c_replay.item[n], from = c_settled.upper_start[n], to = c_settled.upper_start[n + 1];
  settle_column<false>(item, false, n, n, begin, end, count, bins, weights, table, start, gradient);
  for (int b = from; b < to; ++b) {
    __syncthreads();  // `start` of the last column may still be read
    settle_column<true>(item + (b - from) / 2, (b - from) & 1, N + b, 2 * N + b, begin, end, count, bins, weights,
                        table, start, gradient);
  }
}
