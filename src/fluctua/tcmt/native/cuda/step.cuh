// The resonators' step on the device, for trajectories, their replay and the twin's path alike: what is in constant
// memory, a site's registers, its neighbours, its noise and modulation. See cpu/step.hpp for the equations.
//
// A site is a thread, and the sites of a trajectory are a block, or the blocks of a cluster if they are many: a block
// then keeps copies of those sites of others that its own are coupled to ("mirrors"), and of all ports. Compiled at run
// time for the network at hand. Set before this text: Real (float or double), Pair (its 2-vector), N sites, THREADS,
// PER sites per thread, CLUSTER blocks with MIRRORS each, DEGREE (slots per site; unused ones have κ = 0 and point to
// the site itself), BONDS (of a block), PORTS, DRIVES, HARMONICS, INVERSE_DT, and 0 or 1 for SCORES, RATES, NOISE,
// DRIVE_TABLE, INCOMING_TABLE, HEUN. Follows blocks.cuh; drift.cuh is next.

// Everything that does not change during a launch, in constant memory: the host writes these as bytes.
extern "C" {
__constant__ Inputs c_in;
__constant__ Outputs c_out;
__constant__ Real c_gain[PORTS + 1], c_weight[PORTS + 1], c_incoming[2 * PORTS + 2];  // √(2γ_e), wΔt, s⁺
__constant__ u32 c_port[PORTS + 1];                                                   // port's site · sizeof(Pair)
__constant__ Real c_force[2 * DRIVES + 2];  // fΔt of drives that do not change in time
__constant__ int c_drive[DRIVES + 1];       // and their sites
}

#if DEGREE <= 8
#define EACH_SLOT _Pragma("unroll")
#else
#define EACH_SLOT _Pragma("unroll 1")  // sums in local memory: slower, but any degree compiles
#endif

#define KINDS (SCORES ? 2 + DEGREE + (RATES ? 4 : 0) : 0)

#define LOCAL   (PER * THREADS)  // a block's sites, and idle rows that fill its last warp: no branch in the loop
#define ROWS    (CLUSTER * LOCAL)
#define BUFFER  ((LOCAL + MIRRORS) * (u32)sizeof(Pair))  // bytes of one state
#define REWARDS ((HEUN ? 4 : 2) * BUFFER)                // where the rewards of up to 32 steps wait to be added up
#define MAIL    (REWARDS + 32 * (u32)sizeof(Real))       // of a cluster's block: its barriers, and its ports
#define PORT_AT (MAIL + 8 * BARRIERS)
#define WAVES   (CLUSTER > 1 ? PORT_AT + 4 * PORTS * (u32)sizeof(Pair) : MAIL)

// Barriers of a cluster's block, one for each buffer that is exchanged: ψ of even and odd steps, the stage of Heun's
// step, two of the twin's path and adjoint, projections of a quadratic term.
enum Barrier { EVEN, ODD, STAGE, TWIN_EVEN, TWIN_ODD, PROJECTED, BARRIERS = 8 };

__device__ __forceinline__ Real cross(Real ar, Real ai, Pair b) { return ar * b.y - ai * b.x; }

// ã cos φ and ã sin φ, times σ_κΔt, of bond b. Same law as on the host.
__device__ void draw_modulation(u32 stream, int b, int given, Real scale, Real* waves) {
  Real norm = 0;
  for (int k = 0; k < HARMONICS; ++k) {
    u32 w[4];
    philox(stream, 0x80000000u + (u32)given * HARMONICS + k, 0xFFFFFFFFu, w);
    Real a, unused;
    box_muller(w[0], w[1], (Real)1, a, unused);  // any scale: ã = a/‖a‖
    Real sine, cosine;
    sincospi(((Real)(int)w[2] + (Real)0.5) * (Real)4.656612873077393e-10, &sine, &cosine);
    norm += a * a;
    waves[(2 * k) * BONDS + b] = a * cosine;
    waves[(2 * k + 1) * BONDS + b] = a * sine;
  }
  const Real factor = scale / sqrt(norm);
  for (int k = 0; k < 2 * HARMONICS; ++k) waves[k * BONDS + b] *= factor;
}

// The quadratic that stands for δκΔt on the steps of one piece; see `fit_modulation`.
__device__ void refresh_modulation(int thread, const Real* __restrict__ m, const Real* waves, Real* poly) {
  for (int b = thread; b < BONDS; b += THREADS) {
    Real c0 = 0, c1 = 0, c2 = 0;
#pragma unroll 4
    for (int k = 0; k < 2 * HARMONICS; ++k) {
      const Real x = waves[k * BONDS + b];
      c0 += x * m[4 * k];
      c1 += x * m[4 * k + 1];
      c2 += x * m[4 * k + 2];
    }
    poly[b] = c0;
    poly[BONDS + b] = c1;
    poly[2 * BONDS + b] = c2;
  }
}

