// Numbers shared by all trajectories, computed from θ on the device: parameters of JAX never leave it.
#define OUT_OF_RANGE 4  // a flag: a number does not fit into REAL

// In double precision: one thread per step; the first also for numbers that are fixed in time.
struct Ahead {
  typedef double F;
  typedef double V;
  static __device__ void put(REAL* to, double v, int* flags) {
    const double size = fabs(v), largest = sizeof(REAL) == 8 ? 1.7976931348623157e308 : 3.4028234663852886e38;
    const double tiniest = sizeof(REAL) == 8 ? 2.2250738585072014e-308 : 1.1754943508222875e-38;
    if (v - v == 0 && v != 0 && (size > largest || size < tiniest)) atomicOr(flags, OUT_OF_RANGE);
    *to = (REAL)v;
  }
  NUMBERS_AHEAD
};
// times: t (T+1,), then dt (T,). rows: T, or 1 if all steps have the same numbers.
extern "C" __global__ void numbers_ahead(i64 steps, i64 rows, const THETA* theta, const double* times, F* shared,
                                         F* timed, int* flags) {
  const i64 n = blockIdx.x * (i64)128 + threadIdx.x;
  const double origin[] = {times[0], times[1], times[steps]};
  if (n == 0) Ahead::shared(theta, origin, 0, 0, shared, flags);
  if (n < rows) Ahead::timed(theta, origin, times[n], times[steps + 1 + n], timed + n * TIMED, flags);
}
