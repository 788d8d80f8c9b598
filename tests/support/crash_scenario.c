/* SPDX-License-Identifier: Apache-2.0 */
/* crash_scenario.c - plays a script, remembers the acknowledgements, and compares a state with them. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "tests/support/background.h"
#include "tests/support/crash_scenario.h"
#include "tests/support/receive.h"
#include "tests/unit/tiering/codec/content.h"
#include "optim/state/context.h"
#include "optim/state/redo.h"
#include "optim/state/root.h"
#include "tiering/base/fault.h"
#include "tiering/base/hash.h"
#include "tiering/journal/journal.h"
#include "tiering/api/check.h"
#include "tiering/api/stats.h"

enum { PARAMS = SCENARIO_PARAMS, NAME_MAX_BYTES = 64, XATTR_BYTES_MAX = 8192, FILE_BYTES_MAX = 1 << 20 };

const struct harness_param scenario_params[PARAMS] = {{"w", "f32", 1500}, {"h", "bf16", 700}};

static const char clone_name[] = "clone"; /* of a kept step of the model */

static const char *optimizer_of(const struct scenario_script *script)
{
    if (script->keeps)
        return "adamw lr=0.01 weight_decay=0.1 retain=2";
    if (script->clips)
        return "adamw lr=0.01 weight_decay=0.1 max_grad_norm=1 redo=on durable_every=4";
    if (script->logs)
        return "adamw lr=0.01 weight_decay=0.1 redo=on durable_every=4";
    return script->accumulates ? "adamw lr=0.01 weight_decay=0.1 accumulate=2" : "adamw lr=0.01 weight_decay=0.1";
}

static unsigned passes_of(const struct scenario_script *script)
{
    return script->accumulates ? 2 : 1;
}

/* ------------------------------------------------------------------- groups */

static bool is_model(const char *group)
{
    return strcmp(group, "model") == 0;
}

/* Its operations note its states: most of what they do must not survive a cut. */
static bool is_received(const char *group)
{
    return strcmp(group, "received") == 0;
}

static bool is_outside(const char *group)
{
    return !is_model(group) && !is_received(group);
}

static uint64_t mix(uint64_t hash, uint64_t value)
{
    return ht_hash64(&value, sizeof(value), hash);
}

static uint64_t xattr_hash(const struct harness *k, uint64_t ino, uint64_t hash)
{
    static uint8_t value[XATTR_BYTES_MAX];
    ssize_t n = ht_ns_getxattr(k->ns, ino, "user.note", value, sizeof(value));

    return n < 0 ? mix(hash, 3) : ht_hash64(value, (size_t)n, hash);
}

static uint64_t name_hash(const struct harness *k, const char *name, uint64_t hash)
{
    char target[NAME_MAX_BYTES];
    struct stat st;
    uint64_t ino = harness_find(k, HT_NS_ROOT_INO, name);

    if (!ino || ht_ns_getattr(k->ns, ino, &st))
        return mix(hash, 4);
    hash = mix(mix(hash, st.st_mode), st.st_nlink);
    if (S_ISLNK(st.st_mode)) {
        ssize_t n = ht_ns_readlink(k->ns, ino, target, sizeof(target));
        return n < 0 ? 0 : ht_hash64(target, (size_t)n, hash);
    }
    return xattr_hash(k, ino, harness_file_hash(k, ino, hash));
}

/* Kept steps belong to the model. */
static uint64_t kept_hash(const struct harness *k, uint64_t root, uint64_t hash)
{
    char digits[HT_NS_DIGEST_MAX];
    struct ht_ns_kept *all;
    size_t count;

    ck_assert_int_eq(ht_ns_kept_list(k->ns, root, &all, &count), 0);
    for (size_t i = 0; i < count; i++) {
        hash = ht_hash64(all[i].name, strlen(all[i].name), hash);
        hash = mix(mix(hash, harness_model_hash(k, all[i].ino, scenario_params, PARAMS)),
                   harness_model_step(k, all[i].ino));
        if (ht_ns_kept_digest(k->ns, all[i].ino, digits) == 0)
            hash = ht_hash64(digits, sizeof(digits), hash);
    }
    free(all);
    return hash;
}