struct Site {
  Real omega, chi, damping, kick, variance;
  Real kappa[DEGREE];
  u32 self, neighbour[DEGREE];  // addresses in the first buffer
#if CLUSTER > 1
  u32 mirror;  // see Inputs
#endif
#if HARMONICS
  Real slope[DEGREE], bend[DEGREE];  // κ(t) = kappa + τ(slope + τ·bend)
#endif
#if SCORES
  Real weighted[2 + DEGREE], plain[2 + DEGREE];  // Σ(R' − C − λ̄)U and ΣU: ω, χ, bonds
#if RATES
  Real rate[7];  // the same two of damping, ln Q and drive; explicit gain
#endif
#endif
};

// The amplitude that leaves at port p: of the network with its own numbers, or of its twin.
__device__ __forceinline__ Pair emitted(int p, Pair y, Real gain, const Real* table, const Real* constant, int step) {
  const Real* s = INCOMING_TABLE ? table + (step * (long long)PORTS + p) * 2 : constant + 2 * p;
  y.x = gain * y.x - s[0];
  y.y = gain * y.y - s[1];
  return y;
}

__device__ __forceinline__ bool is_port(int p, int n) { return c_port[p] == n * (u32)sizeof(Pair); }

// Where a cluster's block has the state of port p. Four of them in turn: see `publish`.
__device__ __forceinline__ u32 port_address(u32 psi, int p, int step) {
  return psi + PORT_AT + ((step & 3) * PORTS + p) * (u32)sizeof(Pair);
}

// gΔt of the state at psi + buffer; every thread computes it, which is cheaper than to share it.
__device__ __forceinline__ Real reward(u32 psi, u32 buffer, int step) {
  Real g = 0;
#pragma unroll
  for (int p = 0; p < PORTS; ++p) {
    const Pair y = load(CLUSTER > 1 ? port_address(psi, p, step) : psi + buffer + c_port[p], Pair());
    const Pair out = emitted(p, y, c_gain[p], c_in.incoming, c_incoming, step);
    g += c_weight[p] * (out.x * out.x + out.y * out.y);
  }
  return g;
}

// fΔt on site n, from the network's numbers or from its twin's.
__device__ __forceinline__ Pair force(int n, int step, const Real* table, const Real* constant) {
  Pair f = Pair();
#if DRIVE_TABLE
  f = reinterpret_cast<const Pair*>(table)[step * (long long)ROWS + n];
#else
#pragma unroll
  for (int d = 0; d < DRIVES; ++d)
    if (n == c_drive[d]) {
      f.x += constant[2 * d];
      f.y += constant[2 * d + 1];
    }
#endif
  return f;
}

#if RATES
struct Rates {  // scores of Γ_n at fixed Q, of ln Q_n, and of the scale of the drive
  Real drag, spread, push;
};

__device__ __forceinline__ Rates rates_of(const Site& s, Pair y, Real zr, Real zi, Pair f) {
  const Real two_over = s.variance > 0 ? (Real)0.6931471805599453 / s.variance : (Real)0;  // 1/(2·variance of z)
  return {-(zr * y.x + zi * y.y), (zr * zr + zi * zi) * two_over - 1, (zr * f.x + zi * f.y) * (Real)INVERSE_DT};
}

// ∂(gΔt)/∂gain, of the ports on site n.
__device__ __forceinline__ void add_gain(Real& sum, int n, Pair y, int step) {
  for (int p = 0; p < PORTS; ++p)
    if (is_port(p, n)) {
      const Pair out = emitted(p, y, c_gain[p], c_in.incoming, c_incoming, step);
      sum += 2 * c_weight[p] * (out.x * y.x + out.y * y.y);
    }
}
#endif

__device__ __forceinline__ int first_row() { return block_rank() * LOCAL; }  // of this block

__device__ void open_site(Site& s, int n, u32 psi) {
  s.self = fixed(psi + (n - first_row()) * (u32)sizeof(Pair));
#if CLUSTER > 1
  s.mirror = c_in.mirror[n];
#endif
  s.omega = c_in.omega[n];
  s.chi = c_in.chi[n];
  s.damping = c_in.damping[n];
  s.kick = c_in.kick[n];
  s.variance = c_in.variance[n];
  EACH_SLOT
  for (int d = 0; d < DEGREE; ++d) {
    s.kappa[d] = c_in.kappa[d * ROWS + n];
    s.neighbour[d] = fixed(psi + c_in.neighbour[d * ROWS + n] * (u32)sizeof(Pair));
  }
#if SCORES
  EACH_SLOT
  for (int i = 0; i < 2 + DEGREE; ++i) s.weighted[i] = s.plain[i] = 0;
#if RATES
#pragma unroll
  for (int i = 0; i < 7; ++i) s.rate[i] = 0;
#endif
#endif
}

