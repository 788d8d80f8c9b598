/* SPDX-License-Identifier: Apache-2.0 */
/*
 * metrics.h - the two forms of metrics that monitoring reads. The daemon writes OpenMetrics; programs that know only
 * Prometheus' text format refuse some of its types.
 */
#pragma once

#include "tiering/base/buf.h"

/* text: OpenMetrics, which is changed. Appends the same in the text format, version 0.0.4. Check out->err. */
void ht_exposition_text(char *text, struct ht_buf *out);

enum ht_http_answer { HT_HTTP_METRICS, HT_HTTP_OPENMETRICS, HT_HTTP_INDEX, HT_HTTP_BAD, HT_HTTP_METHOD, HT_HTTP_NONE };
/* What a request asks for, by its head up to the empty line. out_head: HEAD, so no body is sent. */
enum ht_http_answer ht_http_parse(const char *request, bool *out_head);
/* "127.0.0.1:9469", "[::1]:0", ":9469" (loopback). False: it is no address with a port. */
bool ht_http_address(const char *text, char host[64], char port[8]);
