/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json.h - write JSON to a stream at once, without building it in memory first.
 *
 * Strings may hold any bytes, as file names do. A byte XX that is not part of a UTF-8 character becomes \udcXX. Python
 * calls this "surrogateescape": os.fsencode() of the parsed text returns the bytes.
 */
#pragma once

#include "tiering/base/base.h"

enum { HT_JSON_DEPTH_MAX = 8 };

struct ht_json {
    FILE *to;
    unsigned depth;
    bool lines; /* each outermost value stands on one line */
    struct {
        char close;    /* the character that ends this level */
        bool any;      /* it has a value already */
        bool one_line; /* objects in an array stand on one line each */
    } level[HT_JSON_DEPTH_MAX];
};

/* key: NULL inside an array and for the outermost value. */
void ht_json_init(struct ht_json *j, FILE *to);
/* For streams: each outermost value on a line of its own. */
void ht_json_init_lines(struct ht_json *j, FILE *to);
void ht_json_object(struct ht_json *j, const char *key);
void ht_json_array(struct ht_json *j, const char *key);
/* Closes the innermost object or array. */
void ht_json_end(struct ht_json *j);
void ht_json_str(struct ht_json *j, const char *key, const char *text);
void ht_json_u64(struct ht_json *j, const char *key, uint64_t value);
void ht_json_bool(struct ht_json *j, const char *key, bool value);
/* A number if text is one by JSON's grammar, else a string. */
void ht_json_word(struct ht_json *j, const char *key, const char *text);
