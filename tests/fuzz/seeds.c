/* SPDX-License-Identifier: Apache-2.0 */
/*
 * seeds.c - writes first inputs, from a real store, for the targets that take a device's content: seeds FOLDER. Run it
 * again when the format has changed; the fuzzer finds the rest.
 */
#include "optim/rules/kernel.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/sample.h"
#include "tests/unit/tiering/codec/content.h"
#include "tiering/codec/frame.h"

enum { PATH_BYTES = 4096, LOG_USED_BYTES = 5 * HT_BLOCK_BYTES };

static const char *folder;

static void put_seed(const char *target, const char *name, const void *data, size_t len)
{
    char path[PATH_BYTES];

    snprintf(path, sizeof(path), "%s/%s/seed-%s", folder, target, name);
    FILE *f = fopen(path, "wb");
    MUST(f && fwrite(data, 1, len, f) == len && fclose(f) == 0);
}

/* Without the zeros at the end: the target fills up with them. */
static void put_super(const struct harness *k)
{
    uint8_t seed[1 + HT_BLOCK_BYTES] = {0x0f};
    size_t len = sizeof(seed);

    memcpy(seed + 1, ht_dev_ram_data(k->dev[0]), HT_BLOCK_BYTES);
    while (!seed[len - 1])
        len--;
    put_seed("super", "all", seed, len);
    seed[0] = 2;
    put_seed("super", "one", seed, len);
}

/* --------------------------------------------------------------- records */

struct records {
    struct ht_buf *out;
    unsigned count;
};

static int put_record(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len)
{
    struct records *r = ctx;

    MUST(len <= UINT16_MAX);
    ht_buf_put_u8(r->out, (uint8_t)type);
    ht_buf_put_u16(r->out, (uint16_t)len);
    ht_buf_put(r->out, payload, len);
    if (++r->count % 7 == 0)
        ht_buf_put_u8(r->out, 0xff); /* another frame */
    return 0;
}

static void put_store(const struct harness *k, const char *name)
{
    struct ht_super_report super_report;
    struct ht_journal_report report;
    struct ht_buf out = HT_BUF_INIT;
    struct records records = {&out, 0};
    struct ht_journal *j;
    struct ht_super s;

    MUST(ht_super_read(k->dev[0], &s, &super_report) == 0);
    struct ht_journal_config c = {
        .dev = {k->dev[0], k->dev[0]},
        .offset = {s.log_offset[0], s.log_offset[1]},
        .log_bytes = s.log_bytes,
        .salt = s.salt,
        .start = {.pos = s.start_pos, .seq = s.start_seq, .chain = s.start_chain},
        .epoch = s.epoch,
        .ctx = &records,
        .replay = put_record,
    };
    MUST(ht_journal_open(&c, false, &report, &j) == 0);
    ht_journal_abandon(j);
    MUST(!out.err);
    put_seed("store", name, out.data, out.len);
    ht_buf_free(&out);
}

/* Records that come 60,000 times and make more memory than the log may take: fuzz_store.c. */
static void put_many(const char *name, uint8_t type, const void *payload, size_t len)
{
    struct ht_buf out = HT_BUF_INIT;

    ht_buf_put_u8(&out, 0xfe);
    ht_buf_put_u16(&out, 60000);
    ht_buf_put_u16(&out, 0);
    ht_buf_put_u8(&out, type);
    ht_buf_put_u16(&out, (uint16_t)len);
    ht_buf_put(&out, payload, len);
    put_seed("store", name, out.data, out.len);
    ht_buf_free(&out);
}

static void put_hostile(void)
{
    struct ht_buf far = HT_BUF_INIT;
    const uint64_t root[] = {100, 0};

    ht_buf_put_u64(&far, 100);
    ht_buf_put_u64(&far, HT_FILE_BYTES_MAX / HT_SMALL_CHUNK_BYTES - 1);
    ht_buf_put_u32(&far, 1);
    ht_buf_put_u8(&far, HT_CODEC_LOST);
    ht_buf_put_u8(&far, 0);
    ht_buf_put_u16(&far, 0);
    ht_buf_put_u32(&far, 0);
    ht_buf_put_u32(&far, HT_SMALL_CHUNK_BYTES);
    ht_buf_put_u64(&far, 0);
    put_many("far", HT_REC_CHUNK, far.data, far.len);
    put_many("roots", HT_REC_OPT_FIRST, root, sizeof(root));
    ht_buf_free(&far);
}

static unsigned moments;

