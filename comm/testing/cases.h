// What the *_cases.cc share.
#pragma once

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "shardweave/comm/testing/conformance.h"
#include "shardweave/comm/testing/values.h"

// In a rank's body: ends it with the error.
#define SHARDWEAVE_RETURN_IF_ERROR(expression)                                        \
  do {                                                                                \
    if (absl::Status status_of_expression = (expression); !status_of_expression.ok()) \
      return status_of_expression;                                                    \
  } while (false)
