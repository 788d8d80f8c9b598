/* SPDX-License-Identifier: Apache-2.0 */
/* harness_fsck.c - fsck's passes on the devices of a harness. Apart, so that tests of fs/ are linked without fsck. */
#include <stdio.h>
#include <stdlib.h>

#include "mount-helpers/fsck/fsck.h"
#include "tests/support/harness.h"

/* text: of the problems, to be freed. */
static uint64_t run_passes(const struct harness *k, char **text, int *out_rc)
{
    static int (*const passes[])(struct ht_fsck * f) = {ht_fsck_pass_super, ht_fsck_pass_log,  ht_fsck_pass_names,
                                                        ht_fsck_pass_optim, ht_fsck_pass_refs, ht_fsck_pass_tensors};
    size_t len = 0;
    struct ht_fsck *f = calloc(1, sizeof(*f));

    f->opt.json = true;
    memcpy(f->devs, k->dev, sizeof(f->devs));
    f->dev_count = k->dev_count;
    ht_json_init(&f->json, open_memstream(text, &len));
    ht_json_array(&f->json, NULL);
    int rc = 0;
    for (unsigned i = 0; i < HT_ARRAY_SIZE(passes) && !rc; i++)
        rc = passes[i](f);
    ht_json_end(&f->json);
    fclose(f->json.to);
    f->dev_count = 0; /* the devices are not its own */
    ht_fsck_close(f);
    uint64_t problems = f->problems;
    free(f);
    *out_rc = rc;
    return problems;
}

uint64_t harness_problems(const struct harness *k, int *out_rc)
{
    char *text = NULL;
    uint64_t n = run_passes(k, &text, out_rc);

    free(text);
    return n;
}

int harness_repair(const struct harness *k)
{
    char *text = NULL;
    size_t len = 0;
    struct ht_fsck *f = calloc(1, sizeof(*f));

    f->opt.mode = HT_FSCK_YES;
    f->out = open_memstream(&text, &len);
    memcpy(f->devs, k->dev, sizeof(f->devs));
    f->dev_count = k->dev_count;
    ht_json_init(&f->json, f->out);
    int status = ht_fsck_run(f, "ram");
    fclose(f->out);
    f->dev_count = 0; /* the devices are not its own */
    ht_fsck_close(f);
    free(f);
    free(text);
    return status;
}

unsigned harness_fsck(const struct harness *k)
{
    char *text = NULL;
    int rc;
    unsigned n = (unsigned)run_passes(k, &text, &rc) + (rc != 0);

    if (n)
        printf("fsck: %s\n", text);
    free(text);
    return n;
}
