/* requests/schema.h: the kinds of rows that the schemas of this folder (<capability>.def) consist of.
 *
 * Each file in requests/passes, isolation/passes and python/passes is one pass over a schema: it defines the kinds that
 * it needs and includes the schema, named by the macro MP_SCHEMA. The generated code becomes a part of the hand-written
 * struct or function that includes the pass; logic that no row can express follows it there.
 * `python csrc/models/requests/expand.py text_embedding` prints the generated C. The order of the rows is the order of
 * the arguments in Python, and of the fields in a message. A row's comment is to its right.
 *
 * Inputs: members of the struct of arguments and of the request; checked, copied, freed, sent, parsed. `keyword` is the
 * name in Python, `name` the one in messages.
 *   MP_COUNT(type, field, low, high, name)                         number of entries; no argument in Python: it is the
 *                                                                  length of the arrays that name it, which must agree
 *   MP_INT(type, field, keyword, low, high, default, name)         integer
 *   MP_REAL(type, field, keyword, low, high, default, name)        floating point; NaN violates all bounds
 *   MP_WORD(field, keyword)                                        any 64 bits
 *   MP_FLAG(field, keyword)                                        bool, false by default
 *   MP_ARRAY(type, field, times, count, plus, low, high, name)     times * count + plus items, each within the bounds
 *   MP_LIST(...)                                                   likewise, from a Python sequence of numbers
 *   MP_OPTIONAL(...)                                               likewise, from an array or None; NULL = none
 *   MP_STRINGS(field, lengths, count, high, name)                  `count` strings of 1 to `high` bytes
 *   MP_GRID(type, field, used, rows, columns, counts, high, name)  field[rows][columns]: `counts[column]` items or NULL
 *   MP_STRUCT(type, field)                                         a struct with a schema of its own, without pointers
 * Arguments only:
 *   MP_OPTION(field)                                               bool from Python; not sent to worker processes
 *   MP_ARGUMENT(type, field)                                       read by hand-written code
 *   MP_PYTHON(marks)                                               "|" and "$" of PyArg_ParseTupleAndKeywords: rows
 *                                                                  after "|" are optional, after "$" keywords only.
 *                                                                  Every schema of a capability needs both, because
 *                                                                  the options of submit follow
 * Request only:
 *   MP_DERIVED(type, field)                                        array made from inputs by hand-written code; freed
 *   MP_FACT(type, field)                                           filled in by the engine's check before queueing
 *   MP_OUTPUT(type, field, when, rows, columns, low, high, text)   [rows, columns] items, allocated if `when`; items
 *                                                                  out of bounds that a worker process returns are
 *                                                                  refused with `text`
 *   MP_PROGRESS(field)                                             _Atomic int32_t: complete results; never decreases
 *
 * The compiler refuses a lower bound above its upper bound, a bound outside the field's type, a default outside
 * the bounds, and a length whose count is missing or no integer. */
#ifndef MP_MODELS_REQUESTS_SCHEMA_H
#define MP_MODELS_REQUESTS_SCHEMA_H

#include <float.h>
#include <math.h>
#include <stdint.h>

/* Number of items of an array in the struct that `from` points to. */
#define MP_ITEMS(from, times, count, plus) ((size_t)(times) * (size_t)(from)->count + (size_t)(plus))

/* Compile-time check of bounds that may be floating. Clang accepts such constants in initialisers only. */
#ifdef __clang__
#define MP_ASSERT_BOUNDS(holds, text)                      \
    {                                                      \
        static const int refused = 1 / ((holds) ? 1 : 0);  \
        (void)refused;                                     \
    }
#else
#define MP_ASSERT_BOUNDS(holds, text) _Static_assert(holds, text);
#endif

/* True if the bound is a value of the items' type. */
#define MP_ITEM_BOUND_float(bound)   1
#define MP_ITEM_BOUND_uint8_t(bound) ((uint8_t)(bound) == (bound))
#define MP_ITEM_BOUND_int32_t(bound) ((int32_t)(bound) == (bound))
#define MP_ITEM_BOUND_int64_t(bound) ((int64_t)(bound) == (bound))

#endif
