/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fsck.h - the common state of the passes of hitrain-fsck.
 *
 *   1 superblocks  pass_super.c    every copy on every device, by itself
 *   2 log          pass_log.c      both copies; then the store is opened by the daemon's own replay, read-only
 *   3 names        pass_optim.c    directories, links, attributes
 *   4 optimizer    pass_optim.c    model roots, parameters and their state belong together
 *   5 references   pass_refs.c     where stored chunks lie: inside the devices, apart from each other, with an owner
 *   6 tensors      pass_tensors.c  every stored chunk is read and its checksum verified
 *   - repair         repair.c        the noted repairs, through the store's own transactions
 *
 * A pass reports problems through ht_fsck_problem, notes repairs, and goes on. It returns a negative errno only if it
 * cannot go on. One thread. fsck writes copies of the superblock anew at once; it changes nothing else before all
 * passes have ended.
 */
#pragma once

#include "mount-helpers/common/text.h"
#include "tiering/base/log.h"
#include "tiering/sys/ticker.h"
#include "tiering/io/dev.h"
#include "tiering/space/alloc.h"
#include "tiering/space/super.h"
#include "tiering/api/store.h"
#include "optim/optim.h"
#include "fs/ns/ns.h"
#include "fs/participants/participants.h"
#include "tiering/base/json.h"

/* Exit codes, as e2fsck's; 4 and 8 may come together. */
enum { HT_FSCK_CLEAN = 0, HT_FSCK_CORRECTED = 1, HT_FSCK_LEFT = 4, HT_FSCK_FAILED = 8, HT_FSCK_USAGE = 16 };

enum { HT_FSCK_PATH_MAX = 4200 };
/* Problems of one code that are lines; the others are one more. */
enum { HT_FSCK_LINES_MAX = 1000 };
/* --json with repair keeps problems until the end: some 50,000, or 2,000 with the longest of paths. */
enum { HT_FSCK_REPORTED_BYTES_MAX = 16 << 20 };

/* ---------------------------------------------------------------- problems */

/*
 * P(identifier, code, consent, part, repair): the consent that the repair needs, what a no means for the others
 * (report.c), and the text.
 */
