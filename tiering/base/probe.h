/* SPDX-License-Identifier: Apache-2.0 */
/*
 * probe.h - places where bpftrace and perf may look at a running daemon (USDT). CONTRIBUTING.md has a table of them.
 *
 * A probe is one instruction that does nothing until a program attaches to it. A build without <sys/sdt.h> (package
 * systemtap-sdt-dev) has no probes. Arguments are integers and pointers; a bit-field needs a cast.
 */
#pragma once

#if __has_include(<sys/sdt.h>)
#include <sys/sdt.h>
#define HT_PROBE1(name, a) DTRACE_PROBE1(hitrain, name, a)
#define HT_PROBE2(name, a, b) DTRACE_PROBE2(hitrain, name, a, b)
#define HT_PROBE3(name, a, b, c) DTRACE_PROBE3(hitrain, name, a, b, c)
#else
#define HT_PROBE1(name, a) ((void)(a))
#define HT_PROBE2(name, a, b) ((void)(a), (void)(b))
#define HT_PROBE3(name, a, b, c) ((void)(a), (void)(b), (void)(c))
#endif
