/* What a build says of itself when it is loaded: Python of another version must not call it. */

#pragma once

#include <stdint.h>

/* A function takes a struct of so many bytes, whose fields are named so: `layout_of` of ops/runtime/cpu.py. */
#define LAYOUT(function, type, fields)                                                                                 \
    const int64_t function##_size = sizeof(type);                                                                      \
    const uint32_t function##_fields = fields;
