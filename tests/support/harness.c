/* SPDX-License-Identifier: Apache-2.0 */
/* harness.c - the whole daemon but FUSE, on devices of memory. */
#include <check.h>
#include <hitrain/topk.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/support/harness.h"
#include "tests/support/states.h"
#include "tiering/api/keep.h"
#include "tiering/base/hash.h"

enum { SPARSE_EVERY = 5, USED_BYTE = 0xa5 };

/* ------------------------------------------------------------------- life */

/* A format leaves the older content of the device in the log. Zeros there would look like padding, and hide a tear. */
static void fill_logs(const struct harness *k, const struct ht_super *sb)
{
    for (unsigned c = 0; c < HT_LOG_COPIES; c++)
        memset((uint8_t *)ht_dev_ram_data(k->dev[sb->log_device[c]]) + sb->log_offset[c], USED_BYTE, sb->log_bytes);
}

void harness_format(struct harness *k, unsigned dev_count, uint64_t bytes, unsigned lba)
{
    struct ht_super sb;
    struct ht_format_opts opts = {0};

    *k = (struct harness){.dev_count = dev_count};
    for (unsigned i = 0; i < dev_count; i++)
        ck_assert_int_eq(dev_open_ram(bytes, lba, &k->dev[i]), 0);
    ck_assert_int_eq(ht_super_format(k->dev, dev_count, &opts, &sb), 0);
    fill_logs(k, &sb);
}

/* The path of a new file, or of the device that is to be used in its place: then true. */
static bool find_place(char path[PATH_MAX], uint64_t bytes)
{
    const char *folder = getenv("HITRAIN_BUILD"), *given = getenv("HITRAIN_TEST_DEVICE");

    if (given) {
        snprintf(path, PATH_MAX, "%s", given);
        return true;
    }
    snprintf(path, PATH_MAX, "%s/stack-XXXXXX", folder ? folder : "/tmp");
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(ftruncate(fd, (off_t)bytes), 0);
    close(fd);
    return false;
}

bool harness_format_file(struct harness *k, uint64_t bytes)
{
    struct ht_super sb;
    struct ht_format_opts opts = {0};
    char path[PATH_MAX];
    bool given = find_place(path, bytes);

    *k = (struct harness){.dev_count = 1};
    int rc = ht_dev_open(path, HT_DEV_NOWAIT, &k->dev[0]);
    if (!given)
        unlink(path);
    if (rc == -EINVAL)
        return false;
    ck_assert_int_eq(rc, 0);
    ck_assert_int_eq(ht_super_format(k->dev, 1, &opts, &sb), 0);
    return true;
}

static int make_participants(struct harness *k, unsigned optim_threads)
{
    const struct ht_ns_setup ns = {.hooks = ht_ctl_parts(k->ctl).ns_hooks};
    const struct ht_optim_setup optim = {.threads = optim_threads, .hooks = ht_ctl_parts(k->ctl).optim_hooks};
    const struct ht_participants_setup setup = {{[HT_PARTICIPANT_NS] = &ns, [HT_PARTICIPANT_OPT] = &optim}};
    int rc = ht_participants_new(k->store, &setup, &k->participants);

    k->ns = k->participants.of[HT_PARTICIPANT_NS];
    k->optim = k->participants.of[HT_PARTICIPANT_OPT];
    return rc;
}

static int make_layers(struct harness *k, unsigned optim_threads)
{
    struct ht_store_opts opts = {.dram_bytes = (8 << 20) + k->shm_bytes,
                                 .staging_bytes = 16 << 20,
                                 .shm_bytes = k->shm_bytes,
                                 .numa_node = HT_NUMA_OFF,
                                 .dedup = true,
                                 .compact = true,
                                 .discard = HT_DISCARD_ON,
                                 .compress_inline = HT_INLINE_ALWAYS, /* of files that may be compressed: none */
                                 .vault_programs = "mount-helpers/vault",
                                 .no_threads = true};
    int rc = ht_store_new(k->dev, k->dev_count, &opts, &k->store);

    if (!rc)
        rc = ht_ctl_new(k->store, NULL, &k->ctl);
    return rc ? rc : make_participants(k, optim_threads);
}

int harness_open(struct harness *k, unsigned optim_threads)
{
    int rc = make_layers(k, optim_threads);

    if (rc)
        return rc;
    ht_ctl_attach(k->ctl, k->ns, k->optim);
    rc = ht_store_mount(k->store);
    if (!rc)
        rc = ht_participants_start(&k->participants);
    if (!rc) /* tests read content past all locks */
        ht_optim_recovered(k->optim);
    return rc ? rc : ht_ctl_start(k->ctl);
}

