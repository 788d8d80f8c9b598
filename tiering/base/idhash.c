/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/base/idhash.h"

#include <stdbool.h>

#include "tiering/base/base.h"

struct ht_id_hash_seed ht_id_hash_seed;

static bool fixed;

void ht_id_hash_fix(void)
{
    fixed = true;
    ht_id_hash_seed = (struct ht_id_hash_seed){0, {0x9e3779b97f4a7c15ull, 0xff51afd7ed558ccdull}};
}

void ht_id_hash_draw(void)
{
    uint64_t words[3];

    if (ht_random(words, sizeof(words)) != 0) /* no such call: where the kernel put us, and when */
        for (unsigned i = 0; i < HT_ARRAY_SIZE(words); i++)
            words[i] = (ht_now_ns() + i + (uintptr_t)&words) * 0x9e3779b97f4a7c15ull;
    ht_id_hash_seed = (struct ht_id_hash_seed){words[0], {words[1] | 1, words[2] | 1}};
}

__attribute__((constructor)) static void draw_before_main(void)
{
    if (!fixed)
        ht_id_hash_draw();
}
