/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wrap.h - calls of the C library that fail when a test wants it: memory and threads.
 *
 * Programs below tests/unit/faults, and some others (Makefile, failing_calls), are linked so that these calls of the
 * project (not those inside shared libraries) come here first. Production code does not know about it. A test allocates
 * with wrap_pause around it, or before it arms.
 */
#pragma once

#include "tiering/base/base.h"

enum wrap_kind { WRAP_MEMORY, WRAP_THREAD, WRAP_KINDS };

/* The n-th call from now (1 = next) of any thread fails, repeat: all after it, too. 0 disarms. */
void wrap_fail(enum wrap_kind kind, unsigned nth, bool repeat);
/* Has the armed call come? */
bool wrap_reached(enum wrap_kind kind);
/* Calls of this thread do not count nor fail while it is paused. Returns how it was. */
bool wrap_pause(bool paused);
