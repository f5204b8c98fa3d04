// Tables of baselines, from the sums of a pass over the ensemble.

// parts: (T, warps, width) -> sums: (T, width). A block per step.
extern "C" __global__ void __launch_bounds__(FOLD) add_warps(i64 warps, i64 width, const double* parts, double* sums) {
  const double* own = parts + blockIdx.x * warps * width;
  for (i64 from = 0; from < width; from += blockDim.x) {  // once, but for very many columns
    const i64 columns = width - from < blockDim.x ? width - from : blockDim.x;
    const i64 slices = blockDim.x / columns, slice = threadIdx.x / columns, k = threadIdx.x % columns;
    double total = 0;
    if (slice < slices)
      for (i64 w = slice; w < warps; w += slices) total += own[w * width + from + k];
    __syncthreads();
    folded[threadIdx.x] = total;
    __syncthreads();
    if (slice == 0) {
      for (i64 other = 1; other < slices; other++) total += folded[other * columns + k];
      sums[blockIdx.x * width + from + k] = total;
    }
  }
}

// sums: (T, 2) of g Δt and r. reward: R (E,). table: the mean of λ̂ₙ (T+1,)
extern "C" __global__ void __launch_bounds__(FOLD)
    tabulate_rewards(i64 count, i64 steps, const double* sums, const F* reward, F* table) {
  double own = 0;
  for (i64 j = threadIdx.x; j < count; j += FOLD) own += reward[j];
  const double total = block_total(own);
  // C after the running reward of step n; that of the step itself follows. A thread has some steps in a row.
  const i64 share = (steps + FOLD - 1) / FOLD, first = threadIdx.x * share;
  double here = 0;
  for (i64 n = first; n < first + share && n < steps; n++) here += sums[2 * n] + (n ? sums[2 * n - 1] : 0);
  __syncthreads();
  folded[threadIdx.x] = here;
  for (int distance = 1; distance < FOLD; distance *= 2) {
    __syncthreads();
    const double before = threadIdx.x >= distance ? folded[threadIdx.x - distance] : 0;
    __syncthreads();
    folded[threadIdx.x] += before;
  }
  __syncthreads();
  double collected = threadIdx.x ? folded[threadIdx.x - 1] : 0;
  if (threadIdx.x == 0) table[0] = (F)(total / count);
  for (i64 n = first; n < first + share && n < steps; n++) {
    collected += sums[2 * n] + (n ? sums[2 * n - 1] : 0);
    table[n + 1] = (F)((total - collected) / count);
  }
}

// sums: (size, 2) of U² and λU². bar: the weighted mean, inverse: 1/ΣU²; zero without weight
extern "C" __global__ void __launch_bounds__(FOLD)
    tabulate_weights(i64 size, const double* sums, F* bar, F* inverse, int* flags) {
  const i64 k = blockIdx.x * (i64)FOLD + threadIdx.x;
  if (k >= size) return;
  const double weight = sums[2 * k], weighted = sums[2 * k + 1];
  if (weight - weight != 0 || weighted - weighted != 0) atomicOr(flags, NOT_FINITE);
  const double reciprocal = weight > 0 ? 1 / weight : 0;
  bar[k] = (F)(weighted * reciprocal);
  inverse[k] = (F)reciprocal;
}
