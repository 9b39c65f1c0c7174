// A library that has none of NVIDIA's functions.
extern "C" int of_no_use() {
  return 0;
}
