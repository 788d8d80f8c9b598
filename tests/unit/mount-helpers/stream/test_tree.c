/* SPDX-License-Identifier: Apache-2.0 */
/* A stream becomes a directory, and changes nothing elsewhere, whatever it says. This holds on every file system. */
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mount-helpers/stream/tree.h"
#include "tests/support/suite.h"
#include "tests/unit/mount-helpers/stream/memory.h"

static size_t at;
static struct ht_stream_writer w;
static char folder[64], why[HT_TREE_WHY_MAX];
static int dir = -1, base_dir = -1; /* base_dir: the stream is an incremental one */

static ssize_t get(void *ctx, void *data, size_t len)
{
    size_t n = stream.len - at < len ? stream.len - at : len;

    (void)ctx;
    memcpy(data, stream.data + at, n);
    at += n;
    return (ssize_t)n;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *f)
{
    (void)st, (void)kind, (void)f;
    return remove(path);
}

static void begin(void)
{
    strcpy(folder, "/tmp/hitrain-tree-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(folder));
    dir = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    ck_assert_int_ge(dir, 0);
    at = 0;
    ht_buf_reset(&stream);
    struct ht_stream_head head = {.step = 1, .incremental = base_dir >= 0};
    ck_assert_int_eq(ht_stream_writer_begin(&w, &head, put, NULL), 0);
    ck_assert_int_eq(
        ht_stream_put_entry(&w, &(struct ht_stream_entry){HT_STREAM_DIRECTORY, 0755, .path = "", .target = ""}), 0);
}

static void end(void)
{
    close(dir);
    ck_assert_int_eq(nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS), 0);
    ht_stream_writer_free(&w);
    ht_buf_free(&stream);
}

static void entry(enum ht_stream_kind kind, uint16_t mode, const char *path, const char *target, uint64_t size)
{
    struct ht_stream_entry e = {.kind = kind, .mode = mode, .path = path, .target = target, .size = size};

    ck_assert_int_eq(ht_stream_put_entry(&w, &e), 0);
}

static const struct stat *stat_of(const char *name)
{
    static struct stat st;

    ck_assert_msg(fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) == 0, "%s", name);
    return &st;
}

/* Writes the stream into the directory. */
static int write_tree(struct ht_hash128 *out_digest)
{
    struct ht_hash128 digest;
    struct ht_stream_reader r;
    struct ht_tree_root root;

    ck_assert_int_eq(ht_stream_put_end(&w, out_digest), 0);
    int rc = ht_stream_reader_begin(&r, get, NULL);
    ck_assert_int_eq(rc, 0);
    rc = ht_tree_write(dir, base_dir, &r, false, NULL, &root, &digest, why);
    ck_assert_uint_eq(stat_of(".")->st_mode & 07777, 0700); /* not yet open to others */
    if (rc == 0)
        rc = ht_tree_write_root(dir, &root, false, why);
    ht_buf_free(&root.lists);
    if (rc == 0)
        ck_assert_uint_eq(stat_of(".")->st_mode & 07777, 0755);
    if (rc == 0)
        ck_assert_mem_eq(&digest, out_digest, sizeof(digest));
    ht_stream_reader_free(&r);
    return rc;
}

TEST(a_tree_comes_back_with_the_same_digest)
{
    static uint8_t block[HT_STREAM_BLOCK_BYTES];
    struct ht_stream_writer again;
    struct ht_hash128 sent, read;

    begin();
    memset(block, 7, sizeof(block));
    entry(HT_STREAM_DIRECTORY, 0500, "d", "", 0);
    entry(HT_STREAM_DIRECTORY, 0750, "d/e", "", 0);
    entry(HT_STREAM_FILE, 0640, "d/e/f", "", 3 * HT_STREAM_BLOCK_BYTES + 5ull);
    ck_assert_int_eq(ht_stream_put_block(&w, 1, block, sizeof(block)), 0);
    ck_assert_int_eq(ht_stream_put_block(&w, 3, block, 5), 0);
    entry(HT_STREAM_FILE, 06711, "d/g", "", 0);
    entry(HT_STREAM_LINK, 0, "h", "d/e/f", 0);
    entry(HT_STREAM_SYMLINK, 0, "s", "/etc", 0);
    ck_assert_msg(write_tree(&sent) == 0, "%s", why);
    ck_assert_uint_eq(stat_of("d")->st_mode & 07777, 0500);
    ck_assert_uint_eq(stat_of("d/e")->st_mode & 07777, 0750);
    ck_assert_uint_eq(stat_of("d/g")->st_mode & 07777, 0711); /* not setuid */
    ck_assert_uint_eq(stat_of("h")->st_nlink, 2);
    ck_assert_int_eq(stat_of("h")->st_size, 3 * HT_STREAM_BLOCK_BYTES + 5);
    ck_assert_int_lt(stat_of("h")->st_blocks * 512, 2 * HT_STREAM_BLOCK_BYTES);
    ck_assert_int_eq(stat_of("s")->st_mode & S_IFMT, S_IFLNK);
    ck_assert_int_eq(ht_stream_writer_begin(&again, &(struct ht_stream_head){.step = 1}, NULL, NULL), 0);
    ck_assert_msg(ht_tree_read(dir, -1, &again, NULL, why) == 0, "%s", why);
    ck_assert_int_eq(ht_stream_put_end(&again, &read), 0);
    ck_assert_mem_eq(&read, &sent, sizeof(read));
    ht_stream_writer_free(&again);
    end();
}

