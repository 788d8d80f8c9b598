/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A sample of e ns multiplies the sums by F / (F + e), which is exp(-e / F) for short samples. Bytes and time of one
 * sample always have the same weight, so a steady device has its exact rate however long its requests take.
 */
#include "tiering/io/rate.h"

#define BYTES_PER_S_MAX 1e18

static uint64_t elapsed(uint64_t from_ns, uint64_t now_ns)
{
    return now_ns > from_ns ? now_ns - from_ns : 0;
}

static double faded(double sum, double ns)
{
    return sum * ((double)HT_RATE_FADE_NS / ((double)HT_RATE_FADE_NS + ns));
}

/* The sample is whole. */
static void fold(struct ht_rate *r)
{
    double ns = (double)r->sample_ns;
    double weight = r->sample_ns > HT_RATE_SAMPLE_NS_MAX ? (double)HT_RATE_SAMPLE_NS_MAX / ns : 1;

    r->bytes = faded(r->bytes, ns) + weight * (double)r->sample_bytes;
    r->busy_ns = faded(r->busy_ns, ns) + weight * ns;
    r->ended_bytes += r->sample_bytes;
    r->ended_ns += r->sample_ns;
    r->sample_bytes = r->sample_ns = 0;
}

static void halve(struct ht_rate *r)
{
    unsigned before = r->requests;

    r->requests = 0;
    for (unsigned i = 0; i < HT_RATE_BUCKETS; i++) {
        r->bucket[i] /= 2;
        r->requests += r->bucket[i];
    }
    r->requests_ns = r->requests_ns / before * r->requests;
}

static void add_latency(struct ht_rate *r, uint64_t ns)
{
    uint64_t us = ns / 1000;
    unsigned i = us ? 64u - (unsigned)__builtin_clzll(us) : 0;

    if (r->requests == HT_RATE_REQUESTS_MAX)
        halve(r);
    r->bucket[ht_min_u64(i, HT_RATE_BUCKETS - 1)]++;
    r->requests++;
    r->requests_ns += ns;
}

void ht_rate_begin(struct ht_rate *r, uint64_t now_ns, uint32_t bytes)
{
    if (r->in_flight++ == 0)
        r->since_ns = now_ns;
    r->in_flight_bytes += bytes;
}

void ht_rate_end(struct ht_rate *r, uint64_t now_ns, uint64_t began_ns, uint32_t bytes, bool succeeded)
{
    assert(r->in_flight > 0 && r->in_flight_bytes >= bytes);
    r->in_flight--;
    r->in_flight_bytes -= bytes;
    r->sample_bytes += succeeded ? bytes : 0;
    r->sample_ns += elapsed(r->since_ns, now_ns);
    if (r->sample_ns >= HT_RATE_SAMPLE_NS)
        fold(r);
    r->since_ns = ht_max_u64(r->since_ns, now_ns);
    if (succeeded)
        add_latency(r, elapsed(began_ns, now_ns));
}

/* ------------------------------------------------------------------ figures */

static double over(double bytes, double ns)
{
    double per_s = bytes / (ns > 1 ? ns : 1) * 1e9;

    return per_s < BYTES_PER_S_MAX ? per_s : BYTES_PER_S_MAX;
}

/* As if everything in flight ended now: the rate cannot be higher. */
static double highest(const struct ht_rate *r, uint64_t since_ns)
{
    double ns = (double)since_ns;

    return over(faded(r->bytes, ns) + (double)r->in_flight_bytes, faded(r->busy_ns, ns) + ns);
}

static uint64_t latency_p99_ns(const struct ht_rate *r)
{
    unsigned wanted = r->requests - r->requests / 100, seen = 0, i = 0;

    if (wanted == 0)
        return 0;
    for (; i < HT_RATE_BUCKETS - 1; i++) {
        seen += r->bucket[i];
        if (seen >= wanted)
            break;
    }
    return UINT64_C(1000) << i;
}

void ht_rate_get(const struct ht_rate *rate, uint64_t now_ns, struct ht_dev_rate *out)
{
    struct ht_rate whole = *rate, *r = &whole;
    uint64_t since_ns = r->in_flight > 0 ? elapsed(r->since_ns, now_ns) : 0;

    fold(r);
    *out = (struct ht_dev_rate){.known = false};
    if (r->ended_bytes < HT_RATE_KNOWN_BYTES && r->ended_ns + since_ns < HT_RATE_KNOWN_NS)
        return;
    double lately = over(r->bytes, r->busy_ns), most = r->in_flight > 0 ? highest(r, since_ns) : lately;
    out->known = true;
    out->bytes_per_s = (uint64_t)(most < lately ? most : lately);
    out->latency_ns = r->requests ? r->requests_ns / r->requests : 0;
    out->latency_p99_ns = latency_p99_ns(r);
}

void ht_rate_totals(const struct ht_rate *r, uint64_t now_ns, struct ht_rate_totals *out)
{
    *out = (struct ht_rate_totals){r->ended_bytes, r->ended_ns, r->in_flight > 0 ? elapsed(r->since_ns, now_ns) : 0};
}