static void put_moment(void *ctx)
{
    char name[16];

    snprintf(name, sizeof(name), "%u", moments++);
    put_store(ctx, name);
}

/* ---------------------------------------------------------------- frames */

static void put_frames(void)
{
    static uint8_t seed[2 + LOG_USED_BYTES] = {0, 3};
    struct ht_journal_config c = {.log_bytes = HT_LOG_BYTES_MIN, .salt = SAMPLE_SALT, .start = {.seq = 1}};
    struct ht_journal_report report;
    struct ht_buf group = HT_BUF_INIT;
    struct ht_journal *j;
    uint64_t lsn;

    MUST(dev_open_ram(HT_LOG_BYTES_MIN, 4096, &c.dev[0]) == 0);
    for (uint64_t epoch = 1; epoch <= 2; epoch++, c.epoch = epoch - 1) {
        MUST(ht_journal_open(&c, false, &report, &j) == 0 && ht_journal_start(j, epoch) == 0);
        group.len = 0;
        ht_record_put(&group, HT_REC_IDS, &epoch, sizeof(epoch));
        MUST(ht_journal_append(j, &group, &lsn) == 0 && ht_journal_sync(j, lsn) == 0);
        ht_journal_abandon(j);
    }
    memcpy(seed + 2, ht_dev_ram_data(c.dev[0]), LOG_USED_BYTES);
    put_seed("frames", "both", seed, sizeof(seed));
    seed[1] = 0;
    seed[0] = 8;
    put_seed("frames", "one", seed, sizeof(seed));
    ht_buf_free(&group);
    ht_dev_close(c.dev[0]);
}

/* ------------------------------------------------------ compressed frames */

static void put_compressed(struct ht_encoder *e, const char *name, content_fn fill)
{
    enum { BYTES = 7 * HT_BLOCK_BYTES, WANT_BYTES = 3 };
    static uint8_t raw[BYTES], seed[WANT_BYTES + BYTES] = {BYTES & 0xff, BYTES >> 8 & 0xff, BYTES >> 16};

    fill(raw, BYTES, 1);
    int len = ht_codec_encode(e, raw, BYTES, seed + WANT_BYTES);
    MUST(len > 0);
    put_seed("frame", name, seed, WANT_BYTES + (size_t)len);
}

/* ------------------------------------------------- summary of a logged step */

static void put_logged_param(struct ht_buf *out, uint64_t object, uint64_t elements, uint8_t dtype, uint8_t grad_dtype)
{
    struct ht_disk_redo_param d = {.dtype = dtype, .grad_dtype = grad_dtype, .kernel = HT_KERNEL_ADAMW};

    ht_le64_store(&d.object, object);
    ht_le64_store(&d.steps, 4);
    ht_le64_store(&d.elements, elements);
    ht_le32_store(&d.chunk_bytes, HT_SMALL_CHUNK_BYTES);
    ht_le32_store(&d.scalar[0], 0x3f800000); /* 1 */
    ht_buf_put(out, &d, sizeof(d));
}

/* In a summary without codings all of its bytes are stored. */
static void put_logged_piece(struct ht_buf *out, bool coded, uint64_t at, uint32_t param, uint32_t end,
                             uint32_t entries)
{
    struct ht_disk_redo_coded d = {.piece = {.at = {{0}}}};

    ht_le64_store(&d.piece.at, at);
    ht_le32_store(&d.piece.param, param);
    ht_le32_store(&d.piece.end, end);
    ht_le32_store(&d.bytes, entries ? entries : end);
    ht_le32_store(&d.coding, entries ? HT_REDO_SPARSE : HT_REDO_PLAIN);
    ht_buf_put(out, &d, coded ? sizeof(d) : sizeof(d.piece));
}

static void put_logged_section(struct ht_buf *out, uint64_t object, uint64_t begin, uint64_t end)
{
    struct ht_disk_redo_section d = {.kernel = HT_KERNEL_ADAMW, .frozen = begin > 0};

    ht_le64_store(&d.object, object);
    ht_le64_store(&d.begin, begin);
    ht_le64_store(&d.end, end);
    ht_le32_store(&d.scalar[0], 0x3f800000); /* 1 */
    ht_buf_put(out, &d, sizeof(d));
}

/*
 * As the target makes it: the version, the number of parameters, these, pieces; and bytes that are entries. sections:
 * the first parameter has as many.
 */
