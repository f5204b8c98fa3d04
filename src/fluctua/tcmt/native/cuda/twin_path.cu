// The twin's noise-free path and its adjoint on the device; follows lattice.cu. A site is a thread, and every thread
// reads only those rows of them that it has written for its own sites, so nothing is exchanged through global memory:
// neighbours are in shared memory, and blocks of a cluster send each other what they need, as in step.cuh.
//
// Set before this text, besides lattice.cu's: OWN (each trajectory has a twin of its own, with its modulation),
// TWIN_HARMONICS, TWIN_AT (bytes of shared memory before the twin's buffers).

#define TWIN_BUFFERS (HEUN ? 3 : 2)

extern "C" {
__constant__ Inputs c_twin;
__constant__ Trail c_trail;
__constant__ Real c_twin_gain[PORTS + 1], c_twin_weight[PORTS + 1], c_twin_incoming[2 * PORTS + 2];
__constant__ Real c_twin_force[2 * DRIVES + 2];
}

struct TwinSite {
  Real omega, chi, damping, kappa[DEGREE];
  u32 self, neighbour[DEGREE];  // addresses in the twin's first buffer
#if CLUSTER > 1
  u32 mirror;  // see Inputs
#endif
#if TWIN_HARMONICS
  Real slope[DEGREE], bend[DEGREE];
#endif
};

__device__ void open_twin(TwinSite& s, int n, u32 base) {
  s.self = base + (n - first_row()) * (u32)sizeof(Pair);
#if CLUSTER > 1
  s.mirror = c_in.mirror[ROWS + n];
#endif
  s.omega = c_twin.omega[n];
  s.chi = c_twin.chi[n];
  s.damping = c_twin.damping[n];
  EACH_SLOT
  for (int d = 0; d < DEGREE; ++d) {
    s.kappa[d] = c_twin.kappa[d * ROWS + n];
    s.neighbour[d] = base + c_in.neighbour[d * ROWS + n] * (u32)sizeof(Pair);
  }
}

struct Wave {  // the modulation of a trajectory: the piece that `poly` is of, and steps per piece
  int piece, steps;
  Real *poly, *waves;
};

// Where the modulation is at `step`, in (−1, 1); on entering another piece, its quadratics for every slot.
__device__ Real twin_modulation(TwinSite (&site)[PER], Wave& wave, int step) {
#if TWIN_HARMONICS
  const int piece = step / wave.steps;
  if (piece != wave.piece) {
    __syncthreads();  // the last piece is still being read
    refresh_modulation(threadIdx.x, c_in.modulation + (long long)piece * 8 * HARMONICS, wave.waves, wave.poly);
    __syncthreads();
    for (int i = 0; i < PER; ++i)
      take_modulation(site[i], first_row() + threadIdx.x + i * THREADS, c_twin.kappa, wave.poly);
    wave.piece = piece;
  }
  return (Real)(2 * (step - piece * wave.steps) + 1 - wave.steps) / (Real)wave.steps;
#else
  return 0;
#endif
}

// How far a step goes in its piece, whose quadratics hold to the end of its last step.
__device__ __forceinline__ Real tau_of_a_step(const Wave& wave) { return (Real)2 / (Real)wave.steps; }

// The part of a reward that counts: with Heun's step that of the trapezoid rule.
__device__ __forceinline__ Real part_of_reward(int step, int steps) {
#if HEUN
  return trapezoid(step, steps);
#else
  return 1;
#endif
}

__device__ __forceinline__ double twin_reward(int n, Pair x, int step) {
  double g = 0;
#pragma unroll
  for (int p = 0; p < PORTS; ++p)
    if (is_port(p, n)) {
      const Pair out = emitted(p, x, c_twin_gain[p], c_twin.incoming, c_twin_incoming, step);
      g += (double)(c_twin_weight[p] * (out.x * out.x + out.y * out.y));
    }
  return g;
}

__device__ __forceinline__ double own_reward(int n, Pair x, int step) {
  double g = 0;
#pragma unroll
  for (int p = 0; p < PORTS; ++p)
    if (is_port(p, n)) {
      const Pair out = emitted(p, x, c_gain[p], c_in.incoming, c_incoming, step);
      g += (double)(c_weight[p] * (out.x * out.x + out.y * out.y));
    }
  return g;
}

