// The README's pendulum by hand, for the CPU: what generated kernels are compared with. Plain C++, no tuned sines.
// own_speed.py compiles it, with its options FAST.
//
// d(angle) = speed dt, d(speed) = (-stiffness sin(angle) - friction speed) dt + shaking dW; the reward is speed^2/2.
// Noise is that of fluctua.philox, so the numbers are those of the library with wiener=philox, to rounding.
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

constexpr int LANES = 64;
typedef uint32_t u32;
typedef uint64_t u64;

struct Run {
  u64 seed;
  int steps;
  float dt, stiffness, friction, shaking, start;
  const float* table;  // mean return-to-go, (steps + 1)
};

struct Normals {  // of two steps
  float first[LANES], second[LANES];
};

void draw(const Run& run, u32 trajectory, u32 pair, Normals& z) {
#pragma omp simd
  for (int l = 0; l < LANES; ++l) {
    u32 c0 = 0, c1 = pair, c2 = trajectory + l, c3 = 0, k0 = u32(run.seed), k1 = u32(run.seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const u64 a = u64(0xD2511F53u) * c0, b = u64(0xCD9E8D57u) * c2;
      c0 = u32(b >> 32) ^ c1 ^ k0;
      c1 = u32(b);
      c2 = u32(a >> 32) ^ c3 ^ k1;
      c3 = u32(a);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    const float scale = 0x1p-32f, turn = 6.283185307f;
    z.first[l] = sqrtf(-2 * logf((float(c0) + 0.5f) * scale)) * sinf(turn * (float(c1) * scale));
    z.second[l] = sqrtf(-2 * logf((float(c2) + 0.5f) * scale)) * sinf(turn * (float(c3) * scale));
  }
}

struct Lanes {
  float angle[LANES], speed[LANES], reward[LANES];
  float g_friction[LANES], g_shaking[LANES], g_stiffness[LANES];  // sums of (R' - C - table) U, R' = table[0]
  float u_friction[LANES], u_shaking[LANES], u_stiffness[LANES];  // sums of U
};

void step(const Run& run, Lanes& x, const float* z, float bar) {
  const float root = sqrtf(run.dt), scale = root / run.shaking, kick = root * run.shaking;
#pragma omp simd
  for (int l = 0; l < LANES; ++l) {
    const float sine = sinf(x.angle[l]), speed = x.speed[l];
    x.reward[l] += speed * speed / 2 * run.dt;
    const float weight = run.table[0] - x.reward[l] - bar;
    const float stiffness = -sine * scale * z[l], friction = -speed * scale * z[l];
    const float shaking = (z[l] * z[l] - 1) / run.shaking;
    x.g_friction[l] += weight * friction;
    x.g_shaking[l] += weight * shaking;
    x.g_stiffness[l] += weight * stiffness;
    x.u_friction[l] += friction;
    x.u_shaking[l] += shaking;
    x.u_stiffness[l] += stiffness;
    x.angle[l] += speed * run.dt;
    x.speed[l] += (-run.stiffness * sine - run.friction * speed) * run.dt + kick * z[l];
  }
}

void block(const Run& run, u32 first, u32 count, float* gradient, float* returns) {
  Lanes x = {};
  for (int l = 0; l < LANES; ++l) x.angle[l] = run.start;
  Normals z;
  for (int n = 0; n < run.steps; ++n) {
    if (n % 2 == 0) draw(run, first, n / 2, z);
    step(run, x, n % 2 == 0 ? z.first : z.second, run.table[n + 1]);
  }
  for (u32 l = 0; l < LANES && first + l < count; ++l) {
    const float late = x.reward[l] - run.table[0];
    float* g = gradient + 3 * u64(first + l);
    g[0] = x.g_friction[l] + late * x.u_friction[l];
    g[1] = x.g_shaking[l] + late * x.u_shaking[l];
    g[2] = x.g_stiffness[l] + late * x.u_stiffness[l];
    returns[first + l] = x.reward[l];
  }
}

}  // namespace

// gradient (count, 3): friction, shaking, stiffness; returns (count,).
extern "C" void pendulum(u64 seed, u32 count, int steps, float dt, const float* theta, const float* table, int threads,
                         float* gradient, float* returns) {
  const Run run{seed, steps, dt, theta[2], theta[0], theta[1], 1.0f, table};
  std::vector<std::thread> workers;
  for (int w = 0; w < threads; ++w)
    workers.emplace_back([=] {
      for (u32 first = w * LANES; first < count; first += threads * LANES) block(run, first, count, gradient, returns);
    });
  for (auto& worker : workers) worker.join();
}
