/* SPDX-License-Identifier: Apache-2.0 */
/* size.c - `hitrainctl size`: how large a store a model needs. It looks at no store. */
#include "mount-helpers/ctl/ctl.h"

#include <inttypes.h>

#include "optim/rules/need.h"
#include <hitrain/words.h>

/* The words of --optimizer, amended by --retain and --redo. */
static int parse_words(const struct ht_cmd_options *o, struct ht_optim_config *out)
{
    const char *text = o->optimizer ? o->optimizer : "adamw";
    char err[HT_OPTIM_ERROR_MAX], more[128];
    int rc = ht_optim_config_parse(text, strlen(text), out, err);

    if (rc == 0 && o->retain) {
        snprintf(more, sizeof(more), "retain=%" PRIu64, o->retain);
        rc = ht_optim_config_amend(more, strlen(more), out, out, err);
    }
    if (rc == 0 && o->redo) {
        snprintf(more, sizeof(more), "redo=on durable_every=%" PRIu64, o->redo);
        rc = ht_optim_config_amend(more, strlen(more), out, out, err);
    }
    if (rc)
        ht_error("--optimizer: %s", err);
    return rc;
}

int ht_cmd_size(const char *path, const struct ht_cmd_options *o)
{
    const uint8_t dtype = o->dtype ? ht_cmd_trained_dtype(o->dtype) : HT_DTYPE_F32;
    struct ht_need need = {.elements = o->params, .tensors = o->tensors, .dtype = dtype};
    struct ht_optim_config config;

    if (!o->params)
        return ht_fail(HT_CMD_USAGE, "size needs --params=N, the number of parameters");
    if (!dtype)
        return ht_fail(HT_CMD_USAGE, "--dtype: not f32, bf16 or f16: %s", o->dtype);
    if (parse_words(o, &config))
        return HT_CMD_USAGE;
    if (!need.tensors)
        need.tensors = ht_need_tensors(need.elements);
    uint64_t bytes = ht_need_bytes(&need, &config);
    if (bytes == UINT64_MAX)
        return ht_fail(HT_CMD_FAILED, "no store is so large");
    if (o->json)
        printf("{\"bytes\": %" PRIu64 "}\n", bytes);
    else
        printf("%" PRIu64 "\n", bytes);
    return HT_CMD_OK;
}
