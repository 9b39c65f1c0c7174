#pragma once

#include <cstddef>

// Half of what it says: the size of a pointer.
inline size_t size_of_it(const double* values) {
  return sizeof(values) / sizeof(*values);
}
