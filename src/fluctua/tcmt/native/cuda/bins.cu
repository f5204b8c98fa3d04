// The baseline again (see columns.cu), for bins that are neither single nor oversized: a warp owns a bin.
//
// A block settles one site and two of its upper bonds. BATCH steps at a time, its threads bring the scores of all
// trajectories into shared memory, in order, copied ahead during the last ones; then each warp gathers the members of its bin, MEMBERS per lane, and a
// bin's sums are shuffles. Follows columns.cu. Set besides: MEMBERS, BATCH, BIN_THREADS (32 per bin), BIN_BLOCKS (per
// multiprocessor), ROW (numbers of a row in shared memory, more than there are trajectories). A bond that an item does
// not have scores 0 in the bins of the site: no branch in the loop, and most items have both. A lane without a member
// has the number `count`, where rows are 0.

#define ROW_TO_GO 4          // rows of a step in shared memory: ω, χ, κ, κ, λ̂
#define STEP_ROWS (5 * ROW)  // their numbers
#define LOADS     ((ROW + BIN_THREADS - 1) / BIN_THREADS)  // trajectories that a thread brings
#define AHEAD_ROW (LOADS * BIN_THREADS)

static_assert(BIN_THREADS % TOGETHER == 0, "trajectories of a thread have the same place in their blocks");

struct Item {  // what a block settles; a bond of −1 is none
  int site, first, second, with_site;
};

// λ̂ − λ̄ of `self` by the definition, in double: for the rare one that holds nearly all of its bin's weight. The whole
// warp comes here.
__device__ __noinline__ Real without(const Real* score, const Real* to_go, const u32* order, int from, int to,
                                     int self) {
  double s0 = 0, s1 = 0, plain = 0;
  for (int i = from + (threadIdx.x & 31); i < to; i += 32) {
    const int j = order[i];
    if (j == self) continue;
    const double w = (double)score[j] * score[j];
    s0 += w;
    s1 += w * to_go[j];
    plain += to_go[j];
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    s0 += __shfl_xor_sync(0xFFFFFFFFu, s0, d);
    s1 += __shfl_xor_sync(0xFFFFFFFFu, s1, d);
    plain += __shfl_xor_sync(0xFFFFFFFFu, plain, d);
  }
  return to_go[self] - (Real)(s0 > 0 ? s1 / s0 : plain / (to - from - 1));
}

struct Bin {
  int from, to;
  const u32* order;
  int member[MEMBERS];
};

// Bin k of a column. whole: all trajectories share a bin, and warp k has its share of them.
template <bool whole> __device__ __forceinline__ void open_bin(Bin& bin, int column, int k, int count, int bins) {
  const int* offset = c_settled.offset + (long long)column * (bins + 1);
  bin.order = c_settled.order + (long long)column * count;
  bin.from = whole ? 0 : offset[k];
  bin.to = whole ? count : offset[k + 1];
  const int from = whole ? k * count / bins : bin.from, to = whole ? (k + 1) * count / bins : bin.to;
#pragma unroll
  for (int r = 0; r < MEMBERS; ++r) {
    const int at = from + (threadIdx.x & 31) + 32 * r;
    bin.member[r] = at < to ? (int)bin.order[at] : count;
  }
}