#define HT_FSCK_PROBLEMS(P)                                                                                     \
    P(SB_READ, "SB-READ", SAFE, COPY, "write it anew from a valid copy")                                        \
    P(SB_MAGIC, "SB-MAGIC", SAFE, COPY, "write it anew from a valid copy")                                      \
    P(SB_CSUM, "SB-CSUM", SAFE, COPY, "write it anew from a valid copy")                                        \
    P(SB_VERSION, "SB-VERSION", ASK, COPY, "write it anew from a valid copy")                                   \
    P(SB_FIELD, "SB-FIELD", SAFE, COPY, "write it anew from a valid copy")                                      \
    P(SB_OTHER, "SB-OTHER", SAFE, COPY, "write it anew from the newest copy")                                   \
    P(SB_NONE, "SB-NONE", ASK, COPY, "write it anew from the other devices of the store")                       \
    P(SB_SHORT, "SB-SHORT", BY_HAND, STORE, "give the device its size again")                                   \
    P(SB_FEATURE, "SB-FEATURE", BY_HAND, STORE, "use the version of hitrain that wrote it")                     \
    P(LOG_FRAME, "LOG-FRAME", SAFE, MARK, "write it anew from the other copy")                                  \
    P(LOG_READ, "LOG-READ", SAFE, MARK, "write it anew from the other copy")                                    \
    P(LOG_ALL, "LOG-ALL", ASK, STORE, "end the log before the damage")                                          \
    P(LOG_FORK, "LOG-FORK", ASK, STORE, "keep the newer copy, and write the other anew from it")                \
    P(LOG_TYPE, "LOG-TYPE", BY_HAND, STORE, "use the version of hitrain that wrote them")                       \
    P(LOG_RECORD, "LOG-RECORD", ASK, STORE, "leave them out")                                                   \
    P(LOG_FULL, "LOG-FULL", BY_HAND, STORE, "mount it with -o ro and copy what it holds to a new store")        \
    P(LOG_MEMORY, "LOG-MEMORY", BY_HAND, STORE,                                                                 \
      "restore the store from a copy, or copy what it holds with the version that wrote it")                    \
    P(NS_ROOT, "NS-ROOT", SAFE, STORE, "make a new one with the same names in it")                              \
    P(NS_PARENT, "NS-PARENT", SAFE, STORE, "drop it; a file without another name goes to lost+found")           \
    P(NS_DANGLING, "NS-DANGLING", SAFE, STORE, "drop it")                                                       \
    P(NS_DIRECTORY_NAMES, "NS-DIRECTORY-NAMES", SAFE, STORE, "drop it")                                         \
    P(NS_LINKS, "NS-LINKS", SAFE, STORE, "drop it")                                                             \
    P(NS_ATTRIBUTES, "NS-ATTRIBUTES", SAFE, STORE, "drop them")                                                 \
    P(NS_TARGET, "NS-TARGET", SAFE, STORE, "make it point to (lost)")                                           \
    P(NS_NESTED_ROOT, "NS-NESTED-ROOT", SAFE, STORE, "make the lower one an ordinary directory")                \
    P(NS_LINK_ACROSS_ROOT, "NS-LINK-ACROSS-ROOT", SAFE, STORE, "drop the name on the other side")               \
    P(NS_UNREACHABLE, "NS-UNREACHABLE", SAFE, STORE, "move it to lost+found")                                   \
    P(NS_COLD, "NS-COLD", ASK, MARK, "say so at its model, by the attribute cold; elsewhere mark them lost")    \
    P(NS_KEPT, "NS-KEPT", ASK, STORE, "forget the kept step; its directory goes to lost+found as a model root") \
    P(OPT_ROOT, "OPT-ROOT", ASK, STORE, "forget it; state of its parameters goes to lost+found")                \
    P(OPT_PARAM, "OPT-PARAM", ASK, STORE, "forget it; its state goes to lost+found")                            \
    P(OPT_STATE, "OPT-STATE", ASK, STORE, "forget all state of this parameter; it goes to lost+found")          \
    P(OPT_STATE_VALUE, "OPT-STATE-VALUE", ASK, MARK, "mark the chunk lost: reading it is an error")             \
    P(OPT_CONFIG, "OPT-CONFIG", ASK, STORE, "set one with lr=0 that goes with its state")                       \
    P(OPT_REDO, "OPT-REDO", ASK, STORE, "forget this step and those after it: the model goes back")             \
    P(OPT_FEATURE, "OPT-FEATURE", SAFE, MARK, "note it in the superblock")                                      \
    P(REF_OBJECT, "REF-OBJECT", ASK, STORE, "describe it as its chunks show it")                                \
    P(REF_RANGE, "REF-RANGE", SAFE, MARK, "mark the chunk lost: reading it is an error")                        \
    P(REF_META, "REF-META", SAFE, MARK, "mark the chunk lost: reading it is an error")                          \
    P(REF_SIZE, "REF-SIZE", SAFE, MARK, "mark the chunk lost: reading it is an error")                          \
    P(REF_VAULT, "REF-VAULT", SAFE, MARK, "mark the chunk lost: reading it is an error")                        \
    P(REF_OVERLAP, "REF-OVERLAP", ASK, MARK, "keep the one whose checksum holds")                               \
    P(REF_ORPHAN, "REF-ORPHAN", SAFE, MARK, "move it to lost+found")                                            \
    P(REF_NUMBER, "REF-NUMBER", ASK, MARK, "delete it")                                                         \
    P(REF_CODEC, "REF-CODEC", SAFE, MARK, "note it in the superblock")                                          \
    P(DATA_READ, "DATA-READ", ASK, MARK, "mark the chunk lost: reading it is an error")                         \
    P(DATA_CSUM, "DATA-CSUM", ASK, MARK, "mark the chunk lost: reading it is an error")                         \
    P(DATA_FRAME, "DATA-FRAME", ASK, MARK, "mark the chunk lost: reading it is an error")                       \
    P(DATA_VAULT, "DATA-VAULT", ASK, MARK, "mark the chunk lost: reading it is an error")                       \
    P(DATA_REDO, "DATA-REDO", ASK, MARK, "forget this step and those after it: the model goes back")

enum ht_fsck_code {
#define HT_FSCK_CODE(id, code, answer, part, repair) HT_FSCK_##id,
    HT_FSCK_PROBLEMS(HT_FSCK_CODE)
#undef HT_FSCK_CODE
        HT_FSCK_CODES
};

/* A number that may be missing: 0. */
struct ht_fsck_number {
    uint64_t plus_one;
};
#define HT_FSCK_AT(value) ((struct ht_fsck_number){(value) + UINT64_C(1)})

/* The place of a problem, for programs that read --json: the fields that apply. */
struct ht_fsck_where {
    const char *device, *path, *state;
    struct ht_fsck_number copy, offset, bytes, position, frame, object, chunk, first_byte;
    bool by_hand; /* no program can repair this one */
};