static uint64_t model_hash(const struct harness *k)
{
    uint64_t root = harness_find(k, HT_NS_ROOT_INO, "model");

    if (!root)
        return 0;
    uint64_t hash = mix(harness_model_hash(k, root, scenario_params, PARAMS), harness_model_step(k, root));
    uint64_t clone = harness_find(k, HT_NS_ROOT_INO, clone_name);
    if (clone)
        hash = mix(mix(hash, harness_model_hash(k, clone, scenario_params, PARAMS)), harness_model_step(k, clone));
    return kept_hash(k, root, hash);
}

static uint64_t group_hash(const struct harness *k, const char *group)
{
    char names[NAME_MAX_BYTES], *rest = NULL;
    uint64_t hash = 0;

    if (is_model(group))
        return model_hash(k);
    if (is_received(group))
        return receive_hash(k, scenario_params);
    snprintf(names, sizeof(names), "%s", group);
    for (char *name = strtok_r(names, " ", &rest); name; name = strtok_r(NULL, " ", &rest))
        hash = name_hash(k, name, hash);
    return hash;
}

static bool group_has(const char *group, const char *name)
{
    char names[NAME_MAX_BYTES], *rest = NULL;

    snprintf(names, sizeof(names), "%s", group);
    for (char *word = strtok_r(names, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        if (strcmp(word, name) == 0)
            return true;
    return false;
}

/* ------------------------------------------------------------ remembering */

static void push(struct crash_scenario *s, unsigned g, uint64_t hash)
{
    if (s->count[g] && s->history[g][s->count[g] - 1] == hash)
        return;
    s->history[g] = realloc(s->history[g], (s->count[g] + 1) * sizeof(uint64_t));
    s->history[g][s->count[g]++] = hash;
}

/* Something outside models has changed. */
static void note(struct crash_scenario *s)
{
    for (unsigned g = 0; g < SCENARIO_GROUPS_MAX && s->script->groups[g]; g++)
        if (is_outside(s->script->groups[g]))
            push(s, g, group_hash(&s->k, s->script->groups[g]));
}

/* Acknowledges the present state of the group of this name; NULL: of everything outside models. */
static void promise(struct crash_scenario *s, const char *name)
{
    for (unsigned g = 0; g < SCENARIO_GROUPS_MAX && s->script->groups[g]; g++)
        if (name ? group_has(s->script->groups[g], name) : is_outside(s->script->groups[g]))
            s->now.floor[g] = s->count[g] - 1;
    char text[32];
    s->acks = realloc(s->acks, (s->ack_count + 1) * sizeof(*s->acks));
    s->acks[s->ack_count++] = s->now;
    snprintf(text, sizeof(text), "ack %zu", s->ack_count - 1);
    if (s->recording)
        ck_assert_int_eq(recorder_mark(s->k.dev[0], text), 0);
}

size_t scenario_ack_at(const struct recording *rec, size_t point)
{
    for (size_t i = point; i-- > 0;)
        if (rec->entry[i].mark && !memcmp(rec->entry[i].data, "ack ", 4))
            return (size_t)strtoull((const char *)rec->entry[i].data + 4, NULL, 10);
    return 0;
}

/* ------------------------------------------------------------------- play */

static uint8_t *devices_content(const struct harness *k)
{
    uint8_t *all = malloc((size_t)k->dev_count * SCENARIO_DEVICE_BYTES);

    for (unsigned i = 0; i < k->dev_count; i++)
        memcpy(all + (size_t)i * SCENARIO_DEVICE_BYTES, ht_dev_ram_data(k->dev[i]), SCENARIO_DEVICE_BYTES);
    return all;
}

void scenario_play(struct crash_scenario *s, const struct scenario_script *script, struct recording *out_rec,
                   uint8_t **out_base)
{
    char path[64];
    int fd = memfd_create("hitrain-recording", MFD_CLOEXEC);

    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    *s = (struct crash_scenario){.script = script};
    harness_format(&s->k, script->devices, SCENARIO_DEVICE_BYTES, script->lba);
    s->k.shm_bytes = script->maps ? 4 << 20 : 0;
    ck_assert_int_eq(harness_open(&s->k, 1), 0);
    for (unsigned g = 0; g < SCENARIO_GROUPS_MAX && script->groups[g]; g++)
        push(s, g, group_hash(&s->k, script->groups[g]));
    if (script->prepare)
        script->prepare(s);
    ck_assert_int_eq(ht_store_commit(s->k.store), 0);
    promise(s, NULL);
    s->acks[0] = s->now; /* before the first mark only the prepared content is acknowledged */
    *out_base = devices_content(&s->k);
    harness_record(&s->k, path);
    s->recording = true;
    script->run(s);
    ck_assert_int_eq(harness_close(&s->k, false), 0);
    ck_assert_int_eq(recorder_stop(s->k.dev[0]), 0);
    recording_load(out_rec, path);
    close(fd);
}

void scenario_free(struct crash_scenario *s)
{
    for (unsigned g = 0; g < SCENARIO_GROUPS_MAX; g++)
        free(s->history[g]);
    free(s->acks);
    harness_free(&s->k);
}

/* ---------------------------------------------------------------- compare */

static bool allowed(const struct crash_scenario *s, unsigned g, size_t floor, uint64_t hash)
{
    for (size_t i = floor; i < s->count[g]; i++)
        if (s->history[g][i] == hash)
            return true;
    return false;
}

const char *scenario_compare(const struct crash_scenario *s, size_t ack, const struct harness *k, uint64_t *out_hash)
{
    static char wrong[128];
    uint64_t all = 0;

    for (unsigned g = 0; g < SCENARIO_GROUPS_MAX && s->script->groups[g]; g++) {
        uint64_t hash = group_hash(k, s->script->groups[g]);
        all = mix(all, hash);
        if (allowed(s, g, s->acks[ack].floor[g], hash))
            continue;
        bool older = allowed(s, g, 0, hash);
        snprintf(wrong, sizeof(wrong), "\"%s\" %s", s->script->groups[g],
                 older ? "is older than what was acknowledged" : "holds what it never held");
        return wrong;
    }
    *out_hash = all;
    return NULL;
}

/* Of logged steps each other one has sparse gradients. */
static void work_pass(const struct crash_scenario *s, const struct harness *k, uint64_t root, unsigned step,
                      unsigned pass)
{
    bool sparse = pass == 1 || (s->script->logs && step % 2);

    for (unsigned i = 0; i < PARAMS; i++)
        (sparse ? harness_sparse_gradient : harness_gradient)(k, root, &scenario_params[i], step * 100 + 10 * pass + i);
}

static void work(const struct crash_scenario *s, const struct harness *k, uint64_t root, unsigned step)
{
    char text[16];

    for (unsigned pass = 0; pass < passes_of(s->script); pass++)
        work_pass(s, k, root, step, pass);
    snprintf(text, sizeof(text), "%u", step);
    harness_put(k, root, "cursor", text, strlen(text));
}

static const char *train_on(const struct crash_scenario *s, const struct harness *k, const char *name)
{
    uint64_t root = harness_find(k, HT_NS_ROOT_INO, name);
    uint64_t step = root ? harness_model_step(k, root) : UINT64_MAX;

    if (step == UINT64_MAX)
        return NULL;
    work(s, k, root, (unsigned)step + 1000);
    if (ht_optim_commit(k->optim, root))
        return "a step after it cannot be committed";
    return harness_model_step(k, root) == step + 1 ? NULL : "a step after it has the wrong number";
}

static uint64_t all_hash(const struct crash_scenario *s, const struct harness *k)
{
    uint64_t all = name_hash(k, "after", 0);

    for (unsigned g = 0; g < SCENARIO_GROUPS_MAX && s->script->groups[g]; g++)
        all = mix(all, group_hash(k, s->script->groups[g]));
    return all;
}

/* A full store can be emptied, and then there is room. */
static int make_room(const struct harness *k)
{
    struct stat st = {.st_size = 0};
    uint64_t filler = harness_find(k, HT_NS_ROOT_INO, "filler");
    int rc = filler ? ht_ns_setattr(k->ns, filler, HT_SET_SIZE, &st, &st) : 0;

    return rc || !filler ? rc : ht_store_commit(k->store);
}

static const char *write_after(const struct harness *k)
{
    static const char text[] = "after the crash";

    if (make_room(k))
        return "the store cannot be emptied";
    uint64_t ino = harness_make(k, HT_NS_ROOT_INO, "after");
    if (harness_write(k, ino, 0, text, sizeof(text)))
        return "a file after it cannot be written";
    return ht_ns_fsync(k->ns, ino) ? "a file after it cannot be synced" : NULL;
}

const char *scenario_go_on(const struct crash_scenario *s, struct harness *k)
{
    const char *wrong = write_after(k);

    if (!wrong)
        wrong = train_on(s, k, "model");
    if (!wrong)
        wrong = train_on(s, k, clone_name);
    if (!wrong)
        wrong = train_on(s, k, receive_name);
    if (!wrong && receive_clean(k))
        wrong = "what a receive left cannot be removed";
    uint64_t before = wrong ? 0 : all_hash(s, k);
    int rc = harness_close(k, !wrong);
    if (wrong || rc)
        return wrong ? wrong : "it does not unmount";
    if (harness_fsck(k))
        return "fsck finds problems after going on";
    rc = harness_open(k, 1);
    if (!rc && all_hash(s, k) != before)
        wrong = "what was done after it is gone";
    harness_close(k, false);
    return rc ? "it does not mount a second time" : wrong;
}

/* --------------------------------------------------- operations of scripts */

static uint64_t must_find(const struct crash_scenario *s, const char *name)
{
    uint64_t ino = *name ? harness_find(&s->k, HT_NS_ROOT_INO, name) : HT_NS_ROOT_INO;

    ck_assert_msg(ino != 0, "%s: there is no %s", s->script->name, name);
    return ino;
}

static void pattern(uint8_t *out, uint64_t seed, size_t len)
{
    for (size_t i = 0; i < len; i++)
        out[i] = (uint8_t)(1 + (seed * 31 + i / 7) % 250); /* no zeros: zeros would hide lost bytes */
}

static int write_bytes(struct crash_scenario *s, const char *name, uint64_t seed, uint64_t off, size_t len,
                       void (*fill)(uint8_t *bytes, uint64_t seed, size_t len))
{
    uint8_t *bytes = malloc(len);
    uint64_t ino = harness_make(&s->k, HT_NS_ROOT_INO, name);

    note(s);
    fill(bytes, seed, len);
    int rc = harness_write(&s->k, ino, off, bytes, len);
    ck_assert(rc == 0 || rc == -ENOSPC);
    free(bytes);
    note(s);
    return rc;
}

void scenario_zeros(struct crash_scenario *s, const char *name, uint64_t off, size_t len)
{
    uint8_t *bytes = calloc(1, len);

    note(s);
    ck_assert_int_eq(harness_write(&s->k, must_find(s, name), off, bytes, len), 0);
    free(bytes);
    note(s);
}

int scenario_write(struct crash_scenario *s, const char *name, uint64_t seed, uint64_t off, size_t len)
{
    return write_bytes(s, name, seed, off, len, pattern);
}

static void weights(uint8_t *bytes, uint64_t seed, size_t len)
{
    content_bf16(bytes, len, seed);
}

int scenario_write_weights(struct crash_scenario *s, const char *name, uint64_t seed, uint64_t off, size_t len)
{
    return write_bytes(s, name, seed, off, len, weights);
}

void scenario_fsync(struct crash_scenario *s, const char *name)
{
    ck_assert_int_eq(ht_ns_fsync(s->k.ns, must_find(s, name)), 0);
    promise(s, name);
}

void scenario_commit(struct crash_scenario *s)
{
    ck_assert_int_eq(ht_store_commit(s->k.store), 0);
    promise(s, NULL);
}

void scenario_truncate(struct crash_scenario *s, const char *name, uint64_t size)
{
    struct stat st = {.st_size = (off_t)size};

    ck_assert_int_eq(ht_ns_setattr(s->k.ns, must_find(s, name), HT_SET_SIZE, &st, &st), 0);
    note(s);
}

void scenario_punch(struct crash_scenario *s, const char *name, uint64_t off, uint64_t len)
{
    struct ht_obj *o;
    uint64_t ino = must_find(s, name);

    ck_assert_int_eq(ht_ns_open(s->k.ns, ino, &o), 0);
    ck_assert_int_eq(ht_obj_punch(o, off, len), 0);
    ht_ns_close(s->k.ns, ino);
    note(s);
}

void scenario_clone(struct crash_scenario *s, const char *from, const char *to, uint64_t len)
{
    struct ht_obj *a, *b;
    uint64_t source = must_find(s, from), target = harness_make(&s->k, HT_NS_ROOT_INO, to);

    note(s);
    ck_assert_int_eq(ht_ns_open(s->k.ns, source, &a), 0);
    ck_assert_int_eq(ht_ns_open(s->k.ns, target, &b), 0);
    ck_assert_int_eq(ht_obj_clone(a, 0, b, 0, len), (ssize_t)len);
    ht_ns_close(s->k.ns, source);
    ht_ns_close(s->k.ns, target);
    note(s);
}

void scenario_rename(struct crash_scenario *s, const char *from, const char *to, unsigned flags)
{
    ck_assert_int_eq(ht_ns_rename(s->k.ns, HT_NS_ROOT_INO, from, HT_NS_ROOT_INO, to, flags, NULL), 0);
    note(s);
}

void scenario_link(struct crash_scenario *s, const char *from, const char *to)
{
    struct stat st;

    ck_assert_int_eq(ht_ns_link(s->k.ns, must_find(s, from), HT_NS_ROOT_INO, to, &st), 0);
    ht_ns_forget(s->k.ns, st.st_ino, 1);
    note(s);
}

void scenario_unlink(struct crash_scenario *s, const char *name)
{
    ck_assert_int_eq(ht_ns_unlink(s->k.ns, HT_NS_ROOT_INO, name), 0);
    note(s);
}

void scenario_symlink(struct crash_scenario *s, const char *name, const char *target)
{
    struct stat st;

    ck_assert_int_eq(ht_ns_symlink(s->k.ns, HT_NS_ROOT_INO, name, target, (struct ht_cred){0, 0}, &st), 0);
    ht_ns_forget(s->k.ns, st.st_ino, 1);
    note(s);
}

void scenario_xattr(struct crash_scenario *s, const char *name, uint64_t seed, size_t len)
{
    static uint8_t value[XATTR_BYTES_MAX];

    pattern(value, seed, len);
    ck_assert_int_eq(ht_ns_setxattr(s->k.ns, must_find(s, name), "user.note", value, len, 0), 0);
    note(s);
}

void scenario_note(struct crash_scenario *s, const char *group, uint64_t hash, bool durable)
{
    for (unsigned g = 0; g < SCENARIO_GROUPS_MAX && s->script->groups[g]; g++)
        if (strcmp(s->script->groups[g], group) == 0)
            push(s, g, hash);
    if (durable)
        promise(s, group);
}

static void note_model(struct crash_scenario *s)
{
    scenario_note(s, "model", model_hash(&s->k), true);
}

void scenario_model(struct crash_scenario *s)
{
    uint64_t root = harness_model(&s->k, "model", scenario_params, PARAMS, optimizer_of(s->script));

    if (s->script->logs) /* with numbers for ranges of elements */
        harness_set_word(&s->k, harness_find(&s->k, root, "w"), "user.hitrain.optimizer",
                         "0:7 weight_decay=0 7:9 frozen=1 1499:1500 lr=1");
    ck_assert_int_eq(ht_optim_commit(s->k.optim, root), 0);
    note_model(s);
}

void scenario_work(struct crash_scenario *s, unsigned step)
{
    work(s, &s->k, must_find(s, "model"), step);
    ck_assert_int_eq(ht_optim_wait(s->k.optim, must_find(s, "model"), 0), 0);
}

void scenario_pass(struct crash_scenario *s, unsigned step, unsigned pass)
{
    work_pass(s, &s->k, must_find(s, "model"), step, pass);
    ck_assert_int_eq(ht_optim_wait(s->k.optim, must_find(s, "model"), 0), 0);
}

void scenario_model_commit(struct crash_scenario *s)
{
    ck_assert_int_eq(ht_optim_commit(s->k.optim, must_find(s, "model")), 0);
    note_model(s);
}

void scenario_model_async(struct crash_scenario *s, unsigned step, void (*during)(struct crash_scenario *s))
{
    uint64_t root = must_find(s, "model");

    work(s, &s->k, root, step);
    ck_assert_int_eq(ht_optim_step_async(s->k.optim, root), 0);
    during(s);
    ck_assert_int_eq(ht_optim_wait(s->k.optim, root, 0), 0);
    note_model(s);
}

void scenario_model_abort(struct crash_scenario *s)
{
    ck_assert_int_eq(ht_optim_abort(s->k.optim, must_find(s, "model")), 0);
}

void scenario_model_commit_full(struct crash_scenario *s)
{
    struct ht_optim_steer by = {.full = true};

    ck_assert_int_eq(ht_optim_commit_by(s->k.optim, must_find(s, "model"), &by), 0);
    note_model(s);
}

void scenario_write_param(struct crash_scenario *s, float value)
{
    uint64_t ino = harness_find(&s->k, must_find(s, "model"), scenario_params[0].name);

    ck_assert_int_eq(harness_write(&s->k, ino, 400, &value, sizeof(value)), 0);
}

void scenario_map(struct crash_scenario *s)
{
    uint64_t ino = harness_find(&s->k, must_find(s, "model"), scenario_params[0].name);
    int fd;

    ck_assert_int_eq(ht_ns_open(s->k.ns, ino, &s->mapped), 0);
    ck_assert_int_eq(ht_obj_shm_open_for(s->mapped, 0, &fd), 0);
    s->mapped_fd = fd;
}

void scenario_unmap(struct crash_scenario *s)
{
    static uint8_t seen[8192], read[8192];
    uint64_t ino = harness_find(&s->k, must_find(s, "model"), scenario_params[0].name);
    ssize_t n = ht_obj_read(s->mapped, 0, read, sizeof(read));

    ck_assert_int_gt(n, 0);
    ck_assert_int_eq(pread(s->mapped_fd, seen, sizeof(seen), 0), n);
    ck_assert_int_eq(memcmp(seen, read, (size_t)n), 0);
    ht_obj_shm_close(s->mapped);
    ht_ns_close(s->k.ns, ino);
}

void scenario_check_logged(const struct crash_scenario *s, unsigned steps)
{
    struct ht_root_stat st;

    ck_assert_int_eq(ht_optim_root_stat(s->k.optim, must_find(s, "model"), &st), 0);
    ck_assert_uint_eq(st.logged_steps, steps);
}

void scenario_check_replays(const struct crash_scenario *s, uint64_t replays)
{
    struct ht_optim *o = s->k.optim;
    uint64_t id = must_find(s, "model");

    lock(o);
    uint64_t found = ht_opt_root_find(o, id)->redo.replays;
    unlock(o);
    ck_assert_uint_eq(found, replays);
}

void scenario_snapshot(struct crash_scenario *s, const char *name)
{
    struct ht_optim_steer by = {0};

    ck_assert_int_eq(ht_optim_snapshot_by(s->k.optim, must_find(s, "model"), name, &by), 0);
    note_model(s);
}

void scenario_digest(struct crash_scenario *s, const char *step)
{
    char digits[HT_NS_DIGEST_MAX];
    struct ht_ns_kept kept;

    ck_assert_int_eq(ht_ns_kept_find(s->k.ns, must_find(s, "model"), step, &kept), 0);
    uint64_t hash = harness_model_hash(&s->k, kept.ino, scenario_params, PARAMS);
    snprintf(digits, sizeof(digits), "%016llx%016llx", (unsigned long long)hash, (unsigned long long)kept.step);
    ck_assert_int_eq(ht_ns_kept_note(s->k.ns, kept.ino, NULL, digits), 0);
    ck_assert_int_eq(ht_ns_kept_note(s->k.ns, kept.ino, NULL, digits), -EEXIST);
    for (unsigned g = 0; g < SCENARIO_GROUPS_MAX && s->script->groups[g]; g++)
        if (is_model(s->script->groups[g]))
            push(s, g, group_hash(&s->k, s->script->groups[g]));
}

void scenario_clone_kept(struct crash_scenario *s, const char *step)
{
    ck_assert_int_eq(harness_clone(&s->k, must_find(s, "model"), step, HT_NS_ROOT_INO, clone_name, 0), 0);
    note_model(s);
}

void scenario_rollback(struct crash_scenario *s, const char *step)
{
    ck_assert_int_eq(harness_rollback(&s->k, must_find(s, "model"), step), 0);
    note_model(s);
}

void scenario_clone_step(struct crash_scenario *s, unsigned step)
{
    uint64_t root = must_find(s, clone_name);

    work(s, &s->k, root, step);
    ck_assert_int_eq(ht_optim_commit(s->k.optim, root), 0);
    note_model(s);
}

void scenario_forget(struct crash_scenario *s, const char *name)
{
    ck_assert_int_eq(ht_ns_kept_forget(s->k.ns, must_find(s, "model"), name), 0);
    note_model(s);
}

void scenario_checkpoint(struct crash_scenario *s)
{
    ck_assert_int_eq(ht_store_checkpoint(s->k.store), 0);
}

uint64_t scenario_discard(struct crash_scenario *s)
{
    struct ht_store_stats before, after;

    ht_store_stats(s->k.store, &before);
    background_discard(s->k.store);
    ht_store_stats(s->k.store, &after);
    return after.device_discarded_bytes - before.device_discarded_bytes;
}

void scenario_writeback(struct crash_scenario *s)
{
    ck_assert_int_ge(background_clean(s->k.store), 0);
}

void scenario_remount(struct crash_scenario *s, bool clean)
{
    ck_assert_int_eq(harness_close(&s->k, clean), 0);
    if (clean)
        promise(s, NULL);
    ck_assert_int_eq(harness_open(&s->k, 1), 0);
    note(s); /* unsynced changes may be gone */
    scenario_note(s, "received", receive_hash(&s->k, scenario_params), false);
}

/* Wherever it has been. Its image is in memory then. */
static void rot_content(struct crash_scenario *s, const char *name, uint8_t *ram)
{
    static uint8_t block[HT_BLOCK_BYTES];
    struct ht_obj *o;
    uint64_t ino = must_find(s, name);

    ck_assert_int_eq(ht_ns_open(s->k.ns, ino, &o), 0);
    ck_assert_int_eq(ht_obj_read(o, 0, block, sizeof(block)), sizeof(block));
    ht_ns_close(s->k.ns, ino);
    for (uint64_t at = 0; at < SCENARIO_DEVICE_BYTES; at += HT_BLOCK_BYTES)
        if (memcmp(ram + at, block, sizeof(block)) == 0)
            ram[at] ^= 1;
}

void scenario_scrub(struct crash_scenario *s, const char *name)
{
    enum { PLACES = 3 };
    struct ht_scrub_stats st;
    const struct ht_super *sb = ht_store_super(s->k.store);
    uint8_t *ram = ht_dev_ram_data(s->k.dev[0]);

    rot_content(s, name, ram);
    ram[ht_super_offset(SCENARIO_DEVICE_BYTES, 1)] ^= 1;
    ram[sb->log_offset[0] + sb->start_pos % sb->log_bytes] ^= 1;
    ck_assert_int_eq(background_scrub(s->k.store), 0);
    ht_store_scrub_stats(s->k.store, &st);
    ck_assert_uint_eq(st.run_found, PLACES);
    ck_assert_uint_eq(st.run_repaired, PLACES);
}

uint64_t scenario_compact_some(struct crash_scenario *s)
{
    uint64_t was = background_figure(s->k.store, "compact", "moved_bytes");

    ck_assert_int_eq(background_compact(s->k.store), 0);
    return background_figure(s->k.store, "compact", "moved_bytes") - was;
}

void scenario_compact(struct crash_scenario *s, uint64_t bytes)
{
    ck_assert_uint_eq(scenario_compact_some(s), bytes);
}

static uint64_t deduplicated(struct crash_scenario *s)
{
    return background_figure(s->k.store, "dedup", "shared_bytes") +
        background_figure(s->k.store, "dedup", "hole_bytes");
}

uint64_t scenario_dedup_some(struct crash_scenario *s)
{
    uint64_t was = deduplicated(s);

    ck_assert_int_eq(background_dedup(s->k.store), 0);
    return deduplicated(s) - was;
}

void scenario_dedup(struct crash_scenario *s, uint64_t bytes)
{
    ck_assert_uint_eq(scenario_dedup_some(s), bytes);
}

/* The file that fills the store stays as it is. */
static bool may_compress(void *ctx, uint64_t oid)
{
    struct crash_scenario *s = ctx;

    return oid == 0 || oid != harness_find(&s->k, HT_NS_ROOT_INO, "filler");
}

static int count_compressed(void *ctx, const struct ht_chunk_info *info)
{
    *(unsigned *)ctx += info->codec == HT_CODEC_PLANES;
    return 0;
}

unsigned scenario_compressed(struct crash_scenario *s)
{
    unsigned count = 0;

    ck_assert_int_eq(ht_store_walk(s->k.store, count_compressed, &count), 0);
    return count;
}

void scenario_compress_inline(struct crash_scenario *s)
{
    ht_ns_compress_begin(s->k.ns, true);
}

unsigned scenario_compress(struct crash_scenario *s)
{
    unsigned complete = 0;

    ht_store_set_compress(s->k.store, may_compress, s);
    for (unsigned i = 0; i < 8 && complete < 2; i++) {
        int rc = background_compress(s->k.store);
        ck_assert(rc == 0 || rc == -EAGAIN);
        complete += rc == 0;
        scenario_commit(s); /* what one round freed is there in the next */
    }
    ck_assert_uint_eq(complete, 2);
    return scenario_compressed(s);
}

void scenario_lose_log(struct crash_scenario *s, unsigned copy)
{
    ht_fault_arm(HT_FAULT_JOURNAL_WRITE, copy + 1, false);
    scenario_write(s, "a", 77, 0, 10);
    scenario_fsync(s, "a");
    ck_assert_uint_gt(ht_fault_passed(HT_FAULT_JOURNAL_WRITE), copy);
    ht_fault_disarm_all();
}

void scenario_lose_super(struct crash_scenario *s, unsigned device)
{
    for (int op = HT_IO_WRITE; op <= HT_IO_FLUSH; op++)
        dev_fail(s->k.dev[device], op, 1, true);
    /* the superblock is to name the feature first; no chunk is lost */
    ck_assert_int_eq(ht_store_lose_chunk(s->k.store, 0, 0), -ENOENT);
    for (int op = HT_IO_WRITE; op <= HT_IO_FLUSH; op++)
        dev_fail(s->k.dev[device], op, 0, false);
}

void scenario_resync_log(struct crash_scenario *s)
{
    ck_assert_int_eq(ht_journal_resync(s->k.store->journal), 0);
}

void scenario_fill(struct crash_scenario *s, uint64_t leave)
{
    static uint8_t bytes[FILE_BYTES_MAX];
    struct ht_store_stats st;
    uint64_t ino = harness_make(&s->k, HT_NS_ROOT_INO, "filler");

    ht_store_stats(s->k.store, &st);
    for (uint64_t at = 0; at + leave < st.available_bytes;) {
        uint64_t n = ht_min_u64(sizeof(bytes), st.available_bytes - leave - at);
        for (uint64_t k = 0; k < n; k += HT_BLOCK_BYTES) /* no chunk is like another */
            ht_le64_store(bytes + k, at + k + 1);
        ck_assert_int_eq(harness_write(&s->k, ino, at, bytes, n), 0);
        at += n;
    }
    ck_assert_int_eq(ht_ns_fsync(s->k.ns, ino), 0);
}
