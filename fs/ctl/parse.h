/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parse.h - texts that clients write: values of attributes and lines of .hitrain/ctl. Pure functions: no state, any
 * thread, nothing trusted. Texts have a length and need no NUL; a NUL inside one is never valid.
 */
#pragma once

#include "tiering/base/base.h"
#include <hitrain/limits.h>
#include <hitrain/words.h>

enum { HT_CTL_ERROR_MAX = 256, HT_CLAIM_NAME_MAX = 64 };

/* A number in decimal digits, nothing else. -EINVAL, -ERANGE. */
int ht_parse_u64(const char *text, size_t len, uint64_t *out) HT_MUST_CHECK;

/* A size as ht_parse_size reads it. -EINVAL, -ERANGE. */
int ht_parse_bytes(const char *text, size_t len, uint64_t *out) HT_MUST_CHECK;

/*
 * Seconds from now with or without a fraction, as nanoseconds; never: UINT64_MAX. -EINVAL; -ERANGE: 0, or more than
 * HT_NEXT_USE_S_MAX.
 */
enum { HT_NEXT_USE_S_MAX = 1000000 };
int ht_parse_next_use(const char *text, size_t len, uint64_t *out_after_ns) HT_MUST_CHECK;

/* NULL: no such dtype. */
const struct ht_dtype_word *ht_parse_dtype(const char *text, size_t len);

struct ht_shape {
    unsigned count; /* 0: a scalar */
    uint64_t dim[HT_SHAPE_DIMS_MAX];
    uint64_t elements;
};
#define HT_SHAPE_SCALAR "scalar"
/*
 * "1024,768", or the word for no dimensions, as the empty text. -EINVAL; -ERANGE: more elements than a file may hold.
 */
int ht_parse_shape(const char *text, size_t len, struct ht_shape *out) HT_MUST_CHECK;

/*
 * The attribute members: a line for each parameter that lies in one file, "OFFSET SHAPE NAME", one after the other from
 * element 0 on. -EINVAL, or -ERANGE for a number that is too large.
 */
int ht_parse_members(const char *text, size_t len, uint64_t *out_elements) HT_MUST_CHECK;

enum ht_command_id {
    HT_COMMAND_NONE, /* an empty line */
    HT_COMMAND_APPLY,
    HT_COMMAND_WAIT,
    HT_COMMAND_STEP,
    HT_COMMAND_COMMIT,
    HT_COMMAND_ABORT,
    HT_COMMAND_RESET,
    HT_COMMAND_DROP,
    HT_COMMAND_PREFETCH,
    HT_COMMAND_EVICT,
    HT_COMMAND_SCRUB,
    HT_COMMAND_TRIM,
    HT_COMMAND_BACKGROUND,
    HT_COMMAND_CLAIM,
    HT_COMMAND_UNCLAIM,
    HT_COMMAND_SNAPSHOT,
    HT_COMMAND_FORGET,
    HT_COMMAND_CLONE,
    HT_COMMAND_ROLLBACK,
    HT_COMMAND_DECIDE,
    HT_COMMAND_PREPARE,
    HT_COMMAND_HOLD,
    HT_COMMAND_ARCHIVED,
    HT_COMMAND_VAULT,
    HT_COMMAND_COLD,
    HT_COMMAND_RECALL,
};
enum { HT_DECISION_BYTES = 72 };
struct ht_command {
    enum ht_command_id id;
    const char *word; /* its name, a text that stays */
    const char *path; /* the argument, inside the line; path_len 0: none */
    size_t path_len;
    uint64_t inside;  /* of a clone: the inode of the directory of its name; 0: whichever the path leads to */
    bool async;       /* of a step */
    bool full;        /* of a commit */
    bool ortho;       /* of apply: the orthogonalised update of the path */
    bool conditional; /* "if=N" was given, and N */
    uint64_t step_open;
    uint8_t numbers[HT_DECISION_BYTES]; /* of a decision; of a vault its uuid */
    /* Of a claim; an engine; a kept step, or "*", and its job. Each may be empty. */
    char name[HT_CLAIM_NAME_MAX + 1], takeover[HT_CLAIM_NAME_MAX + 1];
};
/* Is there a line among these whose command waits for its turn on a root? */
bool ht_parse_takes_turn(const char *text, size_t len);
/* One line without its newline. -EINVAL with a message in err. */
int ht_parse_command(const char *line, size_t len, struct ht_command *out, char err[HT_CTL_ERROR_MAX]) HT_MUST_CHECK;

/*
 * Cuts the next component off a relative path, and skips slashes. 1: *name is NUL-terminated; 0: the end; -EINVAL:
 * empty, "." or ".." or a NUL; -ENAMETOOLONG.
 */
int ht_parse_component(const char **path, size_t *len, char name[HT_NAME_BYTES_MAX + 1]) HT_MUST_CHECK;
