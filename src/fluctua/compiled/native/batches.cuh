// Sums over batches of trajectories on a GPU, through arrays that stay arrays. A block has TRAJECTORIES at a time, and
// a team of TEAM threads for each, which share its elements. Element k of an array of a trajectory is [k·BLOCKS], in
// the shared memory of the block. Products with matrices keep a tile of sums in registers, large ones by the tensor
// cores; sums over trajectories are taken by all threads of the block.
#define TEAM    (THREADS / TRAJECTORIES)
#define BLOCKS  (TRAJECTORIES + 4)  // rows of arrays begin in different banks
#define VECTORS 1                   // per thread and element of an array
#define team    ((int)threadIdx.x / TRAJECTORIES)
#define lane    ((int)threadIdx.x % TRAJECTORIES)

struct __align__(16) Four {
  F v[4];
};

// ------------------------------------------------------------------------------------------ functions

template <int power> INLINE V integer_power(V x) {
  if constexpr (power < 0) {
    return F(1) / integer_power<-power>(x);
  } else if constexpr (power == 0) {
    return F(1);
  } else if constexpr (power == 1) {
    return x;
  } else {
    const V half = integer_power<power / 2>(x);
    return power % 2 ? half * half * x : half * half;
  }
}

// Without a branch, so that several are under way at once; five units in the last place.
INLINE VF array_tanh(VF x) {
  const VF a = fabsf(x), z = x * x;
  const VF far = 1 - __fdividef(2.0f, __expf(2 * a) + 1);
  VF series = fmaf(z, -8.86323552e-3f, 2.18694885e-2f);
  series = fmaf(fmaf(fmaf(series, z, -5.39682540e-2f), z, 1.33333333e-1f), z, -3.33333333e-1f);
  return a < 0.4f ? fmaf(series * z, x, x) : copysignf(far, x);
}
INLINE VD array_tanh(VD x) { return m_tanh(x); }

// ------------------------------------------------------------------------------------------ tensor cores

#if SINGLE
#define WARPS (THREADS / 32)

// A number as the sum of two with 11 bits each, the rest being cut off. The tensor cores multiply such numbers exactly;
// three products of four are taken, and what is left out is about a millionth.
struct Split {
  u32 high, low;
};
INLINE Split split(float v) {
  const u32 high = __float_as_uint(v) & 0xffffe000u;
  return {high, __float_as_uint(v - __uint_as_float(high))};
}

