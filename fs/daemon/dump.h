/* SPDX-License-Identifier: Apache-2.0 */
/* dump.h - a thread that answers `hitrainctl dump`, whatever hangs. */
#pragma once

#include "fs/fuse/session.h"

/* What a dump is about. Must stay as it is until ht_dump_server_end. */
struct ht_dump_server {
    const char *source, *point;
    struct ht_fuse *fuse;
    struct ht_ctl *ctl;
};

/*
 * From now on root may connect to the abstract socket HT_DUMP_SOCKET of this mount and gets a text, of which the last
 * line is HT_DUMP_END. Without the socket or the thread a mount works as ever; a warning says why.
 */
void ht_dump_server_begin(const struct ht_dump_server *server);
/* Does not wait for a client. */
void ht_dump_server_end(void);
