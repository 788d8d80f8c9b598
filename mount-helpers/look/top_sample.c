/* SPDX-License-Identifier: Apache-2.0 */
/* top_sample.c - reads the figures that `hitrainctl top` shows. See top.h. */
#include "mount-helpers/look/top.h"

#include "mount-helpers/ctl/figures.h"

#define WORD(name, word, ...) word,
static const char *const store_words[] = {HT_TOP_STORE(WORD)};
static const char *const device_words[] = {HT_TOP_DEVICE(WORD)};
static const char *const root_words[] = {HT_TOP_ROOT(WORD)};
#undef WORD
static const char *const engine_words[] = {[HT_TOP_READ] = "bytes"};

/* Keys of the lines of devices, models and engines. */
static const struct part_keys {
    const char *name, *state;
    const char *const *words;
    unsigned count;
} device_keys = {"path", "health", device_words, HT_TOP_DEVICE_FIGURES},
  root_keys = {"path", "", root_words, HT_TOP_ROOT_FIGURES},
  engine_keys = {"engine", "state", engine_words, HT_ARRAY_SIZE(engine_words)};

/* A part for each line, as far as there is room. Lines that are no JSON are passed over. */
static unsigned take_parts(char *text, const struct part_keys *keys, struct ht_top_part *list, unsigned max)
{
    struct ht_cmd_line l;
    unsigned count = 0;
    char *save;

    for (char *line = strtok_r(text, "\n", &save); line && count < max; line = strtok_r(NULL, "\n", &save)) {
        struct ht_top_part *p = &list[count];
        if (ht_cmd_parse_json(line, &l) < 0)
            continue;
        *p = (struct ht_top_part){.value = {0}};
        snprintf(p->name, sizeof(p->name), "%s", ht_cmd_value(&l, keys->name));
        snprintf(p->state, sizeof(p->state), "%s", ht_cmd_value(&l, keys->state));
        for (unsigned i = 0; i < keys->count; i++)
            p->value[i] = ht_cmd_number(&l, keys->words[i]);
        count++;
    }
    return count;
}

void ht_top_parse(const struct ht_top_texts *t, uint64_t at_ns, struct ht_top_sample *out)
{
    struct ht_figures f;

    ht_figures_parse(t->stats, &f);
    out->at_ns = at_ns;
    for (unsigned i = 0; i < HT_TOP_STORE_FIGURES; i++)
        out->store[i] = ht_figure(&f, store_words[i]);
    out->devices = take_parts(t->devices, &device_keys, out->device, HT_DEVICES_MAX);
    out->roots = take_parts(t->roots, &root_keys, out->root, HT_TOP_ROOTS_MAX);
    out->engines = take_parts(t->background, &engine_keys, out->engine, HT_TOP_ENGINES_MAX);
}

int ht_top_read(const char *point, struct ht_top_sample *out)
{
    struct ht_top_texts t = {0};
    int rc = ht_cmd_attribute(point, "stats", true, &t.stats);

    if (rc == 0)
        rc = ht_hidden_text(point, "devices", &t.devices);
    if (rc == 0)
        rc = ht_hidden_text(point, "roots", &t.roots);
    if (rc == 0)
        rc = ht_hidden_text(point, "background", &t.background);
    if (rc == 0)
        ht_top_parse(&t, ht_now_ns(), out);
    free(t.stats);
    free(t.devices);
    free(t.roots);
    free(t.background);
    return rc;
}

double ht_top_rate(uint64_t now, uint64_t before, uint64_t ns)
{
    return now > before && ns ? (double)(now - before) * 1e9 / (double)ns : 0;
}

const struct ht_top_part *ht_top_same(const struct ht_top_part *part, const struct ht_top_part *list, unsigned count,
                                      unsigned hint)
{
    if (hint < count && strcmp(list[hint].name, part->name) == 0)
        return &list[hint];
    for (unsigned i = 0; i < count; i++)
        if (strcmp(list[i].name, part->name) == 0)
            return &list[i];
    return NULL;
}
