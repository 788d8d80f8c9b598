/* SPDX-License-Identifier: Apache-2.0 */
/* The text of traces: what the reader takes, what it refuses and why, and bounds. */
#include "bench/replay/generate.h"
#include "bench/replay/trace_text.h"
#include "tests/support/suite.h"

static int read_text(const char *text, size_t len, struct replay_trace *out, char err[REPLAY_ERROR_MAX])
{
    FILE *from = fmemopen((void *)(uintptr_t)text, len, "r");

    ck_assert_ptr_nonnull(from);
    int rc = replay_trace_read(from, out, err);
    fclose(from);
    return rc;
}

#define H REPLAY_HEADER "\n"

static const struct {
    const char *text, *err; /* err: how the reason begins; NULL: the text is right */
} cases[] = {
    {REPLAY_HEADER, NULL},
    {H "# comment\n\n \t\n  # another\n", NULL},
    {H "tensor a 1\nread a\nwrite a 0 1\nstep\ncommit\ncompute 0\n", NULL},
    {H "\ttensor  a\t4096 \nread a 4095 1", NULL},
    {H "parameter p 4 8\ngradient p\nprefetch p\nevict p\ncompute 86400000000\n", NULL},
    {H "tensor a 17592186044416\nread a\n", NULL},
    {"hitrain trace 2\n", "line 1: the first line is not"},
    {"\n" H, "line 1: the first line is not"},
    {H "reads a\n", "line 2: not a word that begins a line: reads"},
    {H "\nread a\n", "line 3: no tensor before this line has the name: a"},
    {H "read a\ntensor a 1\n", "line 2: no tensor before"},
    {H "tensor a\n", "line 2: a name and bytes follow: tensor"},
    {H "tensor a 0\n", "line 2: not a number of bytes"},
    {H "tensor a -1\n", "line 2: not a number of bytes"},
    {H "tensor a 1e3\n", "line 2: not a number of bytes"},
    {H "tensor a 17592186044417\n", "line 2: not a number of bytes"},
    {H "tensor a 99999999999999999999999\n", "line 2: not a number of bytes"},
    {H "tensor a 1\ntensor a 1\n", "line 3: a second tensor of this name: a"},
    {H "parameter a 1\n", "line 2: a name, bytes and bytes of state follow"},
    {H "parameter a 1 0\n", "line 2: not a number of bytes"},
    {H "tensor a 1\ngradient a\n", "line 3: only parameters have gradients"},
    {H "tensor a 8\nread a 8 1\n", "line 3: not an offset in the tensor"},
    {H "tensor a 8\nread a 7 2\n", "line 3: not a number of bytes from there"},
    {H "tensor a 8\nread a 0 0\n", "line 3: not a number of bytes from there"},
    {H "tensor a 8\nread a 0\n", "line 3: a name follows, or a name, an offset and bytes"},
    {H "parameter a 8 8\ngradient a 0 8\n", "line 3: a name follows"},
    {H "tensor a 8\nread a 0 8 1\n", "line 3: too many words"},
    {H "tensor a 8\nread a 0 8 1 2 3\n", "line 3: too many words"},
    {H "step 1\n", "line 2: nothing follows: step"},
    {H "compute\n", "line 2: a whole number of microseconds"},
    {H "compute 1.5\n", "line 2: a whole number of microseconds"},
    {H "compute 86400000001\n", "line 2: a whole number of microseconds"},
    {H "step\r\n", "line 2: not a word that begins a line: step?"},
    {H "tensor a\x01 1\n", "line 2: not a name: a?"},
};

TEST_LOOP(a_line_is_taken_or_refused_with_its_number_and_reason, HT_ARRAY_SIZE(cases))
{
    struct replay_trace t;
    char err[REPLAY_ERROR_MAX];
    int rc = read_text(cases[_i].text, strlen(cases[_i].text), &t, err);

    if (!cases[_i].err) {
        ck_assert_msg(rc == 0, "%s", err);
    } else {
        ck_assert_int_eq(rc, -EINVAL);
        ck_assert_msg(strncmp(err, cases[_i].err, strlen(cases[_i].err)) == 0, "%s", err);
        ck_assert_uint_eq(t.tensors, 0);
    }
    replay_trace_free(&t);
}

