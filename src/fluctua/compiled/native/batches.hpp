// Sums of weighted scores over batches of trajectories. A block of them runs through all steps, which gives the
// returns, and then once more through the states that were stored: the reverse pass adds the weighted scores up.
//
// Sums of a block are in the type of the states, sums of a batch in double precision and in a fixed order.
#pragma once
#include "blocks.hpp"

struct BatchRun {
  Run run;
  int64_t size;    // trajectories per batch
  int64_t stored;  // whether all states are stored; if not, the second pass draws the noise once more
  double* totals;  // (batches, ELEMENTS + PRODUCTS + T · PER_STEP), or (batches, T, 2) of rewards alone
};

struct Workspace {
  V *x, *kept, *collected, *context, *z, *work, *sums;
  F *products, *scratch;
  int64_t bytes;
  Workspace(void* memory, int64_t steps, bool stored) {
    const int64_t slots = stored ? steps : 1;
    char* at = (char*)memory;
    const auto take = [&at](int64_t size) {
      char* const here = at;
      at += (size + 63) / 64 * 64;
      return here;
    };
    const auto vectors = [&take](int64_t count) { return (V*)take(count * BLOCKS * sizeof(V)); };
    x = vectors((slots + 1) * STATE);
    kept = vectors(slots * KEPT);
    collected = vectors(steps);
    context = vectors(CONTEXT);
    z = vectors(NORMALS);
    work = vectors(WORK);
    sums = (V*)take(ELEMENTS * sizeof(V));
    products = (F*)take(PRODUCTS * sizeof(F));
    scratch = (F*)take(SCRATCH * TRAJECTORIES * sizeof(F));
    bytes = at - (char*)memory;
  }
};
extern "C" int64_t workspace_bytes(int64_t steps, int64_t stored) { return Workspace(nullptr, steps, stored).bytes; }

struct Block {
  U stream[BLOCKS][AT_LEAST_ONE(STREAM)];
  Spare spare[BLOCKS];
  V reward[BLOCKS], counts[BLOCKS];
};

// stop: end of the batch; lanes beyond it do not count
INLINE void begin_block(Block& block, const Workspace& space, const Run& run, int64_t first, int64_t stop) {
  for (int b = 0; b < BLOCKS; b++) {
    const int64_t j = first + b * LANES;
    Lanes lanes;
    begun(lanes, run, j);
    EACH(k, STATE) space.x[k * BLOCKS + b] = lanes.x[k];
    EACH(k, CONTEXT) space.context[k * BLOCKS + b] = lanes.c[k];
    EACH(k, STREAM) block.stream[b][k] = lanes.stream[k];
    block.reward[b] = lanes.reward;
    for (int l = 0; l < LANES; l++) block.counts[b][l] = j + l < stop;
  }
}

INLINE void take_step(Block& block, const Workspace& space, const Run& run, int64_t n, const V* x, V* y, V* kept, V* g,
                      V* r) {
  for (int b = 0; b < BLOCKS; b++) {
    V z[AT_LEAST_ONE(NORMALS)];
    drawn(block.stream[b], (uint32_t)n, z, block.spare[b], n == 0);
    EACH(k, NORMALS) space.z[k * BLOCKS + b] = z[k];
  }
  forward(run.shared, run.timed + n * TIMED, space.context, x, space.z, y, g, r, kept, space.work);
}

// Adds the terminal reward, and writes returns and final states.
INLINE void end_block(Block& block, const Workspace& space, const Run& run, int64_t first, int64_t stop,
                      const V* last) {
  V h[BLOCKS];
  finish(run.shared, space.context, last, h, space.work);
  for (int b = 0; b < BLOCKS; b++) {
    const int64_t j = first + b * LANES;
    block.reward[b] += h[b];
    stored(run.reward, block.reward[b], j, stop);
    EACH(k, STATE) stored(run.last + k * run.count, last[k * BLOCKS + b], j, stop);
  }
}