int harness_close(struct harness *k, bool clean)
{
    int rc = 0;

    if (k->optim)
        ht_optim_stop(k->optim);
    if (clean)
        rc = ht_store_unmount(k->store);
    if (k->ctl)
        ht_ctl_detach(k->ctl);
    ht_participants_free(&k->participants);
    if (k->ctl)
        ht_ctl_free(k->ctl);
    if (k->store)
        ht_store_close(k->store);
    k->store = NULL;
    k->ctl = NULL;
    k->ns = NULL;
    k->optim = NULL;
    return rc;
}

void harness_free(struct harness *k)
{
    for (unsigned i = 0; i < k->dev_count; i++)
        ht_dev_close(k->dev[i]);
    k->dev_count = 0;
}

void harness_record(const struct harness *k, const char *path)
{
    ck_assert_int_eq(recorder_start(k->dev[0], path), 0);
    for (unsigned i = 1; i < k->dev_count; i++)
        ck_assert_int_eq(recorder_join(k->dev[i], k->dev[0]), 0);
}

/* ------------------------------------------------------------------ files */

uint64_t harness_find(const struct harness *k, uint64_t dir, const char *name)
{
    struct stat st;

    if (ht_ns_lookup(k->ns, dir, name, &st))
        return 0;
    ht_ns_forget(k->ns, st.st_ino, 1);
    return st.st_ino;
}

uint64_t harness_make(const struct harness *k, uint64_t dir, const char *name)
{
    struct stat st;
    uint64_t ino = harness_find(k, dir, name);

    if (ino)
        return ino;
    ck_assert_int_eq(ht_ns_mknod(k->ns, dir, name, S_IFREG | 0644, 0, (struct ht_cred){0, 0}, &st), 0);
    ht_ns_forget(k->ns, st.st_ino, 1);
    return st.st_ino;
}

int harness_write(const struct harness *k, uint64_t ino, uint64_t off, const void *data, size_t len)
{
    struct ht_obj *o;

    ck_assert_int_eq(ht_ns_open(k->ns, ino, &o), 0);
    ssize_t n = ht_obj_write(o, off, data, len);
    ht_ns_touch(k->ns, ino, true);
    ht_ns_close(k->ns, ino);
    return n == (ssize_t)len ? 0 : n < 0 ? (int)n : -ENOSPC;
}

void harness_put(const struct harness *k, uint64_t dir, const char *name, const void *data, size_t len)
{
    ck_assert_int_eq(harness_write(k, harness_make(k, dir, name), 0, data, len), 0);
}

void harness_set_word(const struct harness *k, uint64_t ino, const char *name, const char *value)
{
    struct ht_caller root = {{0, 0}, NULL, NULL};

    ck_assert_int_eq(ht_attribute_set(k->ctl, ino, name, value, strlen(value), 0, &root), 0);
}

/* ------------------------------------------------------------------ models */

uint64_t harness_element_bytes(const struct harness_param *p)
{
    return strcmp(p->dtype, "f32") == 0 ? 4 : 2;
}

static uint8_t dtype_of(const struct harness_param *p)
{
    return harness_element_bytes(p) == 4 ? HT_DTYPE_F32 : HT_DTYPE_BF16;
}

static void fill(uint8_t *out, const struct harness_param *p, uint64_t seed)
{
    bool whole = harness_element_bytes(p) == 4; /* asked once: with a sanitizer strcmp() takes long */

    for (uint64_t e = 0; e < p->elements; e++) {
        float x = (float)(int32_t)(rnd_next(&seed) & 0xffff) / 65536.0f - 0.5f;
        uint32_t bits;
        memcpy(&bits, &x, 4);
        if (whole)
            ht_le32_store(out + 4 * e, bits);
        else
            memcpy(out + 2 * e, (uint8_t *)&bits + 2, 2);
    }
}

uint64_t harness_model(const struct harness *k, const char *name, const struct harness_param *params, unsigned count,
                       const char *config)
{
    struct stat st;
    struct ht_cred cred = {0, 0};

    ck_assert_int_eq(ht_ns_mkdir(k->ns, HT_NS_ROOT_INO, name, 0755, cred, &st), 0);
    uint64_t root = st.st_ino;
    for (unsigned i = 0; i < count; i++) {
        uint8_t *bytes = malloc(params[i].elements * 4);
        harness_set_word(k, harness_make(k, root, params[i].name), "user.hitrain.dtype", params[i].dtype);
        fill(bytes, &params[i], i + 1);
        harness_put(k, root, params[i].name, bytes, params[i].elements * harness_element_bytes(&params[i]));
        free(bytes);
    }
    harness_put(k, root, "cursor", "0", 1);
    harness_set_word(k, root, "user.hitrain.optimizer", config);
    return root;
}

