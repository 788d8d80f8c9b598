/* SPDX-License-Identifier: Apache-2.0 */
/* lingering.h - a daemon whose mount is gone only in some namespaces reports why it stays. */
#pragma once

/*
 * From now on a thread waits until the mount has left this mount namespace. If the daemon is still needed some seconds
 * later, an event names the process that keeps it, and again some minutes later. Both paths must stay as they are until
 * ht_lingering_end.
 */
void ht_lingering_begin(const char *source, const char *mountpoint);
void ht_lingering_end(void);
