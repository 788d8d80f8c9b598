/* SPDX-License-Identifier: Apache-2.0 */
/*
 * remote.h - a client of the program that serves a vault (docs/vault-format.md): ranges of segments come into memory.
 *
 *     ht_remote_begin: queued --a slot is free--> sent --answer--> copied --ht_remote_end--> the caller's
 *                        ^                         |
 *                        '-- the program ended, or says "again"     queued or sent at the deadline: -ETIMEDOUT
 *
 * A thread of the client starts the program hitrain-vault-SCHEME at the first need, sends what is queued, and copies
 * what comes into the memory of the caller. A program that ends is started again 1, 2, 4 ... 60 s after its start, and
 * requests under way are sent again. No more than two killed programs that the kernel does not let go exist at a time.
 *
 * Silence: each get has a deadline. The vault is silent from the first deadline that passes, and gets are refused at
 * once. A probe goes to it every 5 s, and the first answer in time ends the silence. A program that keeps a request for
 * twice the timeout is killed.
 *
 * Identity: with a uuid in the configuration no get is sent before a look at the vault's own, and one without its
 * segment is sent again after another look. A vault that is gone or another is named once: gets fail with -ENXIO.
 * A look that ends in an error fails those that wait, with -EIO, and the next get looks again.
 *
 * The program is not trusted: a wrong number, length or result ends it, and its memory never shrinks. What a get brings
 * may still be wrong or old. The caller checks it against a checksum of its own.
 *
 * All functions may be called by any thread, and hold no lock while they wait.
 */
#pragma once

#include "tiering/base/list.h"
#include <hitrain/format.h>

enum {
    HT_REMOTE_SLOTS = 16, /* unless the configuration says more or fewer */
    HT_REMOTE_SLOTS_MAX = 64,
    HT_REMOTE_SLOT_BYTES = 1 << 20,
    HT_REMOTE_TIMEOUT_MS = 30000,
    HT_REMOTE_URL_BYTES = 1024, /* with the NUL */
    HT_REMOTE_WHY_BYTES = 160,
};

struct ht_remote_config {
    const char *url;                         /* as ht_remote_url gives it */
    const char *programs;                    /* the folder of the programs, or NULL: the folder of this program */
    uint32_t timeout_ms, slots, slot_bytes;  /* 0: those above */
    void (*changed)(void *ctx, bool silent); /* or NULL; it may raise an event and takes no other lock */
    const uint8_t *uuid;                     /* 16 bytes, which are copied; NULL: of any vault */
    void (*missing)(void *ctx, const char *url, const char *why); /* with a uuid; the same */
    void *ctx;
};

/* A range of a segment. The caller owns it and its memory, and touches neither between begin and end. */
struct ht_remote_get {
    uint32_t lease, n;      /* the segment seg/LEASE/N */
    uint32_t offset, bytes; /* the range in it; at most the bytes of a slot */
    void *to;
    bool is_ahead; /* nobody waits for it yet */
    /* The client's own. */
    int rc, state;
    bool is_doubted; /* it was missing once */
    uint32_t slot;
    uint64_t begun_ns, not_before_ns;
    struct ht_list link;
};

/* The range that a reference names by a block of device HT_DEVICE_VAULT. */
static inline struct ht_remote_get ht_remote_range(uint64_t block, uint32_t bytes, void *to)
{
    return (struct ht_remote_get){
        .lease = (uint32_t)(block >> (HT_VAULT_SEGMENT_BITS + HT_VAULT_UNIT_BITS)),
        .n = (uint32_t)(block >> HT_VAULT_UNIT_BITS) & ((1u << HT_VAULT_SEGMENT_BITS) - 1),
        .offset = (uint32_t)(block & (HT_VAULT_UNITS - 1)) * HT_BLOCK_BYTES,
        .bytes = bytes,
        .to = to,
    };
}

struct ht_remote_state {
    bool is_silent;
    uint64_t answer_age_ns;              /* of the last answer in time; UINT64_MAX: there was none */
    uint64_t gets, get_bytes;            /* that brought bytes */
    uint64_t timeouts, failures, starts; /* gets without an answer; with an error; programs that were started */
    char why[HT_REMOTE_WHY_BYTES];       /* the last trouble, or an empty text */
};

struct ht_remote;

/*
 * The URL in the form in which programs take it: a path becomes file:///PATH. -EINVAL: neither a URL nor an absolute
 * path. -EPERM: it holds a password or a key, which lists of processes would show. -ENAMETOOLONG.
 */
int ht_remote_url(const char *text, char out_url[HT_REMOTE_URL_BYTES]) HT_MUST_CHECK;

/* Starts nothing. -EINVAL, -EPERM, -ENAMETOOLONG as above, -ENOMEM, or an error of eventfd. */
int ht_remote_new(const struct ht_remote_config *config, struct ht_remote **out_remote) HT_MUST_CHECK;
/* Every get has ended. Ends the program, and returns after 2 s at most. r may be NULL. */
void ht_remote_free(struct ht_remote *r);

/*
 * Begins a get, and waits for nothing. After 0 it must be ended, by any thread, once. -ETIMEDOUT: the vault is silent.
 * -EAGAIN: of a get that is_ahead, as half of the slots are taken. -EINVAL: the range fits no segment or slot. -EIO:
 * the program does not start. -ENOMEM: no thread.
 */
int ht_remote_begin(struct ht_remote *r, struct ht_remote_get *get) HT_MUST_CHECK;
/*
 * Waits until its deadline, which the timeout after its begin is. 0: all bytes are in get->to. -ETIMEDOUT; -ENOENT: no
 * such segment; -ENODATA: it ends before the range does; -ENXIO: the vault is not there; -EIO: the program says another
 * error (ht_remote_state); -EINTR: stop (NULL: nobody), which is asked all the time and takes no lock, said so.
 */
typedef bool ht_remote_stop(void *ctx);
int ht_remote_end(struct ht_remote *r, struct ht_remote_get *get, ht_remote_stop *stop, void *ctx) HT_MUST_CHECK;

/* Looks for the vault soon, and waits for nothing. */
void ht_remote_look(struct ht_remote *r);
void ht_remote_state(struct ht_remote *r, struct ht_remote_state *out_state);
