// The second pass on the device, first half: some steps of every trajectory again, now writing scores for columns.cu.
// Follows lattice.cu (with SCORES 0). State and C stay in global memory between launches.
//
// TOGETHER trajectories share a block or cluster, neighbouring threads being the same site of each: what they write for
// columns.cu lies side by side in memory, and so do all sites of theirs. REGION (bytes) keeps their states in different
// banks.
//
// The score of a bond needs the kicks of both its sites: ζ of a step is exchanged with its ψ, at the end of the last.

extern "C" {
__constant__ Replayed c_replay;
}

#define ZETA_AT ((WAVES + 15) / 16 * 16)  // two buffers of ζ, as those of ψ

struct Replay {  // of one trajectory: what does not change from step to step
  int thread, row, begin, piece_steps, j, count;
  u32 psi, half_turn;
  Real *poly, *waves;
};

// The scores of a step, and in them those of an item and trajectory.
__device__ __forceinline__ Quad* step_quads(int slot, int count) {
  return c_replay.quad + (long long)slot * ((count + TOGETHER - 1) / TOGETHER * TOGETHER) * ITEMS;
}
__device__ __forceinline__ u32 quad_place(int item, int j) {
  return (u32)(j / TOGETHER * ITEMS + item) * TOGETHER + j % TOGETHER;
}

__device__ __forceinline__ Pair kick_of(const Site& s, u32 first, u32 second) {
  Pair zeta = Pair();
#if NOISE
  box_muller(first, second, s.variance, zeta.x, zeta.y);
#endif
  return zeta;
}

// ψ and ζ before `step`, for all who need them.
__device__ __forceinline__ void publish_both(const Site& s, int n, u32 psi, int odd, Pair y, Pair zeta, int step) {
  publish(s, n, psi, odd ? BUFFER : 0, y, step);
  share(s, psi, ZETA_AT + (odd ? BUFFER : 0), barrier_address(psi, odd ? ODD : EVEN), zeta);
}

// The scores of site n and of its upper bonds, two per item. upper: their slots, see Replayed.
template <int odd>
__device__ __forceinline__ void keep_scores(const Site& s, int n, u32 upper, Pair y, Pair zeta, int step,
                                            const Replay& t) {
  constexpr u32 from = odd ? BUFFER : 0;
  const Real u = cross(zeta.x, zeta.y, y), power = y.x * y.x + y.y * y.y;
  Quad* place = step_quads(step - t.begin, t.count) + quad_place(c_replay.item[n], t.j);
  Quad q = {u, power, 0, 0};
  int bonds = 0;
  EACH_SLOT
  for (int d = 0; d < DEGREE; ++d) {
    if (d < (int)(upper & 0xFFFF) || d >= (int)(upper >> 16)) continue;
    const Pair m = load(s.neighbour[d] + from, Pair()), z = load(s.neighbour[d] + ZETA_AT + from, Pair());
    const Real both = cross(zeta.x, zeta.y, m) + cross(z.x, z.y, y);
    if (bonds & 1) {
      q.second = both;
      *place = q;
      place += TOGETHER;
      q.second = 0;
    } else {
      q.first = both;
    }
    ++bonds;
  }
  if ((bonds & 1) || bonds == 0) *place = q;
}

// w: words of the noise of the next step.
template <int odd>
__device__ __forceinline__ void replay_step(Site (&site)[PER], const u32 (&upper)[PER], const u32 (&w)[PER][4],
                                            const Replay& t, int step, double& c) {
  constexpr u32 from = odd ? BUFFER : 0;
  Real tau = 0;
#if HARMONICS
  const int within = step % t.piece_steps;
  if (within == 0 || step == t.begin) {
    refresh_modulation(t.thread, c_in.modulation + (long long)(step / t.piece_steps) * 8 * HARMONICS, t.waves, t.poly);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PER; ++i) take_modulation(site[i], t.row + i * THREADS, c_in.kappa, t.poly);
  }
  tau = (Real)(2 * within + 1 - t.piece_steps) / t.piece_steps;
