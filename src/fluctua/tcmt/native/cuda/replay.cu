// The second pass on the device, first half: some steps of every trajectory again, now writing ψ and ζ for
// columns.cu. Follows lattice.cu (with SCORES 0). State and C stay in global memory between launches.
//
// TOGETHER trajectories share a block or cluster, neighbouring threads being the same site of each: what they write for
// columns.cu then lies side by side in memory. REGION (bytes) keeps their states in different banks.

extern "C" {
__constant__ Replayed c_replay;
}

struct Replay {  // of one trajectory: what does not change from step to step
  int thread, row, begin, piece_steps, j, count;
  u32 psi, half_turn;
  Real *poly, *waves;
};

template <int odd>
__device__ __forceinline__ void replay_step(Site (&site)[PER], const u32 (&w)[PER][4], const Replay& t, Post& post,
                                            int step, double& c) {
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
    c += (double)reward(t.psi, odd * BUFFER, step);
    c_replay.to_go[(long long)(step - t.begin) * t.count + t.j] =
        (Real)(c_replay.returns[t.j] - c - c_replay.centre[step + 1]);
  }
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const int n = t.row + i * THREADS;
    Quad* keep =
        n < N && t.j < t.count ? c_replay.quad + ((long long)(step - t.begin) * N + n) * t.count + t.j : nullptr;
    advance<odd>(site[i], n, t.psi, w[i][2 * odd], w[i][2 * odd + 1] ^ t.half_turn, (Real)0, tau, step, keep);
  }
  gather(post, t.psi, odd ? EVEN : ODD, state_bytes(post), t.thread);
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS* TOGETHER, REPLAY_BLOCKS)
    replay(u32 first, int count, int begin, int end, int piece_steps, Real wave_scale) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x % TOGETHER, thread = threadIdx.x / TOGETHER, rank = block_rank();
  Replay t = {thread, first_row() + thread, begin, piece_steps, 0, count};
  t.psi = shared_address(shared) + lane * REGION;
  t.poly = reinterpret_cast<Real*>(shared + TOGETHER * REGION) + lane * 3 * BONDS;
  Site site[PER];
  Post post;
  open_post(post, t.psi, thread);
  const int stride = gridDim.x / CLUSTER * TOGETHER;
  for (int base = blockIdx.x / CLUSTER * TOGETHER; base < count; base += stride) {
    const int own = min(base + lane, count - 1);  // the last block may have lanes that only go along
    const u32 trajectory = first + own, stream = ANTITHETIC ? trajectory & ~1u : trajectory;
    t.j = base + lane;
    t.half_turn = ANTITHETIC ? trajectory << 31 : 0;
    t.waves = c_replay.waves + ((long long)own * CLUSTER + rank) * 2 * HARMONICS * BONDS;
    sync_cluster();
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
      publish(site[i], n, t.psi, (begin & 1) * BUFFER, y, begin);  // the buffer is the parity of the step
    }
#if HARMONICS
    if (begin == 0 && t.j < count)
      for (int b = thread; b < BONDS; b += THREADS)
        draw_modulation(stream, b, c_in.bond_given[rank * BONDS + b], wave_scale, t.waves);
#endif
    double c = begin == 0 ? 0.0 : c_replay.c[own];
    gather(post, t.psi, begin & 1 ? ODD : EVEN, state_bytes(post), thread);
    int step = begin;
    u32 w[PER][4] = {};
    if (step & 1) {
      draw(t.row, w, stream, step);
      replay_step<1>(site, w, t, post, step, c);
      ++step;
    }
#pragma unroll 1
    for (; step < end; step += 2) {
      draw(t.row, w, stream, step);
      replay_step<0>(site, w, t, post, step, c);
      if (step + 1 < end) replay_step<1>(site, w, t, post, step + 1, c);
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
