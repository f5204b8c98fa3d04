// The baseline again (see columns.cu), for bins that are neither single nor oversized: a warp owns a bin.
//
// A block settles one site and two of its upper bonds. STEPS steps at a time, its threads bring the scores of all
// trajectories into shared memory, in order and with the steps side by side; then each warp gathers the members of its
// bin, MEMBERS per lane, and a bin's sums are shuffles. What limits it is the shared memory: members lie in arbitrary
// banks, and wide loads meet fewer of each other. Follows columns.cu. Set besides: MEMBERS, STEPS (1, 2 or 4),
// BIN_THREADS (32 per bin), BIN_BLOCKS (per multiprocessor), ROW (trajectories of a row in shared memory, and one more
// at least). A bond that an item does not have scores 0 in the bins of the site: no branch in the loop, and most items
// have both. A lane without a member has the number `count`, where rows are 0.

#define ROW_TO_GO 4                                        // rows in shared memory: ω, χ, κ, κ, λ̂
#define LOADS     ((ROW + BIN_THREADS - 1) / BIN_THREADS)  // trajectories that a thread brings
#define GROUP     (4 / STEPS)                              // values whose sums are added up at once: eight numbers

static_assert(BIN_THREADS % TOGETHER == 0, "trajectories of a thread have the same place in their blocks");

struct __align__(STEPS * sizeof(Real) < 16 ? STEPS * sizeof(Real) : 16) Several {  // steps of one number
  Real at[STEPS];
};

struct Item {  // what a block settles; a bond of −1 is none
  int site, first, second, with_site;
};

struct Bin {
  int column, member[MEMBERS];
};

struct Span {  // places of a bin's members in the order of its column
  int from, to;
};

// Bin k of a column. whole: all trajectories share a bin.
template <bool whole> __device__ __forceinline__ Span span_of(int column, int k, int count, int bins) {
  const int* offset = c_settled.offset + (long long)column * (bins + 1);
  if (whole) return {0, count};
  return {offset[k], offset[k + 1]};
}

// whole: warp k has its share of the bin.
template <bool whole> __device__ __forceinline__ void open_bin(Bin& bin, int column, int k, int count, int bins) {
  const u32* order = c_settled.order + (long long)column * count;
  Span span = span_of<whole>(column, k, count, bins);
  if (whole) span = {k * count / bins, (k + 1) * count / bins};
  bin.column = column;
#pragma unroll
  for (int r = 0; r < MEMBERS; ++r) {
    const int at = span.from + (threadIdx.x & 31) + 32 * r;
    bin.member[r] = at < span.to ? (int)order[at] : count;
  }
}

// λ̂ − λ̄ of `self` by the definition, in double: for the rare one that holds nearly all of its bin's weight. The whole
// warp comes here.
template <bool whole>
__device__ __noinline__ Real without(const Several* score, const Several* to_go, int s, int column, int self, int count,
                                     int bins) {
  const u32* order = c_settled.order + (long long)column * count;
  const Span span = span_of<whole>(column, threadIdx.x / 32, count, bins);
  double s0 = 0, s1 = 0, plain = 0;
  for (int i = span.from + (threadIdx.x & 31); i < span.to; i += 32) {
    const int j = order[i];
    if (j == self) continue;
    const double u = (double)score[j].at[s], l = (double)to_go[j].at[s];
    s0 += u * u;
    s1 += u * u * l;
    plain += l;
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    s0 += __shfl_xor_sync(0xFFFFFFFFu, s0, d);
    s1 += __shfl_xor_sync(0xFFFFFFFFu, s1, d);
    plain += __shfl_xor_sync(0xFFFFFFFFu, plain, d);
  }
  return to_go[self].at[s] - (Real)(s0 > 0 ? s1 / s0 : plain / (span.to - span.from - 1));
}

__device__ __forceinline__ void gather(const Bin& bin, const Several* row, Several (&v)[MEMBERS]) {
#pragma unroll
  for (int r = 0; r < MEMBERS; ++r) v[r] = row[bin.member[r]];
}

// Eight sums over the lanes of a warp, known to all: halving what each lane carries takes 17 shuffles where eight
// butterflies would take 40.
__device__ __forceinline__ void total(Real (&v)[8]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = lane & (4 * half);
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const Real give = upper ? v[i] : v[i + half], keep = upper ? v[i + half] : v[i];
      v[i] = keep + __shfl_xor_sync(0xFFFFFFFFu, give, 4 * half);
    }
  }
  v[0] += __shfl_xor_sync(0xFFFFFFFFu, v[0], 2);
  v[0] += __shfl_xor_sync(0xFFFFFFFFu, v[0], 1);
  const Real mine = v[0];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = __shfl_sync(0xFFFFFFFFu, mine, 4 * i);
}

