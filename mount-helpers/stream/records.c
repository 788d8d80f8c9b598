/* SPDX-License-Identifier: Apache-2.0 */
/* records.c - see records.h. Nothing that is read is believed before it was checked. */
#include "mount-helpers/stream/records.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

int ht_records_put_bytes(struct ht_records_out *w, const void *data, size_t len)
{
    return w->put && len ? w->put(w->ctx, data, len) : 0;
}

int ht_records_put(struct ht_records_out *w, unsigned type, uint64_t place, const struct ht_hash128 *sum,
                   const void *payload, size_t len)
{
    uint8_t head[HT_RECORDS_HEAD_BYTES] = {0};
    int rc;

    ht_le32_store(head, type);
    ht_le32_store(head + 4, (uint32_t)len);
    ht_le64_store(head + 8, w->number++);
    ht_le64_store(head + 16, place);
    memcpy(head + 24, sum->byte, sizeof(sum->byte));
    ht_le64_store(head + 40, ht_hash64(head, 40, 0));
    rc = ht_records_put_bytes(w, head, sizeof(head));
    return rc < 0 ? rc : ht_records_put_bytes(w, payload, len);
}

int ht_records_put_payload(struct ht_records_out *w, unsigned type, uint64_t place)
{
    struct ht_hash128 sum;

    if (w->payload.err)
        return w->payload.err;
    sum = ht_hash128(w->payload.data, w->payload.len);
    return ht_records_put(w, type, place, &sum, w->payload.data, w->payload.len);
}

int ht_records_fail(struct ht_records_in *r, int rc, const char *fmt, ...)
{
    int n = snprintf(r->why, sizeof(r->why), "at byte %llu of the stream", (unsigned long long)r->at);
    va_list args;

    if (r->after && r->after[0] != '\0')
        n += snprintf(r->why + n, sizeof(r->why) - (size_t)n, ", after %.120s", r->after);
    n += snprintf(r->why + n, sizeof(r->why) - (size_t)n, ": ");
    va_start(args, fmt);
    vsnprintf(r->why + n, sizeof(r->why) - (size_t)n, fmt, args);
    va_end(args);
    for (char *p = r->why; *p != '\0'; p++)
        if ((unsigned char)*p < ' ' || (unsigned char)*p == 127)
            *p = '?';
    return rc;
}

/* All len bytes. */
static int get(struct ht_records_in *r, uint8_t *to, size_t len)
{
    size_t done = 0;

    while (done < len) {
        ssize_t n = r->get(r->ctx, to + done, len - done);
        if (n < 0)
            return ht_records_fail(r, (int)n, "cannot read: %s", strerror((int)-n));
        if (n == 0) {
            r->at += done;
            return ht_records_fail(r, r->cut, "the stream is cut: its end mark is missing");
        }
        done += (size_t)n;
    }
    r->at += len;
    return 0;
}

int ht_records_begin(struct ht_records_in *r, size_t payload_max, uint8_t *header, size_t len)
{
    r->payload_max = payload_max;
    r->payload = malloc(payload_max);
    return r->payload ? get(r, header, len) : ht_records_fail(r, -ENOMEM, "not enough memory");
}

int ht_records_get(struct ht_records_in *r, struct ht_records_head *out)
{
    uint8_t head[HT_RECORDS_HEAD_BYTES];
    size_t len;
    int rc = get(r, head, sizeof(head));

    if (rc < 0)
        return rc;
    len = ht_le32_load(head + 4);
    if (ht_le64_load(head + 40) != ht_hash64(head, 40, 0))
        return ht_records_fail(r, -EPROTO, "a record is damaged");
    if (ht_le64_load(head + 8) != r->number)
        return ht_records_fail(r, -EPROTO, "record %llu comes in the place of record %llu",
                               (unsigned long long)ht_le64_load(head + 8), (unsigned long long)r->number);
    if (len > r->payload_max || head[2] || head[3])
        return ht_records_fail(r, -EPROTO, "a record has an impossible size");
    rc = get(r, r->payload, len);
    if (rc < 0)
        return rc;
    *out = (struct ht_records_head){.type = head[0] | (unsigned)head[1] << 8,
                                    .place = ht_le64_load(head + 16),
                                    .sum = ht_hash128(r->payload, len),
                                    .len = len};
    if (memcmp(out->sum.byte, head + 24, sizeof(out->sum.byte)) != 0)
        return ht_records_fail(r, -EPROTO, "%zu bytes before it do not match their checksum", len);
    r->number++;
    return 0;
}

void ht_records_in_free(struct ht_records_in *r)
{
    free(r->payload);
    r->payload = NULL;
}
