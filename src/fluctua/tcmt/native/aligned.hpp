#pragma once
#include <cstddef>
#include <cstdint>
#include <new>

namespace fluctua {

template <class T> struct Aligned {
  explicit Aligned(std::int64_t n)
      : data(static_cast<T*>(::operator new(std::size_t(n) * sizeof(T) + 64, std::align_val_t(64)))) {}
  ~Aligned() { ::operator delete(data, std::align_val_t(64)); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  T* data;
};

}  // namespace fluctua