TEST(a_hard_link_does_not_follow_a_symlink)
{
    static const char *const target[] = {"s/victim", "s", "d"};
    struct ht_hash128 digest;
    char outside[] = "/tmp/hitrain-outside-XXXXXX", victim[64];

    ck_assert_ptr_nonnull(mkdtemp(outside));
    snprintf(victim, sizeof(victim), "%s/victim", outside);
    close(open(victim, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    for (size_t i = 0; i < HT_ARRAY_SIZE(target); i++) {
        struct stat st;
        begin();
        entry(HT_STREAM_DIRECTORY, 0700, "d", "", 0);
        entry(HT_STREAM_SYMLINK, 0, "s", outside, 0);
        entry(HT_STREAM_LINK, 0, "z", target[i], 0);
        ck_assert_int_lt(write_tree(&digest), 0);
        ck_assert_msg(strncmp(why, "z: cannot", 9) == 0, "%s", why);
        ck_assert(stat(victim, &st) == 0 && st.st_nlink == 1);
        end();
    }
    ck_assert(unlink(victim) == 0 && rmdir(outside) == 0);
}

TEST(a_failure_names_the_entry)
{
    struct ht_hash128 digest;

    begin();
    ck_assert_int_eq(mkdirat(dir, "there", 0700), 0);
    entry(HT_STREAM_FILE, 0600, "there", "", 0);
    ck_assert_int_eq(write_tree(&digest), -EEXIST);
    ck_assert_msg(strstr(why, "there: cannot make the file: File exists"), "%s", why);
    end();
    begin();
    ck_assert_int_eq(mkfifoat(dir, "fifo", 0600), 0);
    ck_assert_int_eq(ht_tree_read(dir, -1, &w, NULL, why), -EINVAL); /* the root was there already */
    uint64_t bytes;
    ck_assert_int_eq(ht_tree_measure(dir, &bytes, why), -EOPNOTSUPP);
    ck_assert_msg(strncmp(why, "fifo is a device, a socket or a FIFO", 30) == 0, "%s", why);
    end();
}

/* No symlink in the base leads away from it. */
TEST(blocks_come_from_files_of_the_base_alone)
{
    static const struct {
        const char *path, *why;
        uint64_t size;
        int error;
    } wrong[] = {
        {"missing", "cannot open the file of the base", 5, -ENOENT},
        {"s/victim", "cannot open the file of the base", 5, -ELOOP},
        {"s", "cannot open the file of the base", 5, -ELOOP},
        {"d", "cannot open the file of the base", 5, -EINVAL},
        {"d/f", "cannot find its blocks in the base", 6, -ESTALE},
    };
    char base[] = "/tmp/hitrain-base-XXXXXX", command[256];
    struct ht_hash128 digest;

    ck_assert_ptr_nonnull(mkdtemp(base));
    snprintf(command, sizeof(command), "cd %s && mkdir d && printf 12345 >d/f && printf 12345 >victim && ln -s . s",
             base);
    ck_assert_int_eq(system(command), 0);
    base_dir = open(base, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (size_t i = 0; i < HT_ARRAY_SIZE(wrong); i++) {
        begin();
        entry(HT_STREAM_FILE, 0600, "new", "", wrong[i].size);
        ck_assert_int_eq(ht_stream_put_same(&w, &(struct ht_stream_same){0, 1, wrong[i].path}), 0);
        ck_assert_int_eq(write_tree(&digest), wrong[i].error);
        ck_assert_msg(strstr(why, wrong[i].why) != 0, "%s", why);
        end();
    }
    begin();
    entry(HT_STREAM_FILE, 0600, "new", "", 5);
    ck_assert_int_eq(ht_stream_put_same(&w, &(struct ht_stream_same){0, 1, "d/f"}), 0);
    ck_assert_msg(write_tree(&digest) == 0, "%s", why);
    char text[8] = "";
    int fd = openat(dir, "new", O_RDONLY | O_CLOEXEC);
    ck_assert_int_eq(read(fd, text, sizeof(text)), 5);
    ck_assert_str_eq(text, "12345");
    close(fd);
    end();
    close(base_dir);
    base_dir = -1;
    snprintf(command, sizeof(command), "rm -r %s", base);
    ck_assert_int_eq(system(command), 0);
}

TEST(state_of_a_file_that_has_none_is_refused)
{
    struct ht_hash128 digest;

    begin();
    entry(HT_STREAM_FILE, 0600, "w", "", 4);
    ck_assert_int_eq(ht_stream_put_state(&w, &(struct ht_stream_state){"exp_avg", 4}), 0);
    ck_assert_int_eq(write_tree(&digest), -ENOENT);
    ck_assert_msg(strstr(why, "w: cannot open its state"), "%s", why);
    end();
}

int main(void)
{
    return run_tests("tree");
}