// The same eight sums over all warps. parts: (8, 32).
__device__ __forceinline__ void add_parts(Real (&v)[8], Real* parts, int warps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (lane == i) parts[32 * i + warp] = v[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = lane < warps ? parts[32 * i + lane] : (Real)0;
  total(v);
}

__device__ __forceinline__ void weigh(const Several (&u)[MEMBERS], const Several (&l)[MEMBERS], int s, Real& s0,
                                      Real& s1) {
  s0 = s1 = 0;
#pragma unroll
  for (int r = 0; r < MEMBERS; ++r) {
    const Real w = u[r].at[s] * u[r].at[s];
    s0 += w;
    s1 += w * l[r].at[s];
  }
}

// 1/S0; where S0 is 0 all scores are, and their weight is 0 whatever it is.
__device__ __forceinline__ Real inverse_of(Real s0) { return quotient((Real)1, max(s0, (Real)1e-37)); }

// The share of a bin's weight that is not a member's own, and whether it is too small for a difference.
__device__ __forceinline__ Real share_of_others(Real u, Real inverse) { return fma(-(u * u), inverse, (Real)1); }
__device__ __forceinline__ bool is_small(Real share) { return share < (Real)(1.0 / 1024); }

// Returns whether a member was left out, whose own share is too large.
__device__ __forceinline__ bool settle_value(const Several (&u)[MEMBERS], const Several (&l)[MEMBERS], int s, Real s0,
                                             Real s1, Real (&g)[MEMBERS]) {
  const Real inverse = inverse_of(s0), mean = s1 * inverse;
  bool left_out = false;
#pragma unroll
  for (int r = 0; r < MEMBERS; ++r) {
    const Real own = u[r].at[s], others = share_of_others(own, inverse);
    const Real part = quotient(l[r].at[s] - mean, others) * own;
    left_out = left_out || is_small(others);
    g[r] += is_small(others) ? (Real)0 : part;
  }
  return left_out;
}

template <bool whole>
__device__ __forceinline__ void settle_rare(const Bin& bin, const Several* score, const Several* to_go,
                                            const Several (&u)[MEMBERS], int s, Real s0, Real (&g)[MEMBERS], int count,
                                            int bins) {
  u32 rare = 0;  // a bit for each member that was left out
#pragma unroll
  for (int r = 0; r < MEMBERS; ++r) rare |= is_small(share_of_others(u[r].at[s], inverse_of(s0))) ? 1u << r : 0u;
  for (u32 waiting = __ballot_sync(0xFFFFFFFFu, rare != 0); waiting; waiting &= waiting - 1) {
    const int of = __ffs(waiting) - 1;
    const u32 bits = __shfl_sync(0xFFFFFFFFu, rare, of);
#pragma unroll
    for (int r = 0; r < MEMBERS; ++r) {
      if (!(bits >> r & 1)) continue;
      const int self = __shfl_sync(0xFFFFFFFFu, bin.member[r], of);
      const Real advantage = without<whole>(score, to_go, s, bin.column, self, count, bins);
      if ((int)(threadIdx.x & 31) == of) g[r] += advantage * u[r].at[s];
    }
  }
}

__device__ __forceinline__ void leave(const Bin& bin, const Real (&g)[MEMBERS], Real* row) {
#pragma unroll
  for (int r = 0; r < MEMBERS; ++r) row[bin.member[r]] = g[r];  // those of no member lie behind the row
}

__device__ __forceinline__ void add_row(Real* gradient, int parameter, const Real* row, int count) {
  for (int j = threadIdx.x; j < count; j += blockDim.x) gradient[(u32)(parameter * count + j)] += row[j];
}

// The scores of some steps and of all trajectories into shared memory; 0 of the steps that are missing.
__device__ __forceinline__ void bring(Several* rows, u32 own_place, int slot, int steps, int count) {
#pragma unroll
  for (int k = 0; k < LOADS; ++k) {
    const int j = threadIdx.x + k * BIN_THREADS;
    if (j >= count) break;
    Quad quad[STEPS] = {};
    Several to_go = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
      if (s < steps) {
        quad[s] = step_quads(slot + s, count)[own_place + (u32)(k * BIN_THREADS * ITEMS)];  // that of `quad_place`
        to_go.at[s] = c_replay.to_go[(u32)((slot + s) * count + j)];
      }
    Several score, kerr, first, second;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      score.at[s] = quad[s].score;
      kerr.at[s] = quad[s].power * quad[s].score;
      first.at[s] = quad[s].first;
      second.at[s] = quad[s].second;
    }
    rows[j] = score;
    rows[ROW + j] = kerr;
    rows[2 * ROW + j] = first;
    rows[3 * ROW + j] = second;
    rows[ROW_TO_GO * ROW + j] = to_go;
  }
}

