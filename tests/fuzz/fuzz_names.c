/* SPDX-License-Identifier: Apache-2.0 */
/* Records of names: the first byte is the type; a record that decodes encodes to the same bytes. */
#include "fs/ns/records.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ht_ns_record r;
    struct ht_buf group = HT_BUF_INIT;

    if (size < 1)
        return -1;
    uint16_t type = (uint16_t)(HT_REC_NS_FIRST + data[0] % 16);
    if (ht_ns_record_decode(type, data + 1, (uint32_t)size - 1, &r))
        return 0;
    ht_ns_record_encode(&group, &r);
    MUST(!group.err && group.len == HT_RECORD_HEADER_BYTES + size - 1);
    MUST(!memcmp(group.data + HT_RECORD_HEADER_BYTES, data + 1, size - 1));
    ht_buf_free(&group);
    return 0;
}
