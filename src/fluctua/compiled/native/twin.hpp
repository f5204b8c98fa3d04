// The reverse sweep of a linear twin, one batch of trajectories at a time: forwards once to the states that are kept,
// every √T steps, then backwards, each segment computed again. Besides x, `p` holds the twin's state x̄ and V: its
// slope, and its bend of order 2.
#pragma once
#include <stdlib.h>

struct TwinRun {
  int64_t count, steps, segment;
  const F *shared, *timed;  // (SHARED,), (T, TIMED)
  const F *x, *context;     // (STATE, E), (CONTEXT, E)
  const uint32_t* stream;   // (STREAM, E)
  F *kept, *last;           // (T/segment, 2·STATE, E), (2·STATE, E): X and x̄
  F *slope, *value;         // (GUESS, E), (E,) in and out: of V
  F *residual, *reward;     // (E,) in and out: Λ and λ̂
  F *direct, *correction;   // (PARAMETERS, E) in and out
  const F* bar;             // (T,) the baseline where it depends on time alone
  const int64_t* edges;     // of the batches
  double* sums;             // (batches, T): ΣΛ
  int32_t* flags;           // DOMINATED: one trajectory has nearly all of a weight; −1: no memory
};

extern "C" void twin_forward(const TwinRun* given, int64_t first, int64_t stop) {
  const TwinRun run = *given;
  for (int64_t j = first; j < stop; j += LANES) {
    V x[STATE], p[STATE + GUESS], c[AT_LEAST_ONE(CONTEXT)];
    U stream[AT_LEAST_ONE(STREAM)];
    Spare spare;
    EACH(k, STATE) x[k] = p[k] = loaded<V>(run.x + k * run.count, j, run.count);
    EACH(k, CONTEXT) c[k] = loaded<V>(run.context + k * run.count, j, run.count);
    EACH(k, STREAM) stream[k] = loaded<U>(run.stream + k * run.count, j, run.count);
    for (int64_t n = 0; n < run.steps; n++) {
      if (n % run.segment == 0) {
        F* at = run.kept + n / run.segment * 2 * STATE * run.count;
        EACH(k, STATE) stored(at + k * run.count, x[k], j, run.count);
        EACH(k, STATE) stored(at + (STATE + k) * run.count, p[k], j, run.count);
      }
      V z[AT_LEAST_ONE(NORMALS)], y[STATE], ahead[STATE], g, r;
      drawn(stream, (uint32_t)n, z, spare, n == 0);
      step_rewards(run.shared, run.timed + n * TIMED, c, x, z, y, g, r, nullptr, 0);
      twin_ahead(run.shared, run.timed + n * TIMED, c, x, z, p, ahead);
      EACH(k, STATE) x[k] = y[k];
      EACH(k, STATE) p[k] = ahead[k];
    }
    EACH(k, STATE) stored(run.last + k * run.count, x[k], j, run.count);
    EACH(k, STATE) stored(run.last + (STATE + k) * run.count, p[k], j, run.count);
  }
}

struct TwinLanes {
  V c[AT_LEAST_ONE(CONTEXT)], slope[GUESS], value, residual, reward, direct[PARAMETERS], correction[PARAMETERS];
  V score[AT_LEAST_ONE(SCORES)], delta;
  U stream[AT_LEAST_ONE(STREAM)];
};
struct TwinStep {
  V x[STATE], twin[STATE], z[AT_LEAST_ONE(NORMALS)];
};