TEST(bytes_that_are_no_text_are_refused)
{
    static const char nul[] = H "step\0\n";
    char line[sizeof(H) + 2000], err[REPLAY_ERROR_MAX];
    struct replay_trace t;

    ck_assert_int_eq(read_text(nul, sizeof(nul) - 1, &t, err), -EINVAL);
    ck_assert_str_eq(err, "line 2: a NUL byte");
    memset(line, 'x', sizeof(line));
    memcpy(line, H, strlen(H));
    ck_assert_int_eq(read_text(line, sizeof(line), &t, err), -EINVAL);
    ck_assert_str_eq(err, "line 2: more than 1023 bytes");
    line[strlen(H)] = '#';
    line[strlen(H) + 1023] = '\n';
    ck_assert_int_eq(read_text(line, strlen(H) + 1024, &t, err), 0);
    replay_trace_free(&t);
    FILE *nothing = fopen("/dev/null", "r");
    ck_assert_int_eq(replay_trace_read(nothing, &t, err), -EINVAL);
    ck_assert(strncmp(err, "line 1: ", 8) == 0);
    fclose(nothing);
    FILE *folder = fopen("/", "r");
    ck_assert_int_eq(replay_trace_read(folder, &t, err), -EIO);
    fclose(folder);
}

/* Reads the text of the trace again. */
static void read_again(const struct replay_trace *t, struct replay_trace *out)
{
    char *text, err[REPLAY_ERROR_MAX];
    size_t len;
    FILE *to = open_memstream(&text, &len);

    ck_assert_int_eq(replay_trace_write(t, to), 0);
    fclose(to);
    ck_assert_msg(read_text(text, len, out, err) == 0, "%s", err);
    free(text);
}

/* Without an assertion for each entry: each is a write to the runner. */
static void assert_same(const struct replay_trace *a, const struct replay_trace *b)
{
    unsigned differ = 0;

    ck_assert_uint_eq(a->tensors, b->tensors);
    ck_assert_uint_eq(a->entries, b->entries);
    for (uint32_t i = 0; i < a->tensors; i++)
        differ += strcmp(a->tensor[i].name, b->tensor[i].name) != 0 || a->tensor[i].bytes != b->tensor[i].bytes ||
            a->tensor[i].state_bytes != b->tensor[i].state_bytes;
    ck_assert_uint_eq(differ, 0);
    ck_assert_int_eq(memcmp(a->entry, b->entry, a->entries * sizeof(*a->entry)), 0);
}

static const char *const kinds[][2] = {
    {"gpt", "125M"}, {"llama", "70B"}, {"gpt-swap", "70B"}, {"llama-swap", "8B"}, {"scan", ""},
};

TEST_LOOP(a_generated_trace_is_the_same_after_it_was_written_and_read, HT_ARRAY_SIZE(kinds))
{
    struct generate_config c = {
        .kind = kinds[_i][0],
        .shape = kinds[_i][1],
        .scale = 1,
        .steps = 3,
        .compute_us = 1000000,
        .activation_bytes = 1 << 20,
        .optimizer_share = 0.2,
        .tensors = 5,
        .bytes = 10000,
    };
    struct replay_trace t, again;
    uint64_t us = 0;

    ck_assert_int_eq(generate_trace(&c, &t), 0);
    read_again(&t, &again);
    assert_same(&t, &again);
    ck_assert_uint_eq(replay_trace_steps(&t), 3);
    for (uint64_t i = 0; i < t.entries; i++)
        us += t.entry[i].op == REPLAY_COMPUTE ? t.entry[i].offset : 0;
    ck_assert(us > 2990000 && us < 3010000);
    replay_trace_free(&t);
    replay_trace_free(&again);
}

