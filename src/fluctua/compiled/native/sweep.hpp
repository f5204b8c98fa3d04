// All trajectories of a run through all steps, LANES side by side; the process itself is in the functions
// `step_rewards`, `step_scores` and so on above.
//
// Sums over the ensemble are in double precision, in an order that depends on the size of the ensemble alone.
#pragma once
#include "ensemble.hpp"

#define GROUP 16

// ------------------------------------------------------------------------------------------ rewards alone

// The sums of g Δt and of r over the ensemble at every step, and with a stop that of the survival W before it
extern "C" void rewards_summed(const Run* given, int64_t first, int64_t stop) {
  const Run run = *given;
  for (int64_t group = first; group < stop; group += GROUP * LANES) {
    Lanes lanes[GROUP];
    int blocks = 0;
    for (int64_t j = group; j < stop && blocks < GROUP; j += LANES) begun(lanes[blocks++], run, j);
    for (int64_t n = 0; n < run.steps; n++) {
      Sum of_g, of_r, of_w;
      for (int b = 0; b < blocks; b++) {
        const int64_t j = group + b * LANES;
        V z[AT_LEAST_ONE(NORMALS)], y[STATE], g, r;
        drawn(lanes[b].stream, (uint32_t)n, z, lanes[b].spare, n == 0);
        step_rewards(run.shared, run.timed + n * TIMED, lanes[b].c, lanes[b].x, z, y, g, r, lanes[b].stream, n);
        lanes[b].reward += g;
        lanes[b].reward += r;
        if (STOPS) of_w.add(counted(lanes[b].x[STATE - 1], j, run.count));
        EACH(k, STATE) lanes[b].x[k] = y[k];
        of_g.add(counted(g, j, run.count));
        of_r.add(counted(r, j, run.count));
      }
      double* const sums = run.sums + (2 + STOPS) * n;
      sums[0] += of_g.total();
      sums[1] += of_r.total();
      if (STOPS) sums[1 + STOPS] += of_w.total();
    }
    for (int b = 0; b < blocks; b++) {
      V h;
      end_rewards(run.shared, 0, lanes[b].c, lanes[b].x, 0, h);
      lanes[b].reward += h;
      ended(lanes[b], run, group + b * LANES);
    }
  }
}

// ------------------------------------------------------------------------------------------ the sweep

#if SWEEP
INLINE V guessed(const Run& run, int64_t j) { return run.guess ? loaded<V>(run.guess, j, run.count) : bc((F)run.same); }

// LEFT_OUT: each trajectory leaves itself out of the weighted mean, (λ − Σλ'U²/ΣU²)U/(1 − U²/ΣU²)
template <bool LEFT_OUT> INLINE void swept(const Run& run, int64_t first, int64_t stop) {
  const F scale = (F)run.scale;
  for (int64_t j = first; j < stop; j += LANES) {
    Lanes lanes;
    begun(lanes, run, j);
    V gradient[PARAMETERS], score[PARAMETERS];
#if BEGINS
    EACH(p, PARAMETERS) gradient[p] = score[p] = V{};
#else
    EACH(p, PARAMETERS) gradient[p] = loaded<V>(run.gradient + p * run.count, j, run.count);
    EACH(p, PARAMETERS) score[p] = loaded<V>(run.score + p * run.count, j, run.count);
#endif
    const V guess = guessed(run, j);
    B dominated = B{};
    for (int64_t n = 0; n < run.steps; n++) {
      V z[AT_LEAST_ONE(NORMALS)], y[STATE], g, r, s[AT_LEAST_ONE(SCORES)], e[AT_LEAST_ONE(EXPLICITS)];
      V q[AT_LEAST_ONE(SLOPES)];
      drawn(lanes.stream, (uint32_t)n, z, lanes.spare, n == 0);
      step_scores(run.shared, run.timed + n * TIMED, lanes.c, lanes.x, z, y, g, r, s, e, q, lanes.stream, n);
      lanes.reward += g;
      const V to_go = guess - lanes.reward;  // λ of n + 1: the reward at n precedes the kick, that of the step follows
      if (LEFT_OUT) {
        EACH(k, SCORES) {
          const V rest = 1 - s[k] * s[k] * run.inverse[n * SCORES + k];
          dominated |= rest < F(0.015625);
          gradient[SCORE_OF[k]] += (to_go - run.bar[n * SCORES + k]) * s[k] / rest;
          score[SCORE_OF[k]] += s[k];
        }
      } else {
        V left = (to_go - run.bar[n]) * scale;
        if (STOPS) {  // (λ − WΣλ'/ΣW)/(1 − W/ΣW), and λ if no other trajectory runs
          const V survival = lanes.x[STATE - 1], rest = 1 - survival * run.inverse[n];
          left = sel(rest > F(ALONE), (to_go - survival * run.bar[n]) / rest, to_go);
        }
        EACH(k, SCORES) {
          gradient[SCORE_OF[k]] += left * s[k];
          score[SCORE_OF[k]] += s[k];
        }
      }
      EACH(k, EXPLICITS) gradient[EXPLICIT_OF[k]] += e[k];
      lanes.reward += r;
      EACH(k, SLOPES) {  // of the survival: what is to come after the step
        gradient[SLOPE_OF[k]] += (guess - lanes.reward) * q[k];
        score[SLOPE_OF[k]] += q[k];
      }
      EACH(k, STATE) lanes.x[k] = y[k];
    }
    V h, f[AT_LEAST_ONE(FINALS)], off = V{};
    end_scores(run.shared, 0, lanes.c, lanes.x, 0, h, f);
    lanes.reward += h;
    EACH(k, FINALS) gradient[FINAL_OF[k]] += f[k];
    const V missed = lanes.reward - guess;
    EACH(p, PARAMETERS) {
      gradient[p] += missed * score[p];
      off += gradient[p] - gradient[p];
    }
    for (int l = 0; l < LANES && j + l < run.count; l++)
      for (int p = 0; p < PARAMETERS; p++) run.rows[(j + l) * PARAMETERS + p] = gradient[p][l];
    EACH(k, STATE) off += lanes.x[k] - lanes.x[k];
    ended(lanes, run, j);
    if (any(counted(off, j, run.count) != 0)) __atomic_fetch_or(run.flags, NOT_FINITE, __ATOMIC_RELAXED);
    if (any(dominated)) __atomic_fetch_or(run.flags, DOMINATED, __ATOMIC_RELAXED);
  }
}
#endif

