/* SPDX-License-Identifier: Apache-2.0 */
/* checksum.c - of stored bytes. chunk_io.c computes it before each write and verifies it after each read. */
#include "tiering/data/checksum.h"
#include "tiering/base/fault.h"
#include "tiering/base/hash.h"
#include "tiering/base/mutant.h"
#include "tiering/api/check.h"
#include "tiering/object/context.h"

uint64_t ht_store_checksum(const struct ht_store *s, const void *stored, size_t len)
{
    return ht_hash64(stored, len, s->layout.salt);
}

bool ht_ref_has_checksum_of(const struct ht_ref *ref, uint32_t bytes)
{
    return ref->codec == HT_CODEC_RAW && ref->stored == bytes;
}

bool ht_ref_matches(const struct ht_store *s, const struct ht_ref *ref, const void *stored)
{
    return ht_store_checksum(s, stored, ref->stored) == ref->checksum;
}

int ht_ref_verify(const struct ht_store *s, const struct ht_ref *ref, const void *stored)
{
    if ((ht_ref_matches(s, ref, stored) && !ht_fault(HT_FAULT_STORE_CHECKSUM)) || HT_MUTANT("chunk-checksum"))
        return 0;
    return -EUCLEAN;
}
