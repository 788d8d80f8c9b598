/* SPDX-License-Identifier: Apache-2.0 */
/*
 * replay.c - a fuzz target without a fuzzer: runs it on files and folders. Without arguments on those of its corpus,
 * tests/fuzz/corpus/NAME, from the root of the tree; then there has to be one. Memory has the bound that it has there.
 */
#include <dirent.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "tests/fuzz/fuzz.h"

enum { RSS_KIB_MAX = 1 << 20 }; /* as make fuzz allows */

static unsigned runs;

__attribute__((weak)) int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    return 0;
}

static void run_file(const char *path)
{
    struct stat st;
    FILE *f = fopen(path, "rb");

    MUST(f && fstat(fileno(f), &st) == 0);
    size_t size = (size_t)st.st_size;
    uint8_t *data = malloc(size ? size : 1); /* as large as it is: reading beyond is seen */
    MUST(data && fread(data, 1, size, f) == size);
    fclose(f);
    (void)LLVMFuzzerTestOneInput(data, size);
    free(data);
    runs++;
}

static int no_dot_files(const struct dirent *e)
{
    return e->d_name[0] != '.';
}

static void run_path(const char *path)
{
    struct dirent **entry = NULL;
    struct stat st;

    if (stat(path, &st) || !S_ISDIR(st.st_mode)) {
        run_file(path);
        return;
    }
    int n = scandir(path, &entry, no_dot_files, alphasort);
    for (int i = 0; i < n; i++) {
        char file[4096];
        snprintf(file, sizeof(file), "%s/%s", path, entry[i]->d_name);
        run_file(file);
        free(entry[i]);
    }
    free(entry);
}

int main(int argc, char **argv)
{
    const char *name = strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0];

    (void)LLVMFuzzerInitialize(&argc, &argv);
    if (argc > 1) {
        for (int i = 1; i < argc; i++)
            run_path(argv[i]);
    } else {
        char corpus[256];
        MUST(strncmp(name, "fuzz_", 5) == 0);
        snprintf(corpus, sizeof(corpus), "tests/fuzz/corpus/%s", name + 5);
        run_path(corpus);
    }
    struct rusage usage;
    MUST(getrusage(RUSAGE_SELF, &usage) == 0 && usage.ru_maxrss <= RSS_KIB_MAX);
    printf("figures: %s: %u inputs\n", name, runs);
    return runs ? 0 : 1;
}
