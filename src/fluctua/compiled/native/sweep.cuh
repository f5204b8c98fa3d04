// Passes over all trajectories of a run, one per thread; the process itself is in the functions `step_rewards`,
// `step_weights` and `step_scores` above.

// ------------------------------------------------------------------------------------------ rewards alone

INLINE void rewarded(const Run& run) {
  SHARED_BY_STEPS
  ALL_TRAJECTORIES {
    const i64 index = group + (threadIdx.x & 31);
    const bool here = index < run.count && FIRST_WARP;
    const i64 j = index < run.count ? index : run.count - 1;
    Trajectory own;
    begun(own, run, j);
    each_step(own.stream, run.steps, [&](i64 n, const V* z) {
      V y[STATE], g, r;
      step_rewards(c_shared, STEP_NUMBERS(n), own.c, own.x, z, y, g, r, own.stream, n);
      own.reward += g;
      own.reward += r;
      const V survival = own.x[STATE - 1];
      EACH(k, STATE) own.x[k] = y[k];
      summed<2 + STOPS>(run.sums, n, [&](int k) { return here ? (k > 1 ? survival : k ? r : g) : F(0); });
    });
    V h;
    end_rewards(c_shared, 0, own.c, own.x, 0, h);
    own.reward += h;
    if (here) ended(own, run, j);
    TOGETHER
  }
}

// ------------------------------------------------------------------------------------------ the sweep

INLINE V guessed(const Run& run, i64 j) { return run.guess ? run.guess[j] : run.near ? *run.near : run.same; }

// Σ(λ − λ̄)U and ΣU of a trajectory: in registers, or where they are too many in the memory of the block
#if IN_BLOCK
extern __shared__ __align__(16) unsigned char shared[];
#define OWN_SUMS                                \
  F* const gradient = (F*)shared + threadIdx.x; \
  F* const score = gradient + PARAMETERS * THREADS;
#define AT(p) [(p) * THREADS]
#else
#define OWN_SUMS V gradient[PARAMETERS], score[PARAMETERS];
#define AT(p)    [p]
#endif

// LEFT_OUT: each trajectory leaves itself out of the weighted mean, (λ − Σλ'U²/ΣU²)U/(1 − U²/ΣU²)
template <bool LEFT_OUT> INLINE void swept(const Run& run) {
  SHARED_BY_STEPS
  ALL_TRAJECTORIES {
    const i64 index = group + (threadIdx.x & 31);
    const bool here = index < run.count && FIRST_WARP;
    const i64 j = index < run.count ? index : run.count - 1;
    Trajectory own;
    begun(own, run, j);
    OWN_SUMS
#if BEGINS
    EACH(p, PARAMETERS) gradient AT(p) = score AT(p) = 0;
#else
    EACH(p, PARAMETERS) gradient AT(p) = run.gradient[p * run.count + j];
    EACH(p, PARAMETERS) score AT(p) = run.score[p * run.count + j];
#endif
    const V guess = guessed(run, j);
    bool dominated = false;
    each_step(own.stream, run.steps, [&](i64 n, const V* z) {
      V y[STATE], g, r, s[AT_LEAST_ONE(SCORES)], e[AT_LEAST_ONE(EXPLICITS)], q[AT_LEAST_ONE(SLOPES)];
      step_scores(c_shared, STEP_NUMBERS(n), own.c, own.x, z, y, g, r, s, e, q, own.stream, n);
      own.reward += g;
      const V to_go = guess - own.reward;  // λ of n + 1: the reward at n precedes the kick, that of the step follows
      if (LEFT_OUT) {
        EACH(k, SCORES) {
          const V rest = 1 - s[k] * s[k] * run.inverse[n * SCORES + k];
          dominated |= rest < F(0.015625);
          gradient AT(SCORE_OF[k]) += (to_go - run.bar[n * SCORES + k]) * s[k] / rest;
          score AT(SCORE_OF[k]) += s[k];
        }
      } else {
        V left = (to_go - run.bar[n]) * run.scale;
        if (STOPS) {  // (λ − WΣλ'/ΣW)/(1 − W/ΣW), and λ if no other trajectory runs
          const V survival = own.x[STATE - 1], rest = 1 - survival * run.inverse[n];
          left = rest > F(ALONE) ? (to_go - survival * run.bar[n]) / rest : to_go;
        }
        EACH(k, SCORES) {
          gradient AT(SCORE_OF[k]) += left * s[k];
          score AT(SCORE_OF[k]) += s[k];
        }
      }
      EACH(k, EXPLICITS) gradient AT(EXPLICIT_OF[k]) += e[k];
      own.reward += r;
      EACH(k, SLOPES) {  // of the survival: what is to come after the step
        gradient AT(SLOPE_OF[k]) += (guess - own.reward) * q[k];
        score AT(SLOPE_OF[k]) += q[k];
      }
      EACH(k, STATE) own.x[k] = y[k];
    });
    V h, f[AT_LEAST_ONE(FINALS)], off = 0;
    end_scores(c_shared, 0, own.c, own.x, 0, h, f);
    own.reward += h;
    EACH(k, FINALS) gradient AT(FINAL_OF[k]) += f[k];
    const V missed = own.reward - guess;
    EACH(k, STATE) off += own.x[k] - own.x[k];
    if (here) {
      ended(own, run, j);
      EACH(p, PARAMETERS) {
        const V whole = gradient AT(p) + missed * score AT(p);
        off += whole - whole;
        run.gradient[p * run.count + j] = whole;
      }
      if (off != 0) atomicOr(run.flags, NOT_FINITE);
      if (dominated) atomicOr(run.flags, DOMINATED);
    }
    TOGETHER
  }
}

// Σ U² and Σ λ U² over the ensemble at every step
INLINE void weighed(const Run& run) {
  SHARED_BY_STEPS
  ALL_TRAJECTORIES {
    const i64 index = group + (threadIdx.x & 31);
    const bool here = index < run.count && FIRST_WARP;
    const i64 j = index < run.count ? index : run.count - 1;
    Trajectory own;
    begun(own, run, j);
    const V guess = guessed(run, j);
    each_step(own.stream, run.steps, [&](i64 n, const V* z) {
      V y[STATE], g, r, s[AT_LEAST_ONE(SCORES)];
      step_weights(c_shared, STEP_NUMBERS(n), own.c, own.x, z, y, g, r, s, own.stream, n);
      own.reward += g;
      const V to_go = guess - own.reward;
      summed<2 * AT_LEAST_ONE(SCORES)>(run.sums, n, [&](int k) {
        const F u = here ? s[k / 2] * s[k / 2] : F(0);
        return k % 2 ? to_go * u : u;
      });
      own.reward += r;
      EACH(k, STATE) own.x[k] = y[k];
    });
    TOGETHER
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    one_pass(i64 count, i64 steps, i64 first, const F* timed, const F* x, const F* context, const u32* stream,
             const F* guess, F* reward, F* last, F* gradient, const F* score, const F* bar, const F* inverse,
             double* sums, int* flags, F scale, F same, const F* near) {
  const Run run = {count,    steps, first, timed,   x,    context, stream, guess, reward, last,
                   gradient, score, bar,   inverse, sums, flags,   scale,  same,  near};
#if PASS == REWARDS_SUMMED
  rewarded(run);
#elif PASS == WEIGHTS
  weighed(run);
#else
  swept<WEIGHTED != 0>(run);
#endif
}