__device__ __forceinline__ void gather(const Bin& bin, const Real* row, Real (&v)[MEMBERS]) {
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

__device__ __forceinline__ void weigh(const Real (&u)[MEMBERS], const Real (&l)[MEMBERS], Real& s0, Real& s1) {
  s0 = s1 = 0;
#pragma unroll
  for (int r = 0; r < MEMBERS; ++r) {
    const Real w = u[r] * u[r];
    s0 += w;
    s1 += w * l[r];
  }
}

// 1/S0; where S0 is 0 all scores are, and their weight is 0 whatever it is.
__device__ __forceinline__ Real inverse_of(Real s0) { return quotient((Real)1, max(s0, (Real)1e-37)); }

// The share of a bin's weight that is not a member's own, and whether it is too small for a difference.
__device__ __forceinline__ Real share_of_others(Real u, Real inverse) { return fma(-(u * u), inverse, (Real)1); }
__device__ __forceinline__ bool is_small(Real share) { return share < (Real)(1.0 / 1024); }

// Returns whether a member was left out, whose own share is too large.
__device__ __forceinline__ bool settle_value(const Real (&u)[MEMBERS], const Real (&l)[MEMBERS], Real s0, Real s1,
                                             Real (&g)[MEMBERS]) {
  const Real inverse = inverse_of(s0), mean = s1 * inverse;
  bool left_out = false;
#pragma unroll
  for (int r = 0; r < MEMBERS; ++r) {
    const Real others = share_of_others(u[r], inverse);
    const Real part = quotient(l[r] - mean, others) * u[r];
    left_out = left_out || is_small(others);
    g[r] += is_small(others) ? (Real)0 : part;
  }
  return left_out;
}

__device__ __forceinline__ void settle_rare(const Bin& bin, const Real* score, const Real* to_go,
                                            const Real (&u)[MEMBERS], Real s0, Real (&g)[MEMBERS]) {
  u32 rare = 0;  // a bit for each member that was left out
#pragma unroll
  for (int r = 0; r < MEMBERS; ++r) rare |= is_small(share_of_others(u[r], inverse_of(s0))) ? 1u << r : 0u;
  for (u32 waiting = __ballot_sync(0xFFFFFFFFu, rare != 0); waiting; waiting &= waiting - 1) {
    const int of = __ffs(waiting) - 1;
    const u32 bits = __shfl_sync(0xFFFFFFFFu, rare, of);
#pragma unroll
    for (int r = 0; r < MEMBERS; ++r) {
      if (!(bits >> r & 1)) continue;
      const Real advantage =
          without(score, to_go, bin.order, bin.from, bin.to, __shfl_sync(0xFFFFFFFFu, bin.member[r], of));
      if ((int)(threadIdx.x & 31) == of) g[r] += advantage * u[r];
    }
  }
}

__device__ __forceinline__ void leave(const Bin& bin, const Real (&g)[MEMBERS], Real* row) {
#pragma unroll
  for (int r = 0; r < MEMBERS; ++r)
    row[bin.member[r]] = g[r];  // those of no member lie behind the row
}

__device__ __forceinline__ void add_row(Real* gradient, int parameter, const Real* row, int count) {
  for (int j = threadIdx.x; j < count; j += blockDim.x) gradient[(u32)(parameter * count + j)] += row[j];
}

struct Ahead {  // what is copied into shared memory ahead of its use, of one step
  Quad quad[AHEAD_ROW];
  Real to_go[AHEAD_ROW];
};

__device__ __forceinline__ void fetch(Ahead& ahead, u32 own_place, int slot, int count) {
  const Quad* const step = step_quads(slot, count) + own_place;
  const Real* const to_go = c_replay.to_go + (u32)(slot * count);
#pragma unroll
  for (int k = 0; k < LOADS; ++k) {
    const int j = threadIdx.x + k * BIN_THREADS;
    if (j >= count) continue;
    const char* const from = reinterpret_cast<const char*>(step + (u32)(k * BIN_THREADS * ITEMS));  // as quad_place
    char* const to = reinterpret_cast<char*>(ahead.quad + j);
#pragma unroll
    for (int part = 0; part < (int)sizeof(Quad); part += 16) copy_ahead<16>(to + part, from + part);
    copy_ahead<sizeof(Real)>(ahead.to_go + j, to_go + j);
  }
}

// The scores that this thread has fetched, into the rows of their step.
__device__ __forceinline__ void take(Real* rows, const Ahead& ahead, int count) {
#pragma unroll
  for (int k = 0; k < LOADS; ++k) {
    const int j = threadIdx.x + k * BIN_THREADS;
    if (j >= count) continue;
    const Quad quad = ahead.quad[j];
    Real* const row = rows + j;
    row[0] = quad.score;
    row[ROW] = quad.power * quad.score;
    row[2 * ROW] = quad.first;
    row[3 * ROW] = quad.second;
    row[ROW_TO_GO * ROW] = ahead.to_go[j];
  }
}

template <bool whole>
__device__ __forceinline__ void settle_item(const Item* items, int count, int slots, int bins, unsigned char* shared,
                                            Real* parts) {
  Real* const rows = reinterpret_cast<Real*>(shared);                       // (BATCH, 5, ROW)
  Ahead* const ahead = reinterpret_cast<Ahead*>(rows + BATCH * STEP_ROWS);  // (BATCH)
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

  for (int i = threadIdx.x; i < BATCH * 5; i += BIN_THREADS) rows[i * ROW + count] = 0;
  const u32 own_place = quad_place(blockIdx.x, threadIdx.x);
  for (int s = 0; s < min(BATCH, end - begin); ++s) fetch(ahead[s], own_place, begin + s, count);
#pragma unroll 1
  for (int slot = begin; slot < end; slot += BATCH) {
    const int batch = min(BATCH, end - slot);
    wait_for_copies();
#pragma unroll 1
    for (int s = 0; s < batch; ++s) take(rows + s * STEP_ROWS, ahead[s], count);
#pragma unroll 1
    for (int s = 0; s < min(BATCH, end - slot - BATCH); ++s) fetch(ahead[s], own_place, slot + BATCH + s, count);
    __syncthreads();
#pragma unroll 1
    for (int s = 0; s < batch; ++s) {
      const Real* const row = rows + s * STEP_ROWS;
      const Real* const to_go = row + ROW_TO_GO * ROW;
      Real l[3][MEMBERS], u[4][MEMBERS], sum[8];
      gather(own, to_go, l[0]);
      gather(first, to_go, l[1]);
      gather(second, to_go, l[2]);
      gather(own, row, u[0]);
      gather(own, row + ROW, u[1]);
      gather(first, row + 2 * ROW, u[2]);
      gather(second, row + 3 * ROW, u[3]);
      weigh(u[0], l[0], sum[0], sum[1]);
      weigh(u[1], l[0], sum[2], sum[3]);
      weigh(u[2], l[1], sum[4], sum[5]);
      weigh(u[3], l[2], sum[6], sum[7]);
      total(sum);
      if (whole) add_parts(sum, parts + 256 * (s & 1), bins);
      bool rare = false;
#pragma unroll
      for (int v = 0; v < 4; ++v) rare |= settle_value(u[v], l[v < 2 ? 0 : v - 1], sum[2 * v], sum[2 * v + 1], g[v]);
      if (__ballot_sync(0xFFFFFFFFu, rare)) {
#pragma unroll
        for (int v = 0; v < 4; ++v)
          settle_rare(v < 2 ? own : v == 2 ? first : second, row + v * ROW, to_go, u[v], sum[2 * v], g[v]);
      }
    }
    __syncthreads();
  }

  // Back into the order of the trajectories before it goes to memory.
  leave(own, g[0], rows);
  leave(own, g[1], rows + ROW);
  leave(first, g[2], rows + 2 * ROW);
  leave(second, g[3], rows + 3 * ROW);
  __syncthreads();
  Real* const gradient = c_settled.gradient + (long long)blockIdx.y * (2 * N + ALL_BONDS) * count;
  if (item.with_site) {
    add_row(gradient, n, rows, count);
    add_row(gradient, N + n, rows + ROW, count);
  }
  if (one) add_row(gradient, 2 * N + item.first, rows + 2 * ROW, count);
  if (two) add_row(gradient, 2 * N + item.second, rows + 3 * ROW, count);
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