#if SWEEP == 1
extern "C" void sweep(const Run* given, int64_t first, int64_t stop) { swept<false>(*given, first, stop); }
#endif

#if SWEEP == 2
extern "C" void sweep(const Run* given, int64_t first, int64_t stop) { swept<true>(*given, first, stop); }

struct Weights {
  Sum squares, weighted;
  INLINE_MEMBER void add(V score, V to_go) {
    EACH(h, HALVES) {
      const Half u = half(score, h), square = u * u;
      squares.of[h] += square;
      weighted.of[h] += half(to_go, h) * square;
    }
  }
  INLINE_MEMBER void to(double* sums) const {
    sums[0] += squares.total();
    sums[1] += weighted.total();
  }
};

// Σ U² and Σ λ U² over the ensemble at every step, with returns that are known
extern "C" void weights(const Run* given, int64_t first, int64_t stop) {
  const Run run = *given;
  for (int64_t group = first; group < stop; group += GROUP * LANES) {
    Lanes lanes[GROUP];
    V guess[GROUP];
    int blocks = 0;
    for (int64_t j = group; j < stop && blocks < GROUP; j += LANES) {
      guess[blocks] = guessed(run, j);
      begun(lanes[blocks++], run, j);
    }
    for (int64_t n = 0; n < run.steps; n++) {
      V scores[GROUP][SCORES];
      V to_go[GROUP];
      for (int b = 0; b < blocks; b++) {
        const int64_t j = group + b * LANES;
        V z[AT_LEAST_ONE(NORMALS)], y[STATE], g, r;
        drawn(lanes[b].stream, (uint32_t)n, z, lanes[b].spare, n == 0);
        step_weights(run.shared, run.timed + n * TIMED, lanes[b].c, lanes[b].x, z, y, g, r, scores[b], lanes[b].stream,
                     n);
        if (j + LANES > run.count) EACH(k, SCORES) scores[b][k] = counted(scores[b][k], j, run.count);
        lanes[b].reward += g;
        to_go[b] = guess[b] - lanes[b].reward;
        lanes[b].reward += r;
        EACH(k, STATE) lanes[b].x[k] = y[k];
      }
      for (int k = 0; k < SCORES; k++) {
        Weights sum;
        for (int b = 0; b < blocks; b++) sum.add(scores[b][k], to_go[b]);
        sum.to(run.sums + 2 * (n * SCORES + k));
      }
    }
  }
}

// The same with the returns, which are not known before: scores and rewards of all steps of LANES trajectories wait for
// them. Up to KEPT_BYTES, which stay in the cache, that is faster than to draw the noise once more.
extern "C" void returns_and_weights(const Run* given, int64_t first, int64_t stop) {
  const Run run = *given;
  V* kept = (V*)aligned_alloc(64, (SCORES + 1) * run.steps * sizeof(V));
  for (int64_t j = first; j < stop; j += LANES) {
    Lanes lanes;
    begun(lanes, run, j);
    for (int64_t n = 0; n < run.steps; n++) {
      V z[AT_LEAST_ONE(NORMALS)], y[STATE], g, r, *at = kept + n * (SCORES + 1);
      drawn(lanes.stream, (uint32_t)n, z, lanes.spare, n == 0);
      step_weights(run.shared, run.timed + n * TIMED, lanes.c, lanes.x, z, y, g, r, at, lanes.stream, n);
      if (j + LANES > run.count) EACH(k, SCORES) at[k] = counted(at[k], j, run.count);
      lanes.reward += g;
      at[SCORES] = lanes.reward;
      lanes.reward += r;
      EACH(k, STATE) lanes.x[k] = y[k];
    }
    V h;
    end_rewards(run.shared, 0, lanes.c, lanes.x, 0, h);
    lanes.reward += h;
    ended(lanes, run, j);
    for (int64_t n = 0; n < run.steps; n++) {
      const V *at = kept + n * (SCORES + 1), to_go = lanes.reward - at[SCORES];
      for (int k = 0; k < SCORES; k++) {
        Weights sum;
        sum.add(at[k], to_go);
        sum.to(run.sums + 2 * (n * SCORES + k));
      }
    }
  }
  free(kept);
}
#endif