TEST(shapes_have_as_many_parameters_as_their_names_say)
{
    struct generate_config c = {.kind = "gpt", .shape = "1.3B", .scale = 1, .steps = 1};
    struct replay_trace t;
    uint64_t bytes = 0;

    ck_assert_int_eq(generate_trace(&c, &t), 0);
    for (uint32_t i = 0; i < t.tensors; i++) {
        bytes += t.tensor[i].bytes;
        ck_assert(t.tensor[i].state_bytes > 0);
    }
    ck_assert(bytes > UINT64_C(2500000000) && bytes < UINT64_C(2800000000));
    uint64_t all = t.bytes;
    ck_assert(all > bytes * 59 / 10 && all < bytes * 61 / 10);
    replay_trace_free(&t);
    c.scale = 0.1;
    ck_assert_int_eq(generate_trace(&c, &t), 0);
    ck_assert(t.bytes > all / 11 && t.bytes < all / 9);
    replay_trace_free(&t);
    c.shape = "2B";
    ck_assert_int_eq(generate_trace(&c, &t), -EINVAL);
    c = (struct generate_config){.kind = "llama-", .shape = "8B", .scale = 1, .steps = 1};
    ck_assert_int_eq(generate_trace(&c, &t), -EINVAL);
    c = (struct generate_config){.kind = "gpt", .shape = "125M", .scale = 0, .steps = 1};
    ck_assert_int_eq(generate_trace(&c, &t), -EINVAL);
}

TEST(a_step_ends_at_the_first_of_several_boundaries)
{
    struct replay_trace t;
    char err[REPLAY_ERROR_MAX];
    static const char text[] = H "compute 1\nstep\ncommit\ncompute 1\ncommit\nstep\nstep\ncompute 1\n";

    ck_assert_int_eq(read_text(text, strlen(text), &t, err), 0);
    ck_assert_uint_eq(replay_trace_steps(&t), 2);
    ck_assert(replay_ends_step(&t, 1) && !replay_ends_step(&t, 2) && replay_ends_step(&t, 4));
    replay_trace_free(&t);
}

TEST(many_tensors_and_entries_are_bounded)
{
    struct replay_trace t, again;
    uint32_t n, wrong = 0;
    char name[32];

    replay_trace_init(&t);
    for (unsigned i = 0; i < 100000; i++) {
        snprintf(name, sizeof(name), "layers.%u.weight", i);
        wrong += replay_trace_add_tensor(&t, name, i + 1, i % 2, &n) != 0 || n != i;
    }
    ck_assert_int_eq(replay_trace_add_tensor(&t, "layers.99999.weight", 1, 0, &n), -EINVAL);
    ck_assert_int_eq(replay_trace_add_tensor(&t, "large", REPLAY_TENSOR_BYTES_MAX + 1, 0, &n), -E2BIG);
    for (unsigned i = 0; i < 300000; i++)
        wrong += replay_trace_add(&t, REPLAY_READ, i % 100000, 0, i % 100000 + 1) != 0;
    ck_assert_uint_eq(wrong, 0);
    read_again(&t, &again);
    assert_same(&t, &again);
    replay_trace_free(&again);
    uint64_t bytes = t.bytes;
    t.bytes = REPLAY_BYTES_MAX - 8;
    ck_assert_int_eq(replay_trace_add_tensor(&t, "more", 4, 5, &n), -E2BIG);
    t.bytes = bytes;
    uint64_t entries = t.entries;
    t.entries = REPLAY_ENTRIES_MAX;
    ck_assert_int_eq(replay_trace_add(&t, REPLAY_STEP, 0, 0, 0), -E2BIG);
    t.entries = entries;
    uint32_t tensors = t.tensors;
    t.tensors = REPLAY_TENSORS_MAX;
    ck_assert_int_eq(replay_trace_add_tensor(&t, "more", 1, 0, &n), -E2BIG);
    t.tensors = tensors;
    replay_trace_free(&t);
}

RUN_TESTS("trace_text")
