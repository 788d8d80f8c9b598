/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/replay/generate.h"

/*
 * Bytes of one element. The store keeps two f32 moments and a master of two bytes beside a bf16 parameter.
 * ZeRO-Infinity swaps f32 gradients, and f32 master and moments.
 */
enum { PARAM_BYTES = 2, STATE_BYTES = 10, SWAP_GRADIENT_BYTES = 4, SWAP_STATE_BYTES = 12, BLOCK = 4096 };
enum { TENSORS_OF_LAYER_MAX = 8 };

static const struct shape {
    const char *name;
    bool llama;
    uint32_t layers, hidden, inner, kv, vocab; /* inner: of the MLP; kv: width of keys and of values */
} shapes[] = {
    {"125M", false, 12, 768, 3072, 768, 50257},    {"350M", false, 24, 1024, 4096, 1024, 50257},
    {"760M", false, 24, 1536, 6144, 1536, 50257},  {"1.3B", false, 24, 2048, 8192, 2048, 50257},
    {"2.7B", false, 32, 2560, 10240, 2560, 50257}, {"6.7B", false, 32, 4096, 16384, 4096, 50257},
    {"13B", false, 40, 5120, 20480, 5120, 50257},  {"30B", false, 48, 7168, 28672, 7168, 50257},
    {"70B", false, 80, 8512, 34048, 8512, 50257},  {"125M", true, 12, 768, 2048, 768, 32000},
    {"350M", true, 24, 1024, 2816, 1024, 32000},   {"1B", true, 16, 2048, 8192, 512, 128256},
    {"3B", true, 28, 3072, 8192, 1024, 128256},    {"7B", true, 32, 4096, 11008, 4096, 32000},
    {"8B", true, 32, 4096, 14336, 1024, 128256},   {"13B", true, 40, 5120, 13824, 5120, 32000},
    {"30B", true, 60, 6656, 17920, 6656, 32000},   {"70B", true, 80, 8192, 28672, 1024, 128256},
};

void generate_put_shapes(FILE *to)
{
    for (unsigned llama = 0; llama < 2; llama++) {
        fprintf(to, "  %s:", llama ? "llama" : "gpt");
        for (unsigned i = 0; i < HT_ARRAY_SIZE(shapes); i++)
            if (shapes[i].llama == llama)
                fprintf(to, " %s", shapes[i].name);
        putc('\n', to);
    }
}

struct model_tensor {
    uint64_t elements;
    uint32_t param, gradient, state; /* numbers in the trace; gradient and state only of swapped ones */
};

struct model {
    const struct generate_config *c;
    const struct shape *shape;
    struct replay_trace *t;
    bool swap;
    uint64_t elements;
    struct model_tensor embedding, head;
    struct layer {
        struct model_tensor tensor[TENSORS_OF_LAYER_MAX];
        unsigned tensors;
        uint32_t activation;
    } layer[128];
    int rc;
};

static uint64_t scaled(const struct generate_config *c, double bytes)
{
    return ht_max_u64(1, (uint64_t)(bytes * c->scale / BLOCK + 0.5)) * BLOCK;
}

static uint32_t add_tensor(struct model *m, const char *name, const char *part, uint64_t bytes, uint64_t state_bytes)
{
    char full[64];
    uint32_t n = 0;

    snprintf(full, sizeof(full), "%s%s", name, part);
    if (!m->rc)
        m->rc = replay_trace_add_tensor(m->t, full, bytes, state_bytes, &n);
    return n;
}

static struct model_tensor add_param(struct model *m, const char *name, uint64_t elements)
{
    struct model_tensor w = {.elements = elements};
    uint64_t bytes = scaled(m->c, (double)elements * PARAM_BYTES);

    m->elements += elements;
    w.param = add_tensor(m, name, "", bytes, m->swap ? 0 : bytes * STATE_BYTES / PARAM_BYTES);
    if (m->swap) {
        w.gradient = add_tensor(m, name, ".gradient", bytes * SWAP_GRADIENT_BYTES / PARAM_BYTES, 0);
        w.state = add_tensor(m, name, ".state", bytes * SWAP_STATE_BYTES / PARAM_BYTES, 0);
    }
    return w;
}

static void add_layer_tensor(struct model *m, unsigned layer, const char *part, uint64_t elements)
{
    struct layer *l = &m->layer[layer];
    char name[48];

    snprintf(name, sizeof(name), "layers.%u.%s", layer, part);
    l->tensor[l->tensors++] = add_param(m, name, elements);
}

static void add_layer(struct model *m, unsigned i)
{
    uint64_t h = m->shape->hidden, inner = m->shape->inner, kv = m->shape->kv;
    char name[48];

    add_layer_tensor(m, i, "norm", (m->shape->llama ? 2 : 4) * h);
    if (m->shape->llama) {
        add_layer_tensor(m, i, "q", h * h);
        add_layer_tensor(m, i, "k", h * kv);
        add_layer_tensor(m, i, "v", h * kv);
    } else {
        add_layer_tensor(m, i, "qkv", h * (h + 2 * kv));
    }
    add_layer_tensor(m, i, "out", h * h);
    add_layer_tensor(m, i, "up", h * inner);
    if (m->shape->llama)
        add_layer_tensor(m, i, "gate", h * inner);
    add_layer_tensor(m, i, "down", inner * h);
    snprintf(name, sizeof(name), "layers.%u.", i);
    if (m->c->activation_bytes)
        m->layer[i].activation = add_tensor(m, name, "activation", scaled(m->c, (double)m->c->activation_bytes), 0);
}

static void add(struct model *m, enum replay_op op, uint32_t tensor)
{
    if (!m->rc)
        m->rc = replay_trace_add(m->t, op, tensor, 0, m->t->tensor[tensor].bytes);
}