/* ------------------------------------------------------------------- state */

enum ht_fsck_mode { HT_FSCK_CHECK, HT_FSCK_PREEN, HT_FSCK_YES };

struct ht_fsck_options {
    enum ht_fsck_mode mode;
    int json, progress, extents, no_data, no_wait, degraded; /* flags, as getopt sets them */
    const char *vault;          /* its URL, or an empty text: that of the log; NULL: it is not read */
    const char *vault_programs; /* their folder; NULL: that of this program */
};

/* One stored chunk. Where it lies in several pieces, they are frags[frag_first...] and block is that of the first. */
struct ht_fsck_item {
    uint64_t oid, checksum, block;
    uint32_t index, stored, visible, frag_first;
    uint16_t frag_count;
    uint8_t device, chunk_shift, codec;
    bool unreadable; /* not read: it is on a missing device, or its place makes no sense and was reported */
    bool contested;  /* it shares space with another one, and the repair has to know which one is sound */
};

/* An element of a list of repairs: chunks, or objects, or parameters of roots. */
struct ht_fsck_note {
    uint64_t id, part;
};
struct ht_fsck_notes {
    struct ht_fsck_note *list;
    size_t count, cap;
};

struct ht_fsck {
    struct ht_fsck_options opt;
    FILE *out;
    struct ht_dev *devs[HT_DEVICES_MAX];   /* as given */
    struct ht_dev *member[HT_DEVICES_MAX]; /* by index in the store; NULL: missing. From pass 1 on */
    unsigned dev_count;                    /* of the given devices */
    struct ht_super super;                 /* newest of all devices */

    struct ht_store *store;
    struct ht_participants participants;
    struct ht_ns *ns; /* these two of them */
    struct ht_optim *optim;
    struct ht_journal_report log;
    bool log_known;
    bool cross_repair;       /* opening cross-repairs the log first ... */
    unsigned cross_repaired; /* ... and these frames were written */

    struct ht_fsck_item *items;
    size_t item_count, item_cap;
    struct ht_extent *frags;
    size_t frag_count, frag_cap;

    uint64_t problems, objects, stored_bytes, verified_bytes;
    uint64_t of_code[HT_FSCK_CODES];  /* problems, without --json */
    uint64_t lost_chunks;             /* marked so by an earlier repair: no problem any more */
    uint64_t replay_lacks_bytes;      /* that a mount needs to compute logged steps again */
    uint64_t cold_chunks, cold_bytes; /* in the vault */
    uint64_t missing_chunks;          /* on devices that are not there */
    struct ht_json json;
    bool failed; /* an operational error was reported */
    struct {     /* for a pass that does not measure its progress: it is told on stderr, every few seconds */
        const char *pass;
        bool on, terminal, shown;
        struct ht_ticker ticker;
    } watch;

    /* Planned repairs. */
    uint64_t repaired, planned;        /* problems: done, and to be done when all passes are through */
    struct ht_fsck_reported *reported; /* for --json: reported problems, until their repair is decided */
    size_t reported_count, reported_cap, reported_bytes;
    size_t last_reported;              /* its place in reported, from 1; 0: the last problem is not listed */
    uint64_t unlisted;                 /* problems of --json that are counted only */
    bool blocked;                      /* a problem was left that prevents writing to the store */
    bool newer;                        /* a newer version wrote the store: no copy of anything is written either */
    bool cut;                          /* the log ends where its longest copy does */
    bool overlaps;                     /* references share space, and at most one is right */
    uint64_t unmarked;                 /* bits of feat_refuse that the superblock should have */
    struct ht_fsck_notes lose;         /* chunks: object, index */
    struct ht_fsck_notes orphans;      /* objects */
    struct ht_fsck_notes strangers;    /* objects that can be no file */
    struct ht_fsck_notes forget;       /* of the optimizer: root, parameter or 0 */
    struct ht_fsck_notes told_steps;   /* logged steps that were reported: root, step */
    struct ht_fsck_notes cut_steps;    /* logged steps of a model: root, the first that goes */
    struct ht_fsck_notes unconfigured; /* model roots */
    struct ht_fsck_notes cold_roots;   /* whose attribute cold is missing */
};

int ht_fsck_note(struct ht_fsck_notes *n, uint64_t id, uint64_t part) HT_MUST_CHECK;

/* Orders by a and b; where they are the same by the rest. */
static inline int ht_fsck_order(uint64_t a, uint64_t b, int rest)
{
    return a != b ? (a < b ? -1 : 1) : rest;
}

