// Named NumPy arrays from a dict, as typed pointers. The Python side has checked shapes and made them
// contiguous; a wrong type here is a bug there, and says which array.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

namespace fluctua {

class Arrays {
 public:
  explicit Arrays(nanobind::dict d) : dict_(d) {}

  template <class T> const T* in(const char* name) const { return find<const T>(name); }
  template <class T> T* out(const char* name) const { return find<T>(name); }
  template <class T> T number(const char* name) const { return nanobind::cast<T>(dict_[name]); }
  bool has(const char* name) const { return dict_.contains(name) && !dict_[name].is_none(); }

 private:
  template <class T> T* find(const char* name) const {
    if (!has(name)) return nullptr;
    try {
      return nanobind::cast<nanobind::ndarray<T, nanobind::c_contig, nanobind::device::cpu>>(dict_[name]).data();
    } catch (const nanobind::cast_error&) {
      throw std::invalid_argument(std::string("array `") + name + "` has the wrong type or is not contiguous");
    }
  }

  nanobind::dict dict_;
};

}  // namespace fluctua