/* The object must be closed with ht_ns_close. */
static struct ht_param_desc describe(const struct harness *k, uint64_t root, const struct harness_param *p,
                                     uint64_t ino)
{
    struct ht_obj *o;

    ck_assert_int_eq(ht_ns_open(k->ns, ino, &o), 0);
    return (struct ht_param_desc){.root = root, .obj = o, .dtype = dtype_of(p), .grad_dtype = dtype_of(p)};
}

/* The kept step of that name, and its optimizer's configuration. */
static int find_kept(const struct harness *k, uint64_t root, const char *step, struct ht_ns_kept *about,
                     struct ht_optim_config *config)
{
    char text[HT_OPTIM_CONFIG_TEXT_MAX], err[HT_OPTIM_ERROR_MAX];
    int rc = ht_ns_kept_find(k->ns, root, step, about);

    if (rc)
        return rc;
    ssize_t n = ht_ns_getxattr(k->ns, about->ino, "user.hitrain.optimizer", text, sizeof(text));
    return n < 0 ? (int)n : ht_optim_config_parse(text, (size_t)n, config, err);
}

static int names_of_step(void *ctx, uint64_t root, uint64_t kept, struct ht_copy_id **out, size_t *out_count)
{
    return ht_ns_rollback(ctx, root, kept, 0, out, out_count);
}

int harness_rollback(const struct harness *k, uint64_t root, const char *step)
{
    struct ht_optim_steer by = {0};
    struct ht_optim_config config;
    struct ht_ns_kept about;
    int rc = find_kept(k, root, step, &about, &config);

    if (rc)
        return rc;
    const struct ht_rollback to = {about.ino, about.step, &config, names_of_step, k->ns};
    return ht_optim_rollback_by(k->optim, root, &to, &by);
}

char harness_why[HT_OPTIM_ERROR_MAX];

int harness_clone(const struct harness *k, uint64_t root, const char *step, uint64_t dir, const char *name,
                  uint32_t uid)
{
    struct ht_optim_config config;
    struct ht_clone_target target = {.parent = dir, .name = name, .uid = uid, .config = &config};
    struct ht_copy copy = {.clone = &target};
    struct ht_ns_kept about;
    uint64_t lsn;
    int rc = find_kept(k, root, step, &about, &config);

    if (rc)
        return rc;
    rc = ht_scope_clone(k->store, about.ino, &copy, &lsn);
    ht_copy_explain(&copy, harness_why, sizeof(harness_why));
    return rc ? rc : ht_store_sync(k->store, lsn);
}

void harness_gradient(const struct harness *k, uint64_t root, const struct harness_param *p, uint64_t seed)
{
    struct ht_grad *g;
    uint64_t ino = harness_find(k, root, p->name), bytes = p->elements * harness_element_bytes(p);
    struct ht_param_desc desc = describe(k, root, p, ino);

    ck_assert_int_eq(ht_grad_open(k->optim, &desc, &g), 0);
    uint8_t *data = malloc(bytes);
    fill(data, p, seed);
    ck_assert_int_eq(ht_grad_write(g, 0, data, bytes), (ssize_t)bytes);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ht_grad_release(g);
    ht_ns_close(k->ns, ino);
    free(data);
}

void harness_ortho(const struct harness *k, uint64_t root, const struct harness_param *p)
{
    uint64_t ino = harness_find(k, root, p->name), bytes = p->elements * 2;
    struct ht_param_desc desc = describe(k, root, p, ino);
    struct ht_root_stat st;
    uint8_t *data = malloc(bytes);
    ssize_t n = ht_optim_update_read(k->optim, &desc, 0, data, bytes);

    if (n != -ENODATA) {
        ck_assert_int_eq(n, (ssize_t)bytes);
        ck_assert_int_eq(ht_optim_ortho_write(k->optim, &desc, 0, data, bytes), (ssize_t)bytes);
        ck_assert_int_eq(ht_optim_root_stat(k->optim, root, &st), 0);
        ck_assert_int_eq(ht_optim_ortho_apply(k->optim, root, ino, st.step_open), 0);
    }
    ht_ns_close(k->ns, ino);
    free(data);
}

