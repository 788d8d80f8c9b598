/* SPDX-License-Identifier: Apache-2.0 */
/*
 * encode_policy.h - does a thread that writes content compress it at once? Pure: measurements are the caller's.
 *
 * It does where the devices are slower than the codec, and a processor is idle. Then the device is the limit, and fewer
 * bytes take less time. Otherwise the bytes are written as they are, and compression in the background comes to them.
 */
#pragma once

#include "tiering/base/base.h"

#define HT_ENCODE_LOOK_NS UINT64_C(250000000) /* between looks, while content is written */

struct ht_encode_look {
    bool device_known;           /* its rate was measured */
    uint64_t device_bytes_per_s; /* writes of all devices together */
    uint64_t codec_bytes_per_s;  /* content that one processor encodes; 0: not measured lately */
    unsigned idle_percent;       /* of one processor: 150 are one and a half that were idle */
    unsigned encoding_percent;   /* that encoding itself has used then */
    uint64_t ns;                 /* since the look before */
};

/* After a pause processors were idle because nothing was written. Then only the next look says something. */
bool ht_encode_is_worth(const struct ht_encode_look *l);

/* Content that saved too little: more of that kind is likely to follow. Zeros: none was seen. */
struct ht_encode_vain {
    unsigned in_a_row, skip;
};
enum { HT_ENCODE_SKIP_MAX = 64 };

/* Is the next chunk tried? After n in a row that saved too little, 2^n are left out, and at most HT_ENCODE_SKIP_MAX. */
bool ht_encode_tries(struct ht_encode_vain *v);
void ht_encode_tried(struct ht_encode_vain *v, bool saved);
