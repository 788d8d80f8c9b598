/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rate.h - how fast a device serves requests of one direction: bytes over busy time, and how long requests take. Pure:
 * the clock is the caller's, and never the wall clock.
 *
 * Busy time is time with at least one request in flight, so idle time lowers no rate. The end of a request adds its
 * bytes and the busy time since the end before to a sample. Samples fade with busy time, by 1/e in HT_RATE_FADE_NS.
 * A request that failed adds its time and no bytes. So a device that completes nothing has the rate 0.
 *
 * Times of requests fade with their number. Failed ones do not count.
 *
 * Not locked: the owner does.
 */
#pragma once

#include "tiering/base/base.h"

#define HT_RATE_FADE_NS UINT64_C(500000000)
#define HT_RATE_KNOWN_BYTES (UINT64_C(16) << 20)    /* a rate is known from here on */
#define HT_RATE_KNOWN_NS UINT64_C(1000000000)       /* or after so much busy time */
#define HT_RATE_SAMPLE_NS UINT64_C(1000000)         /* a sample has at least so much busy time */
#define HT_RATE_SAMPLE_NS_MAX (2 * HT_RATE_FADE_NS) /* a longer sample, of a stall, weighs no more */
#define HT_RATE_LARGE_BYTES (UINT32_C(256) << 10)   /* a request that shows bandwidth */
enum { HT_RATE_BUCKETS = 32, HT_RATE_REQUESTS_MAX = 256 };

struct ht_rate {
    /* What each request changes. Requests that end close to each other make one sample. */
    unsigned in_flight, requests;
    uint64_t in_flight_bytes;
    uint64_t since_ns; /* while requests are in flight: the last end, or the begin of the first of them */
    uint64_t sample_bytes, sample_ns;
    uint64_t requests_ns;
    /* Requests that took less than 1 us << i, and not less than the bucket before: halved at HT_RATE_REQUESTS_MAX. */
    uint16_t bucket[HT_RATE_BUCKETS];
    /* Of all whole samples. */
    double bytes, busy_ns; /* faded */
    uint64_t ended_bytes, ended_ns;
};

/* known false: too little was seen, and the rest is 0. A known rate may be 0: the device completes nothing. */
struct ht_dev_rate {
    bool known;
    uint64_t bytes_per_s;
    uint64_t latency_ns;     /* mean */
    uint64_t latency_p99_ns; /* 99 % of the requests took less; a power of two of microseconds */
};

/* All bytes and all busy time so far, in whole samples; and how long no request has ended though some are in flight. */
struct ht_rate_totals {
    uint64_t bytes, busy_ns, waiting_ns;
};

void ht_rate_begin(struct ht_rate *r, uint64_t now_ns, uint32_t bytes);
/* began_ns: the time of its begin. */
void ht_rate_end(struct ht_rate *r, uint64_t now_ns, uint64_t began_ns, uint32_t bytes, bool succeeded);
/* A request in flight lowers the rate once it takes longer than the rate explains. */
void ht_rate_get(const struct ht_rate *r, uint64_t now_ns, struct ht_dev_rate *out);
void ht_rate_totals(const struct ht_rate *r, uint64_t now_ns, struct ht_rate_totals *out);
