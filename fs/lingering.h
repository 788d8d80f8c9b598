/* SPDX-License-Identifier: Apache-2.0 */
/* lingering.h - a daemon whose mount is gone, but not for everybody, says what it stays for. */
#ifndef HITRAIN_FS_LINGERING_H
#define HITRAIN_FS_LINGERING_H

/*
 * From now on a thread waits for the mount to go. When it has gone from this mount namespace, and the daemon is still needed some seconds
 * later, an event names the process that keeps it, and again some minutes later. Both paths must stay as they are until ht_lingering_end.
 */
void ht_lingering_begin(const char *source, const char *mountpoint);
void ht_lingering_end(void);

#endif
