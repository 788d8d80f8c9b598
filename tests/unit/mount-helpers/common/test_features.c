/* SPDX-License-Identifier: Apache-2.0 */
/* Each feature bit that programs know has one name. */
#include <hitrain/format.h>

#include "mount-helpers/common/features.h"
#include "tests/support/suite.h"

#define ROW(effect, bit, name, since, text) {HT_FEATURE_##effect, UINT64_C(1) << (bit), name, since, text},
static const struct ht_feature features[] = {HT_FEATURES(ROW)};
#undef ROW

TEST(each_known_bit_has_one_row)
{
    uint64_t named[HT_FEATURE_EFFECTS] = {0};

    for (unsigned i = 0; i < HT_ARRAY_SIZE(features); i++) {
        const struct ht_feature *f = &features[i];
        ck_assert_int_eq(__builtin_popcountll(f->bit), 1);
        ck_assert(!(named[f->effect] & f->bit));
        named[f->effect] |= f->bit;
        ck_assert_str_eq(ht_feature_of(f->effect, f->bit)->name, f->name);
        for (unsigned k = 0; k < i; k++)
            ck_assert_str_ne(features[k].name, f->name);
    }
    ck_assert_uint_eq(named[HT_FEATURE_REFUSES], HT_FEAT_REFUSE_KNOWN);
    ck_assert_uint_eq(named[HT_FEATURE_READS], HT_FEAT_RO_KNOWN);
    ck_assert_ptr_null(ht_feature_of(HT_FEATURE_REFUSES, UINT64_C(1) << 63));
}

RUN_TESTS("features")
