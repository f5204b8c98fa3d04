// Sums over a block of FOLD threads, in double precision and in an order that depends on sizes alone.
#define FOLD 1024

__shared__ double folded[FOLD];

// the sum over all threads of a block
INLINE double block_total(double value) {
  __syncthreads();
  folded[threadIdx.x] = value;
  for (int half = FOLD / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) folded[threadIdx.x] += folded[threadIdx.x + half];
  }
  __syncthreads();
  return folded[0];
}