// ∇g̃Δt at x̄, times `part`, is added to q.
__device__ __forceinline__ void add_reward_gradient(Pair& q, int n, Pair x, int step, Real part) {
#pragma unroll
  for (int p = 0; p < PORTS; ++p)
    if (is_port(p, n)) {
      const Pair out = emitted(p, x, c_twin_gain[p], c_twin.incoming, c_twin_incoming, step);
      q.x += 2 * part * c_twin_weight[p] * c_twin_gain[p] * out.x;
      q.y += 2 * part * c_twin_weight[p] * c_twin_gain[p] * out.y;
    }
}

// q_T: Heun's step counts half of the reward at the end, Euler's none of it.
__device__ __forceinline__ Pair last_adjoint(int n, Pair x, int steps) {
  Pair q = Pair();
#if HEUN
  add_reward_gradient(q, n, x, steps, trapezoid(steps, steps));
#endif
  return q;
}

__device__ __forceinline__ Real squared(Pair v) { return v.x * v.x + v.y * v.y; }

// The path of steps begin … end − 1 from x, into rows; leaves x at its end.
__device__ void path_of(TwinSite (&site)[PER], Pair (&x)[PER], Wave& wave, Post& post, u32 psi, int begin, int end,
                        Pair* rows) {
  const u32 base = psi + TWIN_AT;
  const int row = first_row() + threadIdx.x;
  sync_cluster();  // the buffers may still be read
  for (int i = 0; i < PER; ++i) {
    share(site[i], base, 0, barrier_address(psi, TWIN_EVEN), x[i]);
    rows[row + i * THREADS] = x[i];
  }
  gather(post, psi, TWIN_EVEN, post.bonded, threadIdx.x);
#pragma unroll 1
  for (int step = begin; step < end; ++step) {
    const Real tau = twin_modulation(site, wave, step);
#if HEUN
    Pair small[PER];
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const Pair h = couple<(TWIN_HARMONICS > 0)>(site[i], 0, tau, [](int, Pair) {});
      const Pair f = force(row + i * THREADS, step, c_twin.drive, c_twin_force);
      small[i] = drift(site[i], x[i], h, f, squared(x[i]));
      share(site[i], base, BUFFER, barrier_address(psi, TWIN_ODD), pair(x[i].x + small[i].x, x[i].y + small[i].y));
    }
    gather(post, psi, TWIN_ODD, post.bonded, threadIdx.x);
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const Pair ahead = load(site[i].self + BUFFER, Pair());
      const Pair h = couple<(TWIN_HARMONICS > 0)>(site[i], BUFFER, tau + tau_of_a_step(wave), [](int, Pair) {});
      const Pair f = force(row + i * THREADS, step + 1, c_twin.drive, c_twin_force);
      const Pair then = drift(site[i], ahead, h, f, squared(ahead));
      x[i].x += (Real)0.5 * (small[i].x + then.x);
      x[i].y += (Real)0.5 * (small[i].y + then.y);
      share(site[i], base, 0, barrier_address(psi, TWIN_EVEN), x[i]);
      rows[(step + 1 - begin) * (long long)ROWS + row + i * THREADS] = x[i];
    }
    gather(post, psi, TWIN_EVEN, post.bonded, threadIdx.x);
#else
    const int odd = (step - begin) & 1, next = odd ? TWIN_EVEN : TWIN_ODD;
    const u32 from = odd * BUFFER, to = BUFFER - from;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const Pair h = couple<(TWIN_HARMONICS > 0)>(site[i], from, tau, [](int, Pair) {});
      const Pair f = force(row + i * THREADS, step, c_twin.drive, c_twin_force);
      const Pair small = drift(site[i], x[i], h, f, squared(x[i]));
      x[i].x += small.x;
      x[i].y += small.y;
      share(site[i], base, to, barrier_address(psi, next), x[i]);
      rows[(step + 1 - begin) * (long long)ROWS + row + i * THREADS] = x[i];
    }
    gather(post, psi, next, post.bonded, threadIdx.x);
#endif
  }
}

