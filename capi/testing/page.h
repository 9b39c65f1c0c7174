/* Structs where nothing may be read or written behind them: they end where a page ends, and the next
 * page is nobody's. What goes beyond the struct_size that a caller gave ends the program there.
 *
 *   const swv_call_options filled = SWV_CALL_OPTIONS_INIT;
 *   swv_call_options* options = AT_END_OF_PAGE(swv_call_options, filled);
 */
#ifndef SHARDWEAVE_CAPI_TESTING_PAGE_H_
#define SHARDWEAVE_CAPI_TESTING_PAGE_H_

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* `size` bytes, as `from`, and at most 7 behind them, so that members are aligned; never freed. */
static inline void* at_end_of_page(const void* from, size_t size) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (size + 7) / 8 * 8;
  char* const memory =
      (char*)mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == (char*)MAP_FAILED || mprotect(memory + page, page, PROT_NONE) != 0) abort();
  return memcpy(memory + page - room, from, size);
}

/* As much as struct_size says; and structs without one. */
#define AT_END_OF_PAGE(type, value) ((type*)at_end_of_page(&(value), (value).struct_size))
#define WHOLE_AT_END_OF_PAGE(type, value) ((type*)at_end_of_page(&(value), sizeof(value)))

#endif /* SHARDWEAVE_CAPI_TESTING_PAGE_H_ */
