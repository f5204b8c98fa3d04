// The second pass on the device, first half: some steps of every trajectory again, now writing ψ and ζ for
// columns.cu. Follows lattice.cu (with SCORES 0). State and C stay in global memory between launches.
//
// TOGETHER trajectories share a block, neighbouring threads being the same site of each: what they write for
// columns.cu then lies side by side in memory. REGION (bytes) keeps their states in different banks.

static_assert(CLUSTER == 1, "a trajectory is one block here");

extern "C" {
__constant__ Replayed c_replay;
}

template <int odd>
__device__ __forceinline__ void replay_step(Site (&site)[PER], const u32 (&w)[PER][4], int thread, u32 psi, Real* poly,
                                            const Real* waves, u32 half_turn, int step, int begin, int piece_steps,
                                            double& c, int j, int count) {
  Real tau = 0;
#if HARMONICS
  const int within = step % piece_steps;
  if (within == 0 || step == begin) {
    refresh_modulation(thread, c_in.modulation + (long long)(step / piece_steps) * 8 * HARMONICS, waves, poly);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PER; ++i) take_modulation(site[i], thread + i * THREADS, c_in.kappa, poly);
  }
  tau = (Real)(2 * within + 1 - piece_steps) / piece_steps;
#endif
  if (thread == 0 && j < count) {
    c += (double)reward(psi, odd * BUFFER, step);
    c_replay.to_go[(long long)(step - begin) * count + j] = (Real)(c_replay.returns[j] - c - c_replay.centre[step + 1]);
  }
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const int n = thread + i * THREADS;
    Quad* keep = n < N && j < count ? c_replay.quad + ((long long)(step - begin) * N + n) * count + j : nullptr;
    advance<odd>(site[i], n, psi, w[i][2 * odd], w[i][2 * odd + 1] ^ half_turn, (Real)0, tau, step, keep);
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS* TOGETHER, REPLAY_BLOCKS)
    replay(u32 first, int count, int begin, int end, int piece_steps, Real wave_scale) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x % TOGETHER, thread = threadIdx.x / TOGETHER;
  const u32 psi = shared_address(shared) + lane * REGION;
  Real* const poly = reinterpret_cast<Real*>(shared + TOGETHER * REGION) + lane * 3 * BONDS;
  Site site[PER];
  for (int base = blockIdx.x * TOGETHER; base < count; base += gridDim.x * TOGETHER) {
    const int j = base + lane, own = min(j, count - 1);  // the last block may have lanes that only go along
    const u32 trajectory = first + own, stream = ANTITHETIC ? trajectory & ~1u : trajectory;
    const u32 half_turn = ANTITHETIC ? trajectory << 31 : 0;
    Real* const waves = c_replay.waves + (long long)own * 2 * HARMONICS * BONDS;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const int n = thread + i * THREADS;
      open_site(site[i], n, psi);
      Pair y = {};
      if (begin == 0) {
        y.x = c_in.start[2 * n];
        y.y = c_in.start[2 * n + 1];
      } else if (n < N) {
        y = c_replay.state[(long long)own * N + n];
      }
      store(site[i].self + (begin & 1) * BUFFER, y);  // the buffer is the parity of the step
    }
#if HARMONICS
    if (begin == 0 && j < count)
      for (int b = thread; b < BONDS; b += THREADS) draw_modulation(stream, b, c_in.bond_given[b], wave_scale, waves);
#endif
    double c = begin == 0 ? 0.0 : c_replay.c[own];
    __syncthreads();
    int step = begin;
    u32 w[PER][4] = {};
    if (step & 1) {
      draw(thread, w, stream, step);
      replay_step<1>(site, w, thread, psi, poly, waves, half_turn, step, begin, piece_steps, c, j, count);
      ++step;
    }
#pragma unroll 1
    for (; step < end; step += 2) {
      draw(thread, w, stream, step);
      replay_step<0>(site, w, thread, psi, poly, waves, half_turn, step, begin, piece_steps, c, j, count);
      if (step + 1 < end)
        replay_step<1>(site, w, thread, psi, poly, waves, half_turn, step + 1, begin, piece_steps, c, j, count);
    }
    if (j < count) {
      for (int n = thread; n < N; n += THREADS)
        c_replay.state[(long long)j * N + n] = load(psi + (end & 1) * BUFFER + n * (u32)sizeof(Pair), Pair());
      if (thread == 0) c_replay.c[j] = c;
    }
  }
}
