/* SPDX-License-Identifier: Apache-2.0 */
/* A dump lists each chunk that a thread holds once, however many others lie before it. */

#include "tests/unit/tiering/store/fixture.h"
#include "tiering/base/dump.h"
#include "tiering/object/chunk.h"

enum { SMALL = HT_SMALL_CHUNK_BYTES, CHUNKS = 70000 };

static unsigned count(const char *text, const char *line)
{
    unsigned n = 0;

    for (const char *p = strstr(text, line); p; p = strstr(p + 1, line))
        n++;
    return n;
}

TEST(a_held_chunk_is_found_after_many_others)
{
    uint64_t last = CHUNKS / HT_LEAF_CHUNKS * HT_LEAF_CHUNKS;
    struct ht_dump d = {.ids = 0};
    char line[64];

    fresh(256, false);
    struct ht_obj *o = object(SMALL, 0);
    uint8_t *p = pattern(4096, 1);
    for (uint64_t i = 0; i <= last; i += HT_LEAF_CHUNKS) /* a leaf has room for all of its chunks */
        put_all(o, i * SMALL, p, 4096);
    struct ht_batch_pin pin = {.store = s, .count = 2};
    pin.chunk[0] = (struct ht_batch_pin_chunk){.obj = o, .index = 0, .mode = HT_BATCH_PIN_UPDATE};
    pin.chunk[1] = (struct ht_batch_pin_chunk){.obj = o, .index = last, .mode = HT_BATCH_PIN_UPDATE};
    pin_now(&pin);
    ht_store_dump(s, &d);
    ht_buf_put_u8(&d.text, 0);
    ck_assert_uint_eq(count((const char *)d.text.data, "  object "), 2);
    for (unsigned i = 0; i < 2; i++) {
        snprintf(line, sizeof(line), "  object %llu, chunk %llu: exclusive", (unsigned long long)ht_obj_id(o),
                 (unsigned long long)pin.chunk[i].index);
        ck_assert_uint_eq(count((const char *)d.text.data, line), 1);
    }
    unpin(&pin, 0);
    ht_buf_free(&d.text);
}

RUN_TESTS("dump", .teardown = fixture_end)
