// Blocks of addresses that the host fills: one address per line. The host packs them by name and in this order, and
// defines the size of each as NAME_BYTES. Follows noise.cuh.

struct __align__(16) Quad {
  Real score, power, first, second;  // U of ω and |ψ|² of a site, U of two of its upper bonds
};

struct Weight {
  Real s0, s1;
};

struct Inputs {            // a network; ROWS rows of sites, rates × Δt. Place: in the block's buffer
  const Real* omega;       // (ROWS)
  const Real* chi;         // (ROWS)
  const Real* damping;     // (ROWS)
  const Real* kick;        // (ROWS)
  const Real* variance;    // (ROWS)
  const Real* start;       // (ROWS, 2)
  const int* neighbour;    // (DEGREE, ROWS): its place
  const Real* kappa;       // (DEGREE, ROWS)
  const int* bond;         // (DEGREE, ROWS): among those of the block, or −1
  const int* bond_given;   // (CLUSTER, BONDS): those of each block
  const u32* mirror;       // (2, ROWS): place in blocks that need the site, 1 bit if a port, 16 of blocks that need it;
                           // without ports and those that follow them, for the twin
  const int* mail;         // (2, CLUSTER): states of mirrors that a block receives per step
  const Real* drive;       // (steps, ROWS, 2), if it varies
  const Real* incoming;    // (steps, PORTS, 2), if it varies
  const Real* bar;         // R' − λ̄_n (steps, padded to even)
  const Real* modulation;  // (pieces, 2·HARMONICS, 4): c0, c1, c2, 0
};
static_assert(sizeof(Inputs) == INPUTS_BYTES, "the host has another list of fields");

struct Outputs {
  Real* raw;           // (count, KINDS, N): sums per site
  double* returns;     // (count)
  double* reward_sum;  // (blocks, steps), added to: one writer each, so the sums do not depend on the order of writes
  Pair* record;        // (count, records, N)
  int* overflow;       // (count, CLUSTER)
  Real* waves;         // (blocks, 2·HARMONICS, BONDS) if not in shared memory
};
static_assert(sizeof(Outputs) == OUTPUTS_BYTES, "the host has another list of fields");

struct Replayed {         // by the second pass of the binned baseline
  Pair* state;            // (count, N)
  double* left;           // (count): R − C so far
  const double* returns;  // (count): R, from the first pass
  const double* centre;   // (steps + 1): mean return-to-go, subtracted from λ̂ to keep it small
  Quad* quad;             // (slots, ⌈count/TOGETHER⌉, ITEMS, TOGETHER)
  Real* to_go;            // (slots, count): λ̂_{n+1} − centre
  Real* power;            // (N, count): |ψ|² at the first step, by which bins are sorted
  Real* waves;            // (count, CLUSTER, 2·HARMONICS, BONDS)
  const int* item;        // (N): the first item of a site; it has the scores of the site
  const u32* upper;       // (N): the first slot of its upper bonds, and from bit 16 on the slot behind the last
};
static_assert(sizeof(Replayed) == REPLAYED_BYTES, "the host has another list of fields");

struct Settled {
  const int* upper_start;  // (N + 1)
  const int* upper_site;   // (BONDS)
  u32* place;              // (N + BONDS, count): place in the order of the bins, then 8 bits of bin
  u32* order;              // (N + BONDS, count): the trajectory at each place
  int* offset;             // (N + BONDS, bins + 1): where each bin begins
  Real* gradient;          // (copies, 2N + BONDS, count), added to
  Weight* weights;         // (blocks, VALUES, count) if not in shared memory
};
static_assert(sizeof(Settled) == SETTLED_BYTES, "the host has another list of fields");

struct Trail {            // of the twin
  Pair* path;             // (steps + 1, ROWS) if all trajectories share it
  Pair* adjoint;          // the same
  Pair* own;              // (blocks, 2·(segment + 1) + 2·(segments + 1), ROWS) if they do not, or if RANK
  double* prefix_sum;     // (blocks, steps + 1), added to: Λ_0 − Λ_n
  double* gained;         // (count): Λ_0
  const Pair* basis;      // B (RANK, ROWS)
  const Pair* curvature;  // C at the ends of segments (segments, RANK, RANK)
  const double* value;    // ν (segments + 1)
};
static_assert(sizeof(Trail) == TRAIL_BYTES, "the host has another list of fields");
