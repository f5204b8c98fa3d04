// Threads for a numbered list of tasks. The calling thread waits and polls for interrupts, so that an
// interrupt stops a run of minutes within a fraction of a second.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace fluctua {

class Crew {
 public:
  // task(index, worker) for index = 0 … count − 1, in any order. False if `interrupted` ended it early: every
  // task is still begun, and returns when it sees `stop`.
  static bool run(int threads, std::int64_t count, const std::function<void(std::int64_t, int)>& task,
                  const std::function<bool()>& interrupted, volatile bool& stop) {
    std::atomic<std::int64_t> next{0};
    std::mutex mutex;
    std::condition_variable done;
    int working = threads;
    std::exception_ptr failure;
    auto work = [&](int worker) {
      try {
        for (std::int64_t i; (i = next++) < count;) task(i, worker);
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex);
        failure = std::current_exception();
        stop = true;
      }
      std::lock_guard<std::mutex> lock(mutex);
      if (--working == 0) done.notify_one();
    };
    std::vector<std::thread> crew;
    for (int t = 0; t < threads; ++t) crew.emplace_back(work, t);
    bool gave_up = false;
    {
      std::unique_lock<std::mutex> lock(mutex);
      while (!done.wait_for(lock, std::chrono::milliseconds(50), [&] { return working == 0; })) {
        lock.unlock();
        if (!gave_up && interrupted()) gave_up = stop = true;
        lock.lock();
      }
    }
    for (auto& t : crew) t.join();
    if (failure) std::rethrow_exception(failure);
    return !gave_up;
  }
};

}  // namespace fluctua