/* Without the first element, so that no update begins. */
void harness_dropped_gradient(const struct harness *k, uint64_t root, const struct harness_param *p, uint64_t seed)
{
    struct ht_grad *g;
    uint64_t ino = harness_find(k, root, p->name), bytes = p->elements * harness_element_bytes(p);
    struct ht_param_desc desc = describe(k, root, p, ino);

    ck_assert_int_eq(ht_grad_open(k->optim, &desc, &g), 0);
    uint8_t *data = malloc(bytes);
    fill(data, p, seed);
    uint64_t end = ht_min_u64(bytes, 1000);
    ck_assert_int_eq(ht_grad_write(g, 4, data, end - 4), (ssize_t)end - 4);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_grad_write(g, 0, data, 3), 3);
    ck_assert_int_eq(ht_optim_drop(k->optim, root, ino, NULL), 0);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ht_grad_release(g);
    ht_ns_close(k->ns, ino);
    free(data);
}

size_t harness_sparse_content(uint8_t *out, const struct harness_param *p, uint64_t seed)
{
    uint64_t count = ht_div_up(p->elements, SPARSE_EVERY);
    struct ht_topk_header h = {.magic = HT_TOPK_MAGIC, .dtype = dtype_of(p)};
    const struct harness_param named = {p->name, p->dtype, count};
    size_t at = sizeof(h);

    ht_le32_store(&h.version, HT_TOPK_VERSION);
    ht_le64_store(&h.elements, p->elements);
    ht_le64_store(&h.count, count);
    memcpy(out, &h, sizeof(h));
    for (uint32_t i = 0; i < count; i++, at += 4)
        ht_le32_store(out + at, SPARSE_EVERY * i);
    fill(out + at, &named, seed);
    return at + count * harness_element_bytes(p);
}

void harness_sparse_gradient(const struct harness *k, uint64_t root, const struct harness_param *p, uint64_t seed)
{
    struct ht_topk *t;
    uint64_t ino = harness_find(k, root, p->name);
    struct ht_param_desc desc = describe(k, root, p, ino);
    uint8_t *data = malloc(sizeof(struct ht_topk_header) + p->elements * 8);
    size_t bytes = harness_sparse_content(data, p, seed);

    ck_assert_int_eq(ht_topk_open(k->optim, &desc, &t), 0);
    ck_assert_int_eq(ht_topk_write(t, 0, data, bytes), (ssize_t)bytes);
    ck_assert_int_eq(ht_topk_flush(t), 0);
    ht_topk_release(t);
    ht_ns_close(k->ns, ino);
    free(data);
}

uint64_t harness_file_hash(const struct harness *k, uint64_t ino, uint64_t hash)
{
    struct ht_obj *o;

    if (ht_ns_open(k->ns, ino, &o))
        return 1;
    uint64_t size = ht_obj_size(o);
    uint8_t *p = malloc(size + 1);
    ssize_t n = ht_obj_read(o, 0, p, size);
    hash = n == (ssize_t)size ? ht_hash64(p, size, hash ^ size) : 2;
    free(p);
    ht_ns_close(k->ns, ino);
    return hash;
}

static uint64_t mix_state(const struct harness *k, uint64_t root, const struct harness_param *p, uint64_t ino,
                          uint64_t hash)
{
    static const char *const names[] = {"exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "step", "master"};
    struct ht_param_desc desc = describe(k, root, p, ino);
    uint8_t *data = malloc(p->elements * 4);

    for (unsigned s = 0; s < HT_ARRAY_SIZE(names); s++) {
        ssize_t n = ht_optim_state_read(k->optim, &desc, names[s], 0, data, p->elements * 4);
        if (n > 0)
            hash = ht_hash64(data, (size_t)n, hash + s);
    }
    free(data);
    ht_ns_close(k->ns, ino);
    return hash;
}

static int mix_name(void *ctx, const struct ht_ns_dirent *e)
{
    uint64_t *sum = ctx;

    *sum += ht_hash64(e->name, strlen(e->name), 3); /* whatever the order */
    return 0;
}

uint64_t harness_model_hash(const struct harness *k, uint64_t root, const struct harness_param *params, unsigned count)
{
    uint64_t hash = 0, names = 0, cursor = harness_find(k, root, "cursor");

    for (unsigned i = 0; i < count; i++) {
        uint64_t ino = harness_find(k, root, params[i].name);
        if (!ino)
            return 0;
        hash = harness_file_hash(k, ino, hash);
        hash = mix_state(k, root, &params[i], ino, hash);
    }
    if (!cursor)
        return 0;
    hash = harness_file_hash(k, cursor, hash);
    ck_assert_int_eq(ht_ns_readdir(k->ns, root, 0, mix_name, &names), 0);
    return hash ^ names;
}

uint64_t harness_model_step(const struct harness *k, uint64_t root)
{
    struct ht_root_stat st;

    return ht_optim_root_stat(k->optim, root, &st) ? UINT64_MAX : st.durable_step;
}
