// Trajectories in blocks of BLOCKS·LANES, through arrays that stay arrays: element k of an array is the BLOCKS vectors
// from [k·BLOCKS] on. Products with matrices keep a tile of sums in registers.
//
// Needs lanes.hpp, noise.hpp and ensemble.hpp; the process itself is in `forward`, `finish` and `backward`.
#pragma once

template <int power> INLINE V integer_power(V x) {
  if constexpr (power < 0) {
    return F(1) / integer_power<-power>(x);
  } else if constexpr (power == 0) {
    return bc(F(1));
  } else if constexpr (power == 1) {
    return x;
  } else {
    const V half = integer_power<power / 2>(x);
    return power % 2 ? half * half * x : half * half;
  }
}

// The hyperbolic tangent of XLA, to 4.4 units in the last place, in half the time of the other one.
INLINE VF array_tanh(VF x) {
  x = sel(x > 7.90531111f, same(x, 7.90531111f), sel(x < -7.90531111f, same(x, -7.90531111f), x));
  const VF s = x * x;
  VF p = -2.76076847742355e-16f * s + 2.00018790482477e-13f;
  p = (p * s - 8.60467152213735e-11f) * s + 5.12229709037114e-08f;
  p = (p * s + 1.48572235717979e-05f) * s + 6.37261928875436e-04f;
  p = (p * s + 4.89352455891786e-03f) * x;
  VF q = 1.19825839466702e-06f * s + 1.18534705686654e-04f;
  q = (q * s + 2.26843463243900e-03f) * s + 4.89352518554385e-03f;
  return p / q;
}
INLINE VD array_tanh(VD x) { return m_tanh(x); }

// By the error of 1 + x and of exp(x) (Kahan), to a few units in the last place.
INLINE V array_log1p(V x) {
  const V u = 1 + x, rounded = u - 1;
  const V y = sel(rounded == 0, x, m_log(u) * x / rounded);
  return sel(u - u == 0, y, u);  // infinity and what is not a number
}
INLINE V array_expm1(V x) {
  const V u = m_exp(x), rounded = u - 1;
  const V y = sel(rounded == 0, x, rounded * x / m_log(u));
  return sel(u - u == 0 & u > 0, y, rounded);  // beyond the range of exp
}

// ------------------------------------------------------------------------------------------ products

// y = A x for ROWS rows of A and WIDE vectors of lanes
template <int ROWS, int WIDE>
INLINE void multiply_tile(int inner, const F* a, int64_t a_row, int64_t a_inner, const V* x, int64_t x_inner, V* y,
                          int64_t y_row) {
  V sum[ROWS][WIDE];
  EACH(r, ROWS) EACH(w, WIDE) sum[r][w] = V{};
  for (int k = 0; k < inner; k++) {
    V column[WIDE];
    EACH(w, WIDE) column[w] = x[w];
    EACH(r, ROWS) {
      const V factor = bc(a[r * a_row]);
      EACH(w, WIDE) sum[r][w] += factor * column[w];
    }
    a += a_inner;
    x += x_inner * BLOCKS;
  }
  EACH(r, ROWS) EACH(w, WIDE) y[r * y_row * BLOCKS + w] = sum[r][w];
}

#define REGISTER_ROWS (VECTOR_BYTES == 64 ? 12 : 6)  // of two vectors of sums each, beside two of x and a factor
#define TILE_WIDE     (BLOCKS % 2 ? 1 : 2)
#define TILE_ROWS     (TILE_WIDE == 2 ? REGISTER_ROWS : 2 * REGISTER_ROWS)

OUTLINE void multiply(int rows, int inner, const F* a, int64_t a_row, int64_t a_inner, const V* x, int64_t x_inner,
                      V* y, int64_t y_row) {
  for (int w = 0; w < BLOCKS; w += TILE_WIDE) {
    int r = 0;
#define TILES(count)                                                                        \
  for (; r + (count) <= rows; r += (count))                                                 \
    multiply_tile<(count), TILE_WIDE>(inner, a + r * a_row, a_row, a_inner, x + w, x_inner, \
                                      y + r * y_row * BLOCKS + w, y_row);
    TILES(TILE_ROWS)
    TILES(4)
    TILES(2)
    TILES(1)
#undef TILES
  }
}