/* ---------------------------------------------------------------- report.c */

enum { HT_FSCK_WATCH_MS = 2000 };
/* Tells of the pass, and how much the devices have read, each time so many milliseconds have passed. */
void ht_fsck_watch_begin(struct ht_fsck *f, const char *pass, unsigned after_ms);
/* Removes the line, for a message. */
void ht_fsck_watch_clear(struct ht_fsck *f);
void ht_fsck_watch_end(struct ht_fsck *f);
/*
 * True: the problem is to be repaired. The caller notes that, unless opening the store for repair does it. where: NULL
 * for nowhere.
 */
bool ht_fsck_problem(struct ht_fsck *f, enum ht_fsck_code code, const struct ht_fsck_where *where, const char *fmt, ...)
    HT_PRINTF(4, 5);
/* By its code's name, as other layers report theirs. */
bool ht_fsck_problem_named(struct ht_fsck *f, const char *code, const char *text);
/* The problem that was reported last has been repaired at once. */
void ht_fsck_repaired_last(struct ht_fsck *f);
/* For --json with repair: all problems, each with its outcome. */
void ht_fsck_report_all(struct ht_fsck *f, bool repaired);
void ht_fsck_reported_free(struct ht_fsck *f);
/* --extents: where every stored chunk lies. */
void ht_fsck_list_extents(struct ht_fsck *f);
/* The last line or, with --json, everything after the problems. */
void ht_fsck_summary(struct ht_fsck *f, const char *name, int status);

/* ----------------------------------------------------------------- passes */

/* Fills f->super. -EUCLEAN: the devices make no store, and problems say why; other errors are reported as errors. */
int ht_fsck_pass_super(struct ht_fsck *f) HT_MUST_CHECK;
/* Opens the store. -EUCLEAN: reported, and nothing after the log can be checked. */
int ht_fsck_pass_log(struct ht_fsck *f) HT_MUST_CHECK;
int ht_fsck_pass_names(struct ht_fsck *f) HT_MUST_CHECK;
int ht_fsck_pass_optim(struct ht_fsck *f) HT_MUST_CHECK;
int ht_fsck_pass_refs(struct ht_fsck *f) HT_MUST_CHECK;
int ht_fsck_pass_tensors(struct ht_fsck *f) HT_MUST_CHECK;

/* pass_log.c. Attaches, replays the log. force: even if all copies are damaged. repair: for writing. */
int ht_fsck_open_store(struct ht_fsck *f, bool force, bool repair) HT_MUST_CHECK;
void ht_fsck_close_store(struct ht_fsck *f);
/* pass_optim.c. A chunk was reported; repair: it is to be marked lost. */
int ht_fsck_lose(struct ht_fsck *f, uint64_t oid, uint64_t index, bool repair) HT_MUST_CHECK;
/* An object that a logged step names is neither a file nor state: it may be deleted with the step. */
bool ht_fsck_is_gradients(struct ht_fsck *f, uint64_t oid);
/* repair.c. Makes all noted repairs; the store is closed then. Reports an error: the next run finds the rest. */
int ht_fsck_repair(struct ht_fsck *f) HT_MUST_CHECK;

/* ------------------------------------------------------------------- run.c */

/* All passes over f->devs, repair, and the last line, onto f->out. Returns the exit status. */
int ht_fsck_run(struct ht_fsck *f, const char *name);
void ht_fsck_close(struct ht_fsck *f);

/* ------------------------------------------------------------------ items.c */

/* All published references, in (object, chunk) order. */
int ht_fsck_items_load(struct ht_fsck *f) HT_MUST_CHECK;
struct ht_extent ht_fsck_item_extent(const struct ht_fsck *f, const struct ht_fsck_item *it, unsigned i);

/* Whose bytes an object holds. */
struct ht_fsck_owner {
    bool known;
    bool logged_step;            /* it has the gradients of one */
    char path[HT_FSCK_PATH_MAX]; /* of the file, or of the parameter */
    const char *state;           /* name of the optimizer state, or NULL */
};
void ht_fsck_owner(struct ht_fsck *f, uint64_t oid, struct ht_fsck_owner *out);
/* The name of a member, or a text in its place. */
const char *ht_fsck_member_name(const struct ht_fsck *f, uint32_t index);
/* "/a/b, chunk 3 (bytes 3145728 to 4194303)" */
void ht_fsck_item_text(struct ht_fsck *f, const struct ht_fsck_item *it, char *buf, size_t cap,
                       struct ht_fsck_owner *out_owner);
