// The noise of noise.hpp on the device, word for word. Follows device.cuh and philox.hpp.
//
// The key schedule of the seed is put into c_keys before a launch.

extern "C" {
__constant__ u32 c_keys[2 * PHILOX_ROUNDS];  // k0, k1 of each round
}

struct Words {
  static __device__ __forceinline__ void multiply(u32 a, u32 b, u32& high, u32& low) {
    const u64 p = (u64)b * a;
    high = (u32)(p >> 32);
    low = (u32)p;
  }
  static __device__ __forceinline__ u32 mix(u32 a, u32 b, u32 c) { return a ^ b ^ c; }
};

// What depends on the site alone is hoisted out of the loop over steps by the compiler, and what depends on
// trajectory and pair alone is uniform over the block: eight of the ten rounds are left to each thread.
__device__ __forceinline__ void philox(u32 trajectory, u32 site, u32 pair, u32 w[4]) {
  u32 c0 = site, c1 = pair, c2 = trajectory, c3 = 0;
#pragma unroll
  for (int r = 0; r < PHILOX_ROUNDS; ++r) philox_round<Words>(c0, c1, c2, c3, c_keys[2 * r], c_keys[2 * r + 1]);
  w[0] = c0;
  w[1] = c1;
  w[2] = c2;
  w[3] = c3;
}

// Two normals of variance `variance`/(2 ln 2): a factor that is not worth an instruction per step.
//
// float uses the special-function unit: absolute error of cosine and sine 4e-7, of the squared radius 7e-7. A
// kick is a few thousandths of the state, so this is far below the rounding of the state itself.
__device__ __forceinline__ void box_muller(u32 first, u32 second, float variance, float& re, float& im) {
  const float u = fmaf((float)first, 2.3283064365386963e-10f, 1.1641532182693481e-10f);
  const float angle = (float)(int)second * 1.4629180792671596e-9f;  // signed: [−π, π) keeps the full precision
  const float radius = fast_sqrt(fabsf(fast_log2(u)) * variance);
  re = radius * fast_cos(angle);
  im = radius * fast_sin(angle);
}

__device__ __forceinline__ void box_muller(u32 first, u32 second, double variance, double& re, double& im) {
  const double radius = sqrt(fabs(variance * log2(((double)first + 0.5) * 2.3283064365386963e-10)));
  double s, c;
  sincospi((double)(int)second * 4.656612873077393e-10, &s, &c);
  re = radius * c;
  im = radius * s;
}