#ifndef EMULATED
// sum (16, 8) += a (16, 8) b (8, 8). Of a thread g·4 + t, sum is (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1), a
// is (g, k), (g + 8, k), (g, l), (g + 8, l), b is (k, g), (l, g), with k = t and l = t + 4 or any other order.
INLINE void multiply_16_8_8(float* sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif
// TILES products; those that add to one sum are far apart, as each takes long
template <int TILES> INLINE void add_split_products(float (*sum)[4], const Split* a, const Split (*b)[2]) {
  EACH(j, TILES) multiply_16_8_8(sum[j], a[0].low, a[1].low, a[2].low, a[3].low, b[j][0].high, b[j][1].high);
  EACH(j, TILES) multiply_16_8_8(sum[j], a[0].high, a[1].high, a[2].high, a[3].high, b[j][0].low, b[j][1].low);
  EACH(j, TILES) multiply_16_8_8(sum[j], a[0].high, a[1].high, a[2].high, a[3].high, b[j][0].high, b[j][1].high);
}

// y = A x, 16 · DOWN rows and 8 · TILES trajectories per warp; DEPTH products at a time have sums of their own, so that
// they do not wait for each other. x, y: of the first trajectory
template <int DOWN, int TILES, int DEPTH>
INLINE void multiply_by_tensors(int rows, int inner, const float* a, int a_row, int a_inner, const float* x,
                                int x_inner, float* y, int y_row) {
  const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
  const int across = TRAJECTORIES / (8 * TILES), tiles = (rows + 16 * DOWN - 1) / (16 * DOWN) * across;
#pragma unroll 1
  for (int tile = threadIdx.x / 32; tile < tiles; tile += WARPS) {
    const int row = tile / across * 16 * DOWN + g, column = tile % across * 8 * TILES;
    int of[2 * DOWN];  // where rows of A begin
    EACH(q, 2 * DOWN) of[q] = (row + 8 * q < rows ? row + 8 * q : rows - 1) * a_row;
    float sum[DEPTH][DOWN][TILES][4];
    EACH(d, DEPTH) EACH(q, DOWN) EACH(j, TILES) EACH(c, 4) sum[d][q][j][c] = 0;
    float ahead[DEPTH][DOWN][4];  // of A, on their way while the ones before are multiplied
    EACH(d, DEPTH) EACH(q, DOWN) EACH(c, 4) {
      const int i = 8 * d + 2 * t + c / 2;
      ahead[d][q][c] = i < inner ? a[of[2 * q + c % 2] + i * a_inner] : 0.0f;
    }
#pragma unroll DOWN == 1 && DEPTH == 1 ? 2 : 1
    for (int k = 0; k < inner; k += 8 * DEPTH) EACH(d, DEPTH) {
        const int first = k + 8 * d + 2 * t;  // pairs 2t, 2t + 1: neighbours in A, and in other banks of x
        Split left[DOWN][4];
        EACH(q, DOWN) EACH(c, 4) {
          const int i = first + 8 * DEPTH + c / 2;
          left[q][c] = split(ahead[d][q][c]);
          ahead[d][q][c] = i < inner ? a[of[2 * q + c % 2] + i * a_inner] : 0.0f;
        }
        Split right[TILES][2];
        EACH(j, TILES) EACH(c, 2) {
          const int i = first + c < inner ? first + c : inner - 1;
          right[j][c] = split(x[i * x_inner * BLOCKS + column + 8 * j + g]);
        }
        EACH(q, DOWN) add_split_products<TILES>(sum[d][q], left[q], right);
      }
    EACH(q, DOWN) EACH(j, TILES) EACH(c, 4) {
      const int r = row + 16 * q + c / 2 * 8;
      EACH(d, DEPTH - 1) sum[0][q][j][c] += sum[d + 1][q][j][c];
      if (r < rows) y[r * y_row * BLOCKS + column + 8 * j + 2 * t + c % 2] = sum[0][q][j][c];
    }
  }
}

// Only this thread adds to the sum. Outside of the block it does not wait for what is there.
INLINE void add_to_sum(float* sum, float value) {
#if SUMS_IN_BLOCK
  *sum += value;
#else
  atomicAdd(sum, value);
#endif
}

// sums[i][j] += Σ a[i] b[j] over the trajectories of the block, 16 × 8 · TILES sums per warp. a, b: of the first one
template <int TILES>
INLINE void add_by_tensors(int m, int n, const float* a, int a_row, const float* b, int b_row, float* sums) {
  const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
  const int across = (n + 8 * TILES - 1) / (8 * TILES), tiles = (m + 15) / 16 * across;
#pragma unroll 1
  for (int tile = threadIdx.x / 32; tile < tiles; tile += WARPS) {
    const int row = tile / across * 16 + g, column = tile % across * 8 * TILES;
    const float* const upper = a + (row < m ? row : m - 1) * a_row * BLOCKS + t;
    const float* const lower = a + (row + 8 < m ? row + 8 : m - 1) * a_row * BLOCKS + t;
    const float* right[TILES];
    EACH(j, TILES) right[j] = b + (column + 8 * j + g < n ? column + 8 * j + g : n - 1) * b_row * BLOCKS + t;
    float sum[TILES][4];
    EACH(j, TILES) EACH(c, 4) sum[j][c] = 0;
#pragma unroll 2
    for (int l = 0; l < TRAJECTORIES; l += 8) {
      const Split left[4] = {split(upper[l]), split(lower[l]), split(upper[l + 4]), split(lower[l + 4])};
      Split pairs[TILES][2];
      EACH(j, TILES) EACH(c, 2) pairs[j][c] = split(right[j][l + 4 * c]);
      add_split_products<TILES>(sum, left, pairs);
    }
    EACH(j, TILES) EACH(c, 4) {
      const int r = row + c / 2 * 8, k = column + 8 * j + 2 * t + c % 2;
      if (r < m && k < n) add_to_sum(sums + r * n + k, sum[j][c]);
    }
  }
}

#endif

// ------------------------------------------------------------------------------------------ products

// y = A x for ROWS rows of A, or fewer, and four trajectories
template <int ROWS>
INLINE void multiply_tile(int rows, int inner, const F* a, int a_row, int a_inner, const V* x, int x_inner, V* y,
                          int y_row) {
  F sum[ROWS][4];
  const F* row[ROWS];
  EACH(r, ROWS) {
    EACH(l, 4) sum[r][l] = 0;
    row[r] = a + (r < rows ? r : rows - 1) * a_row;
  }
  const bool aligned = (u64)a % 16 == 0;
  if (a_inner == 1 && a_row % 4 == 0 && inner % 4 == 0 && aligned) {
#pragma unroll 2
    for (int k = 0; k < inner; k += 4) {
      Four column[4];
      EACH(c, 4) column[c] = *(const Four*)(x + (k + c) * x_inner * BLOCKS);
      EACH(r, ROWS) {
        const Four w = *(const Four*)(row[r] + k);
        EACH(c, 4) EACH(l, 4) sum[r][l] += w.v[c] * column[c].v[l];
      }
    }
  } else if (ROWS % 4 == 0 && a_row == 1 && a_inner % 4 == 0 && rows >= ROWS && aligned) {
#pragma unroll 4
    for (int k = 0; k < inner; k++) {
      const Four column = *(const Four*)(x + k * x_inner * BLOCKS);
      EACH(q, ROWS / 4) {
        const Four w = *(const Four*)(a + k * a_inner + 4 * q);
        EACH(c, 4) EACH(l, 4) sum[4 * q + c][l] += w.v[c] * column.v[l];
      }
    }
  } else {
#pragma unroll 4
    for (int k = 0; k < inner; k++) {
      const Four column = *(const Four*)(x + k * x_inner * BLOCKS);
      EACH(r, ROWS) EACH(l, 4) sum[r][l] += row[r][k * a_inner] * column.v[l];
    }
  }
  EACH(r, ROWS) if (r < rows) {
    Four four;
    EACH(l, 4) four.v[l] = sum[r][l];
    *(Four*)(y + r * y_row * BLOCKS) = four;
  }
}

#define QUARTERS (TRAJECTORIES / 4)
#define ROW_TEAM (THREADS / QUARTERS)  // threads that share the rows of a product

template <int ROWS>
INLINE void multiply_rows(int rows, int inner, const F* a, int a_row, int a_inner, const V* x, int x_inner, V* y,
                          int y_row) {
#pragma unroll 1
  for (int r = threadIdx.x / QUARTERS * ROWS; r < rows; r += ROW_TEAM * ROWS)
    multiply_tile<ROWS>(rows - r, inner, a + r * a_row, a_row, a_inner, x, x_inner, y + r * y_row * BLOCKS, y_row);
}

// x, y: of the own trajectory
INLINE void multiply(int rows, int inner, const F* a, int a_row, int a_inner, const V* x, int x_inner, V* y,
                     int y_row) {
#if SINGLE
#define BY_TENSORS(down, tiles, depth) \
  return multiply_by_tensors<down, tiles, depth>(rows, inner, a, a_row, a_inner, x - lane, x_inner, y - lane, y_row)
  if (rows <= 16 && inner >= 32) BY_TENSORS(1, 1, 4);
  if (rows >= 128 && (rows + 15) / 16 % 2 == 0 && inner >= 8) BY_TENSORS(2, 4, 1);
  if (rows >= 32 && inner >= 8) {
    if (TRAJECTORIES % 64 == 0 && (rows + 15) / 16 * (TRAJECTORIES / 64) >= WARPS)
      BY_TENSORS(1, TRAJECTORIES % 64 ? 4 : 8, 1);
    BY_TENSORS(1, 4, 1);
  }
#endif
  const int first = 4 * ((int)threadIdx.x % QUARTERS) - lane;
  x += first;
  y += first;
  if (rows > 4 * ROW_TEAM)
    multiply_rows<8>(rows, inner, a, a_row, a_inner, x, x_inner, y, y_row);
  else if (rows > 2 * ROW_TEAM)
    multiply_rows<4>(rows, inner, a, a_row, a_inner, x, x_inner, y, y_row);
  else if (rows > ROW_TEAM)
    multiply_rows<2>(rows, inner, a, a_row, a_inner, x, x_inner, y, y_row);
  else
    multiply_rows<1>(rows, inner, a, a_row, a_inner, x, x_inner, y, y_row);
}

// ------------------------------------------------------------------------------------------ sums over trajectories

// Number of a thread among those that share a sum, whose work begins with thread `begin`: sums that are too small for
// all threads begin with different ones.
INLINE int find_worker(int begin) { return ((int)threadIdx.x + THREADS - begin % THREADS) % THREADS; }

// sums[i][j] += Σ a[i] b[j] over the trajectories of the block, SIDE × SIDE sums per thread: neighbours have
// neighbouring rows, which are in other banks. a, b: of the first one
template <int SIDE>
INLINE void add_tiles(int m, int n, const F* a, int a_row, const F* b, int b_row, F* sums, int begin) {
  const int down = (m + SIDE - 1) / SIDE, across = (n + SIDE - 1) / SIDE;
#pragma unroll 1
  for (int tile = find_worker(begin); tile < down * across; tile += THREADS) {
    const int i = tile / across, j = tile % across;
    const F *left[SIDE], *right[SIDE];
    EACH(r, SIDE) left[r] = a + (i + r * down < m ? i + r * down : m - 1) * a_row * BLOCKS;
    EACH(c, SIDE) right[c] = b + (j + c * across < n ? j + c * across : n - 1) * b_row * BLOCKS;
    F sum[SIDE][SIDE];
    EACH(r, SIDE) EACH(c, SIDE) sum[r][c] = 0;
#pragma unroll 2
    for (int l = 0; l < TRAJECTORIES; l += 4) {
      Four p[SIDE], q[SIDE];
      EACH(r, SIDE) p[r] = *(const Four*)(left[r] + l);
      EACH(c, SIDE) q[c] = *(const Four*)(right[c] + l);
      EACH(r, SIDE) EACH(c, SIDE) EACH(k, 4) sum[r][c] += p[r].v[k] * q[c].v[k];
    }
    EACH(r, SIDE) EACH(c, SIDE) {
      const int k = i + r * down, l = j + c * across;
      if (k < m && l < n) sum[r][c] += sums[k * n + l];
    }
    EACH(r, SIDE) EACH(c, SIDE) {
      const int k = i + r * down, l = j + c * across;
      if (k < m && l < n) sums[k * n + l] = sum[r][c];
    }
  }
}

// a, b: of the own trajectory
INLINE void add_outer(int m, int n, const V* a, int a_row, const V* b, int b_row, F* sums, int begin) {
  a -= lane;
  b -= lane;
#if SINGLE
  if (m >= 32 && n >= 32) {
    if ((m + 15) / 16 * ((n + 63) / 64) >= WARPS)
      add_by_tensors<8>(m, n, a, a_row, b, b_row, sums);
    else
      add_by_tensors<4>(m, n, a, a_row, b, b_row, sums);
    return;
  }
#endif
  if (m * n >= 8 * THREADS)
    add_tiles<4>(m, n, a, a_row, b, b_row, sums, begin);
  else if (m * n >= THREADS)
    add_tiles<2>(m, n, a, a_row, b, b_row, sums, begin);
  else
    add_tiles<1>(m, n, a, a_row, b, b_row, sums, begin);
}

// sums[k] += Σ a[k] over the trajectories of the block
INLINE void add_rows(int n, const V* a, F* sums, int begin) {
  a -= lane;
#pragma unroll 1
  for (int k = find_worker(begin); k < n; k += THREADS) {
    F sum[4] = {0, 0, 0, 0};
#pragma unroll 4
    for (int l = 0; l < TRAJECTORIES; l += 4) {
      const Four p = *(const Four*)(a + k * BLOCKS + l);
      EACH(c, 4) sum[c] += p.v[c];
    }
    sums[k] += (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
}

// Σ a b over the trajectories of the block
INLINE F add_row_products(const V* a, const V* b) {
  F sum[4] = {0, 0, 0, 0};
#pragma unroll 4
  for (int l = 0; l < TRAJECTORIES; l += 4) {
    const Four p = *(const Four*)(a - lane + l), q = *(const Four*)(b - lane + l);
    EACH(c, 4) sum[c] += p.v[c] * q.v[c];
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}
