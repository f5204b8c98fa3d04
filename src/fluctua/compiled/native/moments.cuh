// Moments over the ensemble of what every trajectory has.

// values: (rows, E). table (5, rows): mean, unbiased deviation, skewness, excess kurtosis, mean square. A block per
// row.
extern "C" __global__ void __launch_bounds__(FOLD) take_moments(i64 count, const F* values, F* table) {
  const F* row = values + blockIdx.x * count;
  double sum = 0, square = 0, cube = 0, fourth = 0;
  for (i64 j = threadIdx.x; j < count; j += FOLD) sum += row[j];
  const double mean = block_total(sum) / count;
  for (i64 j = threadIdx.x; j < count; j += FOLD) {
    const double off = row[j] - mean, two = off * off;
    square += two;
    cube += two * off;
    fourth += two * two;
  }
  const double squares = block_total(square), variance = squares / count, unit = variance > 0 ? variance : 1;
  const double cubes = block_total(cube), fourths = block_total(fourth);
  if (threadIdx.x) return;
  F* const to = table + blockIdx.x;
  const i64 rows = gridDim.x;
  to[0] = (F)mean;
  to[rows] = count > 1 ? (F)sqrt(squares / (count - 1)) : (F)NAN;
  to[2 * rows] = (F)(cubes / count / (unit * sqrt(unit)));
  to[3 * rows] = variance > 0 ? (F)(fourths / count / (unit * unit) - 3) : F(0);
  to[4 * rows] = (F)(mean * mean + variance);
}
