// The README's pendulum by hand, for the GPU: what generated kernels are compared with. One thread a trajectory.
// See pendulum.cpp; compiled at run time (NVRTC), where no header is found.
typedef unsigned int u32;
typedef unsigned long long u64;

// theta: friction, shaking, stiffness. gradient (3, count), in that order; returns (count,).
extern "C" __global__ void pendulum(u64 seed, u32 count, int steps, float dt, float friction, float shaking,
                                    float stiffness, const float* table, float* gradient, float* returns) {
  const u32 j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= count) return;
  const float root = sqrtf(dt), scale = root / shaking, kick = root * shaking, inverse = 1 / shaking, guess = table[0];
  float angle = 1, speed = 0, reward = 0, g0 = 0, g1 = 0, g2 = 0, u0 = 0, u1 = 0, u2 = 0;
  u32 w0 = 0, w1 = 0;
  for (int n = 0; n < steps; ++n) {
    u32 a0 = w0, a1 = w1;
    if (n % 2 == 0) {
      u32 c0 = 0, c1 = n / 2, c2 = j, c3 = 0, k0 = u32(seed), k1 = u32(seed >> 32);
#pragma unroll
      for (int round = 0; round < 10; ++round) {
        const u32 low0 = 0xD2511F53u * c0, high0 = __umulhi(0xD2511F53u, c0);
        const u32 low1 = 0xCD9E8D57u * c2, high1 = __umulhi(0xCD9E8D57u, c2);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
      }
      a0 = c0, a1 = c1, w0 = c2, w1 = c3;
    }
    const float r = sqrtf(-2 * __logf((float(a0) + 0.5f) * 0x1p-32f));
    const float z = r * __sinf(6.283185307f * (float(a1) * 0x1p-32f));
    const float sine = __sinf(angle);
    reward += speed * speed / 2 * dt;
    const float weight = guess - reward - table[n + 1];
    const float friction_score = -speed * scale * z, stiffness_score = -sine * scale * z;
    const float shaking_score = (z * z - 1) * inverse;
    g0 += weight * friction_score, g1 += weight * shaking_score, g2 += weight * stiffness_score;
    u0 += friction_score, u1 += shaking_score, u2 += stiffness_score;
    angle += speed * dt;
    speed += (-stiffness * sine - friction * speed) * dt + kick * z;
  }
  const float late = reward - guess;
  gradient[j] = g0 + late * u0;
  gradient[count + j] = g1 + late * u1;
  gradient[2 * u64(count) + j] = g2 + late * u2;
  returns[j] = reward;
}