// The sums of g Δt and of r of a batch at every step: what a pilot needs
INLINE void add_rewards(const BatchRun* given, int64_t batch, void* memory) {
  const Run& run = given->run;
  const Workspace space(memory, run.steps, false);
  const int64_t first = batch * given->size, end = first + given->size, stop = end < run.count ? end : run.count;
  double* const sums = given->totals + batch * 2 * run.steps;
  const auto state = [&](int64_t n) { return space.x + n % 2 * STATE * BLOCKS; };
  for (int64_t j = first; j < stop; j += TRAJECTORIES) {
    Block block;
    V g[BLOCKS], r[BLOCKS];
    begin_block(block, space, run, j, stop);
    for (int64_t n = 0; n < run.steps; n++) {
      take_step(block, space, run, n, state(n), state(n + 1), space.kept, g, r);
      Sum of_g, of_r;
      for (int b = 0; b < BLOCKS; b++) {
        block.reward[b] += g[b];
        block.reward[b] += r[b];
        of_g.add(g[b] * block.counts[b]);
        of_r.add(r[b] * block.counts[b]);
      }
      sums[2 * n] += of_g.total();
      sums[2 * n + 1] += of_r.total();
    }
    end_block(block, space, run, j, stop, state(run.steps));
  }
}

INLINE void add_batch(const BatchRun* given, int64_t batch, void* memory) {
  const Run& run = given->run;
  const bool stored_all = given->stored;
  const Workspace space(memory, run.steps, stored_all);
  const int64_t first = batch * given->size, end = first + given->size, stop = end < run.count ? end : run.count;
  double* const sums = given->totals + batch * (ELEMENTS + PRODUCTS + run.steps * PER_STEP);
  const auto state = [&](int64_t n) { return space.x + (stored_all ? n : n % 2) * STATE * BLOCKS; };
  const auto kept = [&](int64_t n) { return space.kept + (stored_all ? n : 0) * KEPT * BLOCKS; };
  for (int64_t j = first; j < stop; j += TRAJECTORIES) {
    Block block;
    V g[BLOCKS], r[BLOCKS], weight[BLOCKS];
    begin_block(block, space, run, j, stop);
    for (int64_t n = 0; n < run.steps; n++) {
      take_step(block, space, run, n, state(n), state(n + 1), kept(n), g, r);
      for (int b = 0; b < BLOCKS; b++) {
        block.reward[b] += g[b];
        space.collected[n * BLOCKS + b] = block.reward[b];  // the running reward at n precedes the kick
        block.reward[b] += r[b];
      }
    }
    end_block(block, space, run, j, stop, state(run.steps));
    __builtin_memset(space.sums, 0, ELEMENTS * sizeof(V));
    __builtin_memset(space.products, 0, PRODUCTS * sizeof(F));
    if (!stored_all) {
      const Block done = block;
      begin_block(block, space, run, j, stop);
      for (int b = 0; b < BLOCKS; b++) block.reward[b] = done.reward[b];
    }
    for (int64_t n = 0; n < run.steps; n++) {
      if (!stored_all) take_step(block, space, run, n, state(n), state(n + 1), kept(n), g, r);
      for (int b = 0; b < BLOCKS; b++)
        weight[b] = (block.reward[b] - space.collected[n * BLOCKS + b] - run.bar[n]) * block.counts[b];
      V step_sums[AT_LEAST_ONE(PER_STEP)] = {};
      backward(run.shared, run.timed + n * TIMED, space.context, state(n), state(n + 1), weight, block.counts, kept(n),
               space.sums, space.products, step_sums, space.work, space.scratch);
      for (int64_t k = 0; k < PER_STEP; k++) {
        Sum sum;
        sum.add(step_sums[k]);
        sums[ELEMENTS + PRODUCTS + n * PER_STEP + k] += sum.total();
      }
    }
    for (int64_t k = 0; k < ELEMENTS; k++) {
      Sum sum;
      sum.add(space.sums[k]);
      sums[k] += sum.total();
    }
    for (int64_t k = 0; k < PRODUCTS; k++) sums[ELEMENTS + k] += space.products[k];
  }
}

// Threads take batches until none is left. next: the first that is not taken, common to all of them.
#define EACH_BATCH(add)                                                  \
  for (;;) {                                                             \
    const int64_t batch = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); \
    if (batch >= batches) return;                                        \
    add(given, batch, memory);                                           \
  }
extern "C" void batch_sums(const BatchRun* given, int64_t* next, int64_t batches, void* memory) {
  EACH_BATCH(add_batch)
}
extern "C" void batch_rewards(const BatchRun* given, int64_t* next, int64_t batches, void* memory) {
  EACH_BATCH(add_rewards)
}