/* share: of all compute time of the step, for a tensor's part of the model. */
static void compute(struct model *m, const struct model_tensor *w, double share)
{
    double us = (double)m->c->compute_us * share * (double)w->elements / (double)m->elements;

    if (!m->rc && us >= 0.5)
        m->rc = replay_trace_add(m->t, REPLAY_COMPUTE, 0, (uint64_t)(us + 0.5), 0);
}

/* Backward takes twice as long as forward. */
static double forward_share(const struct model *m)
{
    return (m->swap ? 1 - m->c->optimizer_share : 1) / 3;
}

static void forward_of(struct model *m, const struct model_tensor *w)
{
    add(m, REPLAY_READ, w->param);
    compute(m, w, forward_share(m));
}

static void backward_of(struct model *m, const struct model_tensor *w)
{
    add(m, REPLAY_READ, w->param);
    compute(m, w, 2 * forward_share(m));
    add(m, m->swap ? REPLAY_WRITE : REPLAY_GRADIENT, m->swap ? w->gradient : w->param);
}

static void forward(struct model *m)
{
    forward_of(m, &m->embedding);
    for (unsigned i = 0; i < m->shape->layers; i++) {
        for (unsigned k = 0; k < m->layer[i].tensors; k++)
            forward_of(m, &m->layer[i].tensor[k]);
        if (m->c->activation_bytes)
            add(m, REPLAY_WRITE, m->layer[i].activation);
    }
    forward_of(m, &m->head);
}

static void backward(struct model *m)
{
    backward_of(m, &m->head);
    for (unsigned i = m->shape->layers; i-- > 0;) {
        if (m->c->activation_bytes)
            add(m, REPLAY_READ, m->layer[i].activation);
        for (unsigned k = m->layer[i].tensors; k-- > 0;)
            backward_of(m, &m->layer[i].tensor[k]);
    }
    backward_of(m, &m->embedding);
}

/* The optimizer of ZeRO-Infinity, whose sub-group is a tensor here. */
static void swap_of(struct model *m, const struct model_tensor *w)
{
    add(m, REPLAY_READ, w->gradient);
    add(m, REPLAY_READ, w->state);
    compute(m, w, m->c->optimizer_share);
    add(m, REPLAY_WRITE, w->state);
    add(m, REPLAY_WRITE, w->param);
}

static void swap_all(struct model *m)
{
    swap_of(m, &m->embedding);
    for (unsigned i = 0; i < m->shape->layers; i++)
        for (unsigned k = 0; k < m->layer[i].tensors; k++)
            swap_of(m, &m->layer[i].tensor[k]);
    swap_of(m, &m->head);
}

static int add_boundary(const struct generate_config *c, struct replay_trace *t, uint64_t step)
{
    bool durable = c->durable_every && (step + 1) % c->durable_every == 0;

    return replay_trace_add(t, durable ? REPLAY_COMMIT : REPLAY_STEP, 0, 0, 0);
}

static int generate_model(struct model *m)
{
    uint64_t table = (uint64_t)m->shape->vocab * m->shape->hidden;

    m->embedding = add_param(m, "embedding", table);
    for (unsigned i = 0; i < m->shape->layers; i++)
        add_layer(m, i);
    m->head = add_param(m, "head", m->shape->llama ? table : m->shape->hidden);
    for (uint64_t step = 0; !m->rc && step < m->c->steps; step++) {
        forward(m);
        backward(m);
        if (m->swap)
            swap_all(m);
        if (!m->rc)
            m->rc = add_boundary(m->c, m->t, step);
    }
    return m->rc;
}

static int generate_scan(const struct generate_config *c, struct replay_trace *t)
{
    char name[32];
    uint32_t n;
    int rc = c->tensors && c->bytes ? 0 : -EINVAL;

    for (uint64_t i = 0; !rc && i < c->tensors; i++) {
        snprintf(name, sizeof(name), "t%llu", (unsigned long long)i);
        rc = replay_trace_add_tensor(t, name, c->bytes, 0, &n);
    }
    for (uint64_t step = 0; !rc && step < c->steps; step++) {
        for (uint32_t i = 0; !rc && i < c->tensors; i++) {
            rc = replay_trace_add(t, REPLAY_READ, i, 0, c->bytes);
            if (!rc && c->compute_us / c->tensors)
                rc = replay_trace_add(t, REPLAY_COMPUTE, 0, c->compute_us / c->tensors, 0);
        }
        if (!rc)
            rc = add_boundary(c, t, step);
    }
    return rc;
}

int generate_trace(const struct generate_config *c, struct replay_trace *out)
{
    bool llama = strncmp(c->kind, "llama", 5) == 0;
    struct model m = {.c = c, .t = out};
    int rc = -EINVAL;

    replay_trace_init(out);
    if (!(c->scale > 0 && c->scale <= 1) || !(c->optimizer_share >= 0 && c->optimizer_share <= 1) ||
        c->compute_us > REPLAY_COMPUTE_US_MAX)
        return -EINVAL;
    for (unsigned i = 0; i < HT_ARRAY_SIZE(shapes); i++)
        if (shapes[i].llama == llama && strcmp(shapes[i].name, c->shape) == 0)
            m.shape = &shapes[i];
    const char *rest = c->kind + (llama ? 5 : strncmp(c->kind, "gpt", 3) == 0 ? 3 : 0);
    m.swap = strcmp(rest, "-swap") == 0;
    if (strcmp(c->kind, "scan") == 0)
        rc = generate_scan(c, out);
    else if (rest != c->kind && m.shape && (m.swap || !*rest))
        rc = generate_model(&m);
    if (rc)
        replay_trace_free(out);
    return rc;
}
