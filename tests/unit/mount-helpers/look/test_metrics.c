/* SPDX-License-Identifier: Apache-2.0 */
/* The metrics in the text format of Prometheus, and the requests of HTTP clients. */

#include "mount-helpers/look/metrics.h"
#include "tests/support/suite.h"

static const struct {
    const char *open_metrics, *text;
} cases[] = {
    {"", ""},
    {"# EOF\n", ""},
    {"# TYPE a gauge\n# UNIT a bytes\n# HELP a Help of a.\na 1\n", "# TYPE a gauge\n# HELP a Help of a.\na 1\n"},
    {"# TYPE a counter\n# HELP a Help.\na_total{x=\"# TYPE\"} 1\n",
     "# TYPE a_total counter\n# HELP a_total Help.\na_total{x=\"# TYPE\"} 1\n"},
    {"# TYPE a info\n# HELP a Help.\na_info{x=\"1\"} 1\n",
     "# TYPE a_info gauge\n# HELP a_info Help.\na_info{x=\"1\"} 1\n"},
    {"# TYPE a stateset\n# HELP a Help.\na{a=\"1\"} 1\n", "# TYPE a gauge\n# HELP a Help.\na{a=\"1\"} 1\n"},
    {"# TYPE a counter\n# TYPE b gauge\n# HELP b Help.\nb 1\n",
     "# TYPE a_total counter\n# TYPE b gauge\n# HELP b Help.\nb 1\n"},
    {"#\n# TYPE\n# HELP\n# TYPE a\n", ""},
};

TEST_LOOP(text_format, HT_ARRAY_SIZE(cases))
{
    struct ht_buf out = HT_BUF_INIT;
    char *text = strdup(cases[_i].open_metrics);

    ht_exposition_text(text, &out);
    ht_buf_put_u8(&out, 0);
    ck_assert_int_eq(out.err, 0);
    ck_assert_str_eq((char *)out.data, cases[_i].text);
    ht_buf_free(&out);
    free(text);
}

static const struct {
    const char *request;
    enum ht_http_answer answer;
    bool head;
} requests[] = {
    {"GET /metrics HTTP/1.1\r\n\r\n", HT_HTTP_METRICS, false},
    {"GET /metrics?x=1 HTTP/1.0\n\n", HT_HTTP_METRICS, false},
    {"GET /metrics HTTP/1.1\r\naccept: text/plain, application/openmetrics-text;q=1\r\n\r\n", HT_HTTP_OPENMETRICS,
     false},
    {"GET /metrics HTTP/1.1\r\nX: application/openmetrics-text\r\nAccept: */*\r\n\r\n", HT_HTTP_METRICS, false},
    {"HEAD / HTTP/1.1\r\n\r\n", HT_HTTP_INDEX, true},
    {"GET /metrics/.. HTTP/1.1\r\n\r\n", HT_HTTP_NONE, false},
    {"GET /../etc/passwd HTTP/1.1\r\n\r\n", HT_HTTP_NONE, false},
    {"POST /metrics HTTP/1.1\r\n\r\n", HT_HTTP_METHOD, false},
    {"get /metrics HTTP/1.1\r\n\r\n", HT_HTTP_METHOD, false},
    {"GET /metrics\r\n\r\n", HT_HTTP_BAD, false},
    {"GET /metrics HTTP/2\r\n\r\n", HT_HTTP_BAD, false},
    {"\x16\x03\x01 a b\r\n\r\n", HT_HTTP_BAD, false},
    {"", HT_HTTP_BAD, false},
    {"\r\n\r\n", HT_HTTP_BAD, false},
};

TEST_LOOP(http_requests, HT_ARRAY_SIZE(requests))
{
    bool head;

    ck_assert_int_eq(ht_http_parse(requests[_i].request, &head), requests[_i].answer);
    ck_assert_int_eq(head, requests[_i].head);
}

static const struct {
    const char *text, *host, *port; /* host NULL: refused */
} addresses[] = {
    {"127.0.0.1:9469", "127.0.0.1", "9469"},
    {":9469", "127.0.0.1", "9469"},
    {"[::1]:0", "::1", "0"},
    {"localhost:65535", "localhost", "65535"},
    {"localhost:65536", NULL, NULL},
    {"localhost:", NULL, NULL},
    {"localhost", NULL, NULL},
    {"9469", NULL, NULL},
    {"::1:9469", NULL, NULL},
    {"a:-1", NULL, NULL},
    {"a:1x", NULL, NULL},
    {"a:123456", NULL, NULL},
    {"", NULL, NULL},
    {":", NULL, NULL},
    {"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa:1", NULL, NULL},
};

TEST_LOOP(listen_addresses, HT_ARRAY_SIZE(addresses))
{
    char host[64], port[8];
    bool ok = ht_http_address(addresses[_i].text, host, port);

    ck_assert_int_eq(ok, addresses[_i].host != NULL);
    if (ok) {
        ck_assert_str_eq(host, addresses[_i].host);
        ck_assert_str_eq(port, addresses[_i].port);
    }
}

RUN_TESTS("exposition")
