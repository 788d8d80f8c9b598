/* SPDX-License-Identifier: Apache-2.0 */
/* test_encode_policy.c - writers compress where the device is slower than the codec and a processor is idle. */
#include "tests/support/suite.h"
#include "tiering/tier/encode_policy.h"

#define MB UINT64_C(1000000)

static const struct {
    struct ht_encode_look look;
    bool worth;
} cases[] = {
    {{false, 0, 800 * MB, 200, 0}, false},         /* no device was measured */
    {{true, 300 * MB, 800 * MB, 200, 0}, true},    /* slow device, idle processors */
    {{true, 300 * MB, 800 * MB, 99, 0}, false},    /* no whole processor is idle */
    {{true, 300 * MB, 800 * MB, 0, 0}, false},     /* all are busy */
    {{true, 300 * MB, 800 * MB, 20, 80}, true},    /* the work itself keeps one busy */
    {{true, 300 * MB, 800 * MB, 10, 80}, false},   /* and others need the rest */
    {{true, 3000 * MB, 800 * MB, 1600, 0}, false}, /* fast device */
    {{true, 800 * MB, 800 * MB, 1600, 0}, false},  /* as fast as the codec */
    {{true, 640 * MB, 800 * MB, 100, 0}, true},    /* by 5 to 4 */
    {{true, 645 * MB, 800 * MB, 100, 0}, false},   /* not quite */
    {{true, 3000 * MB, 0, 200, 0}, true},          /* the codec has to be measured once */
    {{true, 0, 800 * MB, 200, 0}, true},           /* a device that completes nothing */
    {{true, UINT64_MAX, 800 * MB, 200, 0}, false},
    {{true, 300 * MB, UINT64_MAX, 200, 0}, true},
    {{true, 300 * MB, 800 * MB, 200, 0, 2 * HT_ENCODE_LOOK_NS}, true},
    {{true, 300 * MB, 800 * MB, 200, 0, 2 * HT_ENCODE_LOOK_NS + 1}, false}, /* most of that was a pause */
};

TEST(the_slower_of_both_decides)
{
    for (unsigned i = 0; i < HT_ARRAY_SIZE(cases); i++)
        ck_assert_msg(ht_encode_is_worth(&cases[i].look) == cases[i].worth, "case %u", i);
}

/* Chunks of which each tried one saves too little: how many are tried? */
static unsigned tried_of(struct ht_encode_vain *v, unsigned chunks)
{
    unsigned tried = 0;

    for (unsigned i = 0; i < chunks; i++) {
        if (!ht_encode_tries(v))
            continue;
        ht_encode_tried(v, false);
        tried++;
    }
    return tried;
}

TEST(content_that_saves_nothing_is_tried_less_and_less)
{
    struct ht_encode_vain v = {0};

    ck_assert_uint_le(tried_of(&v, 1000), 21);
    ck_assert_uint_eq(tried_of(&v, 65 * 10), 10); /* and never given up */
    while (!ht_encode_tries(&v))
        continue;
    ht_encode_tried(&v, true);
    for (unsigned i = 0; i < 10; i++) {
        ck_assert(ht_encode_tries(&v));
        ht_encode_tried(&v, true);
    }
}

RUN_TESTS("tier")
