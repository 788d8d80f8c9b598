/* SPDX-License-Identifier: Apache-2.0 */
/* config.h - hyper-parameters, and the text they are set with. Pure functions, any thread. */
#pragma once

#include "tiering/base/base.h"

enum ht_rule_id { HT_RULE_ADAMW = 1, HT_RULE_ADAM, HT_RULE_SGD, HT_RULE_LION, HT_RULE_ADAGRAD, HT_RULE_MUON };

/* How the learning rate of muon follows the shape of a block (muon.h), by the words of adjust_lr. */
enum ht_muon_adjust { HT_MUON_ORIGINAL, HT_MUON_MATCH_RMS_ADAMW, HT_MUON_SPECTRAL_UNCLAMPED };
/* The rows of a matrix from the first one on: `times` blocks of `rows` each, one row of the table after the other. */
enum { HT_MUON_SPLIT_MAX = 4 };
struct ht_muon_split {
    uint8_t count; /* 0: the matrix is one block */
    struct {
        uint32_t rows, times;
    } of[HT_MUON_SPLIT_MAX];
};
/*
 * A parameter has `count` matrices of this shape; rows 0: it is not known. block_rows: those of the block in question.
 */
struct ht_matrix {
    uint32_t rows, columns, count, block_rows;
};

/* Fields lie so that none is padded: a root has three of these, in the memory that a replay of roots has. */
struct ht_optim_config {
    double lr, eps, weight_decay, momentum, lr_decay; /* those its rule has */
    union {
        double beta1, ns_a; /* ns_: of Newton-Schulz */
    };
    union {
        double beta2, ns_b;
    };
    union {
        double dampening, ns_c;
    };
    enum ht_rule_id rule;
    bool nesterov, maximize;
    uint8_t state_bits;      /* in which state is kept: 32, 16 or 8; default 32 */
    uint32_t state_bits_min; /* parameters of fewer elements keep 32; default 4096 */
    double grad_scale;       /* gradients come multiplied by it (loss scaling) */
    double max_grad_norm;    /* clip the whole step's gradient to it; 0: no */
    uint32_t accumulate;     /* gradients of each element that make one step; default 1 */
    bool accumulate_mean;    /* their sum is divided by that number */
    bool skip_nonfinite;     /* a step with a NaN or infinity in its gradients changes nothing */
    bool partial;            /* a boundary may come while parameters are partly covered */
    uint32_t durable_every;  /* steps; default 1 */
    uint32_t retain;         /* kept steps without names of their own: at most so many; 0: commits keep none */
    uint32_t retain_every;   /* a commit keeps its step if it is the first from a multiple of this on; default 1 */
    uint32_t redo_keep;      /* logged steps that stay readable; default 0 */
    bool retain_must;        /* a commit that cannot keep its step fails */
    bool delta;              /* steps leave the elements that they change (state/delta.h) */
    bool delta_bf16;         /* of f32 the elements whose rounding to bf16 changes */
    uint32_t delta_keep;     /* the last so many steps; default 8 */
    double delta_max;        /* unless a step changes more than this part of all elements; default 1/16 */
    bool redo;               /* a step is durable when its gradients are; every durable_every-th publishes all */
    bool frozen;             /* of a section: its elements and state stay; in 8 bits it has whole blocks */
    bool ns_store;           /* the store orthogonalises */
    uint8_t adjust_lr;       /* enum ht_muon_adjust */
    uint32_t ns_steps;       /* of Newton-Schulz */
    uint32_t missed;         /* of a section: so many steps of the parameter did not count for it */
    struct ht_muon_split muon_split;
    struct ht_matrix matrix; /* of a parameter or block of muon: no word, but from its shape */
};
enum {
    HT_OPTIM_CONFIG_TEXT_MAX = 1024,
    HT_OPTIM_ERROR_MAX = 256,
    HT_ACCUMULATE_MAX = 65536,
    HT_REDO_KEEP_MAX = 128,
    HT_DELTA_KEEP_MAX = 128
};
/*
 * A rule and its words: "adamw lr=3e-4 beta1=0.9 beta2=0.95 eps=1e-8 weight_decay=0.1 durable_every=1 partial=0
 * maximize=0". Omitted words have the defaults of the torch.optim class of that name (rules/ has formulas and words).
 * -EINVAL with a message in err that names the word and the allowed values (unknown rule or word, not a number, NaN,
 * out of range, twice).
 */
int ht_optim_config_parse(const char *text, size_t len, struct ht_optim_config *out,
                          char err[HT_OPTIM_ERROR_MAX]) HT_MUST_CHECK;
/*
 * The same for words that amend others: omitted words are as in base. The rule may be omitted, too. If it is another
 * rule than that of base, its own omitted words have their defaults. out may be base. -EINVAL
 */
int ht_optim_config_amend(const char *text, size_t len, const struct ht_optim_config *base, struct ht_optim_config *out,
                          char err[HT_OPTIM_ERROR_MAX]) HT_MUST_CHECK;
/* Puts the message into err. Returns error. */
int ht_optim_refuse(char err[HT_OPTIM_ERROR_MAX], int error, const char *fmt, ...) HT_PRINTF(3, 4);
/* Between words. */
static inline bool ht_optim_is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}
/* The rule and all words that it has, as a text that parses to the same. Cut if it does not fit in cap bytes. */
void ht_optim_config_text(const struct ht_optim_config *c, char *buf, size_t cap);

/* -------------------------------------------------------------- sections */

/*
 * Words for ranges of a parameter's elements, in the text of its file:
 *
 *   words of the file  0:32 weight_decay=0  8224:8736 lr=1e-4 weight_decay=0  ...
 *
 * A section amends the words of its file for elements [begin, end). All sections of a file have its rule and its state,
 * and words of the whole step stay those of the file: a section has words of the rule, maximize, frozen and missed.
 */
enum { HT_OPTIM_SECTIONS_TEXT_MAX = 65536 };

struct ht_optim_section {
    uint64_t begin, end; /* begin < end */
    struct ht_optim_config config;
};
struct ht_optim_sections {
    struct ht_optim_section *section; /* owned: ascending, apart from each other; NULL if count is 0 */
    size_t count;
};

/* Where the first section begins; len: there is none. */
size_t ht_optim_sections_at(const char *text, size_t len);
/* Do these bytes, all those before the first section, have no word? */
bool ht_optim_sections_alone(const char *text, size_t own);
/*
 * text: of sections alone; base: the words of the file. -EINVAL with a message that names the range and what is wrong.
 * The caller frees *out, also after an error.
 */
int ht_optim_sections_parse(const char *text, size_t len, const struct ht_optim_config *base,
                            struct ht_optim_sections *out, char err[HT_OPTIM_ERROR_MAX]) HT_MUST_CHECK;
void ht_optim_sections_free(struct ht_optim_sections *s);
