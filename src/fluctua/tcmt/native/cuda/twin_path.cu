// The twin's noise-free path and its adjoint on the device; follows lattice.cu. A site is a thread, and every thread
// reads only those rows of them that it has written for its own sites, so nothing is exchanged through global memory.
//
// Set before this text, besides lattice.cu's: OWN (each trajectory has a twin of its own, with its modulation),
// TWIN_HARMONICS, TWIN_AT (bytes of shared memory before the twin's two buffers).

static_assert(CLUSTER == 1, "a trajectory is one block here");

extern "C" {
__constant__ Inputs c_twin;
__constant__ Trail c_trail;
__constant__ Real c_twin_gain[PORTS + 1], c_twin_weight[PORTS + 1], c_twin_incoming[2 * PORTS + 2];
__constant__ Real c_twin_force[2 * DRIVES + 2];
}

struct TwinSite {
  Real omega, chi, damping, kappa[DEGREE];
  u32 self, neighbour[DEGREE];  // addresses in the twin's first buffer
#if TWIN_HARMONICS
  Real slope[DEGREE], bend[DEGREE];
#endif
};

__device__ void open_twin(TwinSite& s, int n, u32 base) {
  s.self = base + n * (u32)sizeof(Pair);
  s.omega = c_twin.omega[n];
  s.chi = c_twin.chi[n];
  s.damping = c_twin.damping[n];
  EACH_SLOT
  for (int d = 0; d < DEGREE; ++d) {
    s.kappa[d] = c_twin.kappa[d * ROWS + n];
    s.neighbour[d] = base + c_in.neighbour[d * ROWS + n] * (u32)sizeof(Pair);
  }
}

// Where the modulation is at `step`, in (−1, 1); on entering another piece, its quadratics for every slot.
struct Wave {
  int piece, steps;
  Real *poly, *waves;
};

__device__ Real twin_modulation(TwinSite (&site)[PER], Wave& wave, int step) {
#if TWIN_HARMONICS
  const int piece = step / wave.steps;
  if (piece != wave.piece) {
    __syncthreads();  // the last piece is still being read
    refresh_modulation(threadIdx.x, c_in.modulation + (long long)piece * 8 * HARMONICS, wave.waves, wave.poly);
    __syncthreads();
    for (int i = 0; i < PER; ++i) take_modulation(site[i], threadIdx.x + i * THREADS, c_twin.kappa, wave.poly);
    wave.piece = piece;
  }
  return (Real)(2 * (step - piece * wave.steps) + 1 - wave.steps) / (Real)wave.steps;
#else
  return 0;
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

// The path of steps begin … end − 1 from x, into rows; leaves x at its end.
__device__ void path_of(TwinSite (&site)[PER], Pair (&x)[PER], Wave& wave, int begin, int end, Pair* rows) {
  __syncthreads();  // the buffers may still be read
  for (int i = 0; i < PER; ++i) {
    store(site[i].self, x[i]);
    rows[threadIdx.x + i * THREADS] = x[i];
  }
  __syncthreads();
#pragma unroll 1
  for (int step = begin; step < end; ++step) {
    const Real tau = twin_modulation(site, wave, step);
    const u32 odd = (step - begin) & 1, from = odd * BUFFER, to = BUFFER - from;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const int n = threadIdx.x + i * THREADS;
      const Pair h = couple<(TWIN_HARMONICS > 0)>(site[i], from, tau, [](int, Pair) {});
      const Pair f = force(n, step, c_twin.drive, c_twin_force), y = x[i];
      const Pair small = drift(site[i], y, h, f, y.x * y.x + y.y * y.y);
      x[i].x = y.x + small.x;
      x[i].y = y.y + small.y;
      store(site[i].self + to, x[i]);
      rows[(step + 1 - begin) * (long long)ROWS + n] = x[i];
    }
    __syncthreads();
  }
}

// Its adjoint from q at `end` down to that of `last`, into rows; leaves q there.
__device__ void adjoint_of(TwinSite (&site)[PER], Pair (&q)[PER], Wave& wave, int begin, int end, int last,
                           const Pair* path, Pair* rows) {
  __syncthreads();
  for (int i = 0; i < PER; ++i) {
    store(site[i].self, q[i]);
    rows[(end - begin) * (long long)ROWS + threadIdx.x + i * THREADS] = q[i];
  }
  __syncthreads();
#pragma unroll 1
  for (int step = end - 1; step >= last; --step) {
    const Real tau = twin_modulation(site, wave, step);
    const u32 odd = (end - 1 - step) & 1, from = odd * BUFFER, to = BUFFER - from;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const int n = threadIdx.x + i * THREADS;
      const Pair x = path[(step - begin) * (long long)ROWS + n];
      const Pair h = couple<(TWIN_HARMONICS > 0)>(site[i], from, tau, [](int, Pair) {});
      q[i] = pull_back(site[i], x, x.x * x.x + x.y * x.y, q[i], h);
#pragma unroll
      for (int p = 0; p < PORTS; ++p)
        if (is_port(p, n)) {
          const Pair out = emitted(p, x, c_twin_gain[p], c_twin.incoming, c_twin_incoming, step);
          q[i].x += 2 * c_twin_weight[p] * c_twin_gain[p] * out.x;
          q[i].y += 2 * c_twin_weight[p] * c_twin_gain[p] * out.y;
        }
      store(site[i].self + to, q[i]);
      rows[(step - begin) * (long long)ROWS + n] = q[i];
    }
    __syncthreads();
  }
}

__device__ void start_twin(TwinSite (&site)[PER], Pair (&x)[PER], u32 base) {
  for (int i = 0; i < PER; ++i) {
    const int n = threadIdx.x + i * THREADS;
    open_twin(site[i], n, base);
    x[i].x = c_twin.start[2 * n];
    x[i].y = c_twin.start[2 * n + 1];
  }
}

// Path and adjoint that all trajectories share, at every step: one block.
extern "C" __global__ void __launch_bounds__(THREADS, 1) tabulate(int steps) {
  extern __shared__ __align__(16) unsigned char shared[];
  TwinSite site[PER];
  Pair x[PER];
  Wave wave = {-1, 1, nullptr, nullptr};
  start_twin(site, x, shared_address(shared) + TWIN_AT);
  path_of(site, x, wave, 0, steps, c_trail.path);
  for (int i = 0; i < PER; ++i) x[i] = Pair();
  adjoint_of(site, x, wave, 0, steps, 0, c_trail.path, c_trail.adjoint);
}