// A site's number, into the buffer at `base + offset`: of its own block, and sent to those that have a mirror of it.
template <class S> __device__ __forceinline__ void share(const S& s, u32 base, u32 offset, u32 barrier, Pair v) {
  store(s.self + offset, v);
#if CLUSTER > 1
  const u32 there = base + (s.mirror & 0x7FFF) * (u32)sizeof(Pair) + offset;
  for (u32 left = s.mirror >> 16; left; left &= left - 1) send(__ffs(left) - 1, there, barrier, v);
#endif
}

__device__ __forceinline__ u32 barrier_address(u32 psi, int barrier) { return psi + MAIL + 8 * barrier; }

// The state of site n before `step`, for its own block and for those that have a mirror of it; of a port, for all.
//
// Blocks wait for what they are sent and for nothing else, so one can be ahead of another, but not by so much that it
// writes what is still read. To send ψ_k it must have ψ_{k−1} of all its mirrors. Sites that read its mirrors are
// mirrored to it in turn (bonds have two ends), and have read ψ_{k−2} by then: two buffers do. Ports are read by all
// threads of a block, of which one at least is mirrored to the port's block (the host ensures that); when it sent
// ψ_{k−1} all of them had read ψ_{k−3}: three would do, and four are simpler. Such a mirror without a bond needs the
// port in return: without it the block could be far ahead of the port's. The twin has neither.
//
// Where two kinds of buffers are exchanged in turn, such as ψ and the stage of Heun's step, each is needed once: what
// is sent of one kind has waited for the other, which was sent by threads that had read the last one.
__device__ __forceinline__ void publish(const Site& s, int n, u32 psi, u32 buffer, Pair y, int step) {
#if CLUSTER > 1
  const u32 barrier = barrier_address(psi, buffer ? ODD : EVEN);
  share(s, psi, buffer, barrier, y);
  if (s.mirror >> 15 & 1)
    for (int p = 0; p < PORTS; ++p)
      if (is_port(p, n))
        for (u32 block = 0; block < CLUSTER; ++block) send(block, port_address(psi, p, step), barrier, y);
#else
  store(s.self + buffer, y);
#endif
}

struct Post {       // of a cluster's block
  u32 mirrors = 0;  // bytes that it is sent of the sites of others
  u32 bonded = 0;   // the same of sites with bonds to its own
  u32 phase = 0;    // of its barriers, a bit each
};

__device__ __forceinline__ u32 state_bytes(const Post& post) { return post.mirrors + PORTS * (u32)sizeof(Pair); }

// Waits until all threads of the block are here and all `bytes` for a barrier have arrived. thread: of the trajectory.
__device__ __forceinline__ void gather(Post& post, u32 psi, int barrier, u32 bytes, int thread) {
#if CLUSTER > 1
  const u32 address = barrier_address(psi, barrier);
  if (thread == 0) expect(address, bytes);
#endif
  __syncthreads();
#if CLUSTER > 1
  while (!received(address, post.phase >> barrier & 1)) {
  }
  post.phase ^= 1 << barrier;
#endif
}

// The same of ψ, whose buffer is that of even or odd steps.
template <int odd> __device__ __forceinline__ void gather(Post& post, u32 psi) {
  gather(post, psi, odd ? ODD : EVEN, state_bytes(post), threadIdx.x);
}

__device__ __forceinline__ void open_post(Post& post, u32 psi, int thread) {  // sync_cluster must follow
#if CLUSTER > 1
  post.mirrors = c_in.mail[block_rank()] * (u32)sizeof(Pair);
  post.bonded = c_in.mail[CLUSTER + block_rank()] * (u32)sizeof(Pair);
  if (thread < BARRIERS) make_barrier(barrier_address(psi, thread));
#endif
}

// κ(t) of the piece of the modulation that begins, for every slot of a site; kappa: without it.
template <class S> __device__ void take_modulation(S& s, int n, const Real* kappa, const Real* poly) {
  EACH_SLOT
  for (int d = 0; d < DEGREE; ++d) {
    const int b = c_in.bond[d * ROWS + n];
    s.kappa[d] = kappa[d * ROWS + n] + (b < 0 ? (Real)0 : poly[b]);
    s.slope[d] = b < 0 ? (Real)0 : poly[BONDS + b];
    s.bend[d] = b < 0 ? (Real)0 : poly[2 * BONDS + b];
  }
}

__device__ __forceinline__ void draw(int row, u32 (&w)[PER][4], u32 stream, int step) {
#if NOISE
#pragma unroll
  for (int i = 0; i < PER; ++i) philox(stream, row + i * THREADS, step >> 1, w[i]);
#endif
}
