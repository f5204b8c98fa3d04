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
  int thread, row, begin, piece_steps, steps, j, count;
  bool counts;  // whether this thread adds up the rewards
  u32 psi, half_turn;
  Real *poly, *waves;
};

struct Return {  // R − C of a trajectory, and its mean at the end of the step, which is subtracted
  double left, centre;
};

struct Upper {  // of a site: where its scores are in those of a step, and the slots of its upper bonds (see Replayed)
  u32 place, slots;
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

// The scores of a site and of its upper bonds, two per item: a bond's is added when its neighbour is read.
struct Scored {
  Quad* place;
  Quad quad;
  int bonds;

  __device__ __forceinline__ void add(Real u) {
    if (bonds & 1) {
      quad.second = u;
      *place = quad;
      place += TOGETHER;
      quad.second = 0;
    } else {
      quad.first = u;
    }
    ++bonds;
  }
  __device__ __forceinline__ void close() {
    if ((bonds & 1) || bonds == 0) *place = quad;
  }
};

// w: words of the noise of the next step.
template <int odd>
__device__ __forceinline__ void replay_step(Site (&site)[PER], const Upper (&upper)[PER], const u32 (&w)[PER][4],
                                            const Replay& t, int step, Return& r) {
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
  if (t.counts) {
    r.left -= (double)reward(t.psi, from, step);
    c_replay.to_go[(u32)((step - t.begin) * t.count + t.j)] = (Real)(r.left - r.centre);
    r.centre = c_replay.centre[min(step + 2, t.steps)];  // a step ahead: no step waits for memory
  }
  Quad* const quads = step_quads(step - t.begin, t.count);
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const Site& s = site[i];
    const int n = t.row + i * THREADS;
    const Pair y = load(s.self + from, Pair()), zeta = load(s.self + ZETA_AT + from, Pair());
    const Real power = y.x * y.x + y.y * y.y;
    Scored scored = {quads + upper[i].place, {cross(zeta.x, zeta.y, y), power, 0, 0}, 0};
    const Pair h = couple<(HARMONICS > 0)>(s, from, tau, [&](int d, Pair m) {
      if (d < (int)(upper[i].slots & 0xFFFF) || d >= (int)(upper[i].slots >> 16)) return;
      const Pair z = load(s.neighbour[d] + ZETA_AT + from, Pair());
      scored.add(cross(zeta.x, zeta.y, m) + cross(z.x, z.y, y));
    });
    const Pair small = drift(s, y, h, force(n, step, c_in.drive, c_force), power);
    publish_both(s, n, t.psi, !odd, pair(y.x + (small.x + s.kick * zeta.x), y.y + (small.y + s.kick * zeta.y)),
                 kick_of(s, odd ? w[i][0] : w[i][2], (odd ? w[i][1] : w[i][3]) ^ t.half_turn), step + 1);
    if (n < N && t.j < t.count) scored.close();
  }
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS* TOGETHER, REPLAY_BLOCKS)
    replay(u32 first, int count, int begin, int end, int steps, int piece_steps, Real wave_scale) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x % TOGETHER, thread = threadIdx.x / TOGETHER, rank = block_rank();
  Replay t = {thread, first_row() + thread, begin, piece_steps, steps, 0, count};
  t.psi = shared_address(shared) + lane * REGION;
  t.poly = reinterpret_cast<Real*>(shared + TOGETHER * REGION) + lane * 3 * BONDS;
  Site site[PER];
  Upper upper[PER];
  Post post;
  open_post(post, t.psi, thread);
  const u32 bytes = state_bytes(post) + post.mirrors;
  const int stride = gridDim.x / CLUSTER * TOGETHER;
  for (int base = blockIdx.x / CLUSTER * TOGETHER; base < count; base += stride) {
    const int own = min(base + lane, count - 1);  // the last block may have lanes that only go along
    const u32 trajectory = first + own, stream = ANTITHETIC ? trajectory & ~1u : trajectory;
    t.j = base + lane;
    t.counts = rank == 0 && thread == 0 && t.j < count;
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
      upper[i] = {n < N ? quad_place(c_replay.item[n], own) : 0, n < N && t.j < count ? c_replay.upper[n] : 0};
      if (n < N && t.j < count) c_replay.power[(u32)(n * count + t.j)] = y.x * y.x + y.y * y.y;
      const bool odd = begin & 1;  // the buffer is the parity of the step
      publish_both(site[i], n, t.psi, odd, y,
                   kick_of(site[i], odd ? w[i][2] : w[i][0], (odd ? w[i][3] : w[i][1]) ^ t.half_turn), begin);
    }
#if HARMONICS
    if (begin == 0 && t.j < count)
      for (int b = thread; b < BONDS; b += THREADS)
        draw_modulation(stream, b, c_in.bond_given[rank * BONDS + b], wave_scale, t.waves);
#endif
    Return r = {};
    if (t.counts) r = {begin == 0 ? c_replay.returns[own] : c_replay.left[own], c_replay.centre[begin + 1]};
    if (begin & 1) draw(t.row, w, stream, begin + 1);
    gather(post, t.psi, begin & 1 ? ODD : EVEN, bytes, thread);
#pragma unroll 1
    for (int step = begin; step < end; ++step) {
      if (step & 1) {
        replay_step<1>(site, upper, w, t, step, r);
      } else {
        replay_step<0>(site, upper, w, t, step, r);
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
      if (t.counts) c_replay.left[t.j] = r.left;
    }
  }
}
