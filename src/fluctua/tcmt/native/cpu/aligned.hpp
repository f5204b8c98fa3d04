#pragma once
#include <cstddef>
#include <cstdint>
#include <new>

namespace fluctua {

template <class T> struct Aligned {
  explicit Aligned(std::int64_t n) : data(static_cast<T*>(::operator new(bytes(n), std::align_val_t(64)))) {}
  ~Aligned() { ::operator delete(data, std::align_val_t(64)); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  T* data;

 private:
  static std::size_t bytes(std::int64_t n) {
    if (n < 0 || n > (PTRDIFF_MAX - 64) / std::int64_t(sizeof(T))) throw std::bad_alloc();
    return std::size_t(n) * sizeof(T) + 64;
  }
};

}  // namespace fluctua