INLINE void twin_batch(const TwinRun& run, int64_t batch, TwinLanes* lanes, TwinStep* path) {
  const int64_t first = run.edges[batch], stop = run.edges[batch + 1];
  const int blocks = (int)((stop - first + LANES - 1) / LANES);
  double* sums = run.sums + batch * run.steps;
  for (int b = 0; b < blocks; b++) {
    const int64_t j = first + b * LANES;
    TwinLanes& lane = lanes[b];
    EACH(k, CONTEXT) lane.c[k] = loaded<V>(run.context + k * run.count, j, stop);
    EACH(k, STREAM) lane.stream[k] = loaded<U>(run.stream + k * run.count, j, stop);
    EACH(k, GUESS) lane.slope[k] = loaded<V>(run.slope + k * run.count, j, stop);
    lane.value = loaded<V>(run.value, j, stop);
    lane.residual = loaded<V>(run.residual, j, stop);
    lane.reward = loaded<V>(run.reward, j, stop);
    EACH(k, PARAMETERS) lane.direct[k] = loaded<V>(run.direct + k * run.count, j, stop);
    EACH(k, PARAMETERS) lane.correction[k] = loaded<V>(run.correction + k * run.count, j, stop);
  }
  for (int64_t begin = (run.steps - 1) / run.segment * run.segment; begin >= 0; begin -= run.segment) {
    const int64_t end = begin + run.segment < run.steps ? begin + run.segment : run.steps;
    for (int b = 0; b < blocks; b++) {
      const F* at = run.kept + begin / run.segment * 2 * STATE * run.count;
      const int64_t j = first + b * LANES;
      V x[STATE], p[STATE + GUESS];
      Spare spare;
      EACH(k, STATE) x[k] = loaded<V>(at + k * run.count, j, stop);
      EACH(k, STATE) p[k] = loaded<V>(at + (STATE + k) * run.count, j, stop);
      for (int64_t n = begin; n < end; n++) {
        TwinStep& step = path[(n - begin) * blocks + b];
        V y[STATE], ahead[STATE], g, r;
        drawn(lanes[b].stream, (uint32_t)n, step.z, spare, n == begin);
        EACH(k, STATE) step.x[k] = x[k];
        EACH(k, STATE) step.twin[k] = p[k];
        step_rewards(run.shared, run.timed + n * TIMED, lanes[b].c, x, step.z, y, g, r, nullptr, 0);
        twin_ahead(run.shared, run.timed + n * TIMED, lanes[b].c, x, step.z, p, ahead);
        EACH(k, STATE) x[k] = y[k];
        EACH(k, STATE) p[k] = ahead[k];
      }
    }
    for (int64_t n = end - 1; n >= begin; n--) {
      Sum residuals;
#if TWIN_BASELINE == 2
      Sum squares[AT_LEAST_ONE(SCORES)], weighted[AT_LEAST_ONE(SCORES)];
#endif
      for (int b = 0; b < blocks; b++) {
        TwinLanes& lane = lanes[b];
        const TwinStep& step = path[(n - begin) * blocks + b];
        V p[STATE + GUESS], direct[AT_LEAST_ONE(EXPLICITS)], reward, left, gain;
        EACH(k, STATE) p[k] = step.twin[k];
        EACH(k, GUESS) p[STATE + k] = lane.slope[k];
        twin_back(run.shared, run.timed + n * TIMED, lane.c, step.x, step.z, p, lane.score, direct, lane.delta, reward,
                  left, gain, lane.slope);
        EACH(k, EXPLICITS) lane.direct[EXPLICIT_OF[k]] += direct[k];
        lane.value += gain;
        lane.reward += reward;
        lane.residual += left;
        const int64_t j = first + b * LANES;
        residuals.add(counted(lane.residual, j, stop));
#if TWIN_BASELINE == 2
        EACH(k, SCORES) {
          const V score = counted(lane.score[k], j, stop);
          EACH(h, HALVES) {
            const Half u = half(score, h), square = u * u;
            squares[k].of[h] += square;
            weighted[k].of[h] += half(lane.residual, h) * square;
          }
        }
#endif
      }
      const double members = (double)(stop - first);
      Sum summed;
#if TWIN_BASELINE == 2
      F inverse[AT_LEAST_ONE(SCORES)], mean[AT_LEAST_ONE(SCORES)];
      EACH(k, SCORES) {
        const double weight = squares[k].total();
        inverse[k] = weight > 0 ? (F)(1 / weight) : 0;
        mean[k] = weight > 0 ? (F)(weighted[k].total() / weight) : 0;
      }
#else
      const F mean = TWIN_BASELINE ? (F)(residuals.total() / members) : run.bar[n];
      const F scale = TWIN_BASELINE ? (F)(members / (members - 1)) : 1;
#endif
      for (int b = 0; b < blocks; b++) {
        TwinLanes& lane = lanes[b];
#if TWIN_BASELINE == 2
        EACH(k, SCORES) {
          const V rest = 1 - lane.score[k] * lane.score[k] * inverse[k];
          if (any(rest < F(0.015625))) *run.flags = DOMINATED;
          lane.correction[SCORE_OF[k]] += (lane.residual - mean[k]) * lane.score[k] / rest;
        }
#else
        const V left = (lane.residual - mean) * scale;
        EACH(k, SCORES) lane.correction[SCORE_OF[k]] += left * lane.score[k];
#endif
        lane.residual += lane.delta;
        summed.add(counted(lane.residual, first + b * LANES, stop));
      }
      sums[n] = summed.total();
    }
  }
  for (int b = 0; b < blocks; b++) {
    const int64_t j = first + b * LANES;
    TwinLanes& lane = lanes[b];
    EACH(k, GUESS) stored(run.slope + k * run.count, lane.slope[k], j, stop);
    stored(run.value, lane.value, j, stop);
    stored(run.residual, lane.residual, j, stop);
    stored(run.reward, lane.reward, j, stop);
    EACH(k, PARAMETERS) stored(run.direct + k * run.count, lane.direct[k], j, stop);
    EACH(k, PARAMETERS) stored(run.correction + k * run.count, lane.correction[k], j, stop);
  }
}

extern "C" void twin_backward(const TwinRun* given, int64_t first, int64_t stop) {
  int64_t most = 0;
  for (int64_t batch = first; batch < stop; batch++) {
    const int64_t size = given->edges[batch + 1] - given->edges[batch];
    most = size > most ? size : most;
  }
  const size_t blocks = (size_t)((most + LANES - 1) / LANES);
  void *lanes = 0, *path = 0;
  if (posix_memalign(&lanes, sizeof(V), blocks * sizeof(TwinLanes)) ||
      posix_memalign(&path, sizeof(V), blocks * (size_t)given->segment * sizeof(TwinStep))) {
    *given->flags = -1;
  } else {
    for (int64_t batch = first; batch < stop; batch++) twin_batch(*given, batch, (TwinLanes*)lanes, (TwinStep*)path);
  }
  free(lanes);
  free(path);
}
