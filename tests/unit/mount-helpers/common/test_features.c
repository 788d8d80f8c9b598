/* SPDX-License-Identifier: Apache-2.0 */
/* Each feature bit that programs know has one name. */
#include <hitrain/format.h>

#include "mount-helpers/common/features.h"
#include "tests/support/suite.h"

TEST(each_known_bit_has_one_row)
{
    uint64_t named[HT_FEATURE_EFFECTS] = {0};

    for (unsigned i = 0; i < ht_feature_count; i++) {
        const struct ht_feature *f = &ht_features[i];
        ck_assert_int_eq(__builtin_popcountll(f->bit), 1);
        ck_assert(!(named[f->effect] & f->bit));
        named[f->effect] |= f->bit;
        ck_assert_ptr_eq(ht_feature_of(f->effect, f->bit), f);
        for (unsigned k = 0; k < i; k++)
            ck_assert_str_ne(ht_features[k].name, f->name);
    }
    ck_assert_uint_eq(named[HT_FEATURE_REFUSES], HT_FEAT_REFUSE_KNOWN);
    ck_assert_uint_eq(named[HT_FEATURE_READS], HT_FEAT_RO_KNOWN);
    ck_assert_ptr_null(ht_feature_of(HT_FEATURE_REFUSES, UINT64_C(1) << 63));
}

RUN_TESTS("features")
