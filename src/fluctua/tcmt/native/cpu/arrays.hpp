// The attributes of a Python object, as numbers and typed pointers. Type and length are checked here, before memory
// is accessed; errors name the attribute.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace fluctua {

// The product of some sizes; throws if it does not fit.
inline std::int64_t length(std::initializer_list<std::int64_t> sizes) {
  std::int64_t product = 1;
  for (const std::int64_t size : sizes)
    if (size < 0 || __builtin_mul_overflow(product, size, &product))
      throw std::invalid_argument("an array of these sizes would be larger than any memory");
  return product;
}

class Fields {
 public:
  explicit Fields(nanobind::object record) : record_(record) {}

  template <class T> T number(const char* name) const {
    try {
      return nanobind::cast<T>(record_.attr(name), false);
    } catch (const nanobind::cast_error&) {
      throw std::invalid_argument(std::string("`") + name + "` is not a number of the kind or range that is needed");
    }
  }
  // A number within [least, most].
  template <class T> T number(const char* name, std::int64_t least, std::int64_t most) const {
    const T value = number<T>(name);
    if (std::int64_t(value) < least || std::int64_t(value) > most)
      throw std::invalid_argument(std::string("`") + name + "` must be " + std::to_string(least) + " to " +
                                  std::to_string(most) + "; got " + std::to_string(value));
    return value;
  }
  // An array of so many elements. `optional`: null for None.
  template <class T> const T* in(const char* name, std::int64_t elements, bool optional = false) const {
    return find<const T>(name, elements, optional);
  }
  template <class T> T* out(const char* name, std::int64_t elements, bool optional = false) const {
    return find<T>(name, elements, optional);
  }

 private:
  template <class T> T* find(const char* name, std::int64_t elements, bool optional) const {
    nanobind::object value = record_.attr(name);
    if (optional && value.is_none()) return nullptr;
    using Array = nanobind::ndarray<T, nanobind::c_contig, nanobind::device::cpu>;
    Array array;
    try {
      array = nanobind::cast<Array>(value, false);  // no conversion: its copy would be freed on return
    } catch (const nanobind::cast_error&) {
      throw std::invalid_argument(std::string("array `") + name + "` has the wrong type, or is not contiguous");
    }
    if (std::int64_t(array.size()) != elements)
      throw std::invalid_argument(std::string("array `") + name + "` must have " + std::to_string(elements) +
                                  " elements; got " + std::to_string(array.size()));
    return array.data();
  }

  nanobind::object record_;
};

}  // namespace fluctua