#endif
  if (block_rank() == 0 && t.thread == 0 && t.j < t.count) {
    c += (double)reward(t.psi, from, step);
    c_replay.to_go[(long long)(step - t.begin) * t.count + t.j] =
        (Real)(c_replay.returns[t.j] - c - c_replay.centre[step + 1]);
  }
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const Site& s = site[i];
    const int n = t.row + i * THREADS;
    const Pair y = load(s.self + from, Pair()), zeta = load(s.self + ZETA_AT + from, Pair());
    const Pair h = couple<(HARMONICS > 0)>(s, from, tau, [](int, Pair) {});
    const Pair small = drift(s, y, h, force(n, step, c_in.drive, c_force), y.x * y.x + y.y * y.y);
    if (n < N && t.j < t.count) keep_scores<odd>(s, n, upper[i], y, zeta, step, t);
    publish_both(s, n, t.psi, !odd, pair(y.x + (small.x + s.kick * zeta.x), y.y + (small.y + s.kick * zeta.y)),
                 kick_of(s, odd ? w[i][0] : w[i][2], (odd ? w[i][1] : w[i][3]) ^ t.half_turn), step + 1);
  }
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS* TOGETHER, REPLAY_BLOCKS)
    replay(u32 first, int count, int begin, int end, int piece_steps, Real wave_scale) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x % TOGETHER, thread = threadIdx.x / TOGETHER, rank = block_rank();
  Replay t = {thread, first_row() + thread, begin, piece_steps, 0, count};
  t.psi = shared_address(shared) + lane * REGION;
  t.poly = reinterpret_cast<Real*>(shared + TOGETHER * REGION) + lane * 3 * BONDS;
  Site site[PER];
  u32 upper[PER];
  Post post;
  open_post(post, t.psi, thread);
  const u32 bytes = state_bytes(post) + post.mirrors;
  const int stride = gridDim.x / CLUSTER * TOGETHER;
  for (int base = blockIdx.x / CLUSTER * TOGETHER; base < count; base += stride) {
    const int own = min(base + lane, count - 1);  // the last block may have lanes that only go along
    const u32 trajectory = first + own, stream = ANTITHETIC ? trajectory & ~1u : trajectory;
    t.j = base + lane;
    t.half_turn = ANTITHETIC ? trajectory << 31 : 0;
    t.waves = c_replay.waves + ((long long)own * CLUSTER + rank) * 2 * HARMONICS * BONDS;
    sync_cluster();
    u32 w[PER][4] = {};
    draw(t.row, w, stream, begin);
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const int n = t.row + i * THREADS;
      open_site(site[i], n, t.psi);
      Pair y = {};
      if (begin == 0) {
        y.x = c_in.start[2 * n];
        y.y = c_in.start[2 * n + 1];
      } else if (n < N) {
        y = c_replay.state[(long long)own * N + n];
      }
      upper[i] = n < N ? c_replay.upper[n] : 0;
      const bool odd = begin & 1;  // the buffer is the parity of the step
      publish_both(site[i], n, t.psi, odd, y,
                   kick_of(site[i], odd ? w[i][2] : w[i][0], (odd ? w[i][3] : w[i][1]) ^ t.half_turn), begin);
    }
#if HARMONICS
    if (begin == 0 && t.j < count)
      for (int b = thread; b < BONDS; b += THREADS)
        draw_modulation(stream, b, c_in.bond_given[rank * BONDS + b], wave_scale, t.waves);
#endif
    double c = begin == 0 ? 0.0 : c_replay.c[own];
    if (begin & 1) draw(t.row, w, stream, begin + 1);
    gather(post, t.psi, begin & 1 ? ODD : EVEN, bytes, thread);
#pragma unroll 1
    for (int step = begin; step < end; ++step) {
      if (step & 1) {
        replay_step<1>(site, upper, w, t, step, c);
      } else {
        replay_step<0>(site, upper, w, t, step, c);
        draw(t.row, w, stream, step + 2);  // while messages are on their way
      }
      gather(post, t.psi, step & 1 ? EVEN : ODD, bytes, thread);
    }
    if (t.j < count) {
#pragma unroll
      for (int i = 0; i < PER; ++i) {
        const int n = t.row + i * THREADS;
        if (n < N) c_replay.state[(long long)t.j * N + n] = load(site[i].self + (end & 1) * BUFFER, Pair());
      }
      if (rank == 0 && thread == 0) c_replay.c[t.j] = c;
    }
  }
}
