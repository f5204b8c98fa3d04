// Sums over batches of trajectories on a GPU, through arrays that stay arrays. A block has TRAJECTORIES at a time, and
// a team of TEAM threads for each, which share its elements. Element k of an array of a trajectory is [k·BLOCKS], in
// the shared memory of the block. Products with matrices keep a tile of sums in registers; sums over trajectories are
// taken by all threads of the block.
#define TEAM    (THREADS / TRAJECTORIES)
#define BLOCKS  (TRAJECTORIES + 4)  // rows of arrays begin in different banks
#define VECTORS 1                   // per thread and element of an array
#define team    ((int)threadIdx.x / TRAJECTORIES)
#define lane    ((int)threadIdx.x % TRAJECTORIES)

struct __align__(16) Four {
  F v[4];
};

// ------------------------------------------------------------------------------------------ products

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

INLINE VF array_tanh(VF x) { return m_tanh(x); }
INLINE VD array_tanh(VD x) { return m_tanh(x); }

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
  const int first = 4 * ((int)threadIdx.x % QUARTERS) - lane;
  x += first;
  y += first;
  if (rows >= 8 * ROW_TEAM)
    multiply_rows<8>(rows, inner, a, a_row, a_inner, x, x_inner, y, y_row);
  else if (rows > 2 * ROW_TEAM)
    multiply_rows<4>(rows, inner, a, a_row, a_inner, x, x_inner, y, y_row);
  else if (rows > ROW_TEAM)
    multiply_rows<2>(rows, inner, a, a_row, a_inner, x, x_inner, y, y_row);
  else
    multiply_rows<1>(rows, inner, a, a_row, a_inner, x, x_inner, y, y_row);
}

// ------------------------------------------------------------------------------------------ sums over trajectories

// sums[i][j] += Σ a[i] b[j] over the trajectories of the block, SIDE × SIDE sums per thread. a, b: of the first one
template <int SIDE> INLINE void add_tiles(int m, int n, const F* a, int a_row, const F* b, int b_row, F* sums) {
  const int across = (n + SIDE - 1) / SIDE, tiles = (m + SIDE - 1) / SIDE * across;
#pragma unroll 1
  for (int tile = threadIdx.x; tile < tiles; tile += THREADS) {
    const int i = tile / across * SIDE, j = tile % across * SIDE;
    const F *left[SIDE], *right[SIDE];
    EACH(r, SIDE) left[r] = a + (i + r < m ? i + r : m - 1) * a_row * BLOCKS;
    EACH(c, SIDE) right[c] = b + (j + c < n ? j + c : n - 1) * b_row * BLOCKS;
    F sum[SIDE][SIDE];
    EACH(r, SIDE) EACH(c, SIDE) sum[r][c] = 0;
#pragma unroll 2
    for (int l = 0; l < TRAJECTORIES; l += 4) {
      Four p[SIDE], q[SIDE];
      EACH(r, SIDE) p[r] = *(const Four*)(left[r] + l);
      EACH(c, SIDE) q[c] = *(const Four*)(right[c] + l);
      EACH(r, SIDE) EACH(c, SIDE) EACH(k, 4) sum[r][c] += p[r].v[k] * q[c].v[k];
    }
    EACH(r, SIDE) EACH(c, SIDE) if (i + r < m && j + c < n) sums[(i + r) * n + j + c] += sum[r][c];
  }
}

// a, b: of the own trajectory
INLINE void add_outer(int m, int n, const V* a, int a_row, const V* b, int b_row, F* sums, int, F*) {
  a -= lane;
  b -= lane;
  if (m * n >= 8 * THREADS)
    add_tiles<4>(m, n, a, a_row, b, b_row, sums);
  else if (m * n >= THREADS)
    add_tiles<2>(m, n, a, a_row, b, b_row, sums);
  else
    add_tiles<1>(m, n, a, a_row, b, b_row, sums);
}

// sums[k] += Σ a[k] over the trajectories of the block
INLINE void add_rows(int n, const V* a, F* sums) {
  a -= lane;
#pragma unroll 1
  for (int k = threadIdx.x; k < n; k += THREADS) {
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