template <bool whole>
__device__ __forceinline__ void settle_item(const Item* items, int count, int slots, int bins, unsigned char* shared,
                                            Real* parts) {
  Several* const rows = reinterpret_cast<Several*>(shared);  // (5, ROW)
  const Item item = items[blockIdx.x];
  const int n = item.site, k = threadIdx.x / 32;
  const bool one = item.first >= 0, two = item.second >= 0;
  const int begin = slots * blockIdx.y / gridDim.y, end = slots * (blockIdx.y + 1) / gridDim.y;

  Bin own, first, second;
  open_bin<whole>(own, n, k, count, bins);
  open_bin<whole>(first, one ? N + item.first : n, k, count, bins);
  open_bin<whole>(second, two ? N + item.second : n, k, count, bins);
  Real g[4][MEMBERS];
#pragma unroll
  for (int r = 0; r < MEMBERS; ++r) g[0][r] = g[1][r] = g[2][r] = g[3][r] = 0;

  for (int i = threadIdx.x; i < 5; i += BIN_THREADS) rows[i * ROW + count] = {};
  const u32 own_place = quad_place(blockIdx.x, threadIdx.x);
  const Several* const to_go = rows + ROW_TO_GO * ROW;
#pragma unroll 1
  for (int slot = begin; slot < end; slot += STEPS) {
    bring(rows, own_place, slot, min(STEPS, end - slot), count);
    __syncthreads();
    Several u[4][MEMBERS], l[4][MEMBERS];
#pragma unroll
    for (int from = 0; from < 4; from += GROUP) {
      Real sum[8];
#pragma unroll
      for (int v = from; v < from + GROUP; ++v) {
        const Bin& bin = v < 2 ? own : v == 2 ? first : second;
        gather(bin, rows + v * ROW, u[v]);
        if (v != 1) gather(bin, to_go, l[v]);
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
          const int at = 2 * ((v - from) * STEPS + s);
          weigh(u[v], l[v == 1 ? 0 : v], s, sum[at], sum[at + 1]);
        }
      }
      total(sum);
      if (whole) add_parts(sum, parts + 256 * (from & 1), bins);
      bool rare = false;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int v = from + i / STEPS;
        rare |= settle_value(u[v], l[v == 1 ? 0 : v], i % STEPS, sum[2 * i], sum[2 * i + 1], g[v]);
      }
      if (__ballot_sync(0xFFFFFFFFu, rare)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int v = from + i / STEPS;
          const Bin& bin = v < 2 ? own : v == 2 ? first : second;
          settle_rare<whole>(bin, rows + v * ROW, to_go, u[v], i % STEPS, sum[2 * i], g[v], count, bins);
        }
      }
    }
    __syncthreads();
  }

  // Back into the order of the trajectories before it goes to memory.
  Real* const sums = reinterpret_cast<Real*>(shared);
  leave(own, g[0], sums);
  leave(own, g[1], sums + ROW);
  leave(first, g[2], sums + 2 * ROW);
  leave(second, g[3], sums + 3 * ROW);
  __syncthreads();
  Real* const gradient = c_settled.gradient + (long long)blockIdx.y * (2 * N + ALL_BONDS) * count;
  if (item.with_site) {
    add_row(gradient, n, sums, count);
    add_row(gradient, N + n, sums + ROW, count);
  }
  if (one) add_row(gradient, 2 * N + item.first, sums + 2 * ROW, count);
  if (two) add_row(gradient, 2 * N + item.second, sums + 3 * ROW, count);
}

// Grid: (items, copies), a warp for every bin. Each copy has its share of the slots and its own gradients.
extern "C" __global__ void __launch_bounds__(BIN_THREADS, BIN_BLOCKS)
    settle_bins(const Item* items, int count, int slots, int bins) {
  extern __shared__ __align__(16) unsigned char shared[];
  settle_item<false>(items, count, slots, bins, shared, nullptr);
}

// The same if all trajectories share one bin, as at the start, where their states are equal: the warps share it.
extern "C" __global__ void __launch_bounds__(BIN_THREADS, BIN_BLOCKS)
    settle_whole(const Item* items, int count, int slots, int bins) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Real parts[2 * 8 * 32];  // of two steps in turn
  settle_item<true>(items, count, slots, bins, shared, parts);
}