static void put_logged(const char *name, bool coded, uint8_t sections)
{
    static const uint8_t entries[12] = {3, 0, 1, 2, 3, 4, 0, 0, 5, 6, 7, 8};
    struct ht_buf out = HT_BUF_INIT;

    ht_buf_put_u8(&out, sections ? 5 : coded ? 3 : 1);
    ht_buf_put_u8(&out, 2 + sections);
    put_logged_param(&out, 5, 1000, HT_DTYPE_F32, HT_DTYPE_F32);
    for (uint8_t i = 0; i < sections; i++)
        put_logged_section(&out, 5, i * 100u, i * 100u + 7);
    put_logged_param(&out, 6, 300, HT_DTYPE_BF16, HT_DTYPE_BF16);
    size_t end = out.len + 2 * (coded ? sizeof(struct ht_disk_redo_coded) : sizeof(struct ht_disk_redo_piece));
    put_logged_piece(&out, coded, coded ? end : 0, 0, 4000, coded ? sizeof(entries) : 0);
    put_logged_piece(&out, coded, 4000, 1u + sections, 600, 0);
    if (coded)
        ht_buf_put(&out, entries, sizeof(entries));
    put_seed("redo", name, out.data, out.len);
    ht_buf_free(&out);
}

/* ------------------------------------------------------- calls of clients */

enum {
    SET_WORD = 0,
    USE_HIDDEN = 3,
    END_STEP = 7,
    APPLY_ORTHO = 15,
    W = 2,
    CTL = 0,
    GRAD_W = 1,
    UPDATE_W = 5,
    ORTHO_W = 6,
    ELEMENTS = 700
};

static void put_piece(struct ht_buf *out, const void *data, size_t len)
{
    ht_buf_put_u16(out, (uint16_t)len);
    ht_buf_put(out, data, len);
}

static void put_word(struct ht_buf *out, const char *name, const char *value)
{
    ht_buf_put_u8(out, SET_WORD);
    ht_buf_put_u8(out, W);
    put_piece(out, name, strlen(name));
    put_piece(out, value, strlen(value));
}

static void put_hidden(struct ht_buf *out, uint8_t which, const void *data, size_t len)
{
    ht_buf_put_u8(out, USE_HIDDEN);
    ht_buf_put_u8(out, which);
    ht_buf_put_u16(out, 0);
    ht_buf_put_u8(out, 0);
    put_piece(out, data, len);
}

/* A whole step of w as a matrix of muon: fuzz_clients.c. nonfinite: of which the apply is refused. */
static void put_two_phases(const char *name, bool nonfinite)
{
    static float gradient[ELEMENTS];
    static uint16_t ortho[ELEMENTS];
    struct ht_buf out = HT_BUF_INIT;

    for (unsigned i = 0; i < ELEMENTS; i++) {
        gradient[i] = (float)(i % 7) - 3;
        ortho[i] = i % 11 ? 0x3c00 : 0xbd00;
    }
    ortho[ELEMENTS - 1] = nonfinite ? 0x7f80 : 0;
    put_hidden(&out, CTL, "reset w\n", 8);
    put_word(&out, "user.hitrain.shape", "70,10");
    put_word(&out, "user.hitrain.optimizer", "muon lr=0.01 muon_split=30,20*2");
    put_hidden(&out, GRAD_W, gradient, sizeof(gradient));
    put_hidden(&out, UPDATE_W, NULL, 0);
    put_hidden(&out, ORTHO_W, ortho, sizeof(ortho));
    ht_buf_put_u8(&out, APPLY_ORTHO);
    ht_buf_put_u8(&out, 0);
    ht_buf_put_u8(&out, END_STEP);
    ht_buf_put_u8(&out, 2);
    put_seed("clients", name, out.data, out.len);
    ht_buf_free(&out);
}

int main(int argc, char **argv)
{
    struct harness k;

    MUST(argc == 2);
    folder = argv[1];
    sample_format(&k);
    put_super(&k);
    MUST(harness_open(&k, 1) == 0);
    sample_populate(&k, put_moment, &k);
    MUST(harness_close(&k, true) == 0);
    put_store(&k, "all");
    put_hostile();
    harness_free(&k);
    put_frames();
    struct ht_encoder *e;
    MUST(ht_encoder_new(&e) == 0);
    put_compressed(e, "bf16", content_bf16);
    put_compressed(e, "f32", content_f32);
    put_compressed(e, "text", content_text);
    put_compressed(e, "zeros", content_zeros);
    ht_encoder_free(e);
    put_logged("plain", false, 0);
    put_logged("coded", true, 0);
    put_logged("sections", true, 2);
    put_two_phases("muon", false);
    put_two_phases("muon-nonfinite", true);
    return 0;
}
