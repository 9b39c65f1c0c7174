#pragma once

inline int never_ends(int n) {
  int i = 0;
  int sum = 0;
  while (i < n) sum += n;
  return sum;
}