// ------------------------------------------------------------------------------------------ sums of a bᵀ

#define TRAJECTORIES (BLOCKS * LANES)

// Swaps the blocks of `step` lanes that are off the diagonal of two rows.
template <int step, int... lane> INLINE void swap_blocks(V& a, V& b, std::integer_sequence<int, lane...>) {
#if defined(__clang__)
  const V low = __builtin_shufflevector(a, b, (lane & step ? LANES + lane - step : lane)...);
  const V high = __builtin_shufflevector(a, b, (lane & step ? LANES + lane : lane + step)...);
#else
  const V low = __builtin_shuffle(a, b, B{(lane & step ? LANES + lane - step : lane)...});
  const V high = __builtin_shuffle(a, b, B{(lane & step ? LANES + lane : lane + step)...});
#endif
  a = low;
  b = high;
}
template <int step> INLINE void transpose_blocks(V* square) {
  EACH(k, LANES)
  if (!(k & step)) swap_blocks<step>(square[k], square[k + step], std::make_integer_sequence<int, LANES>{});
  if constexpr (step > 1) transpose_blocks<step / 2>(square);
}
INLINE void transpose(V* square) { transpose_blocks<LANES / 2>(square); }

// sums[i][j] += Σ a[i] b[j] over the trajectories of a block, ROWS × WIDE vectors of sums. b: trajectory first.
template <int ROWS, int WIDE>
INLINE void add_tile(const F* a, int64_t a_row, const F* b, int64_t b_row, F* sums, int64_t columns) {
  V sum[ROWS][WIDE];
  EACH(r, ROWS) EACH(w, WIDE) __builtin_memcpy(&sum[r][w], sums + r * columns + w * LANES, sizeof(V));
  for (int l = 0; l < TRAJECTORIES; l++) {
    V row[WIDE];
    EACH(w, WIDE) __builtin_memcpy(&row[w], b + l * b_row + w * LANES, sizeof(V));
    EACH(r, ROWS) {
      const V factor = bc(a[r * a_row + l]);
      EACH(w, WIDE) sum[r][w] += factor * row[w];
    }
  }
  EACH(r, ROWS) EACH(w, WIDE) __builtin_memcpy(sums + r * columns + w * LANES, &sum[r][w], sizeof(V));
}

#define SUM_WIDE 2
#define SUM_ROWS REGISTER_ROWS

// columns: length of a row of sums, n up to a multiple of LANES
OUTLINE void add_outer(int m, int n, const V* a, int64_t a_row, const V* b, int64_t b_row, F* sums, int64_t columns,
                       F* scratch) {
  for (int64_t j = 0; j < n; j += LANES) {
    for (int w = 0; w < BLOCKS; w++) {
      V square[LANES];
      EACH(k, LANES) square[k] = j + k < n ? b[(j + k) * b_row * BLOCKS + w] : V{};
      transpose(square);
      EACH(l, LANES) __builtin_memcpy(scratch + (w * LANES + l) * columns + j, &square[l], sizeof(V));
    }
  }
  const F* rows = (const F*)a;
  a_row *= TRAJECTORIES;
  int64_t j = 0;
#define ROWS_OF(count, wide)             \
  for (; i + (count) <= m; i += (count)) \
    add_tile<(count), (wide)>(rows + i * a_row, a_row, scratch + j, columns, sums + i * columns + j, columns);
  for (; j + SUM_WIDE * LANES <= columns; j += SUM_WIDE * LANES) {
    int i = 0;
    ROWS_OF(SUM_ROWS, SUM_WIDE)
    ROWS_OF(4, SUM_WIDE)
    ROWS_OF(1, SUM_WIDE)
  }
  for (; j < columns; j += LANES) {
    int i = 0;
    ROWS_OF(SUM_ROWS, 1)
    ROWS_OF(4, 1)
    ROWS_OF(1, 1)
  }
#undef ROWS_OF
}