// Its adjoint from q at `end` down to that of `last`, into rows; leaves q there. steps: of the run.
__device__ void adjoint_of(TwinSite (&site)[PER], Pair (&q)[PER], Wave& wave, Post& post, u32 psi, int begin, int end,
                           int last, int steps, const Pair* path, Pair* rows) {
  const u32 base = psi + TWIN_AT;
  const int row = first_row() + threadIdx.x;
  sync_cluster();
  for (int i = 0; i < PER; ++i) {
#if !HEUN
    share(site[i], base, 0, barrier_address(psi, TWIN_EVEN), q[i]);
#endif
    rows[(end - begin) * (long long)ROWS + row + i * THREADS] = q[i];
  }
#if !HEUN
  gather(post, psi, TWIN_EVEN, post.bonded, threadIdx.x);
#endif
#pragma unroll 1
  for (int step = end - 1; step >= last; --step) {
    const Real tau = twin_modulation(site, wave, step);
    const Pair* const x_row = path + (step - begin) * (long long)ROWS + row;
    Pair* const q_row = rows + (step - begin) * (long long)ROWS + row;
#if HEUN
    // q ↦ ½[q + E_x(E_x̃(q))] with E_x(q) = q + ΔtJ(x)ᵀq: see cpu/twin_path.hpp
    const u32 now = barrier_address(psi, TWIN_EVEN), then = barrier_address(psi, TWIN_ODD);
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      share(site[i], base, 0, now, x_row[i * THREADS]);
      share(site[i], base, BUFFER, now, q[i]);
    }
    gather(post, psi, TWIN_EVEN, 2 * post.bonded, threadIdx.x);
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const Pair x = load(site[i].self, Pair());
      const Pair h = couple<(TWIN_HARMONICS > 0)>(site[i], 0, tau, [](int, Pair) {});
      const Pair f = force(row + i * THREADS, step, c_twin.drive, c_twin_force);
      const Pair small = drift(site[i], x, h, f, squared(x)), ahead = pair(x.x + small.x, x.y + small.y);
      const Pair hq = couple<(TWIN_HARMONICS > 0)>(site[i], BUFFER, tau + tau_of_a_step(wave), [](int, Pair) {});
      share(site[i], base, 2 * BUFFER, then, pull_back(site[i], ahead, squared(ahead), q[i], hq));
    }
    gather(post, psi, TWIN_ODD, post.bonded, threadIdx.x);
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const Pair x = load(site[i].self, Pair()), eta = load(site[i].self + 2 * BUFFER, Pair());
      const Pair h = couple<(TWIN_HARMONICS > 0)>(site[i], 2 * BUFFER, tau, [](int, Pair) {});
      const Pair back = pull_back(site[i], x, squared(x), eta, h);
      q[i] = pair((Real)0.5 * (q[i].x + back.x), (Real)0.5 * (q[i].y + back.y));
      add_reward_gradient(q[i], row + i * THREADS, x, step, trapezoid(step, steps));
      q_row[i * THREADS] = q[i];
    }
#else
    const int odd = (end - 1 - step) & 1, next = odd ? TWIN_EVEN : TWIN_ODD;
    const u32 from = odd * BUFFER, to = BUFFER - from;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const Pair x = x_row[i * THREADS];
      const Pair h = couple<(TWIN_HARMONICS > 0)>(site[i], from, tau, [](int, Pair) {});
      q[i] = pull_back(site[i], x, squared(x), q[i], h);
      add_reward_gradient(q[i], row + i * THREADS, x, step, 1);
      share(site[i], base, to, barrier_address(psi, next), q[i]);
      q_row[i * THREADS] = q[i];
    }
    gather(post, psi, next, post.bonded, threadIdx.x);
#endif
  }
}

__device__ void start_twin(TwinSite (&site)[PER], Pair (&x)[PER], u32 base) {
  for (int i = 0; i < PER; ++i) {
    const int n = first_row() + threadIdx.x + i * THREADS;
    open_twin(site[i], n, base);
    x[i].x = c_twin.start[2 * n];
    x[i].y = c_twin.start[2 * n + 1];
  }
}

// Path and adjoint that all trajectories share, at every step: one block or cluster.
extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1) tabulate(int steps) {
  extern __shared__ __align__(16) unsigned char shared[];
  const u32 psi = shared_address(shared);
  TwinSite site[PER];
  Pair x[PER];
  Post post;
  Wave wave = {-1, 1, nullptr, nullptr};
  open_post(post, psi, threadIdx.x);
  start_twin(site, x, psi + TWIN_AT);
  path_of(site, x, wave, post, psi, 0, steps, c_trail.path);
  for (int i = 0; i < PER; ++i) x[i] = last_adjoint(first_row() + threadIdx.x + i * THREADS, x[i], steps);
  adjoint_of(site, x, wave, post, psi, 0, steps, 0, steps, c_trail.path, c_trail.adjoint);
}
